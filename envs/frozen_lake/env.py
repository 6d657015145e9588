"""FrozenLake for language agents: cross the ice to the goal without falling into a hole.

Rules and rewards are Gymnasium's (Farama Foundation, gymnasium.farama.org, FrozenLake): 1 for
reaching the goal, 0 for everything else. Symbols and maps follow the released RAGEN.
"""

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.envs.drawing import TILE, read_grid, tile_size
from ragen_jax.envs.frozen_lake import lake, maps, solver, sprites
from ragen_jax.envs.frozen_lake.lake import State
from ragen_jax.envs.frozen_lake.rules import MOVES, Outcomes, intended_index, outcomes
from ragen_jax.envs.grounding import Claim, count_true, grid_lines, parse_positions
from ragen_jax.envs.narration import (
    CELL,
    CELLS,
    describe_cell,
    describe_plan,
    describe_things,
    plan_pattern,
)
from ragen_jax.envs.options import grid_size, one_of, probability, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, MAX_SOLUTION, SPLITS, Draws, canonical_grid
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import IMAGE, Observation, Step

OBSERVATIONS = ("grid", "coordinate", "both", "image")

_RULES = """\
You are crossing a frozen lake. Walk to the goal without falling into a hole.
The actions are Left, Down, Right and Up. Each moves you one cell in that direction (Up is towards \
the first row, Left towards the first column). A move off the lake changes nothing.{slippery}
Reaching the goal earns 1 and ends the game. Falling into a hole earns nothing and ends the game."""

_SLIPPERY = """
The ice is slippery: a move goes at right angles to its direction, to either side, \
with a probability of {slip:g} in all."""

_OBSERVATION_RULES = {
    "grid": """\
The lake is drawn as rows of symbols: P you, _ frozen, O hole, G goal, X you in a hole, √ you on \
the goal.""",
    "coordinate": """\
The lake is described by positions, written (row, column); rows count from 0 at the top and \
columns from 0 at the left. Cells that are not listed are frozen.""",
    "image": """\
The lake is drawn from above as a picture of square cells, its first row at the top and its first \
column on the left: plain pale blue is frozen, a dark disc is a hole, a golden diamond is the \
goal, someone in a red coat is you, a red cross on dark water is you in a hole, and the red coat \
on gold is you on the goal.""",
}

# The rules of `FrozenLake.brief`. An episode ends in a hole or on the goal: prompts show no X or √.
_BRIEF = "Frozen lake: walk to the goal without stepping into a hole."
_BRIEF_SLIPPERY = " A move slips sideways with a probability of {slip:g}."
_BRIEF_OBSERVATION = {
    "grid": "P you, _ ice, O hole, G goal.",
    "coordinate": "Positions are (row, column), from (0, 0) at the top left; other cells are ice.",
    "image": "Seen from above: pale blue is ice, a dark disc is a hole, a golden diamond is the "
    "goal, a red coat is you.",
}

# Axis -> actions that lower and raise the position on it.
_AXES = {"row": ("Up", "Down"), "column": ("Left", "Right")}
_NUMBER = "[0-9]{1,2}"
# Axis -> pattern of a sentence with the way to the goal along it, as `narrate` writes it.
_WAY = {
    axis: rf"From {axis} {_NUMBER} to {_NUMBER}: (?:{_NUMBER} (?:{'|'.join(names)})|no move)\."
    for axis, names in _AXES.items()
}
_ANY_WAY = re.compile("|".join(_WAY.values()))

# Name of a thing in a text -> the thing.
_THINGS = {"player": "player", "hole": "hole", "holes": "hole", "goal": "goal"}


class FrozenLake:
    """Generated frozen lakes; see `ragen_jax.envs.types.Environment`.

    size: (rows, columns), from 2 to 20 each
    frozen: probability that a cell is ice rather than a hole, before unsolvable maps are dropped
    slip: probability of an unintended move, half for either side of the intended move. The paper
        uses 0.02, Gymnasium's classic lake 2/3; with 0 the game is deterministic
    observation: "grid" (symbols), "coordinate" (positions in words), "both", or "image" (only a
        picture, for a model with a vision tower: `sprites`)
    min_solution, max_solution: bounds on the shortest safe path of a generated map, in moves
        (None: no bound; at most 200)
    split: "imitation", "train" or "eval": three sets of maps that are disjoint even up to rotation
        and reflection; None draws from all
    tile: side of a cell of the picture in pixels, from 8 to 64; used only with "image"
    """

    actions = tuple(MOVES)
    opposites: Mapping[str, str] = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
    budget_matters = False

    def __init__(
        self,
        size: Sequence[int] = (4, 4),
        frozen: float = 0.8,
        slip: float = 0.02,
        observation: str = "grid",
        min_solution: int | None = None,
        max_solution: int | None = None,
        split: str | None = "train",
        tile: int = TILE,
    ) -> None:
        self.size = grid_size(size, least=2)
        rows, columns = self.size
        cells = [f" {row}{column}" for row in range(rows) for column in range(columns)]
        moves = [*MOVES, *(f" {move}" for move in MOVES)]
        texts = ["√", "||", *moves, "player", " hole", " goal", " plan"]
        self.words: tuple[str, ...] = (*texts, *cells)
        self.frozen = probability("frozen", frozen)
        self.slip = probability("slip", slip)
        # The player never starts on the goal, so the shortest path has at least one move.
        self.min_solution = 1
        if min_solution is not None:
            # Maps with longer paths are almost never drawn.
            self.min_solution = whole("min_solution", min_solution, least=1, most=sum(self.size))
        self.max_solution = None
        if max_solution is not None:
            self.max_solution = whole(
                "max_solution", max_solution, least=self.min_solution, most=MAX_SOLUTION
            )
        self.observation = one_of("observation", observation, OBSERVATIONS)
        self.tile = tile_size(tile, self.observation)
        self.split = one_of("split", split, (*SPLITS, None))
        rules = _RULES.format(slippery=_SLIPPERY.format(slip=self.slip) if self.slip else "")
        modes = ("grid", "coordinate") if observation == "both" else (observation,)
        self.instructions = "\n".join([rules, *(_OBSERVATION_RULES[mode] for mode in modes)])
        rules = _BRIEF + (_BRIEF_SLIPPERY.format(slip=self.slip) if self.slip else "")
        self.brief = "\n".join([rules, *(_BRIEF_OBSERVATION[mode] for mode in modes)])

    def reset(self, seed: int) -> State:
        """Return map number `seed`, an int in [0, 2**63), of this split and size.

        It is the first of attempts 0, 1, ... that meets the constraints; `slip` does not matter.
        Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        draws = Draws(seed, 0, maps.TAG)
        for attempt in range(MAX_ATTEMPTS):
            draws.restart(attempt)
            state = maps.draw_map(draws, self.size, self.frozen)
            # The hash costs a fraction of the search, so it is checked first.
            if self.split is not None and maps.split_of(state) != self.split:
                continue
            plan = self.solve(state)
            if plan is None or len(plan) < self.min_solution:
                continue
            if self.max_solution is None or len(plan) <= self.max_solution:
                return state
        raise ValueError(
            f"no map found in {MAX_ATTEMPTS} attempts for seed={seed}, size={self.size}, "
            f"frozen={self.frozen}, min_solution={self.min_solution}, "
            f"max_solution={self.max_solution}, split={self.split!r}: relax the bounds on the "
            "solution, raise frozen or enlarge the lake"
        )

    def render(self, state: State) -> str | Observation:
        """Return the observation: the grid, the positions in words, the grid above the positions,
        or only a picture."""
        if self.observation == "image":
            return Observation(IMAGE, (sprites.draw(state, self.tile),))
        if self.observation == "grid":
            return lake.grid_text(state)
        if self.observation == "coordinate":
            return coordinate_text(state)
        return lake.grid_text(state) + "\n" + coordinate_text(state)

    def outcomes(self, state: State, action: str) -> Outcomes:
        """Return (probability, cell, reward, done) of each possible outcome; see `rules`.

        Raises ValueError for an unknown action.
        """
        if action not in MOVES:
            raise ValueError(f"unknown action {action!r}; accepted: {', '.join(MOVES)}")
        return outcomes(state.lake, self.slip, state.player, action)

    def step(self, state: State, action: str, rng: np.random.Generator | None) -> Step:
        """Move, or slip: one draw of `rng` per action. Without `rng` (None) nothing slips.

        info: "success" (the player is on the goal), "moved" (the player changed its cell),
        "slipped" (the move was not the intended move, even if both lead to the same cell).
        In a hole or on the goal every action stays there and earns 0.
        """
        possible = self.outcomes(state, action)
        chosen = intended_index(possible) if rng is None else _draw(possible, rng.random())
        _, cell, reward, done = possible[chosen]
        after = State(state.lake, cell)
        info = {
            "success": after.is_on_goal,
            "moved": cell != state.player,
            "slipped": chosen != intended_index(possible),
        }
        return Step(after, float(reward), done, info)

    def identity(self, state: State) -> str:
        """Return the canonical grid text, the same for rotated and mirrored maps."""
        return canonical_grid(lake.grid_text(state))

    def solve(self, state: State) -> tuple[str, ...] | None:
        """Return a shortest safe path in moves, for imitation; None if there is none.

        It is valid as long as nothing slips: after a slip, call again with the resulting state.
        """
        return solver.solve(state, self.slip)

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: all positions, as row and column digits, and its plan.

        For example "player 23 hole 12 21 goal 33 plan Down".
        """
        holes, goal = _holes(state), state.lake.letters.index("G")
        words = [
            " ".join([name, *("{}{}".format(*state.lake.position(cell)) for cell in cells)])
            for name, cells in (("player", [state.player]), ("hole", holes), ("goal", [goal]))
        ]
        return " ".join([*words, "plan", *plan])

    def narrate(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning in sentences: all positions, the way to the goal, its plan.

        For example "The player is at (2,3), the goal at (3,3), holes at (1,2) and (2,1). From row 2
        to 3: 1 Down. From column 3 to 3: no move. The plan is Down."
        """
        position = state.lake.position
        holes = [position(cell) for cell in _holes(state)]
        player, goal = position(state.player), position(state.lake.letters.index("G"))
        facts = f"The player is at {describe_cell(player)}, the goal at {describe_cell(goal)}"
        if holes:
            facts += f", {describe_things('a hole', 'holes', holes)}"
        way = " ".join(_describe_way(player, goal))
        return f"{facts}. {way}{describe_plan(plan)}"

    @property
    def styles(self) -> Mapping[str, Style]:
        """Reasoning styles, for `warmstart.styles`."""
        cells = "( [0-9]{2,4})"
        thought = f"player{cells} hole{cells}* goal{cells} plan( (Up|Down|Left|Right))*"
        return make_styles(self.explain, thought, "player")

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        holes = rf"(?:, a hole at {CELL}|, holes at {CELLS})?"
        facts = (
            rf"The player is at {CELL}, the goal at {CELL}{holes}\. {_WAY['row']} {_WAY['column']}"
        )
        return make_styles(self.narrate, facts + plan_pattern(self.actions), "The")

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true facts in `thought`, number of facts stated).

        Counts positions of the player, holes and goal, and the way from the player to the goal as
        `narrate` states it. (0, 0) if the observation holds IMAGE in place of a text: see
        `transcribe`.
        """
        if IMAGE in observation:
            return 0, 0
        positions, way = _facts_shown(observation)
        right, stated = count_true(parse_positions(thought, _THINGS), positions)
        ways = _ANY_WAY.findall(thought)
        return right + sum(sentence in way for sentence in ways), stated + len(ways)

    def transcribe(self, image: np.ndarray) -> str:
        """Return `grid_text` of the state that `render` drew, with observation="image"."""
        return read_grid(image, sprites.SPRITES, self.tile)

    def parse(self, grid_text: str) -> State:
        """Return the state of a grid text of any size; strict (ValueError)."""
        return lake.parse(grid_text)

    def grid_text(self, state: State) -> str:
        """Return rows of `P _ O G X √` joined by newlines, without a trailing newline."""
        return lake.grid_text(state)


def coordinate_text(state: State) -> str:
    """Return the state in words; all positions are (row, column) from 0 at the top left."""
    letters, position = state.lake.letters, state.lake.position
    where = {"F": "", "H": ", in a hole", "G": ", on the goal"}[letters[state.player]]
    holes = ", ".join(str(position(cell)) for cell in _holes(state)) or "none"
    return "\n".join(
        [
            "Lake: {} rows, {} columns".format(*state.lake.size),
            f"Player: {position(state.player)}{where}",
            f"Goal: {position(letters.index('G'))}",
            f"Holes: {holes}",
        ]
    )


@functools.lru_cache(maxsize=1024)  # the members of a group see the same lake
def _facts_shown(observation: str) -> tuple[frozenset[Claim], tuple[str, str]]:
    """Return all positions that an observation shows, in the form of `parse_positions`, and the way
    to the goal in sentences."""
    grid = grid_lines(observation, lake.SYMBOLS)
    shown = coordinate_text(lake.parse(grid)) if grid else observation
    positions = parse_positions(shown, _THINGS)
    places = dict(positions)
    return frozenset(positions), _describe_way(places["player"], places["goal"])


def _describe_way(start: tuple[int, int], goal: tuple[int, int]) -> tuple[str, str]:
    """Return the way from a position to another in two sentences, rows first; see `_WAY`."""
    first, second = (
        f"From {axis} {a} to {b}: " + (f"{abs(b - a)} {names[b > a]}." if a != b else "no move.")
        for a, b, (axis, names) in zip(start, goal, _AXES.items(), strict=True)
    )
    return first, second


def _holes(state: State) -> list[int]:
    return [cell for cell, letter in enumerate(state.lake.letters) if letter == "H"]


def _draw(possible: Outcomes, uniform: float) -> int:
    """Return the index of the outcome that a uniform number in [0, 1) selects."""
    for index, (share, _, _, _) in enumerate(possible):
        uniform -= share
        if uniform < 0:
            return index
    return len(possible) - 1  # the probabilities sum to 1 only up to rounding
