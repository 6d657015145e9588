"""Keep compiled programs on disk, so that later processes load them."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.console import console
from ragen_jax.storage.ownership import exposure

MOST = 2 << 30  # bytes that are kept from one start to the next


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache in cache_directory()/compiled.

    A user's own JAX_COMPILATION_CACHE_DIR stays; JAX_ENABLE_COMPILATION_CACHE=false: none is kept.
    Neither is used where others could put programs into it (`refuse_shared_cache`).
    Several processes may share it. An entry that cannot be read JAX compiles again, with a warning.

    The folder is bounded here, at a start, and not by jax_compilation_cache_max_size: that one
    writes no entry any more once a process has died between an entry and the file of its time
    (jax 0.10.2), and every process waits for its lock.
    """
    config: Any = jax.config  # whose attributes are there when it runs
    refuse_shared_cache()
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = cache_directory() / "compiled"
    try:
        # What is in it is run: nobody else may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if found := exposure(folder):
            console(_refused(folder, found))
            return
        delete_oldest(folder, MOST)
    except OSError as error:
        console(f"warning: compiled programs are not cached: {error}")
        return
    config.update("jax_compilation_cache_dir", str(folder))
    # A folder in that folder, for what XLA measures on GPUs, is part of the names of all entries: a
    # cache that was copied or moved would not be read.
    if jax.default_backend() != "gpu":
        config.update("jax_persistent_cache_enable_xla_caches", "")
    # JAX keeps what took a second. Of the tiny agent's programs most take less, all together half
    # of what there is to gain (benchmarks/NOTES.md).
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def refuse_shared_cache() -> None:
    """Turns JAX's compilation cache off, with a line, if JAX_COMPILATION_CACHE_DIR names a folder
    where others could put programs of theirs, which would be run. Buckets are not judged."""
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
        console(_refused(folder, found))
        config.update("jax_enable_compilation_cache", False)


def _refused(folder: str | Path, reason: str) -> str:
    return f"warning: compiled programs in {folder} are neither loaded nor cached: {reason}"


def delete_oldest(folder: Path, most: int) -> None:
    """Delete the least recently used files until at most `most` bytes are left.

    Raises:
      OSError: the folder cannot be read, or not be written where something is to be deleted.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process deletes, too
            if path.is_file():
                stat = path.stat()
                files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > most:
            path.unlink(missing_ok=True)
