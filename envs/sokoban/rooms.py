"""Rooms by reverse play, and the split of a room.

To draw a room, open cells at random and keep one connected piece, put the boxes on their targets,
and pull them away: a reversed pull is a push, so the room can always be solved.
"""

from ragen_jax.envs.problems import MAX_ATTEMPTS, Draws, canonical_grid, split_by_hash
from ragen_jax.envs.sokoban.board import Room, State, layout_text, shifts
from ragen_jax.envs.sokoban.solver import solve

# A room keeps at least this much of its interior as floor, and its boxes are pulled up to
# PULLS_PER_BOX times each. On 6x6 rooms with one box, these values and the densities in `_carve`
# give shortest plans of 3 to about 12 moves, and a uniformly random player solves about 5 in 100
# rooms within 10 moves.
MIN_FLOOR_PERCENT = 45
PULLS_PER_BOX = 6

TAG = 0x50C0BA11  # tag of this environment's `Draws`


def generate(
    seed: int,
    *,
    size: tuple[int, int],
    num_boxes: int,
    min_solution: int,
    max_solution: int | None,
    split: str | None,
) -> State:
    """Return the first room of attempts 0, 1, ... of `seed` that meets the constraints.

    `min_solution` and `max_solution` bound the shortest plan, in moves (None: no bound); with
    `split` None any split will do. Raises ValueError after MAX_ATTEMPTS.
    """
    draws = Draws(seed, 0, TAG)
    for attempt in range(MAX_ATTEMPTS):
        draws.restart(attempt)
        state = draw_room(draws, size, num_boxes, split)
        if state is None:
            continue
        if max_solution is not None:
            plan = solve(state, max_moves=max_solution)
            if plan is not None and len(plan) >= min_solution:
                return state
        # Reverse play proves that a plan exists, so only short plans must be ruled out.
        elif solve(state, max_moves=min_solution - 1) is None:
            return state
    raise ValueError(
        f"no room found in {MAX_ATTEMPTS} attempts for seed={seed}, size={size}, "
        f"num_boxes={num_boxes}, min_solution={min_solution}, max_solution={max_solution}, "
        f"split={split!r}: relax the bounds on the solution or enlarge the room"
    )


def draw_room(
    draws: Draws, size: tuple[int, int], num_boxes: int, split: str | None = None
) -> State | None:
    """Make one attempt at an unsolved, solvable room.

    Return None if it is too small, no box moved, or it is not of the split (None: any).
    """
    height, width = size
    stride = width + 1
    board_bits = (height + 1) * stride
    floor = _carve(draws, height, width)
    least = (height - 2) * (width - 2) * MIN_FLOOR_PERCENT // 100
    if floor.bit_count() < max(least, 2 * num_boxes + 1):
        return None
    targets = 0
    for _ in range(num_boxes):
        targets |= draws.member(floor & ~targets)
    room = Room(height, width, floor, targets)
    # Most rooms are of another split, and the hash costs a fraction of all that follows.
    if split is not None and _split_of_layout(layout_text(room)) != split:
        return None
    boxes = targets
    steps = shifts(stride)
    reach = _reach(draws.member(floor & ~boxes), floor & ~boxes, stride)
    for _ in range(1 + draws.below(PULLS_PER_BOX * num_boxes)):
        free = floor & ~boxes
        # Per direction, the cells where the player can stand with a box behind it and a free cell
        # ahead: the player steps ahead and the box follows onto its cell. The four sets are
        # concatenated, so that one draw is uniform over all pulls.
        pulls = 0
        for i, (left, right) in enumerate(steps):
            stands = (boxes << left >> right) & reach & (free << right >> left)
            pulls |= stands << i * board_bits
        if not pulls:
            break
        i, cell = divmod(draws.member(pulls).bit_length() - 1, board_bits)
        left, right = steps[i]
        stand = 1 << cell
        boxes ^= stand | (stand << right >> left)
        reach = _reach(stand << left >> right, floor & ~boxes, stride)
    if boxes == targets:
        return None
    # The player can walk back from every cell that it can walk to.
    player = draws.member(reach).bit_length() - 1
    return State(room, boxes, player)


def _carve(draws: Draws, height: int, width: int) -> int:
    """Return a connected piece of floor inside a border of wall, as a bit set.

    Every interior cell is opened with probability 4/8, 5/8 or 6/8, the same for the whole room,
    and the connected piece that holds a random open cell is kept. Given the density, every layout
    of open cells is equally likely. This repeats rooms less often than carving by a random walk,
    which favours compact shapes (measured on 1,500 6x6 rooms: 6 % repeats against 14 %).
    """
    stride = width + 1
    interior = 0
    for row in range(1, height - 1):
        interior |= ((1 << (width - 2)) - 1) << ((row + 1) * stride + 1)

    def draw_cells() -> int:
        return draws.below(1 << interior.bit_length())

    eighths = 4 + draws.below(3)
    opened = draw_cells()
    if eighths == 5:
        opened |= draw_cells() & draw_cells()
    elif eighths == 6:
        opened |= draw_cells()
    opened &= interior
    return _reach(draws.member(opened), opened, stride) if opened else 0


def _reach(player: int, free: int, stride: int) -> int:
    """Return the cells of `free` that can be walked to from `player`; all are bit sets."""
    reach, grown = 0, player
    while grown != reach:
        reach = grown
        grown |= (reach << 1 | reach >> 1 | reach << stride | reach >> stride) & free
    return reach


# A room without its player and boxes.
_LAYOUT = str.maketrans({"P": "_", "X": "_", "S": "O", "√": "O"})


def split_of(text: str) -> str:
    """Return the split of a room, from a hash of its walls and targets up to symmetry.

    Splits therefore share no room and no position reached by playing a room: every state of an
    imitated episode stays in the imitation split.
    """
    return _split_of_layout(text.translate(_LAYOUT))


def _split_of_layout(text: str) -> str:
    return split_by_hash("sokoban", canonical_grid(text))
