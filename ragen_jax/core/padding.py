"""Padded sizes, so that the many lengths and row counts of a run need only a few programs."""

from collections.abc import Sequence

import numpy as np

# Below this number of rows XLA's float32 products on CPU round differently with their number.
LEAST_ROWS = 64


def length_bucket(length: int, *, least: int = 8, parts: int = 8) -> int:
    """Return a padded length: `length` rounded up to a multiple of a step.

    Args:
      least: smallest step, in tokens.
      parts: the step is the next power of two divided by this, if larger than `least`.
    """
    step = max(least, (1 << (int(length) - 1).bit_length()) // parts)
    return -(-int(length) // step) * step


def row_bucket(live: int, total: int) -> int:
    """Return the padded number of rows: a multiple of a quarter of the batch, at least LEAST_ROWS
    and at most `total`."""
    quarter = -(-total // 4)
    return min(max(-(-live // quarter) * quarter, LEAST_ROWS), total)


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (int32 [size, width], right-padded; lengths); extra rows repeat the first."""
    rows = [*rows, *[rows[0]] * ((size or len(rows)) - len(rows))]
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)
