"""A scripted player: expectimax over one move, the tile that appears, and one more move.

New tiles make a shortest plan meaningless, so this is not a solver: it plays well, not optimally.
"""

import functools

from ragen_jax.envs.game_2048.board import MOVES, Row, State, slide

# Moves of a plan. The plan ignores the tiles that appear meanwhile, so its later moves are less
# reliable.
PLAN = 4
PLACES = 6  # empty cells, evenly spaced, in which a new tile is tried

_REACHED, _STUCK = 1e6, -1e6


def play(state: State, goal: int) -> tuple[str, ...] | None:
    """Return up to PLAN good moves from `state`, ignoring the tiles that appear in between.

    Empty if the goal is reached, None if no move is possible. The result depends only on the
    state.
    """
    plan: list[str] = []
    while len(plan) < PLAN and state.largest < goal:
        _, action, state = _best(state, goal, ahead=1)
        if action is None:
            break
        plan.append(action)
    return tuple(plan) if plan or state.largest >= goal else None


def _best(state: State, goal: int, ahead: int) -> tuple[float, str | None, State]:
    """Return (value, move, board after it) of the first of the best moves; move None if none."""
    best = (_STUCK, None, state)
    for action in MOVES:
        after, merged = slide(state, action)
        if after != state:
            worth = merged + _worth(after, goal, ahead)
            if best[1] is None or worth > best[0]:
                best = (worth, action, after)
    return best


def _worth(state: State, goal: int, ahead: int) -> float:
    """Return the value of a board before a new tile appears, searching `ahead` moves further."""
    if state.largest >= goal:
        return _REACHED * (1 + ahead)  # the sooner, the better
    empty = state.cells(0)
    if not ahead or not empty:
        return _looks(state)
    tried = empty[:: -(-len(empty) // PLACES)]
    # Nine of ten new tiles are a 2, so only a 2 is tried.
    return sum(_best(state.put(cell, 2), goal, ahead - 1)[0] for cell in tried) / len(tried)


def _looks(state: State) -> float:
    """Return a heuristic value of a board: empty cells, equal neighbours, small differences."""
    lines = (*state.rows, *zip(*state.rows, strict=True))
    return sum(map(_line_looks, lines))


@functools.lru_cache(maxsize=1 << 16)  # as board._slid
def _line_looks(line: Row) -> float:
    worth = float(line.count(0))
    for tile, other in zip(line, line[1:], strict=False):
        worth += tile if tile == other else -abs(tile - other) / 4
    return worth
