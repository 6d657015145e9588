"""Shortest safe paths, by breadth-first search backwards from the goal on Gymnasium's table."""

import functools

from ragen_jax.envs.frozen_lake.lake import Lake, State
from ragen_jax.envs.frozen_lake.rules import MOVES, Outcomes, intended, outcomes

Cost = tuple[int, int]  # (moves to the goal, holes that a slip on the way could end in)


def solve(state: State, slip: float) -> tuple[str, ...] | None:
    """A shortest sequence of moves to the goal that enters no hole if nothing slips, or None.

    Among the shortest it is one with the fewest chances to slip into a hole, and among those the
    one that takes the earliest move of MOVES first: the answer depends on the state alone. On
    the goal the plan is ().
    """
    costs = _costs(state.lake, slip)
    if state.player not in costs:
        return None
    plan, cell = [], state.player
    while costs[cell] != (0, 0):
        options = _moves(state.lake, slip, cell, costs)
        action = min(options, key=lambda action: options[action][0])  # the first of the best
        plan.append(action)
        cell = options[action][1]
    return tuple(plan)


@functools.lru_cache(maxsize=256)
def _costs(lake: Lake, slip: float) -> dict[int, Cost]:
    """The cost of the best path from every cell that has one."""
    costs = {lake.letters.index("G"): (0, 0)}
    ice = [cell for cell, letter in enumerate(lake.letters) if letter == "F"]
    while True:
        # All cells one move further than those known: their cost cannot improve later.
        layer = {}
        for cell in ice:
            if cell not in costs:
                options = _moves(lake, slip, cell, costs)
                if options:
                    layer[cell] = min(cost for cost, _ in options.values())
        if not layer:
            return costs
        costs |= layer


def _moves(
    lake: Lake, slip: float, cell: int, costs: dict[int, Cost]
) -> dict[str, tuple[Cost, int]]:
    """The moves from `cell` to a cell of known cost: action -> (cost through it, that cell)."""
    options = {}
    for action in MOVES:
        possible = outcomes(lake, slip, cell, action)
        _, after, _, _ = possible[intended(possible)]
        if after in costs and after != cell:
            moves, risks = costs[after]
            options[action] = ((moves + 1, risks + _holes(possible)), after)
    return options


def _holes(possible: Outcomes) -> int:
    """How many of the outcomes end the game without reaching the goal."""
    return sum(done and not reward for _, _, reward, done in possible)
