"""Sudoku for language agents: fill in the empty cells, a few in each answer.

Each right placement earns 0.1 and stays, each wrong placement costs 0.1 and changes nothing, and
the placement that completes the grid earns 1 more. As in Sokoban, progress is rewarded at once,
and the solution most.
"""

from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.grounding import grid_lines
from ragen_jax.envs.options import bounds, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.sudoku import grid, problems, reading, solver
from ragen_jax.envs.sudoku.grid import DIGITS, EMPTY, SIZES, SYMBOLS, UNITS, State
from ragen_jax.envs.types import Step

MAX_BLANKS = {4: 11, 9: 50}  # with more, grids that singles solve are almost never drawn

REWARD_RIGHT, REWARD_WRONG, REWARD_SOLVED = 0.1, -0.1, 1.0

_RULES = """\
You are solving a Sudoku of {size}x{size} cells. Fill in the empty cells so that every row, every \
column and every box of {side}x{side} cells holds each digit from 1 to {size} once. There is \
exactly one solution.
The grid is drawn as rows of digits, with . for an empty cell and lines between the boxes.
Write a placement as r1c2=3: digit 3 into row 1, column 2; rows count from 1 at the top, columns \
from 1 at the left. {how_many}
Each right placement earns 0.1. One that is not the solution's, or whose cell is not empty, costs \
0.1 and changes nothing; so does an answer that cannot be read. Completing the grid earns 1 and \
ends the game."""

# The rules of `Sudoku.brief`.
_BRIEF = """\
Sudoku: fill in the empty cells (.) so that every row, column and {side}x{side} box holds each \
digit from 1 to {size} once. r1c2=3 puts 3 into row 1, column 2, counted from the top left.
The answer is {how_many}."""


class Sudoku:
    """Generated Sudoku problems; see `ragen_jax.envs.types.Environment`.

    An action is an answer, any text, so `actions` is empty. Every problem has one solution and
    yields to naked and hidden singles (`solver`).

    size: 4 (boxes of 2x2) or 9 (boxes of 3x3)
    blanks: (fewest, most) empty cells of a problem; at most 11 for 4x4 and 50 for 9x9
    placements: number of placements of an answer that are played; the rest is ignored
    split: "imitation", "train" or "eval": three sets of problems that are disjoint up to all
        symmetries of Sudoku; None draws from all. A grid on the way to a solution may be a problem
        of another split, which is unavoidable with as few grids as 4x4 has
    """

    actions: tuple[str, ...] = ()
    budget_matters = False

    def __init__(
        self,
        size: int = 4,
        blanks: Sequence[int] = (4, 8),
        placements: int = 2,
        split: str | None = "train",
    ) -> None:
        self.size = whole("size", size, least=min(SIZES), most=max(SIZES))
        if self.size not in SIZES:
            raise ValueError(f"size must be 4 or 9, got {size!r}")
        most = MAX_BLANKS[self.size]
        self.blanks = bounds("blanks", blanks, most=most, ends="fewest, most")
        self.placements = whole("placements", placements, least=1, most=most)
        self.split = one_of("split", split, (*SPLITS, None))
        names = [grid.name(cell, self.size) for cell in range(self.size**2)]
        symbols = [f" {symbol}" for symbol in (*DIGITS[: self.size], EMPTY)]
        reasons = [" |", grid.separator(self.size), *(f" {unit}" for unit in UNITS)]
        self.words: tuple[str, ...] = (
            *("||", *names, *(f" {name}" for name in names), *symbols, *reasons),
            *(" leaves", " needs", " then"),
        )
        how_many = "An answer is one placement."
        if self.placements > 1:
            how_many = f"An answer holds up to {self.placements} placements, separated by ||."
        side = len(grid.separator(self.size).split("+"))
        self.instructions: str = _RULES.format(size=self.size, side=side, how_many=how_many)
        how_many = "one placement"
        if self.placements > 1:
            how_many = f"up to {self.placements} placements, separated by ||"
        self.brief: str = _BRIEF.format(size=self.size, side=side, how_many=how_many)

    def reset(self, seed: int) -> State:
        """Return problem number `seed`, an int in [0, 2**63), of this split.

        It is the first of attempts 0, 1, ... that meets the constraints. Raises ValueError after
        MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws(seed, attempt, problems.TAG)
            state = problems.draw_problem(draws, size=self.size, blanks=self.blanks)
            if state is not None and self.split in (None, problems.split_of(state)):
                return state
        raise ValueError(
            f"no problem found in {MAX_ATTEMPTS} attempts for seed={seed}, size={self.size}, "
            f"blanks={self.blanks}, split={self.split!r}: widen the bounds on blanks"
        )

    def render(self, state: State) -> str:
        """Return the observation: the grid."""
        return grid.grid_text(state.cells)

    def step(self, state: State, action: str, rng: np.random.Generator | None = None) -> Step:
        """Play the placements of an answer of any content, one by one. `rng` is unused.

        info: "success" (the grid is complete), "right" and "wrong" (numbers of placements).
        A grid that is already complete earns nothing more.
        """
        if EMPTY not in state.cells:
            return Step(state, 0.0, True, {"success": True, "right": 0, "wrong": 0})
        cells = list(state.cells)
        right = wrong = 0
        for placement in reading.placements(action, self.size)[: self.placements]:
            if EMPTY not in cells:
                break
            if placement is None or not self._fits(state, cells, placement):
                wrong += 1
            else:
                cells[placement[0]] = placement[1]
                right += 1
        solved = EMPTY not in cells
        reward = right * REWARD_RIGHT + wrong * REWARD_WRONG + solved * REWARD_SOLVED
        after = State("".join(cells), state.solution) if right else state
        return Step(after, reward, solved, {"success": solved, "right": right, "wrong": wrong})

    @staticmethod
    def _fits(state: State, cells: Sequence[str], placement: solver.Placement) -> bool:
        cell, digit = placement
        return cells[cell] == EMPTY and state.solution[cell] == digit

    def identity(self, state: State) -> str:
        """Return the grid, the same for rotations, reflections and renamed digits."""
        return problems.identity(state.cells)

    def solve(self, state: State) -> tuple[str, ...] | None:
        """Return the fewest answers that complete the grid, for imitation; None if none is found.

        Placements that can be seen at once come first: naked singles, then hidden singles.
        """
        plan = solver.solve(state.cells)
        if plan is None:
            return None
        texts = [f"{grid.name(cell, state.size)}={digit}" for cell, digit in plan]
        size = self.placements
        return tuple("||".join(texts[i : i + size]) for i in range(0, len(texts), size))

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the surroundings of each cell of its plan, and the reason.

        For each cell: its row, column and box, and the digits that fit it. A single fitting digit
        is the reason; otherwise it is a unit that needs the digit there or, with "then", the
        earlier placements. For example "r1c2 row 1 . . 4 column . 4 1 3 box 1 . 3 4 leaves 2" and
        "r1c2 row 1 . . 4 column . . . 3 box 1 . . . leaves 2 row needs 2".
        """
        thoughts = []
        for answer in plan:
            for placement in reading.placements(answer, self.size):
                if placement is not None and state.cells[placement[0]] == EMPTY:
                    thoughts.append(self._reason(state.cells, *placement))
        return " ".join(thoughts)

    def _reason(self, cells: str, cell: int, digit: str) -> str:
        around = zip(UNITS, grid.units(self.size)[cell], strict=True)
        fitting = solver.candidates(cells, cell)
        words = [grid.name(cell, self.size)]
        words += [f"{kind} {reading.spell(cells, unit)}" for kind, unit in around]
        words.append(" ".join(["leaves", *fitting]))
        if fitting != digit:
            kind = solver.hidden_in(cells, cell, digit)
            words.append(f"then {digit}" if kind is None else f"{kind} needs {digit}")
        return " ".join(words)

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true facts about cells in `thought`, number of facts stated).

        Facts are the contents of a cell's row, column and box, the digits that fit it, and its
        digit.
        """
        cells = grid.parse(grid_lines(observation, SYMBOLS))
        claims = reading.parse_claims(thought, self.size)
        return sum(reading.is_true(cells, self.size, claim) for claim in claims), len(claims)

    def parse(self, grid_text: str) -> State:
        """Return the state of a grid text of this size; strict (ValueError).

        Only grids that singles complete are accepted.
        """
        cells = grid.parse(grid_text)
        plan = solver.solve(cells) if len(cells) == self.size**2 else None
        if plan is None:
            raise ValueError(f"not a {self.size}x{self.size} grid that singles solve:\n{grid_text}")
        solution = list(cells)
        for cell, digit in plan:
            solution[cell] = digit
        return State(cells, "".join(solution))

    def grid_text(self, state: State) -> str:
        """Return rows of digits and dots, with lines between boxes, without a trailing newline."""
        return grid.grid_text(state.cells)
