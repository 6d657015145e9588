"""What loaders of files of problems share: rows, texts, and when two texts are one problem."""

import codecs
import contextlib
import importlib.util
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen_jax.storage.confined import BATCH_ROWS, check_parquet
from ragen_jax.storage.limits import parse_json, read_bytes, read_lines

if TYPE_CHECKING:
    from pyarrow import parquet


def is_text(value: Any) -> bool:
    """Whether it is a string that can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def normal(text: str) -> str:
    """A text in lower case, without its spaces and punctuation but for signs of arithmetic."""
    return re.sub(r"[^\w+\-*/^=<>\\]", "", text.lower())


@contextlib.contextmanager
def open_parquet(
    path: str | Path, needed: Sequence[str] = (), *, rows: int = BATCH_ROWS
) -> Generator["parquet.ParquetFile"]:
    """A parquet file that has the columns `needed`, to be read in batches of `rows`.

    Raises:
      ValueError: pyarrow is not installed, the file is missing, is no parquet (which may show while
        it is read), lacks a column, or decodes to more than `confined.check_parquet` accepts.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'ragen_jax[data]'")
    import pyarrow
    from pyarrow import parquet

    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        check_parquet(path, rows=rows)
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in needed if name not in names]
            if missing:
                raise ValueError(
                    f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(names)}"
                )
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def json_value(path: str | Path) -> Any:
    """The value of a JSON file, which may begin with a byte order mark.

    Raises:
      ValueError: the file cannot be read, or is no JSON.
    """
    try:
        return parse_json(read_bytes(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def json_rows(path: str | Path) -> Iterator[Any]:
    """The values of a file of JSON lines, without empty lines and without a byte order mark.

    Raises:
      ValueError: the file cannot be read, or a row is no JSON.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            lines = (line.decode() for line in read_lines(file, path))
            for index, line in enumerate(line for line in lines if line.strip()):
                try:
                    yield parse_json(line)
                except ValueError as error:
                    raise ValueError(
                        f"row {index} of {path} cannot be read as JSON: {error}"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from error
