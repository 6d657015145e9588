"""The 2x2x2 Rubik's cube for language agents: turn faces until each shows one colour.

A turn costs 0.01; the turn that solves the cube earns 1.
"""

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.envs.options import bounds, one_of, problem_seed
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.rubik import cube, distances
from ragen_jax.envs.rubik.cube import COLOURS, FACES, MOVES, State
from ragen_jax.envs.types import Step

TAG = 0x2B1C0BE5  # tag of this environment's `Draws`

REWARD_ACTION, REWARD_SOLVED = -0.01, 1.0

_TOLD = FACES[:3]  # the faces in the expert's reasoning: those that it turns

_RULES = """\
You are solving a 2x2x2 Rubik's cube: turn its faces until each of the six shows one colour.
U turns the upper face a quarter turn clockwise, as seen by someone who looks straight at that \
face, U' a quarter turn counterclockwise, and U2 half a turn. R, R' and R2 turn the right face, F, \
F' and F2 the front face, in the same way. The corner at the bottom, back and left never moves.
Each turn costs 0.01. Solving the cube earns 1 and ends the game.
A line for each face shows its four colours, the upper row before the stroke and the lower row \
behind it, each from left to right, as in a net unfolded around the front face: up, down, right \
and left as they are seen when that face is tipped towards you from the front, back as it is seen \
from behind. The colours are W white, R red, G green, Y yellow, O orange and B blue. The solved \
cube is W up, R right, G in front, Y down, O left and B at the back."""

# The rules of `Rubik.brief`.
_BRIEF = """\
2x2x2 Rubik's cube: make every face one colour. U, R and F turn the upper, right and front face a \
quarter turn clockwise, U' R' F' counterclockwise, U2 R2 F2 half a turn.
A line shows a face, upper row / lower row: up, down, right and left as tipped towards you from \
the front, back as seen from behind. Solved: W up, R right, G front, Y down, O left, B back."""

# A face and its four colours in the order of `render`, with only filler between them. A single
# colour could be a turn: "the right face: R".
_FACE = re.compile(
    rf"\b(?i:({'|'.join(FACES)}))\b(?i:[\s:;,.=]|\b(?:face|is|are|shows|has)\b)*"
    + r"[\s/,|]*".join([rf"([{COLOURS}])"] * 4)
    + r"(?![\w'])",
    re.ASCII,
)


class Rubik:
    """Scrambled 2x2x2 cubes; see `ragen_jax.envs.types.Environment`.

    There are 9, 54, 321, 1847, 9992 and 50136 cubes that take 1, 2, 3, 4, 5 and 6 turns. Up to
    symmetry they are 2, 9, 54, 309, 1670 and 8361 different cubes. Split "eval" has 0, 2, 8, 55,
    352 and 1667 of them: 2084 from 1 to 6 turns, but only 417 up to 5.

    moves: (fewest, most) turns of the shortest solution of a problem, a half turn counting as one;
        at most 11. Every number of turns is equally frequent, as far as the split has such cubes,
        and so is every cube with the same number.
    split: "imitation", "train" or "eval": three sets of scrambles that are disjoint even up to
        rotation about the fixed corner and reflection; None draws from all
    """

    actions = tuple(MOVES)
    opposites: Mapping[str, str] = {
        **{face: f"{face}'" for face in "URF"},
        **{f"{face}'": face for face in "URF"},
        **{f"{face}2": f"{face}2" for face in "URF"},
    }
    instructions = _RULES
    brief = _BRIEF
    budget_matters = False
    words: tuple[str, ...] = (
        *("||", "up:", *(f"\n{face}:" for face in FACES[1:]), " /"),
        *(f" {colour}" for colour in COLOURS),
        *("up", " right", " front", " plan"),
        *(move for move in MOVES if len(move) > 1),
        # " R" is among the colours.
        *(f" {move}" for move in MOVES if move not in COLOURS),
    )

    def __init__(self, moves: Sequence[int] = (1, 6), split: str | None = "train") -> None:
        self.moves = bounds("moves", moves, most=distances.GODS_NUMBER, ends="fewest, most")
        self.split = one_of("split", split, (*SPLITS, None))

    def reset(self, seed: int) -> State:
        """Return scramble number `seed`, an int in [0, 2**63), of this split.

        It is the first of attempts 0, 1, ... in the split. Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        fewest, most = self.moves
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws(seed, attempt, TAG)
            found = distances.layer(fewest + draws.below(most - fewest + 1), most)
            state = distances.numbered_cube(int(found[draws.below(len(found))]))
            if self.split in (None, cube.split_of(state)):
                return state
        raise ValueError(
            f"no cube found in {MAX_ATTEMPTS} attempts for seed={seed}, moves={self.moves}, "
            f"split={self.split!r}: allow more moves"
        )

    def render(self, state: State) -> str:
        """Return a line per face, such as "up: W W / W R", its upper row before the slash."""
        return cube.net_text(state)

    def step(self, state: State, action: str, rng: np.random.Generator | None = None) -> Step:
        """Turn a face. `rng` is unused: the game is deterministic.

        info: "success" (the cube is solved).
        """
        if action not in MOVES:
            raise ValueError(f"unknown action {action!r}; accepted: {', '.join(MOVES)}")
        after = cube.turn(state, action)
        reward = REWARD_ACTION + REWARD_SOLVED * after.is_solved
        return Step(after, reward, after.is_solved, {"success": after.is_solved})

    def identity(self, state: State) -> str:
        """Return the stickers, the same for cubes rotated about the fixed corner, or mirrored."""
        return cube.identity(state)

    def solve(self, state: State) -> tuple[str, ...] | None:
        """Return a shortest plan in turns, for imitation; there always is one."""
        return distances.solve(state, self.moves[1])

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the colours of three faces, and its plan.

        For example "up W W G G right R R R R front G G Y Y plan R'".
        """
        words = [
            " ".join([face, *state.stickers[4 * i : 4 * i + 4]]) for i, face in enumerate(_TOLD)
        ]
        return " ".join([*words, "plan", *plan])

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true colours in `thought`, number stated), four per face."""
        shown = _faces_shown(observation)
        right = stated = 0
        for face, *colours in _FACE.findall(thought):
            pairs = zip(colours, shown.get(face.lower(), ()), strict=False)
            right += sum(said == seen for said, seen in pairs)
            stated += len(colours)
        return right, stated


@functools.lru_cache(maxsize=1024)  # the members of a group see the same cube
def _faces_shown(observation: str) -> dict[str, list[str]]:
    """Return {face: its four colours} of a text that `render` wrote."""
    return {face: colours for face, *colours in _FACE.findall(observation)}
