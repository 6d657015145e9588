"""The cube: its state, its text form, its turns and its symmetries.

Everything follows from the positions of the stickers: x points right, y up and z to the front; a
sticker is its corner, each coordinate -1 or 1, and the direction it faces. The corner at
(-1, -1, -1) never moves, so the solved cube is a single state rather than one per orientation.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ragen_jax.envs.problems import split_by_hash

Vector = tuple[int, int, int]
Sticker = tuple[Vector, Vector]  # (corner, direction)

# Face -> the direction it faces, and the directions in which its rows and its columns are read: as
# seen from outside, unfolded around the front face.
_FACES: dict[str, tuple[Vector, Vector, Vector]] = {
    "up": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "right": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "front": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "down": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    "left": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "back": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}
FACES = tuple(_FACES)
COLOURS = "WRGYOB"  # colours of FACES in the solved cube
SOLVED = "".join(colour * 4 for colour in COLOURS)


def _place(face: str, row: int, column: int) -> Sticker:
    direction, right, down = _FACES[face]
    x, y, z = (
        d + (2 * column - 1) * r + (2 * row - 1) * b
        for d, r, b in zip(direction, right, down, strict=True)
    )
    return (x, y, z), direction


# Face by face, each from top left to bottom right.
STICKERS: tuple[Sticker, ...] = tuple(
    _place(*place) for place in itertools.product(FACES, (0, 1), (0, 1))
)


@dataclass(frozen=True, slots=True)
class State:
    """A position of the cube; hashable, and equal positions are equal states.

    stickers: 24 letters of COLOURS, in the order of STICKERS
    """

    stickers: str

    @property
    def is_solved(self) -> bool:
        return self.stickers == SOLVED


# ---- turns --------------------------------------------------------------------------------------


def _rotate(vector: Vector, axis: Vector) -> Vector:
    """Return a vector after a quarter turn about `axis`, clockwise as seen from its tip."""
    x, y, z = vector
    a, b, c = axis
    along = x * a + y * b + z * c
    return (y * c - z * b + along * a, z * a - x * c + along * b, x * b - y * a + along * c)


def _quarter_turn(face: str) -> tuple[int, ...]:
    """Return, for each place, the index of the place that its sticker comes from."""
    axis = _FACES[face][0]
    source = list(range(24))
    for i, (corner, direction) in enumerate(STICKERS):
        if sum(c * a for c, a in zip(corner, axis, strict=True)) == 1:
            target = _rotate(corner, axis), _rotate(direction, axis)
            source[STICKERS.index(target)] = i
    return tuple(source)


def _moves() -> dict[str, tuple[int, ...]]:
    moves = {}
    for name, face in (("U", "up"), ("R", "right"), ("F", "front")):
        once = _quarter_turn(face)
        twice = tuple(once[i] for i in once)
        moves |= {name: once, f"{name}'": tuple(twice[i] for i in once), f"{name}2": twice}
    return moves


# Action word -> for each place, the index of the place that its sticker comes from. The order is
# also the solver's order of preference.
MOVES = _moves()


def turn(state: State, action: str) -> State:
    stickers = state.stickers
    return State("".join([stickers[i] for i in MOVES[action]]))


# ---- symmetry -----------------------------------------------------------------------------------


def _symmetry(axes: Sequence[int]) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return (source of each place's sticker, new colours) for a permutation of the axes."""

    def permute(vector: Vector) -> Vector:
        x, y, z = (vector[axis] for axis in axes)
        return x, y, z

    source = [0] * 24
    colours = {}
    for i, (corner, direction) in enumerate(STICKERS):
        target = STICKERS.index((permute(corner), permute(direction)))
        source[target] = i
        colours[ord(SOLVED[i])] = SOLVED[target]
    return tuple(source), colours


# The rotations about the fixed corner, and the reflections that keep it in place. Each maps every
# action to one action; symmetries that move the corner do not.
_SYMMETRIES = tuple(_symmetry(axes) for axes in itertools.permutations(range(3)))


def images(state: State) -> list[State]:
    """Return the cube under its six symmetries, recoloured so that a solved cube stays solved."""
    stickers = state.stickers
    return [
        State("".join([stickers[i] for i in source]).translate(colours))
        for source, colours in _SYMMETRIES
    ]


def identity(state: State) -> str:
    """Return the alphabetically first of the `images` of a cube, the same for all of them."""
    return min(image.stickers for image in images(state))


def split_of(state: State) -> str:
    """Return the split of a cube, from a hash of its identity.

    Only problems have a split: every episode passes through cubes of all splits on its way to the
    solved cube, since few cubes are nearly solved.
    """
    return split_by_hash("rubik", identity(state))


# ---- text ---------------------------------------------------------------------------------------


def net_text(state: State) -> str:
    """Return a line per face, such as "up: W W / W R": its upper row, then its lower row."""
    lines = []
    for i, face in enumerate(FACES):
        a, b, c, d = state.stickers[4 * i : 4 * i + 4]
        lines.append(f"{face}: {a} {b} / {c} {d}")
    return "\n".join(lines)
