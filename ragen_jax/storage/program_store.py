"""Keep traced programs on disk, next to the compiled ones (core/stored_programs.py)."""

import hashlib
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import ragen_jax
from ragen_jax import configs, envs
from ragen_jax.core.stored_programs import Store, use_store
from ragen_jax.storage.atomic_io import write_once
from ragen_jax.storage.console import console

# Packages that trace, lower or store programs, or whose functions are traced.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "chex", "numpy", "ml_dtypes", "flatbuffers")
INSTALLED = ("site-packages", "dist-packages")  # names of folders of installed packages
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
RECENT = 60 * 10**9  # nanoseconds; importing everything takes less


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
        fingerprint = fingerprint_of(files, now=time.time_ns())
        use_store(Store(programs, fingerprint, write=write_once, warn=console))
    except OSError as error:
        console(f"warning: traced programs are not kept: {error}")


def fingerprint_of(files: Iterable[str | Path] = (), *, now: int) -> Callable[[], str | None]:
    """Return a function that returns a hash of all that a trace depends on besides its arguments.

    It covers the versions of Python and of `PACKAGES`, JAX's options, the devices, XLA's
    environment variables, and path, size and time of change of Python files: those of this package,
    `files`, and those of the modules that are loaded at the call, such as an environment of your
    own. Of installed packages only the time of the last installation counts.

    The hash is None if one of the files was changed less than RECENT before `now` or after it, or
    cannot be read any more: the process may have loaded it before that, and would keep programs of
    the old code for the new one.

    Args:
      now: the time in nanoseconds, at most RECENT after the start of the process.

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
    folders = [Path(str(package.__file__)).parent for package in (ragen_jax, configs, envs)]
    ours = {str(path.resolve()) for folder in folders for path in folder.rglob("*.py")}
    states = _states(ours | {str(Path(file).resolve()) for file in files})
    # The time of these folders changes when a package is installed, updated or removed. A virtual
    # environment may use a user's or the system's packages besides its own.
    installed = {path for path in sys.path if Path(path).name in INSTALLED and Path(path).is_dir()}
    installed |= {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    parts += [f"{path} {state}" for path, state in sorted(_states(installed).items())]
    elsewhere = tuple(os.path.join(path, "") for path in (*installed, *map(str, folders)))

    def fingerprint():
        loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        others = {file for file in loaded if file and not file.startswith(elsewhere)}
        try:
            found = states | _states(others)
        except OSError:  # a file was removed since, or is in an archive
            return None
        if any(changed > now - RECENT for _, changed in found.values()):
            return None
        lines = [*parts, *(f"{path} {state}" for path, state in sorted(found.items()))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    return fingerprint


def _states(files: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return {path: (size, time of change in nanoseconds)} of files."""
    stats = ((path, os.stat(path)) for path in files)
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats}
