"""Rooms by reverse play, and which split a room belongs to.

A room is drawn by opening cells at random and keeping one connected piece, putting the boxes on
their targets, and pulling them away backwards: every pull undone is a push, so the room can always
be solved.
"""

from ragen_jax.envs.problems import MAX_ATTEMPTS, Draws, canonical_grid, split_by_hash
from ragen_jax.envs.sokoban.board import Room, State, grid_text, shifts
from ragen_jax.envs.sokoban.solver import solve

# A room keeps at least this much of its interior as floor, and its boxes are pulled up to
# PULLS_PER_BOX times each. On 6x6 rooms with one box these and the densities in `_carve` give
# shortest plans of 3 to about 12 moves, and a uniformly random player solves about 5 in 100 rooms
# within 10 moves.
LEAST_FLOOR_PERCENT = 45
PULLS_PER_BOX = 6

TAG = 0x50C0BA11  # of this environment's `Draws`


def generate(
    seed: int,
    *,
    size: tuple[int, int],
    num_boxes: int,
    min_solution: int,
    max_solution: int | None,
    split: str | None,
) -> State:
    """The first room of attempts 0, 1, ... of `seed` that meets the constraints.

    `min_solution` and `max_solution` bound the shortest plan, in moves (None: no bound); `split`
    None takes any. Raises ValueError after MAX_ATTEMPTS.
    """
    for attempt in range(MAX_ATTEMPTS):
        state = draw_room(Draws(seed, attempt, TAG), size, num_boxes)
        if state is None:
            continue
        # The hash costs a fraction of the search, so it goes first.
        if split is not None and split_of(grid_text(state)) != split:
            continue
        if max_solution is not None:
            plan = solve(state, max_moves=max_solution)
            if plan is not None and len(plan) >= min_solution:
                return state
        # Reverse play already proves that there is a plan: only short ones need be ruled out.
        elif solve(state, max_moves=min_solution - 1) is None:
            return state
    raise ValueError(
        f"no room found in {MAX_ATTEMPTS} attempts for seed={seed}, size={size}, "
        f"num_boxes={num_boxes}, min_solution={min_solution}, max_solution={max_solution}, "
        f"split={split!r}: relax the bounds on the solution or enlarge the room"
    )


def draw_room(draws: Draws, size: tuple[int, int], num_boxes: int) -> State | None:
    """One attempt: a solvable room that is not solved yet; None if too small or unmoved."""
    height, width = size
    stride = width + 1
    board_bits = (height + 1) * stride
    floor = _carve(draws, height, width)
    least = (height - 2) * (width - 2) * LEAST_FLOOR_PERCENT // 100
    if floor.bit_count() < max(least, 2 * num_boxes + 1):
        return None
    targets = 0
    for _ in range(num_boxes):
        targets |= draws.member(floor & ~targets)
    boxes = targets
    steps = shifts(stride)
    reach = _reach(draws.member(floor & ~boxes), floor & ~boxes, stride)
    for _ in range(1 + draws.below(PULLS_PER_BOX * num_boxes)):
        free = floor & ~boxes
        # Per direction, the cells where the player can stand with a box behind it and a free cell
        # ahead: it steps ahead and the box follows onto its cell. The four sets are laid end to
        # end, so that one draw is uniform over all pulls.
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
    # Wherever the player can walk to, it can walk back from.
    player = draws.member(reach).bit_length() - 1
    return State(Room(height, width, floor, targets), boxes, player)


def _carve(draws: Draws, height: int, width: int) -> int:
    """A connected piece of floor inside a border of wall, as a bit-set.

    Every interior cell is opened with probability 4, 5 or 6 in 8, the same for the whole room,
    and the piece that holds a random open cell is kept. Given its density, every layout of open
    cells is equally likely, which repeats rooms less often than carving by a random walk: that
    favours compact shapes (measured on 1,500 6x6 rooms: 6 % repeats against 14 %).
    """
    stride = width + 1
    interior = 0
    for row in range(1, height - 1):
        interior |= ((1 << (width - 2)) - 1) << ((row + 1) * stride + 1)

    def coins() -> int:
        return draws.below(1 << interior.bit_length())

    eighths = 4 + draws.below(3)
    opened = coins()
    if eighths == 5:
        opened |= coins() & coins()
    elif eighths == 6:
        opened |= coins()
    opened &= interior
    return _reach(draws.member(opened), opened, stride) if opened else 0


def _reach(player: int, free: int, stride: int) -> int:
    """The cells of `free` that can be walked to from `player`; all are bit-sets."""
    reach, grown = 0, player
    while grown != reach:
        reach = grown
        grown |= (reach << 1 | reach >> 1 | reach << stride | reach >> stride) & free
    return reach


# A room without its player and boxes.
_LAYOUT = str.maketrans({"P": "_", "X": "_", "S": "O", "√": "O"})


def split_of(text: str) -> str:
    """The split of a room: a hash of its walls and targets up to symmetry.

    Splits therefore never share a room, and neither does any position reached by playing one:
    every state of an imitated episode stays in the imitation split.
    """
    return split_by_hash("sokoban", canonical_grid(text.translate(_LAYOUT)))
