"""2048 for language agents: slide and merge tiles until one of them is the goal.

The rules are those of the game (Cirulli 2014, github.com/gabrielecirulli/2048), on a board in mid
game and with a goal that a short episode can reach. A merge earns the new tile's number divided by
the goal, a move that changes nothing costs 0.1, and the goal earns 1.
"""

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.envs.game_2048 import board, boards, player
from ragen_jax.envs.game_2048.board import EMPTY, MOVES, State
from ragen_jax.envs.grounding import Claim, count_true, parse_positions
from ragen_jax.envs.options import one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.types import Step

MAX_SIDE = 6  # rows or columns of the board
MAX_GOAL = 2**17  # the largest tile of the board with 4 x 4 cells

FRACTION_OF_4 = 0.1  # fraction of new tiles that are 4; the others are 2

REWARD_BLOCKED, REWARD_GOAL = -0.1, 1.0

_RULES = """\
You are playing 2048 on a board of {size} x {size} cells. Make a tile of {goal}.
The actions are Up, Down, Left and Right. Each slides all tiles as far as they go in that \
direction (Up is towards the first row, Left towards the first column). Two tiles of the same \
number that meet become one tile of twice the number, those nearest to the edge first, and a tile \
that has just been made is not merged again in the same move. After a move that changed something \
a new tile appears in a random empty cell: a 2, or with a probability of {share:g} a 4.
A tile made by merging earns its number divided by {goal}, and the tile of {goal} another 1, which \
ends the game. A move that changes nothing costs 0.1. The game also ends when no move changes \
anything.
The board is drawn as rows of numbers; _ is an empty cell."""

# The rules of `Game2048.brief`.
_BRIEF = """\
2048 on {size} x {size} cells: make a tile of {goal}. A move slides all tiles to that side; two \
equal tiles that meet merge into one of twice the number, once per move. If anything moved, a 2 or \
rarely a 4 appears in an empty cell (_). The game ends when no move changes anything."""

# Names of a tile, and of the empty cells, in a text.
_THINGS = {
    name.format(2**k): str(2**k)
    for k in range(1, MAX_GOAL.bit_length())
    for name in ("tile {}", "tiles {}", "{} tile", "{} tiles", "merge {}")
} | {"empty": EMPTY}


class Game2048:
    """Generated boards of 2048; see `ragen_jax.envs.types.Environment`.

    With the defaults and 20 moves, the scripted player, which `solve` calls, reaches the goal on 86
    of 100 boards, random moves on 17.

    size: rows, and columns, of the board, from 2 to 6
    goal: the tile to make, a power of two from 8 to 131072 that fits the board
    start_tiles: tiles of a start board, each 2, 4, ... up to a quarter of the goal
    min_sum: minimum sum of the start tiles (None: no bound): it decides how many moves the goal is
        away, since a move adds 2 or 4
    split: "imitation", "train" or "eval": three sets of start boards that are disjoint even up to
        rotation and reflection; None draws from all
    """

    actions: tuple[str, ...] = MOVES
    opposites: Mapping[str, str] = {"Up": "Down", "Down": "Up", "Left": "Right", "Right": "Left"}

    def __init__(
        self,
        size: int = 4,
        goal: int = 128,
        start_tiles: int = 8,
        min_sum: int | None = 112,
        split: str | None = "train",
    ) -> None:
        self.size = whole("size", size, least=2, most=MAX_SIDE)
        # The largest possible tile: a 4 in the last free cell, and every smaller tile once.
        most = min(2 ** (self.size**2 + 1), MAX_GOAL)
        self.goal = whole("goal", goal, least=8, most=most)
        if self.goal & (self.goal - 1):
            raise ValueError(f"goal must be a power of two, got {goal!r}")
        # One cell is left empty, so that a move is possible.
        self.start_tiles = whole("start_tiles", start_tiles, least=2, most=self.size**2 - 1)
        self.min_sum = 0
        if min_sum is not None:
            # Boards with a larger sum are almost never drawn.
            most = max(self.start_tiles * self.goal // 8, 2 * self.start_tiles)
            self.min_sum = whole("min_sum", min_sum, least=1, most=most)
        self.split = one_of("split", split, (*SPLITS, None))
        self.instructions = _RULES.format(size=self.size, goal=self.goal, share=FRACTION_OF_4)
        self.brief = _BRIEF.format(size=self.size, goal=self.goal)
        tiles = [str(2**k) for k in range(1, self.goal.bit_length())]
        cells = [f" {r}{c}" for r in range(self.size) for c in range(self.size)]
        texts = ["||", *MOVES, *(f" {move}" for move in MOVES), f" {EMPTY}"]
        texts += ["tile", " tile", " merge", " plan"]
        texts += [*(tile for tile in tiles if len(tile) > 1), *(f" {tile}" for tile in tiles)]
        self.words: tuple[str, ...] = tuple(dict.fromkeys((*texts, *cells)))

    def reset(self, seed: int) -> State:
        """Return board number `seed`, an int in [0, 2**63), of this split and size.

        It is the first of attempts 0, 1, ... that meets the constraints. Raises ValueError after
        MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws(seed, attempt, boards.TAG)
            state = boards.draw_board(draws, self.size, self.goal, self.start_tiles)
            if state.total < self.min_sum:
                continue
            if self.split in (None, boards.split_of(state)):
                return state
        raise ValueError(
            f"no board found in {MAX_ATTEMPTS} attempts for seed={seed}, size={self.size}, "
            f"goal={self.goal}, start_tiles={self.start_tiles}, min_sum={self.min_sum}, "
            f"split={self.split!r}: lower min_sum or raise start_tiles"
        )

    def render(self, state: State) -> str:
        """Return the observation: rows of numbers, _ for an empty cell."""
        return board.grid_text(state)

    def step(self, state: State, action: str, rng: np.random.Generator | None) -> Step:
        """Slide; after a move that changed something, two draws of `rng` make a new tile.

        Without `rng` (None) no tile appears. Once the game is over, a move changes nothing and
        earns nothing.

        info: "success" (the goal is reached), "moved" (something changed), "merged" (sum of the
        tiles made by merging).
        """
        if action not in MOVES:
            raise ValueError(f"unknown action {action!r}; accepted: {', '.join(MOVES)}")
        after, merged = board.slide(state, action)
        if state.largest >= self.goal or after == state:
            over = state.largest >= self.goal or state.is_stuck
            info = {"success": state.largest >= self.goal, "moved": False, "merged": 0}
            return Step(state, 0.0 if over else REWARD_BLOCKED, over, info)
        if rng is not None:
            empty = after.cells(0)
            cell = empty[int(rng.random() * len(empty))]
            after = after.put(cell, 4 if rng.random() < FRACTION_OF_4 else 2)
        success = after.largest >= self.goal
        reward = merged / self.goal + REWARD_GOAL * success
        info = {"success": success, "moved": True, "merged": merged}
        return Step(after, reward, success or after.is_stuck, info)

    def identity(self, state: State) -> str:
        """Return the board with one letter per cell, the same for rotations and reflections."""
        return boards.identity(state)

    def solve(self, state: State) -> tuple[str, ...] | None:
        """Return a few good moves, for imitation; None if no move is possible.

        It is not the shortest plan of the contract, which new tiles make meaningless, but the
        scripted player's next moves, which need not reach the goal. It is called again each turn.
        """
        return player.play(state, self.goal)

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: its two largest numbers, its merges, and its plan.

        Cells are written as row and column digits: "tile 32 00 tile 16 10 21 merge 4 02 03 plan
        Left Up".
        """
        numbers = sorted({tile for row in state.rows for tile in row if tile}, reverse=True)
        facts = [("tile", number, state.cells(number)) for number in numbers[:2]]
        if plan:
            facts += [("merge", *pair) for pair in board.merges(state, plan[0])]
        words = [
            " ".join([name, str(number), *(f"{row}{column}" for row, column in cells)])
            for name, number, cells in facts
        ]
        return " ".join([*words, "plan", *plan])

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true positions in `thought`, number of positions stated).

        Counts positions of tiles and empty cells.
        """
        return count_true(parse_positions(thought, _THINGS), _positions_shown(observation))

    def parse(self, grid_text: str) -> State:
        """Return the state of a grid text of any size; strict (ValueError)."""
        return board.parse(grid_text)

    def grid_text(self, state: State) -> str:
        """Return rows of numbers and _, separated by spaces, and joined by newlines."""
        return board.grid_text(state)


_ROW = re.compile(rf"(?:{EMPTY}|\d+)(?: (?:{EMPTY}|\d+))+", re.ASCII)


@functools.lru_cache(maxsize=1024)  # the members of a group see the same board
def _positions_shown(observation: str) -> frozenset[Claim]:
    """Return all positions that an observation shows, in the form of `parse_positions`."""
    rows = [line for line in observation.splitlines() if _ROW.fullmatch(line)]
    return frozenset(
        (cell, (r, c)) for r, row in enumerate(rows) for c, cell in enumerate(row.split(" "))
    )
