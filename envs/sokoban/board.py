"""The board: its state as bit sets, and its text form.

Cells are numbered so that a move is one addition, and one shift moves a whole set of cells:

    cell(row, column) = (row + 1) * (width + 1) + column        row, column from 0 at the top left

The extra column and the extra row above are never floor. A cell that is not floor blocks, so a
shift that leaves the grid ends in the extra cells (or beyond the last row) and is masked away.
Rooms with an open border are therefore safe: the outside counts as wall.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = SYMBOLS = "#_O√XPS"

# Action word -> (rows, columns). The order is also the solver's order of preference.
MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}


@dataclass(frozen=True, slots=True)
class Room:
    """The part of a room that is constant in an episode."""

    height: int
    width: int
    floor: int  # bit set of the cells that are not wall
    targets: int  # bit set of cells, a subset of floor

    @property
    def stride(self) -> int:
        """Difference between the numbers of a cell and the cell below it."""
        return self.width + 1

    def cell(self, row: int, column: int) -> int:
        return (row + 1) * (self.width + 1) + column

    def position(self, cell: int) -> tuple[int, int]:
        """Return (row, column) of a cell."""
        row, column = divmod(cell, self.width + 1)
        return row - 1, column


@dataclass(frozen=True, slots=True)
class State:
    """A position of the game; hashable, and equal positions are equal states."""

    room: Room
    boxes: int  # bit set of cells, the same number as of targets
    player: int  # cell

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.room.targets


def cells(bits: int) -> Iterator[int]:
    """Yield the members of a bit set, in ascending order (row by row)."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def shifts(stride: int) -> tuple[tuple[int, int], ...]:
    """Return (left, right) for each move: `bits << left >> right` moves a set of cells.

    `bits << right >> left` moves it back.
    """
    return ((0, stride), (stride, 0), (0, 1), (1, 0))


def grid_text(state: State) -> str:
    """Return the rows of symbols joined by newlines, without a trailing newline."""
    return _text(state.room, state.boxes, 1 << state.player)


def layout_text(room: Room) -> str:
    """Return the `grid_text` of a room without its boxes and player."""
    return _text(room, 0, 0)


def _text(room: Room, boxes: int, player: int) -> str:
    """Return the text of a room with these boxes and this player, both bit sets."""
    width, floor, targets = room.width, room.floor, room.targets
    row = (1 << width) - 1
    rows = [
        _row_text(
            *(width, floor >> first & row, boxes >> first & row),
            *(player >> first & row, targets >> first & row),
        )
        for first in range(width + 1, (width + 1) * (room.height + 1), width + 1)
    ]
    return "\n".join(rows)


@functools.lru_cache(maxsize=1 << 14)  # a room has few different rows, which are slow to draw
def _row_text(width: int, floor: int, boxes: int, player: int, targets: int) -> str:
    """Return the symbols of a row, from bit sets of its columns."""

    def symbol(bit):
        if not floor & bit:
            return WALL
        if boxes & bit:
            return BOX_ON_TARGET if targets & bit else BOX
        if player & bit:
            return PLAYER_ON_TARGET if targets & bit else PLAYER
        return TARGET if targets & bit else FLOOR

    return "".join(symbol(1 << column) for column in range(width))


def parse(text: str) -> State:
    """Return the state of a `grid_text`. Strict: raises ValueError with the error and its place.

    Rows and columns in messages count from 0 at the top left.
    """
    rows = text.split("\n")
    height, width = len(rows), len(rows[0])
    room = Room(height, width, floor=0, targets=0)
    floor = targets = boxes = 0
    players = []
    for r, row in enumerate(rows):
        if len(row) != width or not row:
            raise ValueError(
                f"row {r} has {len(row)} symbols where row 0 has {width}: {row!r} "
                "(rows are joined by single newlines, with none at the end, and are not empty)"
            )
        for c, symbol in enumerate(row):
            if symbol not in SYMBOLS:
                raise ValueError(
                    f"unknown symbol {symbol!r} at row {r}, column {c}; known: {' '.join(SYMBOLS)}"
                )
            bit = 1 << room.cell(r, c)
            floor |= bit * (symbol != WALL)
            targets |= bit * (symbol in (TARGET, BOX_ON_TARGET, PLAYER_ON_TARGET))
            boxes |= bit * (symbol in (BOX, BOX_ON_TARGET))
            if symbol in (PLAYER, PLAYER_ON_TARGET):
                players.append((r, c))
    if len(players) != 1:
        where = ", at " + " and ".join(map(str, players)) if players else ""
        raise ValueError(f"expected exactly one player (P or S), found {len(players)}{where}")
    if boxes.bit_count() != targets.bit_count() or not boxes:
        raise ValueError(
            "expected as many boxes as targets and at least one, found boxes at "
            f"{[room.position(c) for c in cells(boxes)]} and targets at "
            f"{[room.position(c) for c in cells(targets)]}"
        )
    return State(Room(height, width, floor, targets), boxes, room.cell(*players[0]))
