"""Start boards from seeds, and which split a board belongs to."""

from ragen_jax.envs.game_2048.board import State
from ragen_jax.envs.problems import Draws, canonical_grid, split_by_hash

TAG = 0x20480B0A  # of this environment's `Draws`


def draw_board(draws: Draws, size: int, goal: int, start_tiles: int) -> State:
    """One attempt: so many tiles in any cells, each uniform over 2, 4, ... up to a quarter of the
    goal."""
    free = (1 << size * size) - 1
    tiles = [0] * (size * size)
    for _ in range(start_tiles):
        cell = draws.member(free)
        free ^= cell
        tiles[cell.bit_length() - 1] = 2 << draws.below(goal.bit_length() - 3)
    return State(tuple(tuple(tiles[i : i + size]) for i in range(0, size * size, size)))


# By the bits of a number: an empty cell has none, 2 has two.
_LETTERS = "_?abcdefghijklmnopq"


def identity(state: State) -> str:
    """The board with a letter a cell, the same for its rotations and reflections."""
    rows = ("".join(_LETTERS[tile.bit_length()] for tile in row) for row in state.rows)
    return canonical_grid("\n".join(rows))


def split_of(state: State) -> str:
    """The split of a start board: a hash of its identity.

    Boards that are reached in play are of all splits, since a move changes most of a board; what
    two splits do not share is where their episodes begin.
    """
    return split_by_hash("game_2048", identity(state))
