"""Atomic writes: files are written to a temporary name, synced to disk, then renamed.

A process that is killed while writing leaves the previous file. Writes that the disk refuses,
because it is full or read-only, are retried for the time that `retry_disk_errors` sets.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import glob
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

TEMPORARY_NAME = ".{name}.writing-{pid}"
# Leftovers of this module, and of model/hf.py: the folders that it writes, and those they replace.
LEFT_OVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>writing|saving|replaced)-(?P<pid>[1-9]\d*)", re.S)
PAUSE = 1.0  # seconds between two attempts
# Errors of writing only: no space, quota exceeded, file size limit, read-only disk.
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Errors of opening any file when too many files are open; the input is not at fault.
OPEN_FILE_ERRORS = (errno.EMFILE, errno.ENFILE)
# Errors of writing and reading that may pass, or end when permission is given.
TRANSIENT_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.EBUSY, errno.ETXTBSY),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
)
# Errors that do not pass: no folder, no locks, no links, a name that the file system refuses.
PERMANENT_ERRORS = (
    *(errno.ENOENT, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK),
    *(errno.EINVAL, errno.ENOTEMPTY, errno.ENODEV, errno.ENXIO),
)
# Errors of the path on any disk, which commands report as unusable input.
PATH_ERRORS = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
# The errno in the text of exceptions that are not OSErrors: of TensorStore, and of libraries in
# Rust (safetensors, tokenizers).
OS_ERROR = re.compile(r"os_error_code='(\d+)'|os error (\d+)", re.IGNORECASE)
# The errno in the text of shutil's OSErrors, which have no errno attribute.
ERRNO = re.compile(r"\[Errno (\d+)\]")
# Texts without a number: of array_record, and of pathlib before Python 3.13.
ERRNO_OF_TEXT = {
    **{
        os.strerror(n): n
        for n in (
            *DISK_FULL_ERRORS,
            *OPEN_FILE_ERRORS,
            *TRANSIENT_ERRORS,
            *PERMANENT_ERRORS,
            *PATH_ERRORS,
        )
    },
    "Symlink loop": errno.ELOOP,
}
# Messages without an errno for a full disk: of tempfile, and of tensorflow_datasets before it
# generates.
DISK_FULL_TEXTS = ("No usable temporary directory", "Not enough disk space")


@contextlib.contextmanager
def atomic_open(path: str | Path, mode: str = "w") -> Generator[IO[Any]]:
    """Yield a file in memory; at the end, if nothing failed, write it to `path`.

    Folders of the path are made if needed.

    Args:
      mode: "w" (UTF-8; lone surrogates are escaped as in JSON) or "wb".
    """
    data = io.BytesIO()
    file = data if "b" in mode else io.TextIOWrapper(data, "utf-8", "backslashreplace")
    yield file
    file.flush()
    with_retries(lambda: _replace(Path(path), data.getbuffer()), path)


def atomic_write(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_open(path) as file:
        file.write(text)


def write_once(path: Path, content: bytes) -> None:
    """Write a file atomically, without retries, for caches that no run should wait for.

    Raises:
      DiskRefused: the disk refused it.
    """
    with writing(path):
        _replace(path, memoryview(content))


def _replace(path: Path, data: memoryview) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):  # such as /dev/null, or a pipe
        path.write_bytes(data)
        return
    path = path.resolve()  # a link that the user names stays a link
    aside = path.with_name(TEMPORARY_NAME.format(name=path.name, pid=os.getpid()))
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


def make_folder(path: str | Path) -> None:
    """Make a folder and its parents, unless it exists."""
    with_retries(functools.partial(Path(path).mkdir, parents=True, exist_ok=True), path)


def _remove_left_over_of(path: Path) -> None:
    """Remove the leftovers of killed writers of a file.

    `remove_leftovers` is only for folders of ragen_jax, but a user's file can be in any folder.
    """
    for entry in path.parent.glob(TEMPORARY_NAME.format(name=glob.escape(path.name), pid="[1-9]*")):
        found = LEFT_OVER.fullmatch(entry.name)
        if found and not _is_running(int(found["pid"])):
            with contextlib.suppress(OSError):
                entry.unlink()


def append_line(file: io.FileIO, text: str) -> None:
    """Append one or more lines to a file, completely or not at all."""
    data, end = text.encode(errors="backslashreplace"), os.fstat(file.fileno()).st_size

    def write() -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(file.fileno(), data[written:], end + written)
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise

    with_retries(write, file.name)


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of killed writers of the files and folders below a folder.

    Leftovers of running processes of this machine stay, so several processes may share the folder.
    A folder that was moved aside, but whose replacement was not written, is moved back. Entries
    that this process may not remove stay.
    """
    for inside, folders, files in os.walk(folder):
        for entry in [Path(inside) / name for name in (*folders, *files)]:
            found = LEFT_OVER.fullmatch(entry.name)
            if found is None or _is_running(int(found["pid"])):
                continue
            if _is_locked(entry.with_name(f"{found['name']}.lock")):  # possibly by another machine
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
    """Return whether a process on any machine holds a lock that guards making a cache folder."""
    if not path.is_file():
        return False
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _is_running(process: int) -> bool:
    """Return whether another process of this machine has this process number.

    In containers, this process can have the number of an earlier process.
    """
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


# ------------------------------------------------------------------------------ disk errors


class DiskRefused(OSError):
    """A write failed; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class _Patience:
    seconds: float  # longest time for which a write is retried
    say: Callable[[str], None]  # prints a line about the retries


_patience = _Patience(0.0, print)  # no retries without `retry_disk_errors`


@contextlib.contextmanager
def retry_disk_errors(seconds: float, say: Callable[[str], None]) -> Generator[None]:
    """Within this context, make all writers of this process retry writes that a disk refuses.

    Args:
      seconds: longest time for which each write is retried.
      say: prints a line when retries begin, and when the write succeeds.
    """
    global _patience
    before, _patience = _patience, _Patience(seconds, say)
    try:
        yield
    finally:
        _patience = before


def with_retries(write: Callable[[], T], what: object) -> T:
    """Call write() and return its value; retry for the time set by `retry_disk_errors`.

    Args:
      write: a function that can be repeated; if it reads a source, it does so within `reading`.
      what: a path, or a name of the written data.

    Raises:
      DiskRefused: the time is over, or retrying does not help.
    """
    begin, reported = time.monotonic(), False
    while True:
        try:
            value = write()
        except Exception as error:
            refused = _writing_error(error, what)
            if refused is error:
                raise
            may_pass = isinstance(refused, DiskRefused) and _cause(error) not in PERMANENT_ERRORS
            if not may_pass or time.monotonic() - begin >= _patience.seconds:
                raise refused from error
            if not reported:
                _patience.say(f"warning: {refused}: retrying for {_patience.seconds:g} s")
                reported = True
            time.sleep(min(PAUSE, _patience.seconds))
        else:
            if reported:
                _patience.say(f"written after {time.monotonic() - begin:.0f} s")
            return value


@contextlib.contextmanager
def writing(what: object) -> Generator[None]:
    """Report a disk error of the body as `with_retries` does, without retries.

    For writes that cannot be restarted.

    Raises:
      DiskRefused: the disk refused it.
    """
    try:
        yield
    except Exception as error:
        refused = _writing_error(error, what)
        if refused is error:
            raise
        raise refused from error


@contextlib.contextmanager
def reading() -> Generator[None]:
    """Keep errors of the body unchanged, even within `with_retries` and `writing`.

    For a source that is read while a file is written from it.
    """
    try:
        yield
    except OSError as error:
        error.add_note(_READING)
        raise


_READING = "raised while reading"


def disk_error_message(error: BaseException) -> str | None:
    """Return a message if an error means that a disk refused to write or too many files are open.

    Return None for other errors.
    """
    for each in _chain(error):
        if isinstance(each, DiskRefused):
            return str(each)
    cause = _cause(error)
    if cause not in DISK_FULL_ERRORS + OPEN_FILE_ERRORS:
        return None
    path = error.filename if isinstance(error, OSError) else None
    verb = "opened" if cause in OPEN_FILE_ERRORS else "written"
    return f"{path or 'a file'} cannot be {verb} ({_words(cause)})"


def _writing_error(error: Exception, what: object) -> Exception:
    """Return the error to raise after writing `what` failed.

    It is a `DiskRefused` for errors of the disk, an OSError for errors of the path, and otherwise
    the same error.
    """
    if any(isinstance(each, DiskRefused) for each in _chain(error)):
        return error
    cause = _cause(error)
    if cause in PATH_ERRORS and not (isinstance(error, OSError) and error.errno):
        return OSError(cause, os.strerror(cause), str(what))
    if cause not in DISK_FULL_ERRORS + OPEN_FILE_ERRORS + TRANSIENT_ERRORS + PERMANENT_ERRORS:
        return error
    return DiskRefused(f"{what} cannot be written ({_words(cause)})")


def _words(cause: int) -> str:
    """Return the text of an errno, with a remedy if it is not obvious."""
    hint = "; raise the limit, ulimit -n" if cause in OPEN_FILE_ERRORS else ""
    return os.strerror(cause) + hint


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _cause(error: BaseException) -> int:
    """Return the errno of an error or of an error that it was raised from; 0 if there is none.

    The errno can be an attribute or be named in the message.
    """
    for each in _chain(error):
        if _READING in getattr(each, "__notes__", ()):
            return each.errno if isinstance(each, OSError) and each.errno in DISK_FULL_ERRORS else 0
        if found := _errno(each):
            return found
    return 0


def _errno(error: BaseException) -> int:
    text = str(error)
    if any(words in text for words in DISK_FULL_TEXTS):
        return errno.ENOSPC
    if isinstance(error, OSError):
        found = ERRNO.search(text)
        return error.errno or (int(found[1]) if found else 0)
    if found := OS_ERROR.search(text):
        return int(found[1] or found[2])
    if isinstance(error, RuntimeError):
        return next((number for words, number in ERRNO_OF_TEXT.items() if words in text), 0)
    return 0
