"""The cube: turns by hand and as a group, distances, problems, the solver, the splits."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from scipy.stats import chisquare

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.rubik import Rubik, cube, distances, split_of
from ragen_jax.envs.rubik import env as rubik_env
from ragen_jax.envs.rubik.cube import SOLVED, State
from ragen_jax.envs.types import (
    Environment,
    GroundedEnvironment,
    ReversibleEnvironment,
    SolvableEnvironment,
)

pytestmark = pytest.mark.fast


# From a real cube: the solved cube after one turn.
TURNED = {
    "U": "up: W W / W W\nright: B B / R R\nfront: R R / G G\n"
    "down: Y Y / Y Y\nleft: G G / O O\nback: O O / B B",
    "R": "up: W G / W G\nright: R R / R R\nfront: G Y / G Y\n"
    "down: Y B / Y B\nleft: O O / O O\nback: W B / W B",
    "F": "up: W W / O O\nright: W R / W R\nfront: G G / G G\n"
    "down: R R / Y Y\nleft: O Y / O Y\nback: B B / B B",
}

COUNTS = (1, 9, 54, 321, 1847, 9992)  # cubes at distance 0 to 5

# sha256 of the observations of seeds 0..49 with default options. A different digest means that
# every problem has changed, and with it warm starts, evaluation sets and resumed runs.
CUBES_0_TO_49 = "2fd060b10d5bae85abd8080eb7a2f00b86a24d4dfb27557500d7b7fd622716cb"


def cubes_digest() -> str:
    env = Rubik()
    texts = [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def play(state, actions):
    """The state after a sequence of actions, separated by spaces."""
    for action in actions.split():
        state = cube.turn(state, action)
    return state


def cycles(face: str) -> dict[int, int]:
    """Where a turn moves the sticker of each place: five cycles of four, written by hand.

    Places are numbered as the lines of `render` list them: up 0-3, right 4-7, front 8-11, down
    12-15, left 16-19, back 20-23.
    """
    written = {
        "U": ((0, 1, 3, 2), (8, 16, 20, 4), (9, 17, 21, 5)),
        "R": ((4, 5, 7, 6), (9, 1, 22, 13), (11, 3, 20, 15)),
        "F": ((8, 9, 11, 10), (2, 4, 13, 19), (3, 6, 12, 17)),
    }[face]
    return {a: b for cycle in written for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True)}


def by_hand(stickers: str, action: str) -> str:
    """`stickers` after an action, by `cycles`."""
    times = {"": 1, "2": 2, "'": 3}[action[1:]]
    to = cycles(action[0])
    for _ in range(times):
        turned = list(stickers)
        for a, b in to.items():
            turned[b] = stickers[a]
        stickers = "".join(turned)
    return stickers


@pytest.fixture(scope="module")
def depths() -> dict[str, int]:
    """Stickers -> distance, for all cubes within five turns, by an independent search."""
    found = {SOLVED: 0}
    layer = [SOLVED]
    for depth in range(1, 6):
        after = {by_hand(stickers, action) for stickers in layer for action in Rubik.actions}
        layer = sorted(after - set(found))
        found |= dict.fromkeys(layer, depth)
    return found


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("rubik", moves=(2, 3), split=None)
    for protocol in (Environment, SolvableEnvironment, ReversibleEnvironment, GroundedEnvironment):
        assert isinstance(env, protocol)
    assert env.actions == ("U", "U'", "U2", "R", "R'", "R2", "F", "F'", "F2")
    assert ENVS["rubik"] is Rubik
    assert len({action.lower() for action in env.actions}) == 9
    with pytest.raises(ValueError, match=r"'depth'.*accepted: moves"):
        make_env("rubik", depth=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"moves": 4}, r"moves must be two whole numbers \(fewest, most\), got 4"),
        ({"moves": "14"}, "moves must be two whole numbers .*got '14'"),
        ({"moves": (1, 2, 3)}, "moves must be two whole numbers"),
        ({"moves": (0, 2)}, "moves must be .*at least 1, got 0"),
        ({"moves": (3, 2)}, "moves must be .*at least 3, got 2"),
        ({"moves": (1, 12)}, "moves must be .*at most 11, got 12"),
        ({"moves": (1, 2.0)}, "moves must be a whole number.*got 2.0"),
        ({"moves": (True, 2)}, "moves must be a whole number.*got True"),
        ({"moves": (1, float("nan"))}, "moves must be a whole number.*got nan"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Rubik(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Rubik().reset(seed)
    Rubik().reset(np.int64(2**63 - 1))


@pytest.mark.parametrize("action", ["u", "R3", "", "L", " U", "U || R", "U\u2019", "\ud800"])
def test_unknown_actions_are_refused(action):
    with pytest.raises(ValueError, match="unknown action.*accepted: U, U', U2, R"):
        Rubik().step(State(SOLVED), action, None)


def test_state_is_frozen_and_hashable():
    state = Rubik().reset(0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.stickers = SOLVED
    assert len({state, Rubik().reset(0), cube.turn(state, "U")}) == 2


# ---- text ---------------------------------------------------------------------------------------


def test_what_is_shown():
    env = Rubik()
    assert env.render(State(SOLVED)) == (
        "up: W W / W W\nright: R R / R R\nfront: G G / G G\n"
        "down: Y Y / Y Y\nleft: O O / O O\nback: B B / B B"
    )
    state = cube.turn(State(SOLVED), "R")
    assert env.explain(state, ["R'"]) == "up W G W G right R R R R front G Y G Y plan R'"
    for word in (*env.actions, *cube.FACES, "W white", "R red", "G green", "Y yellow", "B blue"):
        assert word in env.instructions
    assert "<" not in env.instructions and "{" not in env.instructions


# ---- turns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", TURNED)
def test_turns_of_the_solved_cube_by_hand(action):
    assert cube.net_text(cube.turn(State(SOLVED), action)) == TURNED[action]


def test_every_turn_moves_every_sticker_where_a_hand_does():
    marked = "".join(map(chr, range(97, 121)))  # 24 letters, all different
    for action in Rubik.actions:
        assert cube.turn(State(marked), action).stickers == by_hand(marked, action)


def test_the_turns_are_those_of_the_group():
    start = Rubik(moves=(6, 6)).reset(5)
    for face in "URF":
        once, twice = cube.turn(start, face), cube.turn(start, f"{face}2")
        assert len({start, once, twice, cube.turn(start, f"{face}'")}) == 4
        assert play(start, f"{face} {face}") == twice
        assert play(start, f"{face} {face} {face}") == cube.turn(start, f"{face}'")
        assert play(start, f"{face} " * 4) == start
    for a, b in itertools.permutations("URF", 2):
        period = [n for n in range(1, 7) if play(start, f"{a} {b} {a}' {b}' " * n) == start]
        assert period == [6]
        assert play(start, f"{a} {b} ") != play(start, f"{b} {a}")


def test_opposites_undo():
    env = Rubik()
    state = env.reset(3)
    for action, back in env.opposites.items():
        assert cube.turn(cube.turn(state, action), back) == state != cube.turn(state, action)


def test_hand_played_episode_with_exact_rewards():
    env = Rubik()
    state, steps = play(State(SOLVED), "R U F2"), []
    for action in ("F2", "U", "U2", "R'"):
        steps.append(env.step(state, action, np.random.default_rng(0)))
        state = steps[-1].state
    assert [step.reward for step in steps] == pytest.approx([-0.01, -0.01, -0.01, 0.99])
    assert [step.done for step in steps] == [False, False, False, True]
    assert [step.info for step in steps] == [{"success": step.done} for step in steps]
    assert state.is_solved and env.solve(state) == ()
    assert type(steps[0].reward) is type(steps[-1].reward) is float


# ---- distances and the solver -------------------------------------------------------------------


@pytest.mark.medium
def test_distances_are_those_of_a_search_of_its_own(depths):
    assert tuple(np.bincount(list(depths.values()))) == COUNTS
    table = distances.distances(5)
    assert np.bincount(table)[:6].tolist() == list(COUNTS)
    for stickers, depth in depths.items():
        assert table[distances.cube_number(State(stickers))] == depth
    np.testing.assert_array_equal(table[table <= 4], distances.distances(4)[table <= 4])


@pytest.mark.medium
def test_plans_are_as_short_as_can_be_and_solve(depths):
    env = Rubik()
    for stickers, depth in list(depths.items())[::7]:
        plan = env.solve(State(stickers))
        assert len(plan) == depth
        assert play(State(stickers), " ".join(plan)).is_solved


@pytest.mark.medium
def test_cubes_beyond_the_table_are_solved_too():
    env = Rubik(moves=(1, 2))
    rng = np.random.Generator(np.random.Philox(3))
    lengths = []
    for number in rng.integers(distances._ARRANGEMENTS * distances._TWISTS, size=100).tolist():
        state = distances.numbered_cube(number)
        assert distances.cube_number(state) == number
        plan = env.solve(state)
        assert play(state, " ".join(plan)).is_solved
        # One turn changes the distance by at most one.
        assert all(abs(len(env.solve(cube.turn(state, a))) - len(plan)) <= 1 for a in env.actions)
        lengths.append(len(plan))
    assert 7 < np.mean(lengths) < 10 and max(lengths) <= 11


@pytest.mark.medium
def test_all_cubes_and_the_farthest():
    counts = np.bincount(distances.distances(11))
    assert counts.sum() == 3_674_160 and len(counts) == 12 and counts[11] == 2644


@pytest.mark.parametrize(
    "stickers, message",
    [
        ("X" + SOLVED[1:], "corners are not those of a cube"),
        (SOLVED.translate(str.maketrans("WY", "YW")), "corners are not those of a cube"),
        (SOLVED.translate(str.maketrans("WYGB", "YWBG")), "down, back and left is not Y, B and O"),
        ("WWWR" + "GRRR" + "GWGG" + SOLVED[12:], "a single corner is twisted"),
    ],
)
def test_what_is_no_cube_is_refused(stickers, message):
    with pytest.raises(ValueError, match=message):
        Rubik().solve(State(stickers))


# ---- problems -----------------------------------------------------------------------------------


def test_problems_are_pinned():
    assert cubes_digest() == CUBES_0_TO_49


@pytest.mark.parametrize("moves", [(1, 6), (3, 4), (5, 5), (11, 11)])
@pytest.mark.parametrize("split", ["eval", None])
def test_problems_are_as_far_as_asked(moves, split):
    env = Rubik(moves=moves, split=split)
    for seed in range(40):
        state = env.reset(seed)
        assert env.split in (None, split_of(state))
        plan = env.solve(state)
        assert moves[0] <= len(plan) <= moves[1]
        assert play(state, " ".join(plan)).is_solved


@pytest.mark.medium
def test_every_distance_and_every_cube_of_one_is_as_frequent():
    env = Rubik(moves=(1, 3), split=None)
    drawn = [env.reset(seed) for seed in range(5400)]
    counts = np.bincount([len(env.solve(state)) for state in drawn], minlength=4)
    assert chisquare(counts[1:]).pvalue > 1e-3
    near = np.unique([state.stickers for state in drawn if len(env.solve(state)) == 2])
    _, times = np.unique(
        [state.stickers for state in drawn if state.stickers in set(near)], return_counts=True
    )
    assert len(near) == 54 and chisquare(times).pvalue > 1e-3


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(rubik_env, "MAX_ATTEMPTS", 50)
    # Neither of the two cubes that one turn solves is in this split.
    with pytest.raises(ValueError, match=r"50 attempts for seed=4, moves=\(1, 1\), split='eval'"):
        Rubik(moves=(1, 1), split="eval").reset(4)


# ---- splits -------------------------------------------------------------------------------------


def test_symmetric_cubes_are_one_problem():
    env = Rubik(split=None)
    for seed in range(30):
        state = env.reset(seed)
        images = cube.images(state)
        assert {env.identity(image) for image in images} == {env.identity(state)}
        assert {split_of(image) for image in images} == {split_of(state)}
        assert len({len(env.solve(image)) for image in images}) == 1
    # Turned about the corner that stays: right becomes up, up becomes front, front becomes right.
    start = play(State(SOLVED), "U R' F2 R")
    for turned in ("R F' U2 F", "F U' R2 U"):
        assert env.identity(play(State(SOLVED), turned)) == env.identity(start)
    # In a mirror that keeps the front in place.
    assert env.identity(play(State(SOLVED), "R' U F2 U'")) == env.identity(start)
    assert env.identity(play(State(SOLVED), "U R F2 R")) != env.identity(start)


@pytest.mark.medium
def test_the_problems_are_as_many_as_the_docstring_says():
    env = Rubik(split=None)
    whole, held = [], []
    for depth in range(1, 7):
        states = map(distances.numbered_cube, distances.layer(depth, 6).tolist())
        different = {env.identity(state): state for state in states}
        whole.append(len(different))
        held.append(sum(split_of(state) == "eval" for state in different.values()))
    assert whole == [2, 9, 54, 309, 1670, 8361]
    assert held == [0, 2, 8, 55, 352, 1667]
    said = " ".join(Rubik.__doc__.split())
    assert "2, 9, 54, 309, 1670 and 8361 different" in said
    assert "0, 2, 8, 55, 352 and 1667" in said
    assert f"{sum(held)} from 1 to 6 turns" in said and f"{sum(held[:5])} up to 5" in said


@pytest.mark.medium
def test_splits_share_no_cube_and_have_their_shares():
    found = {}
    for split in SPLITS:
        env = Rubik(split=split)
        states = [env.reset(seed) for seed in range(300)]
        assert {split_of(state) for state in states} == {split}
        found[split] = {env.identity(state) for state in states}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    env = Rubik(moves=(6, 6), split=None)
    drawn = [split_of(env.reset(seed)) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


@pytest.mark.medium
def test_an_evaluation_set_of_1024_is_found():
    env = Rubik(split="eval")
    assert len({env.identity(env.reset(seed)) for seed in range(5000)}) >= 1024
    assert Rubik().reset(7) == Rubik().reset(7)


# ---- grounded statements ------------------------------------------------------------------------


def test_what_the_expert_says_is_so():
    env = Rubik(moves=(1, 11), split=None)
    for seed in range(200):
        state = env.reset(seed)
        message = f"Your last reply.\n{env.render(state)}\nYou have 2 action(s) left."
        assert env.count_grounded(message, env.explain(state, env.solve(state)[:4])) == (12, 12)


@pytest.mark.parametrize(
    "thought, found",
    [
        ("up W W W W", (4, 4)),
        ("The UP face is W W / W R; left: O O O O", (7, 8)),
        ("back BBBB and down Y,Y,Y,Y", (8, 8)),
        ("front W W W W", (0, 4)),
        ("turn the right face: R U R'", (0, 0)),  # a plan
        ("right R R F R", (0, 0)),
        ("right R R R R'", (0, 0)),
        ("up W W W", (0, 0)),  # fewer than four colours do not say which places
        ("upper W W W W", (0, 0)),
        ("the top is W W W W", (0, 0)),
        ("up w w w w", (0, 0)),  # lower case letters are no colours
    ],
)
def test_grounded_by_hand(thought, found):
    env = Rubik()
    assert env.count_grounded(env.render(State(SOLVED)), thought) == found


@pytest.mark.medium
@pytest.mark.parametrize(
    "thought",
    ["", "up " * 350_000, "up W " * 200_000, "W" * 10**6, "up" + " " * 10**6, "\ud800 up \udfff"]
    + ["\u017fup W\u0301 W W W", "\x00", "up W W W \u212a", "白 W W W W"],
    ids=range(10),
)
def test_hostile_thoughts_are_survived(thought):
    env = Rubik()
    assert env.count_grounded(env.render(State(SOLVED)), thought) == (0, 0)
