"""Shortest plans, by breadth-first search over (boxes, player).

A layer of the search maps each arrangement of the boxes (a bit set) to the bit set of player cells
first reached at that depth, so walking is computed for all cells at once, by shifts; only pushes
are handled one at a time.
"""

from ragen_jax.envs.sokoban.board import MOVES, Room, State, shifts

Layer = dict[int, int]  # boxes -> player cells, both bit sets


def solve(state: State, max_moves: int | None = None) -> tuple[str, ...] | None:
    """Return a shortest sequence of moves that puts every box on a target, or None.

    Every action counts, walking or pushing. None means that no plan exists, or none of at most
    `max_moves` actions. Fixed rules choose among equally short plans (see `_trace`), so the result
    depends only on the state. An already solved state has the plan ().
    """
    if state.is_solved:
        return ()
    room = state.room
    live = live_cells(room)
    if state.boxes & ~live:
        return None
    goal, steps = room.targets, shifts(room.stride)
    stride = room.stride
    seen: Layer = {state.boxes: 1 << state.player}
    layers = [dict(seen)]
    while layers[-1] and (max_moves is None or len(layers) <= max_moves):
        layer: Layer = {}
        for boxes, players in layers[-1].items():
            free = room.floor & ~boxes
            next_cells = players << 1 | players >> 1 | players << stride | players >> stride
            walk_cells = next_cells & free & ~seen[boxes]
            if walk_cells:
                seen[boxes] |= walk_cells
                layer[boxes] = layer.get(boxes, 0) | walk_cells
            if not next_cells & boxes:
                continue
            for left, right in steps:
                pushed_boxes = players << left >> right & boxes
                landing = pushed_boxes << left >> right & free & live
                while landing:
                    new = landing & -landing
                    landing ^= new
                    old = new << right >> left  # where the box was, and the player is now
                    new_boxes = boxes ^ old ^ new
                    seen_cells = seen.get(new_boxes, 0)
                    if not seen_cells & old:
                        seen[new_boxes] = seen_cells | old
                        layer[new_boxes] = layer.get(new_boxes, 0) | old
        layers.append(layer)
        if goal in layer:
            return _trace(layers, goal, steps)
    return None


def live_cells(room: Room) -> int:
    """Return the cells from which a lone box can be pushed to some target, as a bit set.

    Found by pulling backwards from the targets, with a player that may stand on any floor. A box
    on any other cell (a corner, say) can never reach a target, so the search may drop such
    positions without missing a shortest plan.
    """
    floor, live, grown = room.floor, 0, room.targets
    steps = shifts(room.stride)
    while grown != live:
        live = grown
        for left, right in steps:
            # A box pushed by this move to a live cell came from the previous cell, and the player
            # stood on the cell before that: both must be floor.
            origin = (live << right >> left) & floor
            grown |= origin & floor << left >> right
    return live


def _trace(layers: list[Layer], goal: int, steps: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """Return the plan, found by walking back through the layers from the goal.

    Among final player cells the lowest is taken; then, from the last action to the first, the
    earliest move of MOVES that leads there.
    """
    boxes, player = goal, layers[-1][goal] & -layers[-1][goal]
    plan = []
    for layer in reversed(layers[:-1]):
        action, boxes, player = _predecessor(layer, boxes, player, steps)
        plan.append(action)
    return tuple(reversed(plan))


def _predecessor(
    layer: Layer, boxes: int, player: int, steps: tuple[tuple[int, int], ...]
) -> tuple[str, int, int]:
    """Return (action, boxes, player) in `layer` whose action leads to the given position."""
    for action, (left, right) in zip(MOVES, steps, strict=True):
        before = player << right >> left
        if layer.get(boxes, 0) & before:
            return action, boxes, before  # a walk
        box = player << left >> right & boxes
        old_boxes = boxes ^ box ^ player
        if box and layer.get(old_boxes, 0) & before:
            return action, old_boxes, before  # a push
    raise AssertionError("the layers of the search do not connect")
