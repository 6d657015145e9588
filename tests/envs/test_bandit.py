"""Bandit: answers by hand and hostile answers, pay of arms, the expert, the generator, splits."""

import dataclasses
import hashlib
import itertools
import time
from collections import Counter
from decimal import Decimal

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from ragen_jax.configs import bandit as config_file
from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.bandit import Arm, Bandit, State, split_of
from ragen_jax.envs.bandit import env as bandit_env
from ragen_jax.envs.bandit.names import CONNOTATIONS, NAMES, WORDS
from ragen_jax.envs.bandit.reading import MAX_TEXT, find_arm, parse_claims
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import Environment, GroundedEnvironment, SolvableEnvironment
from ragen_jax.rollout.episode import start_plays

pytestmark = pytest.mark.fast


SURE, RISKY = Arm("Red Table", 10, 100), Arm("Blue Window", 100, 25)
PROBLEM = State((SURE, RISKY))

# sha256 of the observations of seeds 0..49 with default options. A different digest means that
# every problem has changed, and with it warm starts, evaluation sets and resumed runs.
PROBLEMS_0_TO_49 = "a4b3b25ef04b8b06e8009d25d9e7ba1e364df19cccecf5f4d8e362e842e84dbc"


def problems_digest() -> str:
    env = Bandit()
    texts = [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


class Uniform:
    """A generator that always draws a given number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("bandit", arms=3, split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert isinstance(env, GroundedEnvironment)
    assert env.actions == ()
    assert ENVS["bandit"] is Bandit
    with pytest.raises(ValueError, match=r"'levers'.*accepted: arms, pulls"):
        make_env("bandit", levers=3)


def test_the_llm_presets_play_the_defaults():
    options = config_file.get_config("qwen2.5-3b").env.options.to_dict()
    env, default = Bandit(**options), Bandit()
    assert all(getattr(env, name) == getattr(default, name) for name in options)
    assert (env.sure, env.chance) == ((10, 10), (25, 25))


UNDECIDED = "told must be True if a single pull has no other information"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"arms": 1}, "arms must be .*at least 2, got 1"),
        ({"arms": 11}, "arms must be .*at most 10, got 11"),
        ({"arms": 2.0}, "arms must be a whole number.*got 2.0"),
        ({"pulls": 0}, "pulls must be .*at least 1, got 0"),
        ({"pulls": 51}, "pulls must be .*at most 50, got 51"),
        ({"told": 1}, "told must be True or False, got 1"),
        (
            {"names": "funny"},
            "names must be one of 'neutral', 'fitting', 'misleading', got 'funny'",
        ),
        ({"sure": 10}, "sure must be two whole numbers .*got 10"),
        ({"sure": "12"}, "sure must be two whole numbers .*got '12'"),
        ({"sure": (-1, 5)}, "sure must be .*at least 0, got -1"),
        ({"sure": (5, 4)}, "sure must be .*at least 5, got 4"),
        ({"sure": (0.1, 0.1)}, "sure must be a whole number.*got 0.1"),
        ({"chance": (25, 101)}, "chance must be .*at most 100, got 101"),
        ({"chance": (float("nan"), 9)}, "chance must be .*got nan"),
        ({"sure": (25, 25)}, r"sure and chance must differ, got \(25, 25\) and \(25, 25\)"),
        ({"told": False}, UNDECIDED),
        ({"told": False, "names": "fitting", "sure": (5, 20)}, UNDECIDED),
        ({"told": False, "names": "misleading", "chance": (5, 20)}, UNDECIDED),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Bandit(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Bandit().reset(seed)
    Bandit().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    assert len({PROBLEM, State((SURE, RISKY)), State((RISKY, SURE))}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROBLEM.history = ((0, 10),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SURE.pay = 3


def test_observations():
    told = "Red Table: pays 0.10 with chance 1.00\nBlue Window: pays 1.00 with chance 0.25"
    untold = "Arms: Red Table, Blue Window"
    pulled = State(PROBLEM.arms, ((0, 10), (None, 0), (1, 100)))
    history = "\nPulled: Red Table 0.10, none 0.00, Blue Window 1.00"
    for env, shown in ((Bandit(pulls=4), told), (Bandit(pulls=4, told=False), untold)):
        assert env.render(PROBLEM) == shown
        assert env.render(pulled) == shown + history


@pytest.mark.parametrize(
    "options, said, unsaid",
    [
        ({}, ("once", "shown with what it pays"), ("not told", "so far", "sounds")),
        ({"pulls": 3}, ("3 times", "so far"), ("once",)),
        ({"pulls": 3, "told": False}, ("not told",), ("shown with", "sounds")),
        ({"told": False, "names": "fitting"}, ("risky is that of a risky arm",), ()),
        ({"told": False, "names": "misleading"}, ("risky is that of a sure arm",), ()),
        ({"names": "misleading"}, (), ("sounds",)),
    ],
)
def test_instructions_tell_what_is_shown(options, said, unsaid):
    text = Bandit(**options).instructions
    assert all(part in text for part in said) and not any(part in text for part in unsaid)
    assert "<" not in text and "{" not in text


# ---- answers ------------------------------------------------------------------------------------

NAMES_SHOWN = [SURE.name, RISKY.name]


@pytest.mark.parametrize(
    "answer, number",
    [
        ("Red Table", 0),
        ("blue window", 1),
        ("  RED \n table ", 0),
        ("'Red Table'.", 0),
        ("[Blue Window]", 1),
        ("“Red Table”", 0),
        ("I choose the Red Table arm.", 0),
        ("I will pull: Blue Window!", 1),
        ("Answer: arm Blue Window", 1),
        ("not Red Table", None),
        ("Red Table or Blue Window", None),
        ("Red Table, Red Table", None),
        ("Red Table||Blue Window", None),
        ("RedTable", None),
        ("Red", None),
        ("Red Tables", None),
        ("Red Window", None),
        ("Green Table", None),
        ("1", None),
        ("", None),
        ("   ", None),
        ("\x00", None),
        ("\ud800", None),
        ("Red Table\ud800", None),
        ("\u0420ed Table", None),
        ("<answer>Red Table</answer>", None),
        ("Red Table" + " " * MAX_TEXT, None),
    ],
)
def test_answers_by_hand(answer, number):
    assert find_arm(answer, NAMES_SHOWN) == number
    step = Bandit().step(PROBLEM, answer, Uniform(0.2))
    assert step.reward == {0: 0.1, 1: 1.0, None: 0.0}[number]
    best = number == 1
    assert step.info == {"success": best, "best": best, "readable": number is not None}
    assert step.done and step.state == State(PROBLEM.arms, ((number, round(100 * step.reward)),))


def test_a_pull_is_used_up_by_what_cannot_be_read():
    env = Bandit(pulls=3)
    state, steps = PROBLEM, []
    for answer in ("Blue Window", "neither", "Blue Window"):
        steps.append(env.step(state, answer, Uniform(0.9)))
        state = steps[-1].state
    assert [step.done for step in steps] == [False, False, True]
    assert [step.info["success"] for step in steps] == [False, False, True]
    assert [step.info["best"] for step in steps] == [True, False, True]
    assert state.history == ((1, 0), (None, 0), (1, 0))


@pytest.mark.parametrize(
    "last, success", [("Blue Window", True), ("Red Table", False), ("?", False)]
)
def test_an_episode_that_is_over_pays_nothing_more(last, success):
    env = Bandit()
    over = env.step(PROBLEM, last, Uniform(0.0)).state
    for answer in ("Blue Window", "Red Table", "x"):
        step = env.step(over, answer, Uniform(0.0))
        assert (step.state, step.reward, step.done) == (over, 0.0, True)
        assert step.info == {"success": success, "best": False, "readable": False}


def test_several_arms_may_be_best():
    arms = (Arm("Red Table", 25, 100), Arm("Blue Window", 100, 25), Arm("Red Window", 24, 100))
    assert [State(arms).is_best(number) for number in (0, 1, 2, None)] == [True, True, False, False]
    assert Bandit(arms=3).solve(State(arms)) == ("Red Table",)


HOSTILE = [
    *(
        "",
        " ",
        "\n" * 300,
        "\x00" * 300,
        "\ud800",
        "\udcff" * 50,
        "\u202eRed Table",
        "Red\u00a0Table",
    ),
    *("Red Table " * 100_000, "I " * 500_000, "the " * 49, "(" * 200, "'" * 199, "-" * 10**6),
    *("the arm " * 24 + "Red", "i" * 200, "I choose " * 22, "9" * 10**6, "\u0661", "||" * 99),
    *("Red " * 50, "Red\n\n\n\n\nTabl", "[" * 90 + "Red Table" + "]" * 90, "arm arm arm Red Table"),
]


@pytest.mark.medium
def test_hostile_answers_are_harmless_and_fast():
    env = Bandit(pulls=2)
    start = time.process_time()
    steps = [env.step(PROBLEM, answer, Uniform(0.0)) for answer in HOSTILE * 20]
    found = [env.count_grounded(env.render(PROBLEM), answer) for answer in HOSTILE]
    assert time.process_time() - start < 3.0
    readable = {
        answer for answer, step in zip(HOSTILE, steps, strict=False) if step.info["readable"]
    }
    assert readable == {HOSTILE[-2], HOSTILE[-1]}
    assert all(step.reward == 0 or step.info["readable"] for step in steps)
    assert found == [(0, 0)] * len(HOSTILE)


@pytest.mark.medium
@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_an_answer(text):
    step = Bandit().step(PROBLEM, text, Uniform(0.0))
    assert step.done and isinstance(step.reward, float)
    assert Bandit().count_grounded(Bandit().render(PROBLEM), text) == (0, 0)


# ---- pay ----------------------------------------------------------------------------------------


def test_arms_pay_on_their_share_of_the_unit_interval():
    env = Bandit()
    for uniform, pays in ((0.0, 1.0), (0.2499, 1.0), (0.25, 0.0), (0.9999, 0.0)):
        assert env.step(PROBLEM, "Blue Window", Uniform(uniform)).reward == pays
        assert env.step(PROBLEM, "Red Table", Uniform(uniform)).reward == 0.1
    assert env.step(PROBLEM, "Blue Window", None).reward == 1.0
    never = State((SURE, Arm("Blue Window", 100, 0)))
    assert env.step(never, "Blue Window", Uniform(0.0)).reward == 0.0


@pytest.mark.medium
def test_pay_is_as_frequent_as_told_with_the_generators_of_a_rollout():
    """Members of many groups, as rollout/play.py starts them, over successive pulls."""
    pulls, members = 8, 250
    env = Bandit(pulls=pulls, sure=(5, 95), chance=(5, 95))
    seeds = range(20)
    states = [env.reset(seed) for seed in seeds]
    plays = start_plays(seeds, states, [""] * 20, members, jax.random.key(3))
    paid = {seed: [] for seed in seeds}
    for play in plays:
        (arm,) = (arm for arm in play.state.arms if arm.pay == 100)
        for _ in range(pulls):
            step = env.step(play.state, arm.name, play.rng)
            play.state = step.state
            paid[play.seed].append(step.reward)
    for seed, state in zip(seeds, states, strict=True):
        (arm,) = (arm for arm in state.arms if arm.pay == 100)
        assert set(paid[seed]) <= {0.0, 1.0}
        wins = int(sum(paid[seed]))
        assert binomtest(wins, pulls * members, arm.chance / 100).pvalue > 1e-4
        # Successive pulls are independent: the number of pairs of wins is as expected.
        pairs = np.array(paid[seed]).reshape(-1, 2).all(1).sum()
        assert binomtest(int(pairs), pulls * members // 2, (arm.chance / 100) ** 2).pvalue > 1e-4
    again = start_plays(seeds, states, [""] * 20, members, jax.random.key(3))[0]
    first = [env.step(states[0], env.solve(states[0])[0], again.rng).reward for _ in range(4)]
    twin = start_plays(seeds, states, [""] * 20, members, jax.random.key(3))[0]
    assert first == [
        env.step(states[0], env.solve(states[0])[0], twin.rng).reward for _ in range(4)
    ]


def test_noise_comes_from_the_generator_alone():
    env = Bandit()
    pairs = [(e, np.random.Generator(np.random.Philox(7))) for e in (env, Bandit())]
    pays = [[e.step(PROBLEM, "Blue Window", rng).reward for _ in range(200)] for e, rng in pairs]
    assert pays[0] == pays[1] and 20 < sum(pays[0]) < 80
    # One draw per answer, whatever it says.
    for answer in ("Blue Window", "Red Table", "neither"):
        rng, twin = (np.random.Generator(np.random.Philox(7)) for _ in range(2))
        env.step(PROBLEM, answer, rng)
        twin.random()
        assert rng.random() == twin.random()


# ---- expert -------------------------------------------------------------------------------------


def best_by_hand(state) -> set[str]:
    """Names of the arms with the largest product of pay and chance, by exact decimals."""
    values = {arm.name: Decimal(arm.pay) / 100 * Decimal(arm.chance) / 100 for arm in state.arms}
    return {name for name, value in values.items() if value == max(values.values())}


@pytest.mark.parametrize("options", [{}, {"arms": 10, "sure": (0, 100), "chance": (0, 100)}])
@pytest.mark.parametrize("pulls", [1, 4])
def test_plans_are_the_best_arm_until_the_end(options, pulls):
    env = Bandit(**options, pulls=pulls)
    rng = np.random.default_rng(0)
    for seed in range(60):
        state = env.reset(seed)
        for left in range(pulls, 0, -1):
            plan = env.solve(state)
            assert len(plan) == left and set(plan) == {plan[0]} <= best_by_hand(state)
            step = env.step(state, plan[0], rng)
            state = step.state
        assert step.done and step.info["success"] and env.solve(state) == ()


def test_a_name_is_enough_where_it_tells():
    for names in ("fitting", "misleading"):
        env = Bandit(told=False, names=names)
        for seed in range(40):
            state = env.reset(seed)
            assert set(env.solve(state)) <= best_by_hand(state)
            connoted = "danger" if names == "fitting" else "safety"
            assert env.solve(state)[0] in NAMES[connoted]


def test_where_pay_is_not_told_the_expert_goes_by_its_pulls():
    env = Bandit(arms=3, pulls=8, told=False, sure=(10, 90))
    arms = (*PROBLEM.arms, Arm("Grey Bucket", 40, 100))

    def next_pull(*pulled):
        return env.solve(State(arms, pulled))[0]

    assert next_pull() == "Red Table"
    assert next_pull((0, 10)) == "Blue Window"
    assert next_pull((0, 10), (1, 0)) == "Grey Bucket"
    three = ((0, 10), (1, 0), (2, 40))
    assert next_pull(*three) == "Red Table"  # half of the pulls explore
    assert next_pull(*three, (0, 10)) == "Grey Bucket"
    assert next_pull((0, 10), (1, 100), (2, 40), (1, 0)) == "Blue Window"
    assert next_pull(*three, (None, 0), (1, 100), (1, 100)) == "Blue Window"
    # The plan depends only on observed pays.
    changed = tuple(dataclasses.replace(arm, pay=99 - arm.pay % 50) for arm in arms)
    for length in range(4):
        states = (State(arms, three[:length]), State(changed, three[:length]))
        assert env.solve(states[0]) == env.solve(states[1])
        assert env.explain(states[0], ()) == env.explain(states[1], ())
    two = Bandit(pulls=2, told=False)
    assert two.solve(PROBLEM) == ("Red Table", "Red Table")
    assert two.solve(State(PROBLEM.arms, ((0, 10),))) == ("Red Table",)


def test_explanations_by_hand():
    env = Bandit()
    assert env.explain(PROBLEM, env.solve(PROBLEM)) == (
        "arms Red Table pays 0.10 chance 1.00 expected 0.10 Blue Window pays 1.00 chance 0.25 "
        "expected 0.25 choose Blue Window"
    )
    env = Bandit(pulls=5, told=False)
    state = State(PROBLEM.arms, ((0, 10), (0, 10), (None, 0)))
    assert env.explain(state, ["Blue Window"] * 2) == (
        "arms Red Table pulled 2 mean 0.10 Blue Window pulled 0 choose Blue Window"
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arms": 10, "sure": (0, 100), "chance": (0, 100), "pulls": 3},
        {"told": False, "names": "fitting"},
        {"told": False, "arms": 4, "pulls": 12, "sure": (1, 99), "chance": (5, 95)},
    ],
)
def test_all_that_an_expert_states_is_so(options):
    env, rng = Bandit(**options), np.random.default_rng(1)
    for seed in range(30):
        state, done = env.reset(seed), False
        while not done:
            plan = env.solve(state)
            message = f"Notice.\n{env.render(state)}\nYou have 2 answer(s) left."
            right, claims = env.count_grounded(message, env.explain(state, plan))
            assert right == claims >= env.arms
            step = env.step(state, plan[0] if seed % 3 else "none of them", rng)
            state, done = step.state, step.done


@pytest.mark.parametrize(
    "thought, found",
    [
        ("red table pays 0.1", (1, 1)),
        ("Blue Window: pays 1 with a chance of 25%, so it pays", (2, 2)),
        ("The Blue Window has an expected pay of 0.25; Red Table pays 1.00", (1, 2)),
        ("Blue Window expected 0.3 chance .25", (0, 1)),
        ("Red Window pays 0.10", (0, 1)),
        ("Red Table pulled 0 mean 0.10", (1, 2)),
        ("Red Table is best, pays 0.10", (0, 0)),  # no arm directly before the figure
        ("pays 0.10 chance 1.00", (0, 0)),
        ("Red Table pays " + "9" * 5000, (0, 0)),
        ("Red Table" + " ,:" * 2000, (0, 0)),
        ("choose Blue Window", (0, 0)),
    ],
)
def test_grounded(thought, found):
    env = Bandit()
    assert env.count_grounded(env.render(PROBLEM), thought) == found


def test_every_fact_of_a_text_is_read_in_order():
    text = "Red Table pays 0.10 chance 100% Blue  window pulled 3"
    assert parse_claims(text) == [
        ("red table", "pays", Decimal("0.10")),
        ("red table", "chance", Decimal(1)),
        ("blue window", "pulled", Decimal(3)),
    ]


# ---- names --------------------------------------------------------------------------------------


def test_a_name_tells_what_it_connotes():
    assert [len(names) for names in NAMES.values()] == [120, 96, 96]
    words = [word for pools in WORDS.values() for pool in pools for word in pool]
    assert len(words) == len({word.lower() for word in words}) and all(map(str.isalpha, words))
    for names, (of_sure, of_risky) in CONNOTATIONS.items():
        env = Bandit(names=names, arms=5)
        for seed in range(40):
            for arm in env.reset(seed).arms:
                assert arm.name in NAMES[of_sure if arm.chance == 100 else of_risky]


# ---- generator ----------------------------------------------------------------------------------


def test_problems_are_pinned():
    assert problems_digest() == PROBLEMS_0_TO_49


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arms": 10, "names": "misleading", "split": "eval"},
        {"arms": 3, "sure": (0, 100), "chance": (40, 60), "split": "imitation"},
        {"sure": (25, 26), "chance": (25, 26), "split": None},
    ],
)
def test_problems_are_as_asked(options):
    env = Bandit(**options)
    for seed in range(150):
        state = env.reset(seed)
        assert state.history == () and len({arm.name for arm in state.arms}) == env.arms
        risky = [arm for arm in state.arms if arm.pay == 100 and arm.chance != 100]
        assert len(risky) == env.arms // 2
        assert all(env.chance[0] <= arm.chance <= env.chance[1] for arm in risky)
        sure = [arm for arm in state.arms if arm not in risky]
        assert all(arm.chance == 100 and env.sure[0] <= arm.pay <= env.sure[1] for arm in sure)
        assert len({arm.expected_pay for arm in state.arms}) > 1
        assert env.split in (None, split_of(state))


def test_every_order_name_pay_and_chance_is_as_likely_as_the_others():
    env = Bandit(sure=(1, 10), chance=(21, 30), split=None)
    states = [env.reset(seed) for seed in range(3000)]
    first = Counter(state.arms[0].chance == 100 for state in states)
    assert binomtest(first[True], 3000).pvalue > 1e-3
    for key, kinds in (
        (lambda state: min(arm.pay for arm in state.arms), 10),
        (lambda state: min(arm.chance for arm in state.arms), 10),
        (lambda state: state.arms[0].name, 120),
    ):
        counts = Counter(map(key, states))
        assert len(counts) == kinds and chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.medium
def test_reset_is_pure_and_problems_are_enough():
    """Distinct problems of the evaluation split, with the defaults and the other name pools."""
    for options in ({}, {"names": "fitting"}, {"names": "misleading", "told": False}):
        env = Bandit(**options, split="eval")
        assert Bandit(**options, split="eval").reset(7) == env.reset(7)
        assert len({env.identity(env.reset(seed)) for seed in range(3000)}) >= 1024


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(bandit_env, "MAX_ATTEMPTS", 3)
    env = Bandit(split="eval")
    monkeypatch.setattr(bandit_env.problems, "split_of", lambda state: "train")
    with pytest.raises(ValueError, match=r"3 attempts for seed=4, arms=2, sure=\(10, 10\)"):
        env.reset(4)


# ---- splits -------------------------------------------------------------------------------------


@pytest.mark.medium
def test_splits_share_no_problem_and_have_their_shares():
    found = {}
    for split in SPLITS:
        env = Bandit(split=split)
        found[split] = {env.identity(env.reset(seed)) for seed in range(2000)}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    turned = State(PROBLEM.arms[::-1])
    assert Bandit().identity(turned) == Bandit().identity(PROBLEM)
    assert split_of(turned) == split_of(PROBLEM)
    others = [State((RISKY, Arm("Red Table", 11, 100))), State((RISKY, Arm("Red Button", 10, 100)))]
    assert len({Bandit().identity(state) for state in (PROBLEM, *others)}) == 3
    env = Bandit(split=None)
    drawn = [split_of(env.reset(seed)) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)
