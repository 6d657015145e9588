"""Limits on the content of untrusted files, checked before memory is allocated for the content.

If a limit refuses a file that you trust, raise the constant here.
"""

import gzip
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ragen_jax.core.clean_text import load_json

MAX_FILE_BYTES = 2 << 30  # file that is read whole; unpacked size for gzip
MAX_LINE_BYTES = 256 << 20  # line of a file that is read line by line
MAX_JSON_VALUES = 32_000_000  # values of a JSON text: numbers, strings, lists and objects
MAX_ARRAYS_BYTES = 256 << 20  # all arrays of an .npz file, unpacked
MAX_CONFIG_BYTES = 64 << 20  # JSON file of settings or of a tokenizer
PIECE_BYTES = 1 << 20  # size of one read

GZIP = b"\x1f\x8b"


class LimitExceeded(ValueError):
    """A file exceeds a limit, which the message names."""


def read_bytes(path: str | Path, most: int | None = None) -> bytes:
    """Return the content of a file, unpacked if it is gzip.

    Args:
      most: largest accepted content in bytes, MAX_FILE_BYTES by default.

    Raises:
      LimitExceeded: the content is larger. OSError, EOFError, zlib.error: it cannot be read.
    """
    most = MAX_FILE_BYTES if most is None else most
    path, content = Path(path), bytearray()
    with path.open("rb") as plain:
        begins = plain.read(len(GZIP))
        plain.seek(0)
        file: io.BufferedIOBase = gzip.GzipFile(fileobj=plain) if begins == GZIP else plain
        # A regular file has a size. A pipe has none, and the size that gzip states may be wrong.
        if begins != GZIP and path.stat().st_size > most:
            raise LimitExceeded(_too_large(path, most))
        while piece := file.read(PIECE_BYTES):
            content += piece
            if len(content) > most:
                raise LimitExceeded(_too_large(path, most))
    return bytes(content)


def _too_large(path: Path, most: int) -> str:
    return f"{path} holds more than {most:,} bytes; split it into several files"


def read_lines(file: io.BufferedIOBase, path: str | Path) -> Iterator[bytes]:
    """Yield the lines of an open file, split at line feeds.

    Args:
      path: path of the file, for messages.

    Raises:
      ValueError: a line is longer than MAX_LINE_BYTES.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise LimitExceeded(f"line {number} of {path} has more than {MAX_LINE_BYTES:,} bytes")
        yield line


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text, with its strings cleaned (clean_text.py).

    Args:
      options: keyword arguments of json.loads.

    Raises:
      ValueError: the text is not JSON, has more than MAX_JSON_VALUES values, or is nested too
        deeply.
    """
    if len(text) > MAX_JSON_VALUES:
        # Each value except the first has one of these marks before it, so the number of marks
        # bounds the number of values.
        marks = (b",", b"[", b"{", b":") if isinstance(text, bytes) else (",", "[", "{", ":")
        # ty: ignore[invalid-argument-type] the marks are of the text's type
        values = 1 + sum(text.count(mark) for mark in marks)
        if values > MAX_JSON_VALUES:
            raise LimitExceeded(f"may hold {values:,} values; accepted: {MAX_JSON_VALUES:,}")
    try:
        return load_json(text, **options)
    except RecursionError:
        raise LimitExceeded("is nested too deep") from None


def read_json(path: str | Path, most: int | None = None) -> Any:
    """Return the value of a JSON file of settings.

    Args:
      most: largest accepted file in bytes, MAX_CONFIG_BYTES by default.

    Raises:
      ValueError: as in `read_bytes` and `parse_json`. OSError: the file cannot be read.
    """
    return parse_json(read_bytes(path, MAX_CONFIG_BYTES if most is None else most))


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, without pickles.

    Raises:
      ValueError: the arrays take more than MAX_ARRAYS_BYTES, or an array's header states more data
        than the file has. Reading a damaged file raises the errors in `run.run_files.DAMAGED`.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        size = sum(member.file_size for member in members)  # zipfile unpacks at most this size
        if size > MAX_ARRAYS_BYTES:
            raise LimitExceeded(f"{path} unpacks to {size:,} bytes; accepted: {MAX_ARRAYS_BYTES:,}")
        for member in members:
            with archive.open(member) as file:
                shape, dtype = _array_header(file)
            # In Python's integers, which do not overflow.
            promised = dtype.itemsize
            for length in shape:
                promised *= length
            if promised > member.file_size:
                raise LimitExceeded(f"{member.filename} in {path} is shorter than its header says")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return (shape, dtype) of an array in NumPy's format."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"NumPy format version {version} is not supported")
    return shape, dtype
