"""FrozenLake: Gymnasium's table, slips, symbols, the generator, the solver, the splits."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.frozen_lake import FrozenLake, split_of
from ragen_jax.envs.frozen_lake import env as frozen_lake_env
from ragen_jax.envs.frozen_lake.lake import State
from ragen_jax.envs.problems import SPLITS, canonical_grid
from ragen_jax.envs.types import Environment, SolvableEnvironment, Step

pytestmark = pytest.mark.fast


LAKE = """\
P___
_O_O
___O
O__G"""

NUMBERS = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}  # Gymnasium's action numbers

# sha256 of the grid texts of seeds 0..49 with default options. A different digest means that every
# map has changed, and with it warm starts, evaluation sets and resumed runs.
MAPS_0_TO_49 = "c0333450cd5ba10a43d3a461682c4c596a2154e63c5488350a3f99c1ab67ae52"


def maps_digest() -> str:
    env = FrozenLake()
    texts = [env.grid_text(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


class Uniform:
    """A generator that always draws a given number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


def play(env, state, actions, rng=None) -> list[Step]:
    """The steps of a sequence of actions."""
    steps = []
    for action in actions:
        steps.append(env.step(state, action, rng))
        state = steps[-1].state
    return steps


def gymnasium_table(text: str, slip: float) -> dict:
    """Gymnasium's table of the lake in a grid text, with the player at the start."""
    rows = text.translate(str.maketrans("P_OGX√", "SFHGHG")).split("\n")
    return FrozenLakeEnv(desc=rows, is_slippery=slip > 0, success_rate=1 - slip).P


def images(text: str) -> list[str]:
    """The eight rotations and reflections of a grid text, by NumPy."""
    grid = np.array([list(row) for row in text.split("\n")])
    turned = [np.rot90(g, k) for g in (grid, grid.T) for k in range(4)]
    return ["\n".join("".join(row) for row in g) for g in turned]


def values(table: dict, sweeps: int, discount: float) -> np.ndarray:
    """Value iteration on a Gymnasium table: the value of every cell."""
    value = np.zeros(len(table))
    for _ in range(sweeps):
        value = np.array(
            [
                max(
                    sum(p * (r + discount * (not done) * value[s]) for p, s, r, done in table[c][a])
                    for a in range(4)
                )
                for c in range(len(table))
            ]
        )
    return value


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("frozen_lake", size=(5, 6), slip=0.1, split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert env.actions == ("Left", "Down", "Right", "Up")
    assert ENVS["frozen_lake"] is FrozenLake
    assert env.grid_text(env.reset(1)).count("\n") == 4
    assert FrozenLake().slip == 0.02
    with pytest.raises(ValueError, match=r"'holes'.*accepted: size, frozen, slip"):
        make_env("frozen_lake", holes=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 4}, "size must be two whole numbers.*got 4"),
        ({"size": (4, 1)}, "size must be .*at least 2, got 1"),
        ({"size": (4, 4.0)}, "size must be a whole number.*got 4.0"),
        ({"frozen": 1.5}, "frozen must be a number from 0 to 1, got 1.5"),
        ({"frozen": "0.8"}, "frozen must be a number from 0 to 1, got '0.8'"),
        ({"slip": -0.1}, "slip must be a number from 0 to 1, got -0.1"),
        ({"slip": float("nan")}, "slip must be a number from 0 to 1, got nan"),
        ({"slip": True}, "slip must be a number from 0 to 1, got True"),
        ({"size": (4, 21)}, "size must be .*at most 20, got 21"),
        ({"frozen": float("inf")}, "frozen must be a number from 0 to 1, got inf"),
        ({"slip": 10**400}, "slip must be a number from 0 to 1, got 1000"),
        ({"min_solution": 9}, "min_solution must be .*at most 8, got 9"),
        ({"min_solution": 0}, "min_solution must be .*at least 1, got 0"),
        ({"min_solution": 5, "max_solution": 4}, "max_solution must be .*at least 5, got 4"),
        (
            {"observation": "pixels"},
            "observation must be one of 'grid', 'coordinate', 'both', 'image'",
        ),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            FrozenLake().reset(seed)
    FrozenLake().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    env = FrozenLake()
    state = env.parse(LAKE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.player = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.lake.rows = ()
    assert len({state, env.parse(LAKE), env.step(state, "Right", None).state}) == 2
    assert env.grid_text(state) == LAKE


# ---- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [LAKE, "PG", "_√", "XG_", "_O\n_O\nX_\nGO"])
def test_parse_and_grid_text_are_inverse(text):
    env = FrozenLake()
    assert env.grid_text(env.parse(text)) == text


@pytest.mark.medium
@given(st.text("P_OGX√\n", max_size=20))
@settings(max_examples=300, deadline=None)
def test_parse_is_exact_or_refuses(text):
    env = FrozenLake()
    try:
        state = env.parse(text)
    except ValueError:
        return
    assert env.grid_text(state) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("P.G", "unknown symbol '.' at row 0, column 1"),
        ("P_G\n__", "row 1 has 2 symbols where row 0 has 3"),
        ("P_G\n", "row 1 has 0 symbols where row 0 has 3"),
        ("", "row 0 has 0 symbols"),
        ("__G", "exactly one player .* found 0"),
        ("P_G\nX__", r"exactly one player .*found 2, at \(0, 0\) and \(1, 0\)"),
        ("P__", "exactly one goal .* found 0"),
        ("PG√", "exactly one player .*found 2"),
        ("PGG", r"exactly one goal .*found 2, at \(0, 1\) and \(0, 2\)"),
        ("XG", "at least one frozen cell"),
    ],
)
def test_parse_says_what_is_wrong_and_where(text, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake().parse(text)


def test_the_released_symbols():
    """Every symbol that occurs in play: frozen, hole, goal, the player on each of the three."""
    env = FrozenLake()
    state = env.parse("P_O\n__G")
    in_hole = play(env, state, ["Right", "Right"])[-1].state
    on_goal = play(env, state, ["Down", "Right", "Right"])[-1].state
    assert env.grid_text(in_hole) == "__X\n__G"
    assert env.grid_text(on_goal) == "__O\n__√"


def test_observations():
    state = FrozenLake().parse(LAKE)
    words = (
        "Lake: 4 rows, 4 columns\nPlayer: (0, 0)\nGoal: (3, 3)\nHoles: (1, 1), (1, 3), (2, 3), "
        "(3, 0)"
    )
    assert FrozenLake(observation="grid").render(state) == LAKE
    assert FrozenLake(observation="coordinate").render(state) == words
    assert FrozenLake(observation="both").render(state) == LAKE + "\n" + words
    env = FrozenLake(observation="coordinate")
    assert "Player: (0, 1), in a hole\nGoal: (0, 2)\nHoles: (0, 1)" in env.render(env.parse("_XG"))
    assert "Player: (0, 1), on the goal\nGoal: (0, 1)\nHoles: none" in env.render(env.parse("_√"))


@pytest.mark.parametrize("observation", ["grid", "coordinate", "both"])
def test_instructions_explain_what_is_shown(observation):
    env = FrozenLake(observation=observation, slip=0.25)
    grid, coordinate = observation != "coordinate", observation != "grid"
    for symbol in "P you, _ frozen, O hole, G goal, X you in a hole, √ you on the goal".split(","):
        assert (symbol.strip() in env.instructions) == grid
    assert ("(row, column)" in env.instructions) == coordinate
    assert all(action in env.instructions for action in env.actions)
    assert "<" not in env.instructions and "{" not in env.instructions
    assert "probability of 0.25" in env.instructions
    assert "slippery" not in FrozenLake(slip=0).instructions


# ---- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slip", [0.0, 0.02, 2 / 3, 1.0])
@pytest.mark.parametrize("size", [(4, 4), (5, 7), (8, 8)])
def test_outcomes_are_gymnasiums_table(size, slip):
    env = FrozenLake(size=size, slip=slip, split=None)
    for seed in range(4):
        start = env.reset(seed)
        table = gymnasium_table(env.grid_text(start), slip)
        for cell in range(size[0] * size[1]):
            for action, number in NUMBERS.items():
                state = State(start.lake, cell)
                assert list(env.outcomes(state, action)) == table[cell][number]


@pytest.mark.parametrize("slip", [0.0, 0.02, 2 / 3, 1.0])
def test_step_takes_each_outcome_with_its_share_of_the_unit_interval(slip):
    env = FrozenLake(slip=slip, split=None)
    for seed in range(3):
        start = env.reset(seed)
        table = gymnasium_table(env.grid_text(start), slip)
        for cell, action in itertools.product(range(16), env.actions):
            below = 0.0
            listed = table[cell][NUMBERS[action]]
            for index, (share, after, reward, done) in enumerate(listed):
                inside = [below, below + share / 2, below + share * (1 - 1e-9)] if share else []
                for uniform in inside:
                    step = env.step(State(start.lake, cell), action, Uniform(uniform))
                    got = (step.state.lake, step.state.player, step.reward, step.done)
                    assert got == (start.lake, after, reward, done)
                    assert step.info == {
                        "success": env.grid_text(step.state).count("√") == 1,
                        "moved": after != cell,
                        "slipped": len(listed) == 3 and index != 1,
                    }
                below += share
            assert below == pytest.approx(1, abs=1e-12)


@pytest.mark.medium
def test_slips_by_chi_square():
    """100,000 steps: intended moves and slips to each side; the given generator draws the slips."""
    env = FrozenLake(slip=0.3)
    state = env.parse("___\n_P_\n__G")
    rng = np.random.Generator(np.random.Philox(7))
    cells = [env.step(state, "Up", rng).state.player for _ in range(100_000)]
    counts = np.bincount(cells, minlength=9)
    assert counts.sum() == counts[[1, 3, 5]].sum()
    assert chisquare(counts[[1, 3, 5]], [70_000, 15_000, 15_000]).pvalue > 1e-3
    # Successive slips are independent: test pairs of outcomes.
    codes = np.searchsorted([1, 3, 5], cells).reshape(-1, 2)
    pairs = np.bincount(codes[:, 0] * 3 + codes[:, 1], minlength=9)
    share = np.array([0.7, 0.15, 0.15])
    assert chisquare(pairs, 50_000 * np.outer(share, share).ravel()).pvalue > 1e-3
    again = np.random.Generator(np.random.Philox(7))
    assert [env.step(state, "Up", again).state.player for _ in range(1000)] == cells[:1000]


def test_members_of_a_group_share_the_map_and_slip_apart():
    env = FrozenLake(slip=0.5, size=(8, 8))
    states = [env.reset(3), env.reset(3)]
    assert states[0] == states[1]
    rngs = [np.random.Generator(np.random.Philox(key=[3, member])) for member in range(2)]
    ways = [play(env, s, ["Up", "Left"] * 10, r) for s, r in zip(states, rngs, strict=True)]
    assert ways[0] != ways[1]


def test_hand_made_lake_with_exact_rewards():
    env = FrozenLake(slip=0)
    plan = ["Left", "Down", "Down", "Right", "Right", "Down", "Right"]
    steps = play(env, env.parse(LAKE), plan, np.random.default_rng(0))
    assert [s.reward for s in steps] == [0.0] * 6 + [1.0]
    assert [s.done for s in steps] == [False] * 6 + [True]
    assert [s.info["moved"] for s in steps] == [False] + [True] * 6
    assert steps[-1].info == {"success": True, "moved": True, "slipped": False}
    fallen = play(env, env.parse(LAKE), ["Right", "Down"])[-1]
    assert (fallen.reward, fallen.done, fallen.info["success"]) == (0.0, True, False)


def test_an_episode_that_is_over_pays_nothing_more():
    env = FrozenLake()
    for text, success in (("_√_", True), ("_XG", False)):
        for action in env.actions:
            step = env.step(env.parse(text), action, np.random.default_rng(0))
            assert (step.reward, step.done, step.info["success"]) == (0.0, True, success)
            assert env.grid_text(step.state) == text


@pytest.mark.parametrize("action", ["up", "UP", "", "Jump", " Up", "Up || Down"])
def test_unknown_actions_are_refused(action):
    env = FrozenLake()
    with pytest.raises(ValueError, match="unknown action.*accepted: Left, Down, Right, Up"):
        env.step(env.parse(LAKE), action, None)


# ---- generator ----------------------------------------------------------------------------------


def test_maps_are_pinned():
    assert maps_digest() == MAPS_0_TO_49


@pytest.mark.medium
@pytest.mark.parametrize(
    "options, count",
    [
        ({}, 200),
        ({"min_solution": 3, "max_solution": 5, "split": "eval"}, 50),
        ({"size": (8, 8), "split": "imitation"}, 20),
        ({"size": (3, 7), "frozen": 0.5, "split": None}, 50),
        ({"size": (2, 2), "frozen": 1, "split": None}, 20),
    ],
)
def test_maps_are_as_asked_and_solvable(options, count):
    env = FrozenLake(**options)
    least, most = options.get("min_solution", 1), options.get("max_solution", 10**9)
    for seed in range(count):
        state = env.reset(seed)
        text = env.grid_text(state)
        rows = text.split("\n")
        assert (len(rows), len(rows[0])) == env.size
        assert (text.count("P"), text.count("G")) == (1, 1)
        assert env.split in (None, split_of(state))
        plan = env.solve(state)
        assert least <= len(plan) <= most
        steps = play(env, state, plan)
        assert [s.done for s in steps] == [False] * (len(plan) - 1) + [True]
        assert steps[-1].info["success"] and steps[-1].reward == 1


def test_slip_has_no_part_in_the_map():
    slips = (0.0, 0.02, 1.0)
    for seed in range(20):
        assert len({FrozenLake(slip=slip).reset(seed) for slip in slips}) == 1


def test_density_and_places_are_as_asked(monkeypatch):
    """Before the solvability check: uniform start and goal, the other cells by `frozen`."""
    monkeypatch.setattr(FrozenLake, "solve", lambda self, state: ("Up",))
    env = FrozenLake(frozen=0.6, split=None)
    states = [env.reset(seed) for seed in range(3000)]
    letters = np.array([list(state.lake.letters) for state in states])
    assert (letters == "H").sum() / (3000 * 14) == pytest.approx(0.4, abs=0.01)
    goals = np.argmax(letters == "G", axis=1)
    starts = np.array([state.player for state in states])
    assert chisquare(np.bincount(starts, minlength=16)).pvalue > 1e-3
    apart = np.bincount((goals - starts) % 16, minlength=16)
    assert apart[0] == 0 and chisquare(apart[1:]).pvalue > 1e-3


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(frozen_lake_env, "MAX_ATTEMPTS", 50)
    env = FrozenLake(size=(2, 3), min_solution=5, split=None)
    with pytest.raises(ValueError, match=r"50 attempts for seed=4, size=\(2, 3\).*min_solution=5"):
        env.reset(4)


# ---- solver -------------------------------------------------------------------------------------


def test_plans_are_as_short_as_value_iteration_says():
    """Without slips the best discounted value of a cell is discount ** (moves - 1)."""
    env = FrozenLake(size=(5, 5), frozen=0.7, slip=0, split=None)
    unsolvable = 0
    for seed in range(10):
        start = env.reset(seed)
        value = values(gymnasium_table(env.grid_text(start), 0), sweeps=25, discount=0.5)
        for cell in range(25):
            state = State(start.lake, cell)
            plan = env.solve(state)
            if start.lake.letters[cell] == "G":
                assert plan == ()
            elif value[cell] == 0:
                assert plan is None
                unsolvable += start.lake.letters[cell] == "F"
            else:
                assert len(plan) == 1 - np.log2(value[cell])
    assert unsolvable > 0


def test_plans_are_the_safest_of_the_shortest():
    """Compared with all shortest plans: fewest holes that a slip to either side would end in."""
    env = FrozenLake(slip=0.1, split=None)

    def risks(state, plan):
        risk = 0
        for action in plan:
            ends = env.outcomes(state, action)
            risk += sum(done and reward == 0 for _, _, reward, done in ends)
            state = env.step(state, action, None).state
        return risk if state.is_on_goal else None

    saved = 0
    for seed in range(60):
        state = env.reset(seed)
        plan = env.solve(state)
        if len(plan) > 5:
            continue
        found = [risks(state, p) for p in itertools.product(env.actions, repeat=len(plan))]
        found = [risk for risk in found if risk is not None]
        assert risks(state, plan) == min(found)
        saved += min(found) < max(found)
    assert saved > 5


def test_plans_of_small_lakes_by_hand():
    env = FrozenLake()
    assert env.solve(env.parse("P_\n_G")) == ("Down", "Right")
    # By way of (1, 0) a slip could end in the hole below it; by way of (0, 1) no slip could.
    assert env.solve(env.parse("P__\n___\nO_G")) == ("Right", "Down", "Down", "Right")
    assert env.solve(env.parse("P__\n___\n__G")) == ("Down", "Down", "Right", "Right")
    assert env.solve(env.parse("_√")) == ()
    assert env.solve(env.parse("_XG")) is None
    assert env.solve(env.parse("POG")) is None
    assert env.solve(env.parse("POG\n___")) == ("Down", "Right", "Right", "Up")


def test_explain_names_every_position_and_the_plan():
    env = FrozenLake()
    state = env.parse(LAKE)
    expected = "player 00 hole 11 13 23 30 goal 33 plan Down Right"
    assert env.explain(state, ["Down", "Right"]) == expected


# ---- splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(4, 4), (3, 6)])
def test_symmetric_maps_are_one_map(size):
    env = FrozenLake(size=size, split=None)
    for seed in range(30):
        state = env.reset(seed)
        turned = [env.parse(image) for image in images(env.grid_text(state))]
        assert {env.identity(image) for image in turned} == {env.identity(state)}
        assert {split_of(image) for image in turned} == {split_of(state)}


@pytest.mark.medium
def test_splits_share_no_map_and_have_their_shares():
    found = {}
    for split in SPLITS:
        env = FrozenLake(split=split)
        states = [env.reset(seed) for seed in range(300)]
        assert {split_of(state) for state in states} == {split}
        found[split] = {canonical_grid("\n".join(state.lake.rows)) for state in states}
    assert SPLITS == ("imitation", "train", "eval")
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    env = FrozenLake(split=None, size=(6, 6))
    drawn = [split_of(env.reset(seed)) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


def test_maps_vary_and_reset_is_pure():
    env = FrozenLake()
    states = [env.reset(seed) for seed in range(300)]
    assert FrozenLake().reset(7) == states[7]
    assert len({env.identity(state) for state in states}) > 270


# ---- soak ---------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("episodes", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_play_stays_within_the_rules(episodes):
    """Random play on all kinds of lakes; text, state and rewards must agree after each action."""
    rng = np.random.Generator(np.random.Philox(1))
    wins = falls = 0
    kinds = [
        FrozenLake(size=size, frozen=frozen, slip=slip, split=None)
        for size in ((4, 4), (3, 5))
        for frozen in (0.6, 0.9)
        for slip in (0.02, 0.5)
    ]
    for episode in range(episodes):
        env = kinds[episode % len(kinds)]
        state = env.reset(episode)
        for _ in range(20):
            before = env.grid_text(state)
            action = env.actions[rng.integers(4)]
            step = env.step(state, action, rng)
            text = env.grid_text(step.state)
            assert env.parse(text) == step.state
            assert sum(map(text.count, "PX√")) == 1
            assert step.done == ("P" not in text)
            assert step.reward == step.info["success"] == ("√" in text)
            assert step.info["moved"] == (text != before)
            state = step.state
            if step.done:
                wins, falls = wins + ("√" in text), falls + ("X" in text)
                break
    assert wins > episodes / 20 and falls > episodes / 20
