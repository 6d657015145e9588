"""Problems from seeds, the identity of a problem, and its split."""

import math
from collections import Counter

from ragen_jax.envs.problems import Draws, grid_images, split_by_hash
from ragen_jax.envs.sudoku.grid import DIGITS, EMPTY, UNITS, State, peers, units
from ragen_jax.envs.sudoku.solver import is_single

TAG = 0x50D0C017  # tag of this environment's `Draws`


def draw_problem(draws: Draws, *, size: int, blanks: tuple[int, int]) -> State | None:
    """Make one attempt: a full grid, emptied cell by cell; None if too few cells can be emptied.

    A cell is emptied only if its digit is then a single. Filled in again in reverse order, every
    digit is a single, so the solution is unique and needs no guessing.

    blanks: (fewest, most) cells emptied, inclusive
    """
    count = blanks[0] + draws.below(blanks[1] - blanks[0] + 1)
    solution = full_grid(draws, size)
    cells = list(solution)
    for cell in draws.shuffled(range(size * size)):
        cells[cell] = EMPTY
        if not is_single(cells, cell, solution[cell]):
            cells[cell] = solution[cell]
        elif cells.count(EMPTY) == count:
            return State("".join(cells), solution)
    return None


def full_grid(draws: Draws, size: int) -> str:
    """Return a full grid: repeatedly, the cell with the fewest fitting digits gets any of them.

    Every grid can be drawn, though not with equal probability.
    """
    around = peers(size)
    fits = [(1 << size) - 1] * (size * size)  # for each empty cell, bit i for digit i + 1
    grid = [0] * (size * size)

    def fill() -> bool:
        empty = [cell for cell, digit in enumerate(grid) if not digit]
        if not empty:
            return True
        cell = min(empty, key=lambda cell: fits[cell].bit_count())
        left = fits[cell]
        while left:
            grid[cell] = digit = draws.member(left)
            left ^= digit
            changed_peers = [peer for peer in around[cell] if fits[peer] & digit]
            for peer in changed_peers:
                fits[peer] ^= digit
            if fill():
                return True
            for peer in changed_peers:
                fits[peer] ^= digit
        grid[cell] = 0
        return False

    fill()
    return "".join(DIGITS[digit.bit_length() - 1] for digit in grid)


def identity(cells: str) -> str:
    """Return the grid, the same for rotations, reflections and renamed digits.

    It is the lexicographic minimum of the eight images, with digits named in the order of their
    first appearance. Sudoku has more symmetries: rows of a band, bands, columns of a stack and
    stacks may be exchanged. Grids that differ by those have different identities: up to all
    symmetries only 3,432 4x4 grids with four to eight empty cells are left, too few to evaluate on
    a fifth of them. They are, however, in the same split.
    """
    size = math.isqrt(len(cells))
    rows = "\n".join(cells[i : i + size] for i in range(0, len(cells), size))
    return min(map(_rename_digits, grid_images(rows)))


def _rename_digits(text: str) -> str:
    digits = dict.fromkeys(symbol for symbol in text if symbol in DIGITS)
    return text.translate(str.maketrans(dict(zip(digits, DIGITS, strict=False))))


def split_of(state: State) -> str:
    """Return the split of a problem, from a hash that no symmetry of Sudoku changes."""
    return split_by_hash("sudoku", invariant(state.cells))


def invariant(cells: str) -> str:
    """Return an invariant of exchanges of rows, bands, columns, stacks, digits, and transposition.

    For every given digit it counts the digits given in its row and column, in its box, and of its
    kind; sorted. Grids that are equal up to symmetry share it, as do a few other grids: a canonical
    form would distinguish all, but for 9x9 grids it is the minimum of millions of images.
    """
    size = math.isqrt(len(cells))
    digit_counts = Counter(cells)
    kinds = []
    for cell, digit in enumerate(cells):
        if digit != EMPTY:
            unit = zip(UNITS, units(size)[cell], strict=True)
            filled_counts = {kind: sum(cells[c] != EMPTY for c in its) for kind, its in unit}
            crossing = sorted((filled_counts["row"], filled_counts["column"]))
            kinds.append((*crossing, filled_counts["box"], digit_counts[digit]))
    return " ".join("".join(map(str, kind)) for kind in sorted(kinds))
