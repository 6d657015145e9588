"""The cache folder, locks on its entries, and hashes of the content of files."""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
from collections.abc import Generator
from pathlib import Path
from typing import IO

from ragen_jax.storage.atomic_io import make_folder, with_retries
from ragen_jax.storage.console import console


def cache_directory() -> Path:
    """Return the folder of generated files: $XDG_CACHE_HOME (or ~/.cache)/ragen_jax."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragen_jax"


@contextlib.contextmanager
def lock_path(path: Path) -> Generator[None]:
    """Lock a path for this process; other processes that lock it wait.

    Use it for files that are generated on first use, since several runs can start together.
    """
    make_folder(path.parent)
    place = path.with_name(f"{path.name}.lock")
    with with_retries(functools.partial(place.open, "w"), place) as file:
        with_retries(
            functools.partial(fcntl.flock, file, fcntl.LOCK_EX), place
        )  # until the file is closed
        yield


def open_locked(path: Path) -> IO[bytes]:
    """Open a file, lock it for this process, and write this process's number and host into it.

    The folder is made if needed.

    Raises:
      BlockingIOError: another process holds the lock.
      ValueError: the file has another hard link, so emptying it would empty another file.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as unless_locked:
            # Opening fails for a link that was made after `refuse_links`. Unbuffered, so that data
            # that a full disk has refused is not written again when the file is closed.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            file = unless_locked.enter_context(open(os.open(path, flags, 0o666), "ab", buffering=0))
            if os.fstat(file.fileno()).st_nlink > 1:
                raise ValueError(f"{path} is a hard link to another file; remove it")
            try:
                # Forked processes do not inherit this lock.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:  # some network file systems have no locks
                console(
                    f"warning: {path} cannot be locked ({error}); do not start a second run there"
                )
            else:
                try:
                    current = os.path.samestat(path.stat(), os.fstat(file.fileno()))
                except FileNotFoundError:
                    current = False
                if not current:  # the previous holder has removed it meanwhile
                    continue
                file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
            unless_locked.pop_all()
            return file


def content_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file's content, or of a folder, in hex digits.

    A file is read only once while its size and modification time are unchanged. The hash of a
    folder covers the names and contents of all files below it except hidden files.

    Raises:
      OSError: the file or folder cannot be read.
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
