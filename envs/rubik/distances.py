"""The number of turns from each cube to the solved cube: a table over all 3,674,160 cubes.

A cube is numbered by the arrangement of its corners (5,040 ways) and their twists (729 ways), for
the seven corners that move. Turns change the two independently, so a breadth-first search moves
whole layers at a time. Up to six turns it takes a few hundredths of a second, up to 11 half a
second, once per process.
"""

import functools
import itertools
import math

import numpy as np

from ragen_jax.envs.rubik.cube import MOVES, SOLVED, STICKERS, State, Vector, turn

GODS_NUMBER = 11  # the largest distance of any cube
UNKNOWN = 255  # entry of a cube beyond a table's maximum distance

_ARRANGEMENTS, _TWISTS = math.factorial(7), 3**6  # the seven twists add up to 0 modulo 3


def _clockwise(corner: Vector) -> tuple[int, int, int]:
    """Return a corner's stickers: the sticker that faces up or down, then clockwise."""
    up, side, front = (i for axis in (1, 0, 2) for i in _stickers_facing(corner, axis))
    return (up, side, front) if math.prod(corner) == 1 else (up, front, side)


def _stickers_facing(corner: Vector, axis: int) -> list[int]:
    return [i for i, (at, direction) in enumerate(STICKERS) if at == corner and direction[axis]]


# The fixed corner comes last.
_CORNERS = [_clockwise((x, y, z)) for x, y, z in itertools.product((1, -1), repeat=3)]

# The colours of a corner, in the order of its stickers -> (corner, its twist).
_CORNER_BY_COLOURS = {
    tuple(SOLVED[stickers[(i - twist) % 3]] for i in range(3)): (number, twist)
    for number, stickers in enumerate(_CORNERS)
    for twist in range(3)
}


def corners(state: State) -> list[tuple[int, int]]:
    """Return (corner, its twist) at each of the seven places that move.

    Raises ValueError for stickers that cannot be reached by turns from the solved cube.
    """
    found = [
        _CORNER_BY_COLOURS.get(tuple(state.stickers[i] for i in stickers)) for stickers in _CORNERS
    ]
    pairs = [pair for pair in found if pair is not None]
    if sorted(number for number, _ in pairs) != list(range(8)):
        raise ValueError("the corners are not those of a cube, each once")
    if pairs[7] != (7, 0):
        raise ValueError("the corner down, back and left is not Y, B and O: it never moves")
    if sum(twist for _, twist in pairs) % 3:
        raise ValueError("a single corner is twisted, which no turns can undo")
    return pairs[:7]


def cube_number(state: State) -> int:
    """Return the number of a cube, from 0; raises ValueError as `corners`."""
    places = corners(state)
    order = np.array([[number for number, _ in places]])
    twists = np.array([[twist for _, twist in places]])
    return int(_rank(order)[0]) * _TWISTS + int(_twist_rank(twists)[0])


def numbered_cube(number: int) -> State:
    """Return the cube of a number."""
    rank, rest = divmod(number, _TWISTS)
    stickers = list(SOLVED)
    for place, (corner, twist) in enumerate(
        zip(_arrangements()[rank].tolist(), _twists()[rest].tolist(), strict=True)
    ):
        for i in range(3):
            stickers[_CORNERS[place][i]] = SOLVED[_CORNERS[corner][(i - twist) % 3]]
    return State("".join(stickers))


@functools.cache
def distances(most: int) -> np.ndarray:
    """Return uint8 [cubes], by number: turns to the solved cube, up to `most`, else UNKNOWN."""
    arrangement, twist = _turns()
    distance = np.full(_ARRANGEMENTS * _TWISTS, UNKNOWN, np.uint8)
    layer = np.array([cube_number(State(SOLVED))])
    distance[layer] = 0
    for depth in range(1, most + 1):
        places, twists = divmod(layer, _TWISTS)
        for by_place, by_twist in zip(arrangement, twist, strict=True):
            reached = by_place[places] * _TWISTS + by_twist[twists]
            distance[reached[distance[reached] == UNKNOWN]] = depth
        layer = np.flatnonzero(distance == depth)
    distance.flags.writeable = False
    return distance


@functools.cache
def layer(depth: int, most: int) -> np.ndarray:
    """Return the numbers, ascending, of all cubes that are `depth` turns from the solved cube."""
    return np.flatnonzero(distances(most) == depth)


def solve(state: State, most: int) -> tuple[str, ...]:
    """Return a shortest sequence of turns that solves a cube, with the earliest of MOVES first.

    most: maximum distance of the table to try first; if it is too small, the full table is made
    """
    number = cube_number(state)
    distance = distances(most)
    if distance[number] == UNKNOWN:
        distance = distances(GODS_NUMBER)
    arrangement, twist = _turns()
    plan = []
    while distance[number]:
        place, rest = divmod(number, _TWISTS)
        after = arrangement[:, place] * _TWISTS + twist[:, rest]
        chosen = int(np.argmax(distance[after] == distance[number] - 1))
        plan.append(tuple(MOVES)[chosen])
        number = int(after[chosen])
    return tuple(plan)


@functools.cache
def _turns() -> tuple[np.ndarray, np.ndarray]:
    """Return the result of each of MOVES for every arrangement and twist: (9, 5040), (9, 729)."""
    arrangements, twists = [], []
    for action in MOVES:
        places = corners(turn(State(SOLVED), action))
        source = [number for number, _ in places]
        added = np.array([twist for _, twist in places])
        arrangements.append(_rank(_arrangements()[:, source]))
        twists.append(_twist_rank((_twists()[:, source] + added) % 3))
    return np.stack(arrangements), np.stack(twists)


@functools.cache
def _arrangements() -> np.ndarray:
    """Return (5040, 7): all orders of seven corners, in lexicographic order."""
    return np.array(list(itertools.permutations(range(7))))


@functools.cache
def _twists() -> np.ndarray:
    """Return (729, 7): all twists of seven corners; the last makes the sum 0 modulo 3."""
    free = np.array(list(itertools.product(range(3), repeat=6)))
    return np.column_stack([free, -free.sum(1) % 3])


def _rank(order_N7: np.ndarray) -> np.ndarray:
    """Return the index of each order in `_arrangements`."""
    smaller = [(order_N7[:, i + 1 :] < order_N7[:, i : i + 1]).sum(1) for i in range(7)]
    return np.column_stack(smaller) @ np.array([math.factorial(6 - i) for i in range(7)])


def _twist_rank(twist_N7: np.ndarray) -> np.ndarray:
    """Return the index of each row of twists in `_twists`."""
    return twist_N7[:, :6] @ 3 ** np.arange(5, -1, -1)
