"""Files that are whole or absent: written aside, synced to the disk, then renamed.

Who is killed in the writing leaves the file of before. What a disk refuses, because it is full or
may not be written, is tried again for as long as `patient` says.
"""

import contextlib
import dataclasses
import errno
import fcntl
import glob
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

ASIDE = ".{name}.writing-{pid}"
# And how model/hf.py calls folders that it writes, and the ones that these replace.
LEFT_OVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|saving|replaced)-(?P<pid>[1-9]\d*)", re.S)
PAUSE = 1.0  # seconds between two attempts
# What only writing meets: no space, no quota, a limit to a file's size, a read-only file system.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# And what passes by itself, or when somebody gives leave.
AWAY = (*(errno.EACCES, errno.EPERM, errno.EIO), *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN))
# As TensorStore writes an errno, in exceptions that are no OSError.
OS_ERROR = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")


@contextlib.contextmanager
def whole(path: str | Path, mode: str = "w") -> Generator[IO[Any]]:
    """Yields a file in memory that becomes `path`, in folders that are made if need be, at the end,
    if nothing failed.

    Args:
      mode: "w" (UTF-8) or "wb".
    """
    data = io.BytesIO()
    file = data if "b" in mode else io.TextIOWrapper(data, encoding="utf-8")
    yield file
    file.flush()
    retried(lambda: _replace(Path(path), data.getbuffer()), path)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file that is whole or absent."""
    with whole(path) as file:
        file.write(text)


def _replace(path: Path, data: memoryview) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null, or a pipe
        path.write_bytes(data)
        return
    path = path.resolve()  # a link that the user names stays one
    aside = path.with_name(ASIDE.format(name=path.name, pid=os.getpid()))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over_of(path)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _remove_left_over_of(path: Path) -> None:
    """Removes what killed writers of a file have left beside it: nobody owns the folder of a file
    that the user names."""
    for entry in path.parent.glob(ASIDE.format(name=glob.escape(path.name), pid="[1-9]*")):
        found = LEFT_OVER.fullmatch(entry.name)
        if found and not _is_running(int(found["pid"])):
            with contextlib.suppress(OSError):
                entry.unlink()


def append(file: io.FileIO, text: str) -> None:
    """Adds a line, or several, to the end of a file: whole or not at all."""
    data, end = text.encode(), os.fstat(file.fileno()).st_size

    def write() -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(file.fileno(), data[written:], end + written)
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise

    retried(write, file.name)


def remove_left_over(folder: Path) -> None:
    """Removes what killed writers of files and folders below a folder have left aside.

    What a running process of this machine is writing stays, so that several may share the folder.
    A folder that was moved away to be replaced, and was not, is moved back. What this process may
    not remove stays.
    """
    for inside, folders, files in os.walk(folder):
        for entry in [Path(inside) / name for name in (*folders, *files)]:
            found = LEFT_OVER.fullmatch(entry.name)
            if found is None or _is_running(int(found["pid"])):
                continue
            if _is_locked(entry.with_name(f"{found['name']}.lock")):  # perhaps by another machine
                continue
            folders[:] = [name for name in folders if name != entry.name]
            with contextlib.suppress(OSError):
                _remove_aside(entry, entry.with_name(found["name"]), found["kind"])


def _remove_aside(entry: Path, final: Path, kind: str) -> None:
    if kind == "replaced" and not final.exists():
        entry.rename(final)
    elif entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    """Whether a process, of any machine, has the lock by which the cache's folders are made."""
    if not path.is_file():
        return False
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _is_running(process: int) -> bool:
    """Whether another process of this machine has that number. In containers, this one may have the
    number of one before it."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


# ------------------------------------------------------------------------------ disks that refuse


class DiskRefused(OSError):
    """What could not be written, and why, in words."""


@dataclasses.dataclass(frozen=True)
class _Patience:
    seconds: float  # that a disk is waited for
    say: Callable[[str], None]  # told of it


_patience = _Patience(0.0, print)  # without `patient` there is none


@contextlib.contextmanager
def patient(seconds: float, say: Callable[[str], None]) -> Generator[None]:
    """Lets all writers of this process, until its end, try again what a disk refuses.

    Args:
      seconds: how long each. say: is told that it is waited, and that this is over.
    """
    global _patience
    before, _patience = _patience, _Patience(seconds, say)
    try:
        yield
    finally:
        _patience = before


def retried(write: Callable[[], T], what: object) -> T:
    """write(), again and again while a disk refuses it and the patience lasts.

    Args:
      what: a path, or the name of what is written.

    Raises:
      DiskRefused: the patience is over.
    """
    begin, told = time.monotonic(), False
    while True:
        try:
            value = write()
        except Exception as error:
            cause = _cause(error)
            if cause not in FULL + AWAY:
                raise
            reason = f"{what} cannot be written ({os.strerror(cause)})"
            if time.monotonic() - begin >= _patience.seconds:
                raise DiskRefused(reason) from error
            if not told:
                _patience.say(f"warning: {reason}: trying again for {_patience.seconds:g} s")
                told = True
            time.sleep(min(PAUSE, _patience.seconds))
        else:
            if told:
                _patience.say(f"written after {time.monotonic() - begin:.0f} s")
            return value


def refusal(error: BaseException) -> str | None:
    """What a disk has refused to write, in words; None: the error is of another kind."""
    if isinstance(error, DiskRefused):
        return str(error)
    cause = _cause(error)
    if cause not in FULL:
        return None
    path = error.filename if isinstance(error, OSError) else None
    return f"{path or 'a file'} cannot be written ({os.strerror(cause)})"


def _cause(error: BaseException) -> int:
    """The errno that an error has or tells of; 0: none."""
    if isinstance(error, OSError):
        return error.errno or 0
    found = OS_ERROR.search(str(error))
    return int(found[1] or found[2]) if found else 0
