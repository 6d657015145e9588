"""Grids of Sudoku: the state, the cells of a unit, and text.

A grid is a text of its cells, row by row, with "." for an empty cell. A cell is an index into it.
"""

import functools
import math
from dataclasses import dataclass

EMPTY = "."
DIGITS = "123456789"
SIZES = (4, 9)
UNITS = ("row", "column", "box")

SYMBOLS = DIGITS + EMPTY + " |-+"  # characters in a `grid_text`


@dataclass(frozen=True, slots=True)
class State:
    """A partly filled grid. All filled-in digits are right."""

    cells: str
    solution: str  # the unique solution

    @property
    def size(self) -> int:
        """Number of rows, of columns and of digits."""
        return math.isqrt(len(self.cells))


@functools.cache
def units(size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each cell, the cells of its row, its column and its box, in reading order."""
    side = math.isqrt(size)

    def names(cell: int) -> tuple[int, int, int]:
        row, column = divmod(cell, size)
        return row, column, row // side * side + column // side

    cells = range(size * size)
    return tuple(
        tuple(
            tuple(other for other in cells if names(other)[kind] == names(cell)[kind])
            for kind in range(len(UNITS))
        )
        for cell in cells
    )


@functools.cache
def peers(size: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each cell, the other cells of its row, column and box."""
    return tuple(
        tuple(sorted({other for unit in its for other in unit} - {cell}))
        for cell, its in enumerate(units(size))
    )


def name(cell: int, size: int) -> str:
    """Return a cell's name in answers and reasoning: r1c2 is in row 1, column 2."""
    row, column = divmod(cell, size)
    return f"r{row + 1}c{column + 1}"


def grid_text(cells: str) -> str:
    """Return rows of digits and dots, with lines between the boxes."""
    size = math.isqrt(len(cells))
    side = math.isqrt(size)
    rows = []
    for start in range(0, len(cells), size):
        row = cells[start : start + size]
        boxes = (" ".join(row[i : i + side]) for i in range(0, size, side))
        rows.append(" | ".join(boxes))
    bands = ("\n".join(rows[i : i + side]) for i in range(0, size, side))
    return f"\n{separator(size)}\n".join(bands)


def separator(size: int) -> str:
    """Return the line between two bands of boxes, with a + where it crosses vertical lines."""
    side = math.isqrt(size)
    inner, outer = "-" * (2 * side + 1), "-" * (2 * side)
    return "+".join([outer, *[inner] * (side - 2), outer])


def is_solved(cells: str) -> bool:
    """Whether every row, column and box holds every digit."""
    size = math.isqrt(len(cells))
    every = set(DIGITS[:size])
    return all({cells[other] for other in unit} == every for its in units(size) for unit in its)


def parse(text: str) -> str:
    """Return the cells of a grid text; strict (ValueError)."""
    cells = "".join(symbol for symbol in text if symbol in DIGITS + EMPTY)
    size = math.isqrt(len(cells))
    if size not in SIZES or grid_text(cells) != text or not set(cells) <= {EMPTY, *DIGITS[:size]}:
        raise ValueError(f"not a grid of 4x4 or 9x9 cells as Sudoku draws it: {text!r}")
    return cells
