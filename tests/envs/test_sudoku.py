"""Sudoku: answers by hand, hostile answers, singles, the generator, symmetries, the splits."""

import dataclasses
import hashlib
import itertools
import math
import random
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.configs import sudoku as config_file
from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.problems import SPLITS, Draws
from ragen_jax.envs.sudoku import Sudoku, split_of
from ragen_jax.envs.sudoku import env as sudoku_env
from ragen_jax.envs.sudoku.grid import DIGITS, grid_text, is_solved, parse
from ragen_jax.envs.sudoku.problems import full_grid, identity, invariant
from ragen_jax.envs.sudoku.reading import MAX_TEXT, parse_claims, placements
from ragen_jax.envs.sudoku.solver import candidates, hidden_in, solve
from ragen_jax.envs.types import Environment, GroundedEnvironment, SolvableEnvironment

pytestmark = pytest.mark.fast


GRID = """\
. 4 | 1 3
3 1 | 4 2
----+----
. . | 2 4
4 2 | . ."""

SOLVED = """\
2 4 | 1 3
3 1 | 4 2
----+----
1 3 | 2 4
4 2 | 3 1"""

LARGE = """\
5 3 . | . 7 . | . . .
6 . . | 1 9 5 | . . .
. 9 8 | . . . | . 6 .
------+-------+------
8 . . | . 6 . | . . 3
4 . . | 8 . 3 | . . 1
7 . . | . 2 . | . . 6
------+-------+------
. 6 . | . . . | 2 8 .
. . . | 4 1 9 | . . 5
. . . | . 8 . | . 7 9"""

# sha256 of the observations of seeds 0..49 with default options. A different digest means that
# every problem has changed, and with it warm starts, evaluation sets and resumed runs.
PROBLEMS_0_TO_49 = "ccf296df495020db7f06dd46661c3eb55ed3e56be73dca49a33ab572b34b9505"


def problems_digest() -> str:
    env = Sudoku()
    texts = [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def solutions(cells: str) -> list[str]:
    """Every solution, by trying each digit in the first empty cell."""
    if "." not in cells:
        return [cells]
    size = math.isqrt(len(cells))
    cell = cells.index(".")
    found = []
    for digit in DIGITS[:size]:
        if not clashes(cells, cell, digit):
            found += solutions(cells[:cell] + digit + cells[cell + 1 :])
    return found


def clashes(cells: str, cell: int, digit: str) -> bool:
    """Whether another cell in the same row, column or box has the digit."""
    size = math.isqrt(len(cells))
    side = math.isqrt(size)
    row, column = divmod(cell, size)
    return any(
        cells[other] == digit
        and (
            other // size == row
            or other % size == column
            or (other // size // side, other % size // side) == (row // side, column // side)
        )
        for other in range(size * size)
        if other != cell
    )


def symmetric(cells: str, rng: random.Random) -> str:
    """A random image: permuted rows, bands, columns and stacks, transposition, renamed digits."""
    size = math.isqrt(len(cells))
    side = math.isqrt(size)

    def lines():
        bands = [[side * band + i for i in rng.sample(range(side), side)] for band in range(side)]
        return [line for band in rng.sample(bands, side) for line in band]

    rows, columns, turned = lines(), lines(), rng.random() < 0.5
    image = "".join(cells[r * size + c] for r in rows for c in columns)
    if turned:
        image = "".join(image[c * size + r] for r in range(size) for c in range(size))
    names = "".join(rng.sample(DIGITS[:size], size))
    return image.translate(str.maketrans(DIGITS[:size], names))


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("sudoku", size=9, blanks=(30, 40), split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert isinstance(env, GroundedEnvironment)
    assert env.actions == ()
    assert ENVS["sudoku"] is Sudoku
    with pytest.raises(ValueError, match=r"'holes'.*accepted: size, blanks, placements"):
        make_env("sudoku", holes=2)


def test_the_llm_presets_play_the_defaults():
    config = config_file.get_config("qwen2.5-3b")
    options = config.env.options.to_dict()
    env, default = Sudoku(**options), Sudoku()
    assert all(getattr(env, name) == getattr(default, name) for name in options)
    assert config.env.max_turns * env.placements >= env.blanks[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 3}, "size must be .*at least 4, got 3"),
        ({"size": 16}, "size must be .*at most 9, got 16"),
        ({"size": 6}, "size must be 4 or 9, got 6"),
        ({"size": 4.0}, "size must be a whole number.*got 4.0"),
        ({"size": True}, "size must be a whole number.*got True"),
        ({"size": (4, 4)}, r"size must be a whole number.*got \(4, 4\)"),
        ({"blanks": 5}, "blanks must be two whole numbers .*got 5"),
        ({"blanks": "46"}, "blanks must be two whole numbers .*got '46'"),
        ({"blanks": (0, 4)}, "blanks must be .*at least 1, got 0"),
        ({"blanks": (5, 4)}, "blanks must be .*at least 5, got 4"),
        ({"blanks": (4, 12)}, "blanks must be .*at most 11, got 12"),
        ({"size": 9, "blanks": (40, 51)}, "blanks must be .*at most 50, got 51"),
        ({"blanks": (float("nan"), 9)}, "blanks must be .*got nan"),
        ({"placements": 0}, "placements must be .*at least 1, got 0"),
        ({"placements": 12}, "placements must be .*at most 11, got 12"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sudoku(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Sudoku().reset(seed)
    Sudoku().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    env = Sudoku()
    state = env.parse(GRID)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.cells = "1" * 16
    assert len({state, env.parse(GRID), env.step(state, "r1c1=2").state}) == 2


@pytest.mark.parametrize("size, side, example", [(4, 2, GRID), (9, 3, LARGE)])
def test_instructions_tell_the_rules(size, side, example):
    text = Sudoku(size=size).instructions
    assert f"{size}x{size} cells" in text and f"{side}x{side} cells" in text
    assert f"from 1 to {size} once" in text and "up to 2 placements, separated by ||" in text
    assert "An answer is one placement." in Sudoku(placements=1).instructions
    assert "<" not in text and "{" not in text
    assert example.count("\n") == size + side - 2


# ---- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, size", [(GRID, 4), (SOLVED, 4), (LARGE, 9)])
def test_parse_and_grid_text_are_inverse(text, size):
    env = Sudoku(size=size)
    state = env.parse(text)
    assert env.grid_text(state) == env.render(state) == text
    assert is_solved(state.solution) and state.size == size


@pytest.mark.parametrize("text", ["", ".", GRID + "\n", GRID.replace("|", " "), GRID[2:], "5" * 16])
def test_parse_is_strict(text):
    with pytest.raises(ValueError, match="not a grid of 4x4 or 9x9 cells"):
        parse(text)


def test_parse_refuses_what_singles_do_not_solve():
    for text in (grid_text("." * 16), GRID.replace("3 1", "4 1"), LARGE):
        with pytest.raises(ValueError, match="not a 4x4 grid that singles solve"):
            Sudoku().parse(text)
    five = GRID.replace("1", "5")
    with pytest.raises(ValueError, match="not a grid of"):
        Sudoku().parse(five)


# ---- answers ------------------------------------------------------------------------------------

# (answer, right, wrong) for GRID and two placements per answer
ANSWERS = [
    ("r1c1=2", 1, 0),
    ("r1c1=2||r3c1=1", 2, 0),
    ("r1c1=2 || r3c1=1 || r3c2=3", 2, 0),  # the third placement is ignored
    ("r1c1=3||r1c1=2", 1, 1),
    ("r1c1=2||r1c1=2", 1, 1),  # the cell is no longer empty
    ("r1c2=4", 0, 1),  # a given cell
    ("r1c2=1", 0, 1),
    ("r1c1=1", 0, 1),  # breaks a rule
    ("r3c1=3", 0, 1),  # breaks another
    ("R1 C1 = 2", 1, 0),
    ("r1c1: 2", 1, 0),
    ("row 1, column 1: 2", 1, 0),
    ("row 1 col 1 is 2; row 3 col 1 is 1", 2, 0),
    ("1,1,2", 1, 0),
    ("(1, 1) = 2\n(3, 1): 1", 2, 0),
    ("(1,1,2)", 1, 0),
    ("112", 0, 1),
    ("1 1 2", 0, 1),
    ("r1c1=2 r3c1=1", 0, 1),
    ("I place r1c1=2", 0, 1),
    ("r1c1", 0, 1),
    ("r0c1=2", 0, 1),
    ("r1c5=2", 0, 1),
    ("r1c1=5", 0, 1),
    ("r1c1=0", 0, 1),
    ("r1c1=22", 0, 1),
    ("r01c1=2", 0, 1),
    ("r1c-1=2", 0, 1),
    ("r999999999999c1=2", 0, 1),
    ("r1c1=\u0662", 0, 1),
    ("r\u00b9c1=2", 0, 1),
    ("r1c1=2\ud800", 0, 1),
    ("", 0, 1),
    ("||", 0, 1),
    ("||r1c1=2||", 1, 0),
    ("\x00", 0, 1),
    ("r1c1=2" + " " * MAX_TEXT, 0, 1),
]


@pytest.mark.parametrize("answer, right, wrong", ANSWERS)
def test_answers_by_hand(answer, right, wrong):
    env = Sudoku()
    state = env.parse(GRID)
    step = env.step(state, answer)
    assert step.info == {"success": False, "right": right, "wrong": wrong}
    assert step.reward == pytest.approx(0.1 * right - 0.1 * wrong)
    assert not step.done and isinstance(step.reward, float)
    expected = list(state.cells)
    for cell, digit in ((0, "2"), (8, "1"))[:right]:
        expected[cell] = digit
    assert step.state.cells == "".join(expected) and step.state.solution == state.solution


def test_a_whole_episode_with_exact_rewards():
    env = Sudoku()
    state, rewards, dones = env.parse(GRID), [], []
    for answer in ("r1c1=2||r3c1=3", "r3c1=1||r3c2=3", "r4c4=1||r4c3=1", "r4c3=3||r1c1=1"):
        step = env.step(state, answer)
        state = step.state
        rewards.append(step.reward)
        dones.append(step.done)
    # placements after the last cell are ignored
    assert rewards == pytest.approx([0.0, 0.2, 0.0, 1.1])
    assert dones == [False] * 3 + [True] and env.grid_text(state) == SOLVED
    assert step.info == {"success": True, "right": 1, "wrong": 0}
    for answer in ("r1c1=2", "", "r1c1=3"):
        step = env.step(state, answer)
        assert (step.state, step.reward, step.done) == (state, 0.0, True)
        assert step.info == {"success": True, "right": 0, "wrong": 0}


def test_as_many_placements_are_read_as_asked():
    every = "||".join(Sudoku(placements=11).solve(Sudoku().parse(GRID)))
    for number in (1, 2, 4, 5, 11):
        step = Sudoku(placements=number).step(Sudoku().parse(GRID), every)
        assert step.info["right"] == min(number, 5) and step.done == (number >= 5)


def hostile_answers(count: int) -> list[str]:
    """Handmade answers, and mutations of answers."""
    rng = random.Random(0)
    answers = [
        *("", " " * 10**6, "\n" * 10**6, "||" * 10**6, ";" * 500, "r" * 10**6, "9" * 10**6),
        *("r1c1=2||" * 10**5, "r1c1=" + "2" * 5000, "(" * 900 + "1,1,2", "1," * 450, "row " * 240),
        *("\ud800" * 100, "\udcffr1c1=2", "\x00" * 300, "\U0001f600", "r\u0661c\u0661=\u0662"),
        *("r1c1=2\u202e", "r1" + " " * 900 + "c1", "r1" + ",\t" * 400, "<answer>r1c1=2</answer>"),
    ]
    alphabet = "r1c2=34()|,; :\n rowcolumnis0" + "\u0663\x00\ud800-9"
    while len(answers) < count:
        text = list(rng.choice(["r1c1=2||r3c1=1", "row 1, column 1: 2", "(1, 1) = 2", ""]))
        for _ in range(rng.randrange(1, 9)):
            text.insert(rng.randrange(len(text) + 1), rng.choice(alphabet))
        answers.append("".join(text))
    return answers


def test_hostile_answers_are_harmless_and_fast():
    env = Sudoku()
    state = env.parse(GRID)
    answers = hostile_answers(1000)
    start = time.process_time()
    steps = [env.step(state, answer) for answer in answers]
    found = [env.count_grounded(GRID, answer) for answer in answers]
    assert time.process_time() - start < 3.0
    for step in steps:
        right, wrong = step.info["right"], step.info["wrong"]
        assert 1 <= right + wrong <= 2 and step.state.cells.count(".") == 5 - right
        given = zip(state.cells, step.state.cells, state.solution, strict=True)
        assert all(after in (before, right_one) for before, after, right_one in given)
    assert all(0 <= right <= claims for right, claims in found)
    assert placements("r1c1=2", 4) == [(0, "2")] and placements("4,4,1", 4) == [(15, "1")]


@given(st.text("rc1234=|,() ", max_size=30))
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_answer(text):
    env = Sudoku()
    step = env.step(env.parse(GRID), text)
    assert not step.done and step.reward in (-0.2, -0.1, 0.0, 0.1, 0.2)


# ---- solver -------------------------------------------------------------------------------------


def test_singles_find_the_solution_that_brute_force_finds():
    """On random sub-grids: a grid that singles complete has one solution, the one they find."""
    rng = random.Random(2)
    solved = stuck = 0
    for seed in range(200):
        full = full_grid(Draws(seed, 0, 1), 4)
        assert is_solved(full) and not any(clashes(full, i, full[i]) for i in range(16))
        cells = "".join(digit if rng.random() < 0.45 else "." for digit in full)
        every = solutions(cells)
        for cell in range(16):
            fitting = [digit for digit in "1234" if not clashes(cells, cell, digit)]
            assert candidates(cells, cell) == "".join(fitting)
        plan = solve(cells)
        if plan is None:
            stuck += 1
            continue
        assert every == [full] and len(plan) == cells.count(".")
        assert all(full[cell] == digit for cell, digit in plan)
        solved += 1
    assert solved > 30 and stuck > 30


def test_hidden_singles_by_hand():
    cells = parse(GRID)
    # Row 4 has two empty cells; 3 fits only the third column, and 1 only the fourth.
    assert hidden_in(cells, 14, "3") == "row" and hidden_in(cells, 15, "1") == "row"
    assert hidden_in("." * 16, 0, "1") is None
    column = "...." + ".1.." + "...." + "..1."  # 1 fits neither rows 2 and 4 nor columns 2 and 3
    assert candidates(column, 0) == "234" and hidden_in(column, 12, "4") is None
    assert hidden_in(column, 8, "1") == "row" and candidates(column, 8) == "1234"


def test_grids_that_contradict_themselves_have_no_plan():
    assert solve(parse(SOLVED)) == []
    assert solve("1" + parse(SOLVED)[1:]) is None
    assert solve("11.." + "." * 12) is None
    assert solve("123." + "...4" + "." * 8) is None  # no digit fits the fourth cell


def test_plans_are_short_and_what_is_seen_at_once_comes_first():
    for size, blanks in ((4, (4, 10)), (9, (30, 45))):
        for number in (1, 2, 5):
            env = Sudoku(size=size, blanks=blanks, placements=number, split=None)
            for seed in range(15):
                state = env.reset(seed)
                plan = env.solve(state)
                assert len(plan) == -(-state.cells.count(".") // number)
                naked = [
                    cell
                    for cell, digit in enumerate(state.cells)
                    if digit == "." and len(candidates(state.cells, cell)) == 1
                ]
                ((first, _), *_) = placements(plan[0], size)
                assert not naked or first == naked[0]
                for answer in plan:
                    step = env.step(state, answer)
                    assert step.info["wrong"] == 0
                    state = step.state
                assert step.done and step.info["success"]


def test_explanations_by_hand():
    env = Sudoku()
    state = env.parse(GRID)
    assert env.solve(state) == ("r1c1=2||r3c1=1", "r3c2=3||r4c3=3", "r4c4=1")
    assert env.explain(state, env.solve(state)[:1]) == (
        "r1c1 row . 4 1 3 column . 3 . 4 box . 4 3 1 leaves 2 "
        "r3c1 row . . 2 4 column . 3 . 4 box . . 4 2 leaves 1"
    )
    state = env.parse(grid_text(".1.4" + ".2.." + "...." + "14.."))
    # 2 fits no other cell of row 1; and once r4c3 is 3, only 2 fits r4c4.
    assert env.explain(state, ["r1c3=2"]) == (
        "r1c3 row . 1 . 4 column . . . . box . 4 . . leaves 2 3 row needs 2"
    )
    assert env.explain(state, ["r4c4=2"]) == (
        "r4c4 row 1 4 . . column 4 . . . box . . . . leaves 2 3 then 2"
    )
    assert env.explain(state, ["nothing", "r1c2=1"]) == ""


@pytest.mark.parametrize("options", [{}, {"blanks": (11, 11)}, {"size": 9, "blanks": (40, 45)}])
def test_all_that_an_expert_states_is_so(options):
    env = Sudoku(**options, placements=3, split=None)
    reasons = Counter()
    for seed in range(12):
        state, done = env.reset(seed), False
        while not done:
            plan = env.solve(state)
            thought = env.explain(state, plan[:2])
            message = f"Your last reply.\n{env.render(state)}\nYou have 3 answer(s) left."
            count = sum(answer.count("=") for answer in plan[:2])
            assert env.count_grounded(message, thought) == (4 * count, 4 * count)
            reasons.update(word for word in thought.split() if word in ("needs", "then"))
            step = env.step(state, plan[0])
            state, done = step.state, step.done
    assert set(reasons) == {"needs", "then"} or not options


@pytest.mark.parametrize(
    "thought, found",
    [
        ("r1c1 row . 4 1 3 column . 3 . 4 box . 4 3 1 leaves 2", (4, 4)),
        ("R1C1: row . 4 1 3, column . 3 . 3", (1, 2)),
        ("r1c1 row 4 1 3", (0, 1)),
        ("r1c2 is 4, r2c2 is 4. r1c1 is 2", (1, 3)),
        ("r1c2 leaves 4", (0, 1)),  # the cell is not empty
        ("r3c2 leaves 3 row needs 3", (1, 1)),
        ("r3c2 leaves 1 3", (0, 1)),
        ("r5c1 is 1 r9c9 row 1 2", (0, 2)),
        ("r1c1=2 r1c2 4", (0, 0)),  # a plan
        ("row . 4 1 3", (0, 0)),  # names no row
        ("r1c1 row" + " 1" * 3000, (0, 1)),
        ("r1c1" + " row" * 3000, (0, 0)),
        ("r1c1 is 22", (0, 0)),
    ],
)
def test_grounded(thought, found):
    assert Sudoku().count_grounded(f"Notice.\n{GRID}\nYou have 2.", thought) == found


def test_every_fact_of_a_text_is_read_in_order():
    assert parse_claims("r1c2 is 4 r9c1 row 1 . 3 leaves 2", 4) == [
        *((1, "is", "4"), (-1, "row", "1 . 3"), (-1, "leaves", "2"))
    ]


# ---- generator ----------------------------------------------------------------------------------


def test_problems_are_pinned():
    assert problems_digest() == PROBLEMS_0_TO_49


@pytest.mark.parametrize(
    "options, count",
    [
        ({}, 150),
        ({"blanks": (11, 11), "split": "eval"}, 30),
        ({"blanks": (1, 2), "split": "imitation"}, 60),
        ({"size": 9, "blanks": (20, 48)}, 20),
    ],
)
def test_problems_are_as_asked_and_have_one_solution(options, count):
    env = Sudoku(**options)
    seen = Counter()
    for seed in range(count):
        state = env.reset(seed)
        assert env.blanks[0] <= state.cells.count(".") <= env.blanks[1]
        assert is_solved(state.solution) and state.size == env.size
        assert env.split in (None, split_of(state))
        assert env.parse(env.render(state)) == state
        if env.size == 4:
            assert solutions(state.cells) == [state.solution]
        seen[state.cells.count(".")] += 1
    assert len(seen) >= min(8, env.blanks[1] - env.blanks[0] + 1)


@pytest.mark.medium
def test_every_4x4_grid_is_drawn_and_cells_are_emptied_everywhere():
    assert len({full_grid(Draws(seed, 0, 5), 4) for seed in range(2000)}) == 288
    env = Sudoku(split=None)
    emptied = Counter()
    for seed in range(800):
        emptied.update(i for i, digit in enumerate(env.reset(seed).cells) if digit == ".")
    assert len(emptied) == 16 and min(emptied.values()) > 0.8 * emptied.total() / 16


def test_problems_are_drawn_quickly():
    for options, seconds in (({}, 0.002), ({"size": 9, "blanks": (30, 45)}, 0.05)):
        env = Sudoku(**options)
        env.reset(0)
        start = time.process_time()
        for seed in range(30):
            env.reset(seed)
        assert (time.process_time() - start) / 30 < seconds


@pytest.mark.medium
def test_reset_is_pure_and_problems_are_enough():
    env = Sudoku(split="eval")
    states = [env.reset(seed) for seed in range(1400)]
    assert Sudoku(split="eval").reset(7) == states[7]
    assert len({env.identity(state) for state in states}) >= 1024


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(sudoku_env, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(sudoku_env.problems, "draw_problem", lambda draws, **bounds: None)
    with pytest.raises(ValueError, match=r"3 attempts for seed=4, size=4, blanks=\(4, 8\)"):
        Sudoku().reset(4)


# ---- symmetry and splits ------------------------------------------------------------------------


@pytest.mark.parametrize("size, blanks", [(4, (4, 8)), (9, (30, 45))])
def test_symmetric_problems_are_in_one_split(size, blanks):
    env, rng = Sudoku(size=size, blanks=blanks, split=None), random.Random(0)
    invariants = set()
    for seed in range(25):
        state = env.reset(seed)
        images = [symmetric(state.cells, rng) for _ in range(12)]
        assert {invariant(image) for image in images} == {invariant(state.cells)}
        assert len(set(images)) > 6
        invariants.add(invariant(state.cells))
    assert len(invariants) > 20  # the invariant differs between problems


@pytest.mark.parametrize("size, blanks", [(4, (4, 8)), (9, (30, 45))])
def test_turned_mirrored_and_renamed_problems_are_one(size, blanks):
    env, rng = Sudoku(size=size, blanks=blanks, split=None), random.Random(0)
    for seed in range(25):
        state = env.reset(seed)
        square = np.array(list(state.cells)).reshape(size, size)
        images = set()
        for turned in (np.rot90(grid, k) for grid in (square, square.T) for k in range(4)):
            names = "".join(rng.sample(DIGITS[:size], size))
            text = "".join(turned.ravel()).translate(str.maketrans(DIGITS[:size], names))
            images.add(identity(text))
        assert images == {env.identity(state)}
    swapped = parse(GRID)
    swapped = swapped[4:8] + swapped[:4] + swapped[8:]  # swaps two rows of one band
    assert identity(swapped) != identity(parse(GRID))


@pytest.mark.medium
def test_splits_share_no_problem_and_have_their_shares():
    found, classes = {}, {}
    for split in SPLITS:
        env = Sudoku(split=split, blanks=(2, 4))  # few enough problems that many repeat
        states = [env.reset(seed) for seed in range(500)]
        found[split] = {env.identity(state) for state in states}
        classes[split] = {invariant(state.cells) for state in states}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b] and not classes[a] & classes[b]
    for options in ({}, {"size": 9, "blanks": (30, 45)}):
        env = Sudoku(**options, split=None)
        drawn = [split_of(env.reset(seed)) for seed in range(700)]
        shares = {split: drawn.count(split) / 700 for split in SPLITS}
        assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.06)
