"""Shared code for files of problems: rows, texts, and when two texts pose the same problem."""

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
from ragen_jax.storage.parquet import rows_of_batch

if TYPE_CHECKING:
    from pyarrow import parquet


def is_text(value: Any) -> bool:
    """Whether `value` is a string that can be encoded as UTF-8: it has no lone surrogates."""
    try:
        return isinstance(value, str) and (value.isascii() or value.encode() is not None)
    except UnicodeEncodeError:
        return False


def normalize(text: str) -> str:
    """Return a text in lower case, without spaces and punctuation other than arithmetic signs."""
    return re.sub(r"[^\w+\-*/^=<>\\]", "", text.lower())


@contextlib.contextmanager
def open_parquet(
    path: str | Path, needed: Sequence[str] = (), *, rows: int = BATCH_ROWS
) -> Generator["parquet.ParquetFile"]:
    """Open a parquet file that has the columns `needed`, to be read in batches of `rows`.

    Raises:
      ValueError: pyarrow is not installed, the file is missing or is not parquet (which may show
        only while it is read), lacks a column, or decodes to more than `confined.check_parquet`
        accepts.
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


def parquet_rows(
    file: "parquet.ParquetFile",
    path: str | Path,
    columns: Sequence[str] | None = None,
    *,
    rows: int = BATCH_ROWS,
) -> Generator[dict[str, Any]]:
    """Yield the rows of an open file, in batches of `rows`.

    Raises:
      ValueError: a cell has no Python value; the message names row (from 0) and field.
    """
    batches = file.iter_batches(batch_size=rows, columns=columns)
    for index, row in enumerate(row for batch in batches for row in rows_of_batch(batch)):
        if isinstance(row, ValueError):
            raise ValueError(f"row {index} of {path}: {row}")
        yield row


def json_value(path: str | Path) -> Any:
    """Return the value of a JSON file, which may begin with a byte order mark.

    Raises:
      ValueError: the file cannot be read or is not JSON.
    """
    try:
        return parse_json(read_bytes(path))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error


def json_rows(path: str | Path) -> Iterator[Any]:
    """Yield the values of a JSON Lines file, skipping empty lines and a byte order mark.

    Raises:
      ValueError: the file cannot be read, or a row is not JSON.
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
