"""Sokoban for language agents: push every box onto a target.

Rules and rewards follow gym-sokoban (Schrader 2018, github.com/mpSchrader/gym-sokoban) with moves
that push when a box is in the way: -0.1 per action, +1 for pushing a box onto a target, -1 for
pushing a box off, +10 for the action that solves the room.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.envs.drawing import TILE, read_grid, tile_size
from ragen_jax.envs.grounding import Claim, count_true, grid_lines, parse_positions
from ragen_jax.envs.narration import (
    CELL,
    CELLS,
    describe_cell,
    describe_plan,
    describe_things,
    plan_pattern,
)
from ragen_jax.envs.options import grid_size, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_SOLUTION, SPLITS, canonical_grid
from ragen_jax.envs.sokoban import board, rooms, solver, sprites
from ragen_jax.envs.sokoban.board import MOVES, State
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import IMAGE, Observation, Step

OBSERVATIONS = ("grid", "coordinate", "both", "image")

MAX_BOXES = 8
# With DEEP_BOXES boxes, the search for plans longer than DEEP takes at most a second.
MAX_DEEP_BOXES, MAX_DEPTH = 5, 30

REWARD_ACTION, REWARD_ON, REWARD_OFF, REWARD_SOLVED = -0.1, 1.0, -1.0, 10.0

_RULES = """\
You are solving Sokoban. Push every box onto a target.
The actions are Up, Down, Left and Right. Each moves you one cell in that direction (Up is \
towards the first row, Left towards the first column). If a box stands there it is pushed one \
cell further, which works only if the cell behind it holds neither a wall nor another box. Boxes \
cannot be pulled. A move that is blocked changes nothing.
Each action costs 0.1. A box pushed onto a target earns 1, a box pushed off a target loses 1, and \
having every box on a target earns 10 and ends the game."""

_OBSERVATION_RULES = {
    "grid": """\
The room is drawn as rows of symbols: # wall, _ empty floor, O target, X box, √ box on a target, \
P you, S you on a target.""",
    "coordinate": """\
The room is described by positions, written (row, column); rows count from 0 at the top and \
columns from 0 at the left. A wall runs all around the room and is not listed. A box whose \
position is also that of a target is on that target.""",
    "image": """\
The room is drawn from above as a picture of square cells, its first row at the top and its first \
column on the left: grey bricks are wall, plain sand is empty floor, a red ring around a red dot \
is a target, a brown crate is a box, a green crate is a box on a target, a blue disc with a white \
middle is you, and the same disc on red is you on a target.""",
}

# The rules of `Sokoban.brief`.
_BRIEF = """\
Sokoban: push every box onto a target. Moving into a box pushes it one cell, unless a wall or \
another box blocks it. Boxes cannot be pulled."""
_BRIEF_OBSERVATION = {
    "grid": "# wall, _ floor, O target, X box, √ box on target, P you, S you on target.",
    "coordinate": "Positions are (row, column), from (0, 0) at the top left; a wall surrounds the "
    "room.",
    "image": "Seen from above: grey bricks are wall, sand is floor, a red ring is a target, a "
    "brown crate is a box, a green crate is a box on a target, a blue disc is you, a blue disc on "
    "red is you on a target.",
}

# Name of a thing in a text -> the thing.
_THINGS = {
    **{"player": "player", "box": "box", "boxes": "box"},
    **{"target": "target", "targets": "target"},
}


class Sokoban:
    """Generated Sokoban rooms; see `ragen_jax.envs.types.Environment`.

    size: (rows, columns) including the border of wall, from 3 to 20 each
    num_boxes: number of boxes and of targets; at most 8. With more than 5, plans are limited to 30
        moves
    observation: "grid" (symbols), "coordinate" (positions in words), "both", or "image" (only a
        picture, for a model with a vision tower: `sprites`)
    min_solution, max_solution: bounds on the shortest plan of a generated room, in moves
        (None: no bound; at most 200)
    split: "imitation", "train" or "eval": three sets of rooms that are disjoint even up to
        rotation and reflection; None draws from all
    tile: side of a cell of the picture in pixels, from 8 to 64; used only with "image"
    """

    actions = tuple(MOVES)
    opposites: Mapping[str, str] = {"Up": "Down", "Down": "Up", "Left": "Right", "Right": "Left"}
    budget_matters = False
    words: tuple[str, ...] = (
        *("√", "||", "Up", "Down", "Left", "Right", " Up", " Down", " Left", " Right"),
        *("player ", " box ", " target ", " plan"),
    )

    def __init__(
        self,
        size: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        observation: str = "grid",
        min_solution: int | None = 3,
        max_solution: int | None = None,
        split: str | None = "train",
        tile: int = TILE,
    ) -> None:
        self.size = grid_size(size, least=3)
        self.num_boxes = whole("num_boxes", num_boxes, least=1, most=MAX_BOXES)
        area = (self.size[0] - 2) * (self.size[1] - 2)
        if area < 2 * self.num_boxes + 1:
            raise ValueError(
                f"size={self.size} has {area} cells inside its border, but num_boxes={num_boxes} "
                f"needs at least {2 * self.num_boxes + 1} (boxes, targets and the player)"
            )
        # A room is never solved at the start, so its shortest plan has at least one move.
        self.min_solution = 1
        if min_solution is not None:
            # Rooms with longer plans are almost never drawn.
            most = min(2 * self.num_boxes * sum(self.size), MAX_SOLUTION)
            self.min_solution = whole("min_solution", min_solution, least=1, most=most)
        self.max_solution = None
        if max_solution is not None:
            self.max_solution = whole(
                "max_solution", max_solution, least=self.min_solution, most=MAX_SOLUTION
            )
        depth = self.max_solution or self.min_solution
        if self.num_boxes > MAX_DEEP_BOXES and depth > MAX_DEPTH:
            raise ValueError(
                f"max_solution (or min_solution) must be at most {MAX_DEPTH} with more than "
                f"{MAX_DEEP_BOXES} boxes, whose rooms take seconds to search deeper; got {depth}"
            )
        self.observation = one_of("observation", observation, OBSERVATIONS)
        self.tile = tile_size(tile, self.observation)
        self.split = one_of("split", split, (*SPLITS, None))
        modes = ("grid", "coordinate") if observation == "both" else (observation,)
        self.instructions = "\n".join([_RULES, *(_OBSERVATION_RULES[mode] for mode in modes)])
        self.brief = "\n".join([_BRIEF, *(_BRIEF_OBSERVATION[mode] for mode in modes)])

    def reset(self, seed: int) -> State:
        """Return room number `seed`, an int in [0, 2**63), of this split and size."""
        return rooms.generate(
            problem_seed(seed),
            size=self.size,
            num_boxes=self.num_boxes,
            min_solution=self.min_solution,
            max_solution=self.max_solution,
            split=self.split,
        )

    def render(self, state: State) -> str | Observation:
        """Return the observation: the grid, the positions in words, the grid above the positions,
        or only a picture."""
        if self.observation == "image":
            return Observation(IMAGE, (sprites.draw(state, self.tile),))
        if self.observation == "grid":
            return board.grid_text(state)
        if self.observation == "coordinate":
            return coordinate_text(state)
        return board.grid_text(state) + "\n" + coordinate_text(state)

    def step(self, state: State, action: str, rng: np.random.Generator | None = None) -> Step:
        """Move, pushing a box if one is in the way. `rng` is unused: the game is deterministic.

        info: "success" (every box is on a target), "moved" (the player moved), "pushed" (and pushed
        a box). A state that is already solved does not earn the final reward again.
        """
        if action not in MOVES:
            raise ValueError(f"unknown action {action!r}; accepted: {', '.join(MOVES)}")
        rows, columns = MOVES[action]
        room, boxes = state.room, state.boxes
        delta = rows * (room.width + 1) + columns
        ahead = state.player + delta
        bit = 1 << ahead
        reward = REWARD_ACTION
        moved, pushed = bool(room.floor & bit), False
        if moved and boxes & bit:
            landing = 1 << (ahead + delta)
            moved = pushed = bool(landing & room.floor & ~boxes)
            if pushed:
                boxes ^= bit | landing
                # From target to target counts as neither on nor off.
                reward += REWARD_ON * (room.targets & landing != 0)
                reward += REWARD_OFF * (room.targets & bit != 0)
        solved = boxes == room.targets
        if solved and pushed:
            reward += REWARD_SOLVED
        after = State(room, boxes, ahead) if moved else state
        info = {"success": solved, "moved": moved, "pushed": pushed}
        return Step(after, reward, solved, info)

    def identity(self, state: State) -> str:
        """Return the canonical grid text, the same for rotated and mirrored rooms."""
        return canonical_grid(board.grid_text(state))

    def solve(self, state: State, max_moves: int | None = None) -> tuple[str, ...] | None:
        """Return a shortest plan, for imitation; None if there is none (within `max_moves`)."""
        return solver.solve(state, max_moves)

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: all positions, as row and column digits, and its plan.

        For example "player 23 box 33 target 43 plan Down Down".
        """
        room = state.room
        words = [
            " ".join([name, *("{}{}".format(*room.position(cell)) for cell in board.cells(bits))])
            for name, bits in (
                ("player", 1 << state.player),
                ("box", state.boxes),
                ("target", room.targets),
            )
        ]
        return " ".join([*words, "plan", *plan])

    def narrate(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning in sentences: all positions, and its plan.

        For example "The player is at (2,3), the box at (3,3), the target at (4,3). The plan is
        Down, Down."
        """
        room = state.room
        player = describe_cell(room.position(state.player))
        boxes, targets = (
            describe_things(one, several, [room.position(cell) for cell in board.cells(bits)])
            for one, several, bits in (
                ("box", "boxes", state.boxes),
                ("target", "targets", room.targets),
            )
        )
        return f"The player is at {player}, the {boxes}, the {targets}.{describe_plan(plan)}"

    @property
    def styles(self) -> Mapping[str, Style]:
        """Reasoning styles, for `warmstart.styles`."""
        cells = "( [0-9]{2,4})"
        thought = f"player{cells} box{cells}+ target{cells}+ plan( (Up|Down|Left|Right))*"
        return make_styles(self.explain, thought, "player ")

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        box, target = (rf"(?:{name} at {CELL}|{name}e?s at {CELLS})" for name in ("box", "target"))
        facts = rf"The player is at {CELL}, the {box}, the {target}\."
        return make_styles(self.narrate, facts + plan_pattern(self.actions), "The")

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true positions in `thought`, number of positions stated).

        Counts positions of the player, boxes and targets. (0, 0) if the observation holds IMAGE in
        place of a text: see `transcribe`.
        """
        if IMAGE in observation:
            return 0, 0
        return count_true(parse_positions(thought, _THINGS), _positions_shown(observation))

    def transcribe(self, image: np.ndarray) -> str:
        """Return `grid_text` of the state that `render` drew, with observation="image"."""
        return read_grid(image, sprites.SPRITES, self.tile)

    def parse(self, grid_text: str) -> State:
        """Return the state of a grid text of any size and number of boxes; strict (ValueError)."""
        return board.parse(grid_text)

    def grid_text(self, state: State) -> str:
        """Return rows of `# _ O √ X P S` joined by newlines, without a trailing newline."""
        return board.grid_text(state)


def coordinate_text(state: State) -> str:
    """Return the state in words; all positions are (row, column) from 0 at the top left."""
    room = state.room

    def positions(bits: int) -> str:
        return ", ".join(str(room.position(cell)) for cell in board.cells(bits)) or "none"

    inside, border = 0, 0
    for row in range(room.height):
        for column in range(room.width):
            edge = row in (0, room.height - 1) or column in (0, room.width - 1)
            bit = 1 << room.cell(row, column)
            inside |= bit * (not edge)
            border |= bit * edge
    # A parsed room may have an open border; then the border's walls must be listed.
    closed = not border & room.floor
    walls = (inside if closed else inside | border) & ~room.floor
    return "\n".join(
        [
            f"Room: {room.height} rows, {room.width} columns",
            f"Player: {room.position(state.player)}",
            f"Boxes: {positions(state.boxes)}",
            f"Targets: {positions(room.targets)}",
            f"Walls{' inside the border' if closed else ''}: {positions(walls)}",
        ]
    )


@functools.lru_cache(maxsize=1024)  # the members of a group see the same room
def _positions_shown(observation: str) -> frozenset[Claim]:
    """Return all positions that an observation shows, in the form of `parse_positions`."""
    grid = grid_lines(observation, board.SYMBOLS)
    shown = coordinate_text(board.parse(grid)) if grid else observation
    return frozenset(parse_positions(shown, _THINGS))
