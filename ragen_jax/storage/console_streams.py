"""Standard output and standard error whose failures never end a command.

`set_up_console` replaces sys.stdout and sys.stderr, so libraries that print, warn or log use the
new streams. Text is made printable and encoded for the console before it is written to a terminal,
pipe or file. Text that cannot be written, to a closed pipe or a full disk, is lost; the first
failure of each stream is recorded for `take_failures`.
"""

import errno
import io
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

from ragen_jax.core.clean_text import one_line, printable, shorten

STREAMS = {1: "standard output", 2: "standard error"}  # by descriptor
WAIT_SECONDS = 10.0  # maximum wait for a full non-blocking pipe
# Escape sequences that libraries write: colours, which are dropped, and the moves of progress bars.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOVES = re.compile(r"\r|(?:\x1b\[A)+")

_failures: list[str] = []  # sentences for the next `take_failures`


class _Descriptor(io.RawIOBase):
    """A file descriptor whose writes never raise."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._failed = descriptor, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self._descriptor)
        except OSError:
            return False

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError as error:
                if not select.select([], [self._descriptor], [], WAIT_SECONDS)[1]:
                    self._fail(error)
                    break
            except OSError as error:
                self._fail(error)
                break
        return size

    def _fail(self, error: OSError) -> None:
        if self._failed:
            return
        self._failed = True
        name = STREAMS[self._descriptor]
        why = os.strerror(error.errno or 0)
        _failures.append(f"{name} cannot be written ({why}); its output is lost")
        # The reader closed a pipe on purpose. Other failures are reported on the other stream.
        if self._descriptor == 1 and error.errno != errno.EPIPE and sys.stderr is not None:
            sys.stderr.write(f"warning: {_failures[-1]}\n")


class _Stream(io.TextIOWrapper):
    """A text stream that writes whole printable lines and never raises an error."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        super().__init__(
            _Descriptor(descriptor),  # ty: ignore[invalid-argument-type] raw, as with python -u
            encoding=encoding,
            errors="backslashreplace",
            newline="\n",
            write_through=True,
        )
        # A signal handler may print while its thread is printing.
        self._lock, self._rest, self._is_terminal = threading.RLock(), "", self.buffer.isatty()

    @property
    def mode(self) -> str:
        return "w"

    def write(self, text: str) -> int:
        with self._lock:
            self._rest += self._printable(text)
            if self._is_terminal:
                self._emit(len(self._rest))
            else:
                self._emit(self._rest.rfind("\n") + 1)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            self._emit(len(self._rest))

    def close(self) -> None:
        """Flush the stream; its descriptor stays open."""
        self.flush()

    def _emit(self, end: int) -> None:
        text, self._rest = self._rest[:end], self._rest[end:]
        if text:
            super().write(text)

    def _printable(self, text: str) -> str:
        moves = _MOVES.match(text)
        if not moves:
            return printable(_COLOUR.sub("", text).replace("\r\n", "\n"))
        # A progress bar rewrites its line. In a file, each version is a separate line.
        begin = moves[0] if self._is_terminal else "\n" * ("\r" in moves[0])
        return begin + self._printable(text[moves.end() :])


def set_up_console() -> None:
    """Replace this process's standard streams with streams that never raise, once.

    Closed descriptors among 0 to 2 are opened as /dev/null. Otherwise the next file that the
    process opens would get such a number, and text for standard output would go into that file.
    Streams that other code has installed (a test, a notebook) stay.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        encoding = "utf-8"
        if stream is not None:
            encoding = stream.encoding
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # the new stream will have the same failure, and records it
        replacement = _Stream(descriptor, encoding)
        setattr(sys, name, replacement)
        _redirect_logging(stream, replacement)


def _redirect_logging(old: TextIO | None, new: TextIO) -> None:
    """Make log handlers that write to the old stream write to the new stream."""
    loggers = [logging.root, *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):  # a PlaceHolder has none
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


def take_failures() -> list[str]:
    """Return a sentence for each standard stream that has failed since the last call."""
    failures = _failures[:]
    del _failures[: len(failures)]
    return failures


def show(text: str, *, error: bool = False) -> None:
    """Print lines above any progress bar, printable and of limited length.

    Args:
      error: print on standard error instead of standard output.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:
        return
    lines = "\n".join(printable(shorten(line)) for line in text.split("\n"))
    encoding = getattr(stream, "encoding", None) or "utf-8"
    lines = lines.encode(encoding, "backslashreplace").decode(encoding)
    tqdm.write(f"{lines}\n", file=stream, end="")
    stream.flush()  # so that readers of a pipe or file see it now


def show_line(kind: str, text: str) -> None:
    """Print `KIND: TEXT` as one line on standard error."""
    show(f"{kind}: {one_line(text)}", error=True)
