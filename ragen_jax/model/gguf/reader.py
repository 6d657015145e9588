"""Open a GGUF file, or the files that one model is split into."""

import dataclasses
import math
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.storage import confined

MAGIC = b"GGUF"  # first bytes of a file
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Errors of the package `gguf` for a file that is truncated, damaged or newer than the package.
DAMAGED = (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True)
class GGUF:
    """An open GGUF file.

    fields: metadata key -> value; of several files, those of the first
    tensors: name -> the package's `ReaderTensor`, whose data stays on disk until it is read
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of an architecture's key, such as "block_count"."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def whole_number(self, key: str, default: int | None = None) -> int:
        """Return the value of an architecture's key that is a whole number of at least 1.

        Args:
          default: value if the key is missing; None: the file must have it.

        Raises:
          ValueError: it is missing or is no such number, for example a number for each layer.
        """
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise self._unexpected(key, value, "a whole number from 1, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of an architecture's key that is a number above 0; as `whole_number`.

        Files hold float32. The result is the shortest decimal number with that value: 1e-5, not
        9.999999747378752e-06.
        """
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._unexpected(key, value, "a number above 0")
        return float(str(np.float32(value)))

    def _unexpected(self, key: str, value: Any, expected: str) -> ValueError:
        found = "missing" if value is None else f"{value!r:.40}"
        return ValueError(f"{self.path}: {self.architecture}.{key} is {found}; expected {expected}")


def list_files(path: Path) -> list[Path]:
    """Return the files of the model that `path` belongs to, in order.

    llama.cpp splits a large model into NAME-00001-of-00003.gguf and so on; any of them may be
    given.

    Raises:
      ValueError: a file is missing or is not GGUF.
    """
    files = [path]
    split = PART.fullmatch(path.name)
    if split and 1 <= int(split["number"]) <= int(split["count"]):
        files = [
            path.with_name(f"{split['name']}-{number:05}-of-{split['count']}.gguf")
            for number in range(1, int(split["count"]) + 1)
        ]
    missing = [file.name for file in files if not file.is_file()]
    if missing and len(files) == 1:
        raise ValueError(f"no GGUF file {path}")
    if missing:
        raise ValueError(
            f"{path} is one of {len(files)} files of a model, but {path.parent} lacks "
            f"{', '.join(missing[:4])}"
        )
    for file in files:
        with file.open("rb") as opened:
            found = opened.read(len(MAGIC))
        if found != MAGIC:
            begins = f"begins with {found!r}, not {MAGIC!r}" if found else "is empty"
            raise ValueError(f"{file} is not a GGUF file: it {begins}")
    return files


def open_gguf(path: Path) -> GGUF:
    """Open a model's GGUF file or files.

    Raises:
      ValueError: a file is missing, damaged, truncated or not GGUF, or the package `gguf` is not
        installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"{path} is a GGUF file, which the package gguf reads: pip install 'ragen_jax[gguf]'"
        ) from error
    files = list_files(path)
    confined.check_gguf(*files)
    fields: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for file in files:
        try:
            reader = gguf.GGUFReader(file)
            found = {name: field.contents() for name, field in reader.fields.items()}
        except DAMAGED as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(
                f"{file} is truncated or damaged, or newer than the package gguf "
                f"{version('gguf')} ({reason:.200})"
            ) from error
        if reader.byte_order != "I":
            raise ValueError(f"{file} has another byte order than this machine")
        count = found.get("split.count") or 1
        if count != len(files):
            raise ValueError(
                f"{file} is one of {count!r:.40} files of a model (split.count), but its name "
                f"says {len(files)}; keep the names NAME-00001-of-0000N.gguf"
            )
        fields = fields or found
        tensors |= {tensor.name: tensor for tensor in reader.tensors}
    return GGUF(path, fields, tensors)
