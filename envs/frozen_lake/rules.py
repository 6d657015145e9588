"""The rules are Gymnasium's: `FrozenLakeEnv`'s transition table of a lake."""

import functools

from gymnasium.envs.toy_text.frozen_lake import DOWN, LEFT, RIGHT, UP, FrozenLakeEnv

from ragen_jax.envs.frozen_lake.lake import Lake

# Action word -> Gymnasium's number. The order is also the solver's order of preference.
MOVES = {"Left": LEFT, "Down": DOWN, "Right": RIGHT, "Up": UP}

# (probability, cell, reward, done) of each thing that can happen
Outcomes = tuple[tuple[float, int, float, bool], ...]


def outcomes(lake: Lake, slip: float, cell: int, action: str) -> Outcomes:
    """What `action` can lead to from `cell`, as Gymnasium's table has it.

    Three outcomes, the intended move in the middle and on either side the moves at right angles
    to it, each with probability slip / 2; or the intended one alone, where slip is 0 or the
    episode is over.
    """
    return tuple(_table(lake, slip)[cell][MOVES[action]])


def intended(possible: Outcomes) -> int:
    """The index of the outcome of a move that does not slip."""
    return len(possible) // 2


# A step of training plays tens of lakes, an evaluation goes through them in chunks as large.
@functools.lru_cache(maxsize=256)
def _table(lake: Lake, slip: float) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
    # Gymnasium wants a start somewhere; it is ice like any other, so the table does not show it.
    letters = lake.letters.replace("F", "S", 1)
    width = lake.size[1]
    return FrozenLakeEnv(
        desc=[letters[i : i + width] for i in range(0, len(letters), width)],
        is_slippery=slip > 0,
        success_rate=1.0 - slip,
    ).P
