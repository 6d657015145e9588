"""Shortest safe paths, by breadth-first search backwards from the goal on Gymnasium's table."""

import functools

from ragen_jax.envs.frozen_lake.lake import Lake, State
from ragen_jax.envs.frozen_lake.rules import MOVES, Outcomes, intended_index, outcomes

Cost = tuple[int, int]  # (moves to the goal, number of outcomes on the path that slip into a hole)


def solve(state: State, slip: float) -> tuple[str, ...] | None:
    """Return a shortest sequence of moves to the goal that enters no hole without a slip, or None.

    Among the shortest paths it has the fewest chances to slip into a hole; ties are resolved by the
    order of MOVES, earliest first. The result depends only on the state. On the goal the plan is
    ().
    """
    costs = _costs(state.lake, slip)
    if state.player not in costs:
        return None
    plan, cell = [], state.player
    while costs[cell] != (0, 0):
        options = _moves(state.lake, slip, cell, costs)
        action = min(options, key=lambda action: options[action][0])  # first of the best moves
        plan.append(action)
        cell = options[action][1]
    return tuple(plan)


@functools.lru_cache(maxsize=256)
def _costs(lake: Lake, slip: float) -> dict[int, Cost]:
    """Return the cost of the best path from every cell that has a path."""
    costs = {lake.letters.index("G"): (0, 0)}
    ice = [cell for cell, letter in enumerate(lake.letters) if letter == "F"]
    while True:
        # All cells one move further than the known cells: their cost cannot improve later.
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
    """Return the moves from `cell` to a cell of known cost: action -> (total cost, that cell)."""
    options = {}
    for action in MOVES:
        possible = outcomes(lake, slip, cell, action)
        _, after, _, _ = possible[intended_index(possible)]
        if after in costs and after != cell:
            moves, risks = costs[after]
            options[action] = ((moves + 1, risks + _holes(possible)), after)
    return options


def _holes(possible: Outcomes) -> int:
    """Return the number of outcomes that end the game without reaching the goal."""
    return sum(done and not reward for _, _, reward, done in possible)
