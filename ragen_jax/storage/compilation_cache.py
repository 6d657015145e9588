"""Keep compiled programs on disk, so that later processes load them."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.console import console
from ragen_jax.storage.ownership import exposure

MOST = 2 << 30  # bytes that `enable_compilation_cache` leaves in the folder


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache in cache_directory()/compiled.

    JAX_COMPILATION_CACHE_DIR, if set, takes precedence; JAX_ENABLE_COMPILATION_CACHE=false disables
    caching. A cache into which other users could put programs is not used (`refuse_shared_cache`).
    Several processes may share the cache. If an entry cannot be read, JAX warns and compiles the
    program again.

    The size of the folder is limited here, at the start, and not by
    jax_compilation_cache_max_size. With that option every process waits for the cache's lock, and
    no entry is written any more if a process died after writing an entry but before writing the
    file with its access time (jax 0.10.2).
    """
    config: Any = jax.config  # its attributes are created at run time
    refuse_shared_cache()
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = cache_directory() / "compiled"
    try:
        # The programs in it are run, so other users must not be able to write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if found := exposure(folder):
            console(_refusal_message(folder, found))
            return
        delete_oldest(folder, MOST)
    except OSError as error:
        console(f"warning: compiled programs are not cached: {error}")
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # XLA's caches for GPUs use a folder inside this folder, and its path is part of the name of
    # every entry: a copied or moved cache would not be read.
    if jax.default_backend() != "gpu":
        config.update("jax_persistent_cache_enable_xla_caches", "")
    # By default JAX caches programs that took at least a second to compile. Most programs of the
    # tiny agent take less; together they are half of the possible gain (benchmarks/NOTES.md).
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def refuse_shared_cache() -> None:
    """Disable JAX's compilation cache if other users can put programs into its folder.

    Such programs would be run. A line reports it. The folder is that of JAX_COMPILATION_CACHE_DIR;
    cloud storage buckets are not checked.
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    if not folder or "://" in str(folder) or not config.jax_enable_compilation_cache:
        return
    try:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        found = exposure(Path(folder))
    except OSError as error:
        found = str(error)
    if found:
        console(_refusal_message(folder, found))
        config.update("jax_enable_compilation_cache", False)


def _refusal_message(folder: str | Path, reason: str) -> str:
    return f"warning: compiled programs in {folder} are neither loaded nor cached: {reason}"


def delete_oldest(folder: Path, most: int) -> None:
    """Delete the least recently used files until at most `most` bytes are left.

    Raises:
      OSError: the folder cannot be read, or a file in it cannot be deleted.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may have deleted it
            if path.is_file():
                stat = path.stat()
                files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > most:
            path.unlink(missing_ok=True)
