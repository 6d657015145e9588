"""The texts of a corpus of any size: read line by line, stored in a file, and memory-mapped.

The corpus has the format of wiki-18: each line is a JSON object whose `contents` is the text, in a
file that may be compressed (.gz). Texts are identified by their position.
"""

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from ragen_jax.storage.atomic_io import reading, writing
from ragen_jax.storage.limits import parse_json, read_lines
from ragen_jax.storage.writers import save_array

FIELD = "contents"
TEXTS, ENDS = "texts.bin", "ends.npy"  # concatenated UTF-8; where each text ends, in bytes
CHUNK = 20_000  # texts in memory at a time


def read_corpus(path: str | Path) -> Iterator[str]:
    """Yield the texts of a corpus in order.

    Raises:
      ValueError: there is no such file, a line of it is malformed, or the file is truncated.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"no corpus at {path}: expected a .jsonl or .jsonl.gz file")
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _text(line, f"{path}, line {number}")
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read after line {number}: {error}") from None


def _text(line: bytes, place: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    text = row.get(FIELD) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{place}: the field {FIELD!r} must be a text, got {text!r:.80}")
    return text


def write_passages(folder: Path, texts: Iterator[str]) -> Iterator[list[str]]:
    """Write texts to a folder, and yield them in chunks of CHUNK.

    Raises:
      ValueError: there are no texts.
    """
    ends, chunk, end = [np.zeros(1, np.int64)], [], 0
    path = folder / TEXTS
    with writing(path), path.open("wb") as file:
        for text in _read(texts):
            end += file.write(text.encode())
            chunk.append((text, end))
            if len(chunk) == CHUNK:
                file.flush()  # if the caller stops here, closing the file has nothing left to write
                yield [text for text, _ in chunk]
                ends.append(np.array([end for _, end in chunk]))
                chunk = []
        if chunk:
            file.flush()
            yield [text for text, _ in chunk]
            ends.append(np.array([end for _, end in chunk]))
    if len(ends) == 1:
        raise ValueError("a corpus must hold at least one text, got none")
    save_array(folder / ENDS, np.concatenate(ends))


def _read(texts: Iterator[str]) -> Iterator[str]:
    """Yield the same texts; errors in reading them are not reported as errors in writing."""
    with reading():
        yield from texts


class Passages(Sequence[str]):
    """The texts that `write_passages` wrote: memory-mapped, so only texts in use are read."""

    def __init__(self, folder: str | Path) -> None:
        """Raise ValueError if the files are missing or incomplete."""
        folder = Path(folder).expanduser()
        try:
            self._ends = np.load(folder / ENDS, mmap_mode="r", allow_pickle=False)
            size = (folder / TEXTS).stat().st_size
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(
                f"{folder} holds no index ({error}); make one with python -m ragen_jax.retriever "
                "build"
            ) from None
        if self._ends[-1] != size:
            raise ValueError(
                f"{folder / TEXTS} has {size} bytes, but {ENDS} tells of {self._ends[-1]}"
            )
        self._bytes = np.memmap(folder / TEXTS, mode="r") if size else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not 0 <= place < len(self):  # IndexError ends iteration over a sequence
            raise IndexError(f"text {place} of {len(self)}")
        start, end = self._ends[place : place + 2].tolist()
        return self._bytes[start:end].tobytes().decode()
