"""The texts of a corpus of any size: read line by line, kept in a file, and mapped.

A corpus is wiki-18's: a line is a JSON object whose `contents` is the text, in a file that may be
compressed (.gz). Texts are known by their place.
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
TEXTS, ENDS = "texts.bin", "ends.npy"  # UTF-8 one behind the other; where each ends, in bytes
CHUNK = 20_000  # texts that are in memory at a time


def read_corpus(path: str | Path) -> Iterator[str]:
    """The texts of a corpus, one after the other.

    Raises:
      ValueError: there is no such file, or a line of it is not what it should be, or half a file.
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
    """Writes texts to a folder, and hands them on, CHUNK at a time.

    Raises:
      ValueError: there is none.
    """
    ends, chunk, end = [np.zeros(1, np.int64)], [], 0
    path = folder / TEXTS
    with writing(path), path.open("wb") as file:
        for text in _read(texts):
            end += file.write(text.encode())
            chunk.append((text, end))
            if len(chunk) == CHUNK:
                yield [text for text, _ in chunk]
                ends.append(np.array([end for _, end in chunk]))
                chunk = []
        if chunk:
            yield [text for text, _ in chunk]
            ends.append(np.array([end for _, end in chunk]))
    if len(ends) == 1:
        raise ValueError("a corpus must hold at least one text, got none")
    save_array(folder / ENDS, np.concatenate(ends))


def _read(texts: Iterator[str]) -> Iterator[str]:
    """The same texts; errors in reading them stay those of reading."""
    with reading():
        yield from texts


class Passages(Sequence[str]):
    """The texts that `write_passages` wrote: mapped, so that only those that are shown are read."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ValueError where they are missing or incomplete."""
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
        if not 0 <= place < len(self):  # what iterating over a sequence ends with
            raise IndexError(f"text {place} of {len(self)}")
        start, end = self._ends[place : place + 2].tolist()
        return self._bytes[start:end].tobytes().decode()
