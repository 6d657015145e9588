"""Start boards from seeds, and the split of a board."""

from ragen_jax.envs.game_2048.board import State
from ragen_jax.envs.problems import Draws, canonical_grid, split_by_hash

TAG = 0x20480B0A  # tag of this environment's `Draws`


def draw_board(draws: Draws, size: int, goal: int, start_tiles: int) -> State:
    """Make one attempt at a start board: `start_tiles` tiles in random cells.

    Each tile is uniform over 2, 4, ... up to a quarter of the goal.
    """
    free = (1 << size * size) - 1
    tiles = [0] * (size * size)
    for _ in range(start_tiles):
        cell = draws.member(free)
        free ^= cell
        tiles[cell.bit_length() - 1] = 2 << draws.below(goal.bit_length() - 3)
    return State(tuple(tuple(tiles[i : i + size]) for i in range(0, size * size, size)))


# Indexed by the bit length of a number: an empty cell has 0 bits, a 2 has 2.
_LETTERS = "_?abcdefghijklmnopq"


def identity(state: State) -> str:
    """Return the board with one letter per cell, the same for its rotations and reflections."""
    rows = ("".join(_LETTERS[tile.bit_length()] for tile in row) for row in state.rows)
    return canonical_grid("\n".join(rows))


def split_of(state: State) -> str:
    """Return the split of a start board, from a hash of its identity.

    Boards reached in play belong to all splits, since a move changes most of a board; splits are
    disjoint only in the boards at which their episodes begin.
    """
    return split_by_hash("game_2048", identity(state))
