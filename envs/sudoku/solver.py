"""Sudoku by singles: placements that follow directly from rows, columns and boxes.

A naked single is a cell that only one digit fits; a hidden single is a digit that fits only one
cell of a unit. Neither is a guess, so the digits that they fill in are right in every solution, and
a grid that they complete has a unique solution.
"""

import math
from collections.abc import Sequence

from ragen_jax.envs.sudoku.grid import DIGITS, EMPTY, UNITS, is_solved, peers, units

Placement = tuple[int, str]  # cell, digit


def solve(cells: str) -> list[Placement] | None:
    """Return the placements that complete a grid, those that can be seen at once first.

    Each round fills in all naked singles of the current grid or, if there are none, all hidden
    singles. None if that does not lead to a right grid.
    """
    grid, plan = list(cells), []
    while EMPTY in grid:
        fits = {cell: candidates(grid, cell) for cell, digit in enumerate(grid) if digit == EMPTY}
        found = [(cell, digits) for cell, digits in fits.items() if len(digits) == 1]
        if not found:
            found = [
                (cell, digit)
                for cell, digits in fits.items()
                for digit in digits
                if hidden_in(grid, cell, digit) is not None
            ]
        if not found:
            return None
        for cell, digit in found:
            grid[cell] = digit
        plan += found
    return plan if is_solved("".join(grid)) else None


def candidates(cells: Sequence[str], cell: int) -> str:
    """Return the digits, in order, that are not in the cell's row, column or box."""
    size = math.isqrt(len(cells))
    taken = {cells[peer] for peer in peers(size)[cell]}
    return "".join(digit for digit in DIGITS[:size] if digit not in taken)


def hidden_in(cells: Sequence[str], cell: int, digit: str) -> str | None:
    """Return the first of the empty cell's units in which `digit` fits no other cell."""
    around = peers(math.isqrt(len(cells)))
    for kind, unit in zip(UNITS, units(math.isqrt(len(cells)))[cell], strict=True):
        if not any(
            other != cell
            and cells[other] == EMPTY
            and all(cells[peer] != digit for peer in around[other])
            for other in unit
        ):
            return kind
    return None


def is_single(cells: Sequence[str], cell: int, digit: str) -> bool:
    """Whether `digit`, which fits the empty cell, is a naked or a hidden single there."""
    return candidates(cells, cell) == digit or hidden_in(cells, cell, digit) is not None
