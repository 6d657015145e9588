"""Files that are whole or absent: written aside, synced to the disk, then renamed.

Who is killed in the writing leaves the file of before. What a disk refuses, because it is full or
may not be written, is tried again for as long as `patient` says.
"""

import contextlib
import dataclasses
import errno
import io
import os
import re
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

ASIDE = ".{name}.writing-{pid}"
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
      mode: "w" (UTF-8; halves of surrogate pairs as JSON escapes them) or "wb".
    """
    data = io.BytesIO()
    file = data if "b" in mode else io.TextIOWrapper(data, "utf-8", "backslashreplace")
    yield file
    file.flush()
    retried(lambda: _replace(Path(path), data.getbuffer()), path)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file that is whole or absent."""
    with whole(path) as file:
        file.write(text)


def _replace(path: Path, data: memoryview) -> None:
    path = path.resolve()  # a link stays one
    if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null
        path.write_bytes(data)
        return
    aside = path.with_name(ASIDE.format(name=path.name, pid=os.getpid()))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def append(file: io.FileIO, text: str) -> None:
    """Adds a line, or several, to the end of a file: whole or not at all."""
    data, end = text.encode(errors="backslashreplace"), os.fstat(file.fileno()).st_size

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
    """Removes what killed writers of files below a folder have left aside.

    For the folder's owner: it would take away what another process is writing.
    """
    for path in folder.rglob(ASIDE.format(name="*", pid="*")):
        path.unlink(missing_ok=True)


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
