"""Gymnasium's rules: the transition table that `FrozenLakeEnv` computes for a lake."""

import functools

from gymnasium.envs.toy_text.frozen_lake import DOWN, LEFT, RIGHT, UP, FrozenLakeEnv

from ragen_jax.envs.frozen_lake.lake import Lake

# Action word -> Gymnasium's number. The order is also the solver's order of preference.
MOVES = {"Left": LEFT, "Down": DOWN, "Right": RIGHT, "Up": UP}

# (probability, cell, reward, done) of each possible outcome
Outcomes = tuple[tuple[float, int, float, bool], ...]


def outcomes(lake: Lake, slip: float, cell: int, action: str) -> Outcomes:
    """Return the possible outcomes of `action` from `cell`, as in Gymnasium's table.

    There are three outcomes: the intended move in the middle, and on either side the moves at right
    angles to it, each with probability slip / 2. If slip is 0 or the episode is over, the intended
    move is the only outcome.
    """
    return tuple(_table(lake, slip)[cell][MOVES[action]])


def intended_index(possible: Outcomes) -> int:
    """Return the index of the outcome without a slip."""
    return len(possible) // 2


# A training step plays tens of lakes; an evaluation goes through its lakes in chunks of that size.
@functools.lru_cache(maxsize=256)
def _table(lake: Lake, slip: float) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
    # Gymnasium requires a start; it is ice like any other cell, so the table does not depend on it.
    letters = lake.letters.replace("F", "S", 1)
    width = lake.size[1]
    return FrozenLakeEnv(
        desc=[letters[i : i + width] for i in range(0, len(letters), width)],
        is_slippery=slip > 0,
        success_rate=1.0 - slip,
    ).P
