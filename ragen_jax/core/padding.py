"""Padded sizes, so that the many lengths and row counts of a run need only a few programs."""

from collections.abc import Sequence

import numpy as np


def length_bucket(length: int, *, least: int = 8, parts: int = 8) -> int:
    """The padded length of a program: multiples of an eighth of the next power of two (>= 8).

    Args:
      least, parts: other numbers than those: multiples of at least `least`, and of a `parts`th.
    """
    step = max(least, (1 << (int(length) - 1).bit_length()) // parts)
    return -(-int(length) // step) * step


def row_bucket(live: int, total: int) -> int:
    """The padded number of rows: quarters of the batch, at least 64.

    Below 64 rows XLA's float32 products on CPU round differently with the number of rows.
    """
    quarter = -(-total // 4)
    return min(max(-(-live // quarter) * quarter, 64), total)


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [size, width], right-padded, and the lengths); more rows repeat the first."""
    rows = [*rows, *[rows[0]] * ((size or len(rows)) - len(rows))]
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
