"""Read the config in a run's folder, and compare it with the config of a command."""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from ragen_jax.config.fields import FIELDS
from ragen_jax.config.renamed import add_earlier, apply_renames, drop_fixed
from ragen_jax.configs import base
from ragen_jax.configs.base import Config
from ragen_jax.core.flatten import flatten
from ragen_jax.model.dates import AUTO
from ragen_jax.storage.console import console
from ragen_jax.storage.limits import read_json


def require_run_folder(workdir: str | Path) -> Path:
    """Return the path of the config.json in a run's folder.

    Raises:
      ValueError: there is none.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} is not a run folder: it has no config.json")
    return path


def read_config_file(workdir: str | Path) -> dict[str, Any]:
    """Return the config.json of a run's folder.

    Raises:
      ValueError: the file is missing or damaged.
    """
    path = require_run_folder(workdir)
    try:
        config = read_json(path)
        config["env"]["name"], config["model"]["path"]  # all versions have these
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return config


def stored_date(workdir: Path, missing: str) -> str | None:
    """Return the model.date of the run in a folder; None if there is no run or the date is open.

    Args:
      missing: returned for a run of a version that recorded no date; a line reports it.

    Raises:
      ValueError: the config.json is damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        return None
    recorded = read_config_file(workdir)["model"]
    if "date" in recorded:
        return None if recorded["date"] == AUTO else recorded["date"]
    _print_once(
        f"{path} lacks these fields, using defaults: {_list_fields({'model.date': missing})}"
    )
    return missing


def read_run_config(workdir: str | Path) -> ConfigDict:
    """Return the config that a run wrote to its folder.

    Fields that were added later get base.py's values, which keep the earlier behavior. Fields that
    no longer exist are left out. A line reports both.

    Raises:
      ValueError: the file is missing or damaged.
    """
    config, added, unknown = _read_config(workdir)
    path = Path(workdir) / "config.json"
    if added:
        _print_once(f"{path} lacks these fields, using defaults: {_list_fields(added)}")
    if unknown:
        _print_once(f"{path} has fields that no longer exist, ignored: {_list_fields(unknown)}")
    return config


def _read_config(workdir: str | Path) -> tuple[ConfigDict, dict[str, Any], dict[str, Any]]:
    """Return (config of a run, added fields that the file lacks, removed obsolete fields)."""

    def typed(value):
        """Return a value with types that accept overrides: tuples for lists, any type for null."""
        if isinstance(value, dict):
            return {name: typed(inner) for name, inner in value.items()}
        if value is None:
            return config_dict.placeholder(object)
        return tuple(value) if isinstance(value, list) else value

    stored = read_config_file(workdir)
    apply_renames(stored)
    add_earlier(stored)
    if fixed := drop_fixed(stored):
        _print_once(
            f"{Path(workdir) / 'config.json'} has {_list_fields(fixed)}, which are constants now "
            "(ragen_jax/config/renamed.py); these values are ignored"
        )
    config = ConfigDict(typed(stored))
    defaults = base.get_config()
    added, unknown = _add_missing(config, defaults), _pop_unknown(config, defaults)
    for name, part in config.also.items():  # each has a section like env
        if isinstance(part, ConfigDict) and isinstance(part.get("env"), ConfigDict):
            added |= _add_missing(part.env, defaults.env, f"also.{name}.env.")
            unknown |= _pop_unknown(part.env, defaults.env, f"also.{name}.env.")
    return config, added, unknown


def _list_fields(fields: dict[str, Any]) -> str:
    return ", ".join(f"config.{name}={value!r}" for name, value in fields.items())


@functools.cache
def _print_once(line: str) -> None:
    """Print a line, but only once per command."""
    console(line)


def _add_missing(config: ConfigDict, defaults: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Add the fields of `defaults` that a config lacks; return them as {dotted name: value}."""
    added: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in config:
            config[name] = value
            added[prefix + name] = value.to_dict() if isinstance(value, ConfigDict) else value
        elif isinstance(value, ConfigDict) and isinstance(config[name], ConfigDict):
            added |= _add_missing(config[name], value, f"{prefix}{name}.")
    return added


def _pop_unknown(config: ConfigDict, defaults: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Remove the fields that `defaults` lacks; return them as {dotted name: value}.

    Sections that are empty in `defaults`, such as env.options, may hold any fields.
    """
    removed: dict[str, Any] = {}
    for name, value in list(config.items()):
        if name not in defaults:
            removed[prefix + name] = value.to_dict() if isinstance(value, ConfigDict) else value
            del config[name]
        elif isinstance(value, ConfigDict) and isinstance(defaults[name], ConfigDict):
            inner = defaults[name]
            removed |= _pop_unknown(value, inner, f"{prefix}{name}.") if inner else {}
    return removed


DECIDING = ("env.name", "model.path", "algorithm.name")  # fields that a refusal names first
MOST_NAMED = 3  # fields that a refusal names
MAY_CHANGE = (
    *("steps", "eval.", "checkpoint.", "stopping.", "report.", "log."),
    *("rollout.save_every", "diagnose.scores_every"),
)


def same_run(config: Config, workdir: Path) -> list[str]:
    """Return the fields of MAY_CHANGE in which a config differs from the run that it resumes.

    A model.date that is open in either config does not count: the run keeps its date.

    Raises:
      ValueError: other fields differ, or the number of steps differs although the learning rate's
        schedule depends on it (the message names all such fields); the run has fields of another
        version; or the folder has checkpoints but no config.json.
    """
    path = workdir / "config.json"
    if not path.exists():
        if any((workdir / "checkpoints").glob("[0-9]*")):
            raise ValueError(
                f"{workdir} has checkpoints but no config.json, which describes their run; "
                "restore it, or give another --workdir"
            )
        return []
    run, _, unknown = _read_config(workdir)
    if unknown:
        raise ValueError(
            f"{path} was written by another version: it has {_list_fields(unknown)}, unknown "
            "to this version; resume with that version (evaluate works with this version)"
        )
    before, now = fields_of(run), fields_of(config)
    changed = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
    if AUTO in (before["model.date"], now["model.date"]):
        changed = [name for name in changed if name != "model.date"]
    stretched = config.optimizer.schedule != "constant"
    refused = [
        name
        for name in changed
        if not name.startswith(MAY_CHANGE) or (name == "steps" and stretched)
    ]
    if refused:
        raise ValueError(_refusal(config, workdir, before, now, refused))
    return changed


def _refusal(
    config: Config,
    workdir: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    refused: Sequence[str],
) -> str:
    """Return the message about fields in which a config differs from the run that it resumes.

    Args:
      before, now: fields of the run and of the config.
      refused: names of the fields. MOST_NAMED are listed: those of DECIDING, then in the order of
        base.py.
    """
    order = [*DECIDING, *FIELDS, *refused]  # the last for fields of env.options and also
    ranked = sorted(refused, key=order.index)[:MOST_NAMED]
    was = ", ".join(f"config.{name}={before.get(name)!r}" for name in ranked)
    has = ", ".join(repr(now.get(name)) for name in ranked)
    others = len(refused) - len(ranked)
    more = f" (and {others} more field{'s' * (others > 1)})" if others else ""
    fixed = ""
    if "steps" in refused:
        fixed = f"; steps may not, with optimizer.schedule={config.optimizer.schedule}"
    return (
        f"{workdir} holds a run with {was}, but this command has {has}{more}; resume it "
        f"with --workdir={workdir} alone, or use another --workdir. These may change: "
        f"{', '.join(name for name in MAY_CHANGE if not (fixed and name == 'steps'))}{fixed}"
    )


def fields_of(config: Config | ConfigDict) -> dict[str, Any]:
    """Return {"a.b": value} of a config as config.json would hold it, with sequences as lists."""
    found = flatten(json.loads(json.dumps(config.to_dict())))
    return {name: value for name, value in found.items() if value != {}}
