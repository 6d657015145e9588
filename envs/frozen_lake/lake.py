"""The lake: its state, and its text form in the symbols of the released RAGEN.

Cells are numbered as in Gymnasium: row * columns + column, both from 0 at the top left.
"""

from dataclasses import dataclass

PLAYER, FROZEN, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_ON_GOAL = SYMBOLS = "P_OGX√"

# A cell's letter in Gymnasium -> its symbol without and with the player.
_SYMBOL = {"F": FROZEN, "H": HOLE, "G": GOAL}
_SYMBOL_WITH_PLAYER = {"F": PLAYER, "H": PLAYER_IN_HOLE, "G": PLAYER_ON_GOAL}
_LETTER = {symbol: letter for d in (_SYMBOL, _SYMBOL_WITH_PLAYER) for letter, symbol in d.items()}


@dataclass(frozen=True, slots=True)
class Lake:
    """The part of a map that is constant in an episode.

    rows: rows of Gymnasium's letters: F frozen, H hole, G goal (exactly one). The start is F: it
        has no meaning once the player has left it
    """

    rows: tuple[str, ...]

    @property
    def size(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.rows), len(self.rows[0])

    @property
    def letters(self) -> str:
        """The letters of all cells, in the order of their numbers."""
        return "".join(self.rows)

    def position(self, cell: int) -> tuple[int, int]:
        """Return (row, column) of a cell."""
        return divmod(cell, len(self.rows[0]))


@dataclass(frozen=True, slots=True)
class State:
    """A position of the game; hashable, and equal positions are equal states."""

    lake: Lake
    player: int  # cell

    @property
    def is_on_goal(self) -> bool:
        return self.lake.letters[self.player] == "G"


def grid_text(state: State) -> str:
    """Return the rows of symbols joined by newlines, without a trailing newline."""
    letters = state.lake.letters
    symbols = [_SYMBOL[letter] for letter in letters]
    symbols[state.player] = _SYMBOL_WITH_PLAYER[letters[state.player]]
    height, width = state.lake.size
    return "\n".join("".join(symbols[row * width : (row + 1) * width]) for row in range(height))


def parse(text: str) -> State:
    """Return the state of a `grid_text`. Strict: raises ValueError with the error and its place.

    Rows and columns in messages count from 0 at the top left.
    """
    rows = text.split("\n")
    width = len(rows[0])
    places = {symbol: [] for symbol in SYMBOLS}
    for r, row in enumerate(rows):
        if len(row) != width or not row:
            raise ValueError(
                f"row {r} has {len(row)} symbols where row 0 has {width}: {row!r} "
                "(rows are joined by single newlines, with none at the end, and are not empty)"
            )
        for c, symbol in enumerate(row):
            if symbol not in places:
                raise ValueError(
                    f"unknown symbol {symbol!r} at row {r}, column {c}; known: {' '.join(SYMBOLS)}"
                )
            places[symbol].append((r, c))
    row, column = _find_only("player", (PLAYER, PLAYER_IN_HOLE, PLAYER_ON_GOAL), places)
    _find_only("goal", (GOAL, PLAYER_ON_GOAL), places)
    if not places[PLAYER] and not places[FROZEN]:
        raise ValueError("expected at least one frozen cell (P or _), found none")
    lake = Lake(tuple("".join(_LETTER[symbol] for symbol in row) for row in rows))
    return State(lake, row * width + column)


def _find_only(
    what: str, symbols: tuple[str, ...], places: dict[str, list[tuple[int, int]]]
) -> tuple[int, int]:
    """Return the only place of any of `symbols`; raise ValueError unless there is exactly one."""
    matches = sorted(place for symbol in symbols for place in places[symbol])
    if len(matches) != 1:
        where = ", at " + " and ".join(map(str, matches)) if matches else ""
        raise ValueError(
            f"expected exactly one {what} ({', '.join(symbols)}), found {len(matches)}{where}"
        )
    return matches[0]
