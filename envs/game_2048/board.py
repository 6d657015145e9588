"""The board: its state, its text form, and the result of a slide."""

import functools
from dataclasses import dataclass

EMPTY = "_"

MOVES = ("Up", "Down", "Left", "Right")  # also the scripted player's order of preference

Row = tuple[int, ...]
Cell = tuple[int, int]  # (row, column), both from 0 at the top left


@dataclass(frozen=True, slots=True)
class State:
    """A position of the game; hashable, and equal positions are equal states.

    rows: rows of a square board, from the top; the number on each tile, 0 for an empty cell
    """

    rows: tuple[Row, ...]

    @property
    def largest(self) -> int:
        return max(map(max, self.rows))

    @property
    def total(self) -> int:
        """Sum of the tiles."""
        return sum(map(sum, self.rows))

    @property
    def is_stuck(self) -> bool:
        """Whether no move changes anything."""
        return all(slide(self, action)[0] == self for action in MOVES)

    def cells(self, number: int) -> list[Cell]:
        """Return the cells with tiles of a number, row by row; 0: the empty cells."""
        size = range(len(self.rows))
        return [(r, c) for r in size for c in size if self.rows[r][c] == number]

    def put(self, cell: Cell, number: int) -> "State":
        """Return the board with another number in a cell."""
        r, c = cell
        row = self.rows[r]
        row = row[:c] + (number,) + row[c + 1 :]
        return State(self.rows[:r] + (row,) + self.rows[r + 1 :])


def slide(state: State, action: str) -> tuple[State, int]:
    """Return (board after a move, before a new tile appears; sum of the tiles made by merging)."""
    rows = state.rows
    lines = tuple(zip(*rows, strict=True)) if action in ("Up", "Down") else rows
    back = -1 if action in ("Down", "Right") else 1
    slid = [_slide_line(line[::back]) for line in lines]
    lines = tuple(line[::back] for line, _ in slid)
    after = tuple(zip(*lines, strict=True)) if action in ("Up", "Down") else lines
    return State(after), sum(map(sum, (merged for _, merged in slid)))


def merges(state: State, action: str) -> list[tuple[int, list[Cell]]]:
    """Return (number, its two cells) of each pair of tiles that a move merges, largest first."""
    size = len(state.rows)
    found = []
    for line in range(size):
        cells = [(i, line) if action in ("Up", "Down") else (line, i) for i in range(size)]
        cells = cells[:: -1 if action in ("Down", "Right") else 1]
        full = [cell for cell in cells if state.rows[cell[0]][cell[1]]]
        numbers = [state.rows[r][c] for r, c in full]
        first = 0
        while first < len(full) - 1:
            if numbers[first] == numbers[first + 1]:
                found.append((numbers[first], sorted(full[first : first + 2])))
                first += 1
            first += 1
    return sorted(found, key=lambda pair: -pair[0])


# Rows repeat more often than boards, and a player looks at thousands of boards.
@functools.lru_cache(maxsize=1 << 16)
def _slide_line(line: Row) -> tuple[Row, Row]:
    """Return (a line slid towards its beginning, the tiles made by merging)."""
    slid: list[int] = []
    merged: list[int] = []
    fresh = False  # whether the last tile was just made by merging: it is not merged again
    for tile in filter(None, line):
        if slid and slid[-1] == tile and not fresh:
            slid[-1] = 2 * tile
            merged.append(2 * tile)
            fresh = True
        else:
            slid.append(tile)
            fresh = False
    return (*slid, *(0,) * (len(line) - len(slid))), tuple(merged)


def grid_text(state: State) -> str:
    """Return rows of numbers and EMPTY, separated by spaces, and joined by newlines."""
    return "\n".join(" ".join(str(tile or EMPTY) for tile in row) for row in state.rows)


def parse(text: str) -> State:
    """Return the state of a `grid_text`. Strict: raises ValueError with the error and its place.

    Rows and columns in messages count from 0 at the top left.
    """
    lines = [line.split(" ") for line in text.split("\n")]
    rows = []
    for r, cells in enumerate(lines):
        if len(cells) != len(lines):
            raise ValueError(
                f"row {r} has {len(cells)} cells where there are {len(lines)} rows: "
                f"{' '.join(cells)!r} (a board is square, cells are parted by single spaces)"
            )
        rows.append(tuple(_tile(cell, r, c) for c, cell in enumerate(cells)))
    if not any(map(any, rows)):
        raise ValueError("expected at least one tile, found none")
    return State(tuple(rows))


def _tile(cell: str, row: int, column: int) -> int:
    if cell == EMPTY:
        return 0
    # A number of at most six digits, so that int() never refuses.
    number = int(cell) if cell.isascii() and cell.isdigit() and len(cell) <= 6 else 0
    if number < 2 or number & (number - 1) or str(number) != cell:
        raise ValueError(
            f"unknown cell {cell!r} at row {row}, column {column}; known: _ and 2, 4, 8, 16, ..."
        )
    return number
