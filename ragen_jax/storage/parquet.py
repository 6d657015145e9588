"""Rows of a Parquet file, also if some of its cells have no Python value."""

from collections.abc import Iterator
from typing import Any

from ragen_jax.core.clean_text import describe_error


def rows_of_batch(batch: Any) -> Iterator[dict[str, Any] | ValueError]:
    """Yield each row of a `pyarrow.RecordBatch`, as `to_pylist` returns it.

    A row with a cell that pyarrow cannot convert is a ValueError that names the field: a time in
    nanoseconds, a date beyond the year 9999, an unknown time zone, text that is not UTF-8.
    """
    try:
        rows = batch.to_pylist()
    except Exception:  # any kind of error, which a single cell may cause
        rows = (_row(batch, index) for index in range(batch.num_rows))
    yield from rows


def _row(batch: Any, index: int) -> dict[str, Any] | ValueError:
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except Exception as error:  # as above
            return ValueError(
                f"field {name} of type {column.type} cannot be converted: {describe_error(error)}"
            )
    return row
