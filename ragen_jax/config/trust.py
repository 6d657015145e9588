"""Refuse to import code that a run's config.json names unless the user trusts it.

Such code is a user's environment or the functions in its options. It is imported if this user
started the run, which a signature in the folder shows, if the command line names the code, or with
--trust. Otherwise the folder's author could run any code.
"""

import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.config.stored import read_config_file
from ragen_jax.configs.base import Config
from ragen_jax.core.sharding import from_main_process
from ragen_jax.envs import names_code
from ragen_jax.storage.atomic_io import atomic_write, make_folder, with_retries
from ragen_jax.storage.cache import cache_directory, lock_path
from ragen_jax.storage.console import console
from ragen_jax.storage.ownership import exposure

SIGNATURE = ".signature"  # in a run's folder
KEY_BYTES = 32


def code_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted field: value} of the fields that name code, for a config of plain dicts."""
    found = {}
    for prefix, name, options in _environments(config):
        if names_code(name):
            found[f"{prefix}.name"] = name
        for option, value in options.items():
            if value and names_code(name, option):
                found[f"{prefix}.options.{option}"] = value
    taught = config.get("warmstart", {}).get("options", {})
    for option, value in taught.items():  # they replace those of env.options
        if value and names_code(config["env"]["name"], option):
            found[f"warmstart.options.{option}"] = value
    return found


def _environments(config: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (field, name, options) of all environments of a config."""
    found = {"env": config["env"]}
    for name, part in config.get("also", {}).items():
        found[f"also.{name}.env"] = part["env"]
    return [(prefix, env["name"], env.get("options") or {}) for prefix, env in found.items()]


def require_trust(
    workdir: Path, config: ConfigDict, named: Collection[str] = (), *, trust: bool = False
) -> None:
    """Refuse a config that came from a run's folder and names code, unless the user trusts it.

    Args:
      config: the folder's config, with the command line's values.
      named: dotted fields that the command line sets.
      trust: whether the user passed --trust.

    Raises:
      ValueError: fields that name code are not in `named`, and this user has not started the run.
    """
    foreign = {n: v for n, v in code_fields(config.to_dict()).items() if n not in named}
    if not foreign or trust:
        return
    reason = _explain_distrust(workdir)
    if from_main_process(int(reason is not None)):
        listed = ", ".join(f"config.{name}={value!r}" for name, value in foreign.items())
        raise ValueError(
            f"{workdir} names code that would be imported: {listed}; "
            f"{reason or 'the first process does not trust it'}. If you trust the folder's "
            "author, pass --trust"
        )


def sign(workdir: Path, config: Config) -> None:
    """Record in a run's folder that this user started the run, if its config names code.

    Without this record, resuming and evaluating the run require --trust. If it cannot be written, a
    line reports the reason.
    """
    if not code_fields(config.to_dict()):
        return
    try:
        key = _key(create=True)
    except (OSError, ValueError) as error:
        console(f"warning: resuming {workdir} will need --trust: {error}")
        return
    atomic_write(workdir / SIGNATURE, f"{_signature(key, json_of(config))}\n")


def json_of(config: Config) -> dict[str, Any]:
    """Return a config in the form of config.json."""
    return json.loads(json.dumps(config.to_dict()))


def _explain_distrust(workdir: Path) -> str | None:
    """Return why a run does not count as started by this user, or None if it does."""
    try:
        found = (workdir / SIGNATURE).read_text().strip()
        expected = _signature(_key(create=False), read_config_file(workdir))
    except FileNotFoundError:
        return "you did not start it on this machine, or an earlier version did"
    except (OSError, ValueError) as error:
        return f"whether you started it is unknown ({error})"
    if not hmac.compare_digest(found.encode(), expected.encode()):
        return f"its {SIGNATURE} belongs to another user, machine or config.json"
    return None


def _signature(key: bytes, config: Mapping[str, Any]) -> str:
    """Return the HMAC of a config.json's environments, which requires the key, as hex digits."""
    signed = [_environments(config), config.get("warmstart", {}).get("options", {})]
    return hmac.new(key, json.dumps(signed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes:
    """Return this user's key, which is in the cache directory.

    Args:
      create: whether to make a key if none exists.

    Raises:
      OSError: the key does not exist, or it cannot be read or made.
      ValueError: other users can read or replace it, or it is damaged.
    """
    path = cache_directory() / "key"
    if create and not path.exists():
        make_folder(path.parent)
        with lock_path(path):
            if not path.exists():  # no other process has made it meanwhile
                with_retries(functools.partial(_make_key, path), path)
    if found := exposure(path):
        raise ValueError(found)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"other users can read {path}; delete it")
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged; delete it")
    return key


def _make_key(path: Path) -> None:
    aside = path.with_name(f".{path.name}.making")
    aside.unlink(missing_ok=True)  # left over from a killed process
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(secrets.token_bytes(KEY_BYTES))
        opened.flush()
        os.fsync(opened.fileno())
    aside.replace(path)
