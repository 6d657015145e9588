"""A scripted player: expectimax over one move, the tile that appears, and one more move.

New tiles make a shortest plan meaningless, so this is not a solver: it plays well, not optimally.
"""

import functools

from ragen_jax.envs.game_2048.board import MOVES, Row, State, slide

# Moves of a plan. The plan ignores the tiles that appear meanwhile, so its later moves are less
# reliable.
MAX_PLAN = 4
MAX_CANDIDATES = 6  # empty cells, evenly spaced, in which a new tile is tried

_GOAL_VALUE, _STUCK_VALUE = 1e6, -1e6


def play(state: State, goal: int) -> tuple[str, ...] | None:
    """Return up to MAX_PLAN good moves from `state`, ignoring the tiles that appear in between.

    Empty if the goal is reached, None if no move is possible. The result depends only on the
    state.
    """
    plan: list[str] = []
    while len(plan) < MAX_PLAN and state.largest < goal:
        _, action, state = _best(state, goal, ahead=1)
        if action is None:
            break
        plan.append(action)
    return tuple(plan) if plan or state.largest >= goal else None


def _best(state: State, goal: int, ahead: int) -> tuple[float, str | None, State]:
    """Return (value, move, board after it) of the first of the best moves; move None if none."""
    best = (_STUCK_VALUE, None, state)
    for action in MOVES:
        after, merged = slide(state, action)
        if after != state:
            value = merged + _value(after, goal, ahead)
            if best[1] is None or value > best[0]:
                best = (value, action, after)
    return best


def _value(state: State, goal: int, ahead: int) -> float:
    """Return the value of a board before a new tile appears, searching `ahead` moves further."""
    if state.largest >= goal:
        return _GOAL_VALUE * (1 + ahead)  # the sooner, the better
    empty = state.cells(0)
    if not ahead or not empty:
        return _score_board(state)
    candidates = empty[:: -(-len(empty) // MAX_CANDIDATES)]
    # Nine of ten new tiles are a 2, so only a 2 is tried.
    values = [_best(state.put(cell, 2), goal, ahead - 1)[0] for cell in candidates]
    return sum(values) / len(candidates)


def _score_board(state: State) -> float:
    """Return a heuristic value of a board: empty cells, equal neighbours, small differences."""
    lines = (*state.rows, *zip(*state.rows, strict=True))
    return sum(map(_score_line, lines))


@functools.lru_cache(maxsize=1 << 16)  # as board._slide_line
def _score_line(line: Row) -> float:
    value = float(line.count(0))
    for tile, other in zip(line, line[1:], strict=False):
        value += tile if tile == other else -abs(tile - other) / 4
    return value
