"""Records the versions, devices, code and files that a run uses in the run's folder.

A resumed run repeats the numbers of an uninterrupted run only if all of these are the same.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ragen_jax import envs
from ragen_jax.config.build_environment import hash_option_files
from ragen_jax.config.per_task import per_task_configs, teacher_path
from ragen_jax.configs.base import WARMSTART, Config, Env
from ragen_jax.core.domains import plain
from ragen_jax.envs import ENVS, MODULE_CLASS
from ragen_jax.envs.own_code import files_hash, own_files
from ragen_jax.model import hf
from ragen_jax.rollout.lanes import cores
from ragen_jax.run.run_files import policy_directory
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.console import console
from ragen_jax.storage.limits import read_json

FILE = "provenance.json"
# Packages whose versions can change numbers: they compute the model, optimizer, prompts, problems.
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers", "jinja2"),
    "pillow",
)
# Built-in environment -> further packages whose versions can change its problems.
ENGINES = {
    "gymnasium": ("gymnasium",),
    "metamathqa": ("math-verify", "sympy"),
    "reasoning_gym": ("reasoning-gym",),
    "textarena": ("textarena",),
}
JAX_SETTINGS = (
    *("jax_default_matmul_precision", "jax_enable_x64"),
    *("jax_default_prng_impl", "jax_threefry_partitionable"),
)
# Parts of ragen_jax that cannot change the numbers of a training run.
READERS = ("lab", "preflight", "report", "retriever", "score")
HASH_DIGITS = 12  # number of hex digits of a hash in a message

Provenance = dict[str, str]  # name -> version, number or hash


def provenance_of(config: Config, python: str) -> Provenance:
    """Return the current versions, devices, code and files that a run of a config depends on.

    Args:
      python: version of Python.

    Raises:
      ValueError: the model cannot be found.
    """
    device = jax.devices()[0]
    platform = " ".join(device.client.platform_version.split())
    found = {"ragen_jax": _version("ragen_jax"), "sources of ragen_jax": _our_sources()}
    found |= {"python": python} | {name: _version(name) for name in PACKAGES}
    found |= {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}
    found |= {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processes": str(jax.process_count()),
        "cores": str(cores()),
        "backend": f"{device.platform} {platform}",
    }
    for name, c in per_task_configs(config).items():
        found |= {package: _version(package) for package in ENGINES.get(name, ())}
        found |= _own_code(c.env)
        try:
            files = hash_option_files(c.env)
        except (ValueError, TypeError):  # building the environment raises a better message
            files = {}
        found |= {f"file of {name}'s option {o}": digest for o, digest in files.items()}
    if config.model.path != "tiny":  # the run's folder has a copy of the tiny agent
        found["files of model.path"] = _model_files(hf.resolve(config.model.path))
    teacher = teacher_path(config.algorithm)
    if teacher and teacher != WARMSTART:  # that teacher is a function of the config
        found["files of kl_reference"] = _model_files(hf.resolve(policy_directory(teacher)))
    return found


def report_changes(workdir: Path, now: Provenance, *, strict: bool) -> None:
    """Print a line if anything has changed since the run was last started.

    Raises:
      ValueError: something has changed, and `strict` is set.
    """
    records = _read(workdir)
    if not records:
        reason = "is damaged" if records is None else "is missing (an older version wrote none)"
        found = (
            f"{workdir / FILE} {reason}, so changes of versions, devices and code since the "
            "last start are unknown;"
        )
        effect = "numbers may differ"
    else:
        before = records[-1]["made_with"]
        changed = [n for n in sorted(before.keys() | now.keys()) if before.get(n) != now.get(n)]
        if not changed:
            return
        listed = (f"{n} {_shorten(before.get(n))} -> {_shorten(now.get(n))}" for n in changed)
        found = (
            f"{workdir} was last started with other versions, devices or files: "
            f"{', '.join(listed)};"
        )
        effect = "numbers will differ"
    if strict:
        raise ValueError(
            f"{found} {effect}: --strict refuses to resume; restore them, or resume without "
            "--strict"
        )
    console(f"warning: {found} {effect} (recorded for the next start; --strict refuses this)")


def record(workdir: Path, now: Provenance, step: int | None) -> None:
    """Add the provenance of a start to the records in a run's folder, if it has changed.

    Args:
      step: step after which the run resumes; None: the run starts, and earlier records are dropped.
    """
    records = (step is not None and _read(workdir)) or []
    if not records or records[-1]["made_with"] != now:
        records.append({"after_step": step or 0, "made_with": now})
        atomic_write(workdir / FILE, json.dumps(records, indent=2) + "\n")


def _read(workdir: Path) -> list[dict[str, Any]] | None:
    """Return the records in a run's folder, oldest first; [] without a file; None if damaged."""
    path = workdir / FILE
    if not path.exists():
        return []
    try:
        records = read_json(path)
        parts = [part for each in records for part in each["made_with"].items()]
        if not records or not all(isinstance(x, str) for part in parts for x in part):
            return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return records


def _shorten(value: str | None) -> str:
    """Return a value as a message shows it; a hash is shortened."""
    if value is None:
        return "(none)"
    return value[:HASH_DIGITS] if re.fullmatch("[0-9a-f]{64}", value) else value


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _our_sources() -> str:
    """Return a hash of the modules that can change a run's numbers."""
    found = {}
    for name, folder in (("ragen_jax", Path(__file__).parents[1]), ("envs", _envs_folder())):
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder)
            if name == "envs" or inside.parts[0] not in (*READERS, "envs", "configs"):
                found[f"{name}/{inside.as_posix()}"] = path
    return files_hash(found)


def _envs_folder() -> Path:
    return Path(envs.__file__).parent


def _own_code(env: Env) -> Provenance:
    """Return {name: hash} of the code that an environment and its options name as MODULE:NAME."""
    names = [env.name] if env.name not in ENVS else []
    names += [t for t in _texts(plain(env.options)) if MODULE_CLASS.fullmatch(t)]
    found = {name: own_files(name.partition(":")[0]) for name in names}
    return {f"code of {name}": files_hash(files) for name, files in found.items() if files}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part)


def _model_files(directory: Path) -> str:
    """Return a hash of a model directory: contents of its small files, names and sizes of weights.

    If `checksums.json` lists the weights, their contents count as well, because the contents of
    that file count.
    """
    digest = hashlib.sha256()
    for pattern in hf.DOWNLOADED:
        for path in sorted(directory.glob(pattern)):
            content = b"" if path.suffix == ".safetensors" else path.read_bytes()
            digest.update(f"{path.name} {path.stat().st_size}\n".encode() + content)
    return digest.hexdigest()
