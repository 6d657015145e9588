"""Keep traced programs on disk, next to the compiled ones (core/stored_programs.py)."""

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import ragen_jax
from ragen_jax import configs, envs
from ragen_jax.core.stored_programs import Store, use_store
from ragen_jax.storage.atomic_io import atomic_open
from ragen_jax.storage.console import console

# Packages that trace, lower or store programs, or whose functions are traced.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "flatbuffers")
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def enable_program_store(files: Iterable[str | Path] = ()) -> None:
    """Keep programs in the folder "traced" of the compilation cache, if that is in use.

    On one CPU device only: elsewhere it is untested, and starts take much longer than tracing. The
    folder is part of the cache, so `enable_compilation_cache`, which must be called before, limits
    its size and refuses it if other users could write to it.

    Args:
      files: Python files whose code a trace may depend on, besides the loaded modules.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or "://" in folder or not config.jax_enable_compilation_cache:
        return
    if jax.device_count() > 1 or jax.default_backend() != "cpu":
        return
    programs = Path(folder) / "traced"
    try:
        programs.mkdir(mode=0o700, exist_ok=True)
        use_store(Store(programs, fingerprint(files), write=_write, warn=console))
    except OSError as error:
        console(f"warning: traced programs are not kept: {error}")


def _write(path: Path, content: bytes) -> None:
    with atomic_open(path, "wb") as file:
        file.write(content)


def fingerprint(files: Iterable[str | Path] = ()) -> str:
    """Return a hash of all that a trace depends on and that is constant in a process.

    It covers the versions of Python and of `PACKAGES`, JAX's options, the devices, XLA's
    environment variables, and path, size and time of change of every Python file of this package,
    of `files`, and of every loaded module that is not part of Python or of an installed package.

    Raises:
      OSError: one of the files cannot be read.
    """
    device = jax.devices()[0]
    parts = [sys.version, platform.platform(), device.client.platform_version]
    parts += [f"{jax.device_count()} x {device.device_kind}"]
    parts += [f"{name} {metadata.version(name)}" for name in PACKAGES]
    config: Any = jax.config
    parts += [f"{name} {value}" for name, value in sorted(config.values.items())]
    parts += [f"{name} {os.environ.get(name)}" for name in VARIABLES]
    for path in sorted({str(Path(path).resolve()) for path in (*_sources(), *files)}):
        stat = os.stat(path)
        parts.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _sources() -> set[Path]:
    """Return the Python files of this package and those of loaded modules outside of packages."""
    found: set[Path] = set()
    for package in (ragen_jax, configs, envs):
        found |= set(Path(str(package.__file__)).parent.rglob("*.py"))
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return found | {Path(file) for file in loaded if file and not file.startswith(installed)}
