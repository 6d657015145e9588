"""Folders: the cache, and what a run's folder says about the run that it holds."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base
from ragen_jax.run.log import console


def cache_directory() -> Path:
    """Where generated models and datasets are kept: $XDG_CACHE_HOME (or ~/.cache)/ragen_jax."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragen_jax"


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds what `path` names for this process; others that ask for it wait meanwhile.

    For what is generated on first use, which several runs may begin with at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield


def content_hash(path: str | Path) -> str:
    """SHA-256 of a file's content in hex digits, read once while its size and times stay.

    Of a folder: of the names and contents of all files below it, hidden ones apart.

    Raises:
      OSError: it cannot be read.
    """
    path = Path(path).resolve()
    if path.is_dir():
        names = sorted(file.relative_to(path) for file in path.rglob("[!.]*") if file.is_file())
        shown = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        text = "\n".join(f"{content_hash(path / name)} {name.as_posix()}" for name in shown)
        return hashlib.sha256(text.encode()).hexdigest()
    stat = path.stat()
    return _content_hash(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=256)
def _content_hash(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_run_config(workdir: str | Path) -> ConfigDict:
    """The config that a run wrote to its folder.

    Fields that came later have base.py's values, by which a run does what it did before them.

    Raises:
      ValueError: there is none.
    """
    path = Path(workdir) / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} is not the folder of a run: it has no config.json")

    def typed(value):
        """Of types that an override knows: tuples for lists, for null what takes any."""
        if isinstance(value, dict):
            return {name: typed(inner) for name, inner in value.items()}
        if value is None:
            return config_dict.placeholder(object)
        return tuple(value) if isinstance(value, list) else value

    config = ConfigDict(typed(json.loads(path.read_text())))
    defaults = base.get_config()
    added = _add_missing(config, defaults)
    for name, part in config.also.items():  # which has a section like env for each
        if isinstance(part, ConfigDict) and isinstance(part.get("env"), ConfigDict):
            added |= _add_missing(part.env, defaults.env, f"also.{name}.env.")
    if added:
        listed = ", ".join(f"config.{name}={value!r}" for name, value in added.items())
        console(f"{path} has not, and gets: {listed}")
    return config


def _add_missing(config: ConfigDict, defaults: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Adds the fields of `defaults` that a config has not; {dotted name: value} of these."""
    added: dict[str, Any] = {}
    for name, value in defaults.items():
        if name not in config:
            config[name] = value
            added[prefix + name] = value.to_dict() if isinstance(value, ConfigDict) else value
        elif isinstance(value, ConfigDict) and isinstance(config[name], ConfigDict):
            added |= _add_missing(config[name], value, f"{prefix}{name}.")
    return added


def same_run(config: ConfigDict, workdir: Path) -> None:
    """Refuses to continue a run under a config that would make it another run.

    Raises:
      ValueError: names the first field that differs; steps (where the learning rate is
        constant), eval.every, checkpoint.every and .keep, rollout.save_every, log.trackers and
        stopping.* may change.
    """
    if not (workdir / "config.json").exists():
        return
    free = ["eval.every", "checkpoint.every", "checkpoint.keep", "rollout.save_every"]
    free.append("log.trackers")
    if config.optimizer.schedule == "constant":  # any other is stretched over all steps
        free.append("steps")
    before, now = flat(read_run_config(workdir)), flat(config)
    for name in sorted(set(before) | set(now)):
        free_to_change = name in free or name.startswith("stopping.")
        if not free_to_change and before.get(name) != now.get(name):
            raise ValueError(
                f"{workdir} holds a run with config.{name}={before.get(name)!r}, but this command "
                f"has {now.get(name)!r}; give the same value, or another --workdir"
            )


def flat(config: ConfigDict) -> dict[str, Any]:
    """{"a.b": value} of a nested config, sequences as lists."""

    def leaves(node, prefix):
        for name, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(leaves(json.loads(json.dumps(config.to_dict())), ""))
