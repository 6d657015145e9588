"""Padded sizes: of the lengths and rows that a run meets, only a few become programs."""


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
