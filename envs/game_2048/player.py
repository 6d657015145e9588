"""A scripted player: expectimax over one move, the tile that appears, and one more move.

New tiles make a shortest plan meaningless, so that this is no solver: it plays well, not best.
"""

import functools

from ragen_jax.envs.game_2048.board import MOVES, Row, State, slide

# Moves of a plan. It leaves out the tiles that appear meanwhile, and says the less the longer it
# is.
PLAN = 4
PLACES = 6  # empty cells, evenly spread over all, in which a new tile is tried

_REACHED, _STUCK = 1e6, -1e6


def play(state: State, goal: int) -> tuple[str, ...] | None:
    """Up to PLAN good moves from `state`, each as if no tile had appeared since it.

    Empty where the goal is reached, None where no move is possible. The answer depends on the
    state alone.
    """
    plan: list[str] = []
    while len(plan) < PLAN and state.largest < goal:
        _, action, state = _best(state, goal, ahead=1)
        if action is None:
            break
        plan.append(action)
    return tuple(plan) if plan or state.largest >= goal else None


def _best(state: State, goal: int, ahead: int) -> tuple[float, str | None, State]:
    """(worth, move, board after it) of the first of the best moves; None where none is possible."""
    best = (_STUCK, None, state)
    for action in MOVES:
        after, merged = slide(state, action)
        if after != state:
            worth = merged + _worth(after, goal, ahead)
            if best[1] is None or worth > best[0]:
                best = (worth, action, after)
    return best


def _worth(state: State, goal: int, ahead: int) -> float:
    """Of a board on which a tile is about to appear, where it is looked `ahead` moves further."""
    if state.largest >= goal:
        return _REACHED * (1 + ahead)  # the sooner the better
    empty = state.cells(0)
    if not ahead or not empty:
        return _looks(state)
    tried = empty[:: -(-len(empty) // PLACES)]
    # Nine of ten new tiles are a 2.
    return sum(_best(state.put(cell, 2), goal, ahead - 1)[0] for cell in tried) / len(tried)


def _looks(state: State) -> float:
    """How good a board looks: empty cells, pairs, and neighbours that differ little."""
    lines = (*state.rows, *zip(*state.rows, strict=True))
    return sum(map(_line_looks, lines))


@functools.lru_cache(maxsize=1 << 16)  # as board._slid
def _line_looks(line: Row) -> float:
    worth = float(line.count(0))
    for tile, other in zip(line, line[1:], strict=False):
        worth += tile if tile == other else -abs(tile - other) / 4
    return worth
