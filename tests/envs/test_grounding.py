"""envs/grounding.py and `count_grounded`: which statements count, and which are true."""

import pytest

from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.countdown.problems import Problem
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.grounding import grid_lines, parse_positions
from ragen_jax.envs.sokoban import Sokoban

pytestmark = pytest.mark.fast

THINGS = {"player": "player", "box": "box", "boxes": "box"}

ROOM = """\
######
#__O_#
#_P__#
#__X_#
#____#
######"""

LAKE = """\
P__O
_O__
____
O__G"""


@pytest.mark.parametrize(
    "text, claims",
    [
        ("player 23 box 33 41", [("player", (2, 3)), ("box", (3, 3)), ("box", (4, 1))]),
        ("The player is at (2, 3).", [("player", (2, 3))]),
        ("PLAYER: row... (2,3)", [("player", (2, 3))]),
        ("Boxes: (1, 12), (4, 4)", [("box", (1, 12)), ("box", (4, 4))]),
        ("the boxes are at 1,2 and 4, 4", [("box", (1, 2)), ("box", (4, 4))]),
        ("box 23, 33", [("box", (2, 3)), ("box", (3, 3))]),
        ("the player moves to (2, 3)", []),  # no claim about the current position
        ("player plan Down 23", []),
        ("at (2, 3) and 33", []),  # names no thing
        ("boxer 23 players 23", []),  # other words, which only begin like things
        ("player 2 box 234 box 2", []),  # not positions
        ("boxe\u017f 23", []),  # a letter that Python treats as another case of s
        ("", []),
    ],
)
def test_stated_positions(text, claims):
    assert parse_positions(text, THINGS) == claims


def test_stated_positions_survives_whatever_was_sampled():
    many = "9" * 5000  # more digits than int() accepts
    for text in (
        f"player {many}",
        f"player ({many}, 1)",
        "player (" * 2000,
        "player" + " 2 ,," * 999,
    ):
        assert parse_positions(text, THINGS) == []


def test_grid_lines_leave_other_lines_out():
    assert grid_lines(f"Your last reply.\n{ROOM}\n\nYou have 2.", "#_O√XPS") == ROOM


@pytest.mark.parametrize(
    "thought, found",
    [
        ("player 22 box 33 target 13 plan Right 11", (3, 3)),
        ("player 22 box 13 target 33", (1, 3)),  # box and target are swapped
        ("The box at (3, 3) must go up; the player is in (4, 4)", (1, 2)),
        ("Up, up and away", (0, 0)),
    ],
)
def test_sokoban(thought, found):
    environment = Sokoban()
    assert environment.count_grounded(ROOM, thought) == found
    for observation in ("coordinate", "both"):
        other = Sokoban(observation=observation)
        assert other.count_grounded(other.render(environment.parse(ROOM)), thought) == found


@pytest.mark.parametrize(
    "thought, found",
    [
        ("player 00 hole 03 11 30 goal 33 plan Down", (5, 5)),
        ("holes: (0, 3), (1, 2)", (1, 2)),
        ("The goal is at (3, 0).", (0, 1)),
    ],
)
def test_frozen_lake(thought, found):
    environment = FrozenLake()
    assert environment.count_grounded(LAKE, thought) == found
    for observation in ("coordinate", "both"):
        other = FrozenLake(observation=observation)
        assert other.count_grounded(other.render(environment.parse(LAKE)), thought) == found


@pytest.mark.parametrize(
    "thought, found",
    [
        ("numbers 44 19 35 target 60 plan 44-19=25 25+35=60", (4, 4)),
        ("The numbers are 44, 19 and 19. The target is 61", (2, 4)),  # 19 is given only once
        ("numbers " + "9" * 5000, (0, 1)),
        ("44-19=25", (0, 0)),
    ],
)
def test_countdown(thought, found):
    environment = Countdown()
    shown = environment.render(Problem((44, 19, 35), 60))
    assert environment.count_grounded(shown, thought) == found
