"""envs/engines.py, envs/gymnasium_text.py: engines that mutate, played as frozen states."""

import dataclasses
import random
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.config.auto_fields import fill_auto_fields
from ragen_jax.config.build_environment import build_environment
from ragen_jax.config.check import check
from ragen_jax.configs import base, recipes
from ragen_jax.configs import gymnasium as gymnasium_config
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.diagnostics.rollouts import rollout_metrics
from ragen_jax.envs import make_env
from ragen_jax.envs.engines import EngineEnvironment, EngineStep
from ragen_jax.envs.types import Environment, LiveEnvironment
from ragen_jax.rollout.env_calls import Limits, StepRequest, act, begin
from ragen_jax.run.heldout import summarise
from ragen_jax.storage.metrics_reader import read_metrics

DOCS = Path(__file__).parents[2] / "docs/environments/engines.md"


class Hunt(gymnasium.Env):
    """A hidden number; each guess is answered by higher or lower. The number may move by one."""

    observation_space = gymnasium.spaces.Text(100, charset=string.printable)
    action_space = gymnasium.spaces.Text(100, charset=string.printable)
    made = 0

    def __init__(self, most=1000, steps=None):
        type(self).made += 1
        self._most, self._steps, self._count = most, steps, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._hidden = int(self.np_random.integers(1, self._most + 1))
        return f"Guess. It ends with {self._hidden % 100}.", {}

    def step(self, action):
        self._count += 1
        self._hidden += int(self.np_random.integers(2))
        guess = int(action)
        told = "right" if guess == self._hidden else "higher" if guess < self._hidden else "lower"
        observation = f"{told} after {self._count}: {self.np_random.integers(10**6)}"
        return observation, float(told == "right"), told == "right", self._count == self._steps, {}


class Rolls:
    """An engine that draws from the process-wide generators, as many engines do."""

    def reset(self, seed):
        return self._roll()

    def step(self, action):
        return EngineStep(f"{self._roll()} {action}", 0.0, False, {})

    def _roll(self):
        first = random.random()
        time.sleep(1e-4)  # lets another thread run
        return f"{first} {random.random()} {np.random.random()}"


class Counts:
    """An engine that never repeats itself."""

    count = 0

    def reset(self, seed):
        return f"problem {seed}"

    def step(self, action):
        Counts.count += 1
        return EngineStep(str(Counts.count), 1.0, False, {})


@pytest.fixture(autouse=True)
def hunt():
    gymnasium.register("test/Hunt-v0", entry_point=Hunt)
    Hunt.made = 0
    yield make_env("gymnasium", id="test/Hunt-v0", split=None)
    del gymnasium.registry["test/Hunt-v0"]


def walk(environment, state, *actions):
    """The start state and the state after each action."""
    states = [state]
    for action in actions:
        states.append(environment.step(states[-1], action, None).state)
    return states


def test_the_contract(hunt):
    assert isinstance(hunt, Environment) and isinstance(hunt, LiveEnvironment) and hunt.resumable
    assert hunt.actions == ()
    state = hunt.reset(3)
    assert hunt.reset(3) == state and hash(hunt.reset(3)) == hash(state)
    assert hunt.render(state).startswith("Guess. It ends with")
    assert hunt.identity(state) == hunt.render(state)


def test_a_state_is_stepped_as_often_as_one_likes(hunt):
    """The engine of the latest state is stepped directly; for other states an engine replays the
    actions."""
    start = hunt.reset(7)
    line = walk(hunt, start, "500", "600", "700")
    made = Hunt.made
    assert hunt.step(line[-1], "1", None).state.actions == ("500", "600", "700", "1")
    assert Hunt.made == made  # no new engine was needed
    for state, action in ((start, "500"), (line[1], "600"), (line[2], "700")):
        again = hunt.step(state, action, None).state
        assert again == line[len(state.actions) + 1]
    assert Hunt.made == made + 3
    assert hunt.render(hunt.step(start, "2", None).state) != hunt.render(line[1])


def test_members_of_a_group_do_not_meet_on_one_engine(hunt):
    start = hunt.reset(7)
    first, second = start, start
    alone = walk(hunt, hunt.reset(7), "1", "2", "3")
    for action in "123":  # alternately, on the same problem
        first = hunt.step(first, action, None).state
        second = hunt.step(second, action, None).state
    assert first == second == alone[-1]
    # The same in threads, from a shared state.
    limits = Limits(time_limit=20.0, workers=8)
    shared = alone[1]
    jobs = [StepRequest(shared, ("2",), np.random.default_rng(0), 5) for _ in range(32)]
    assert {x.observation for x in act(hunt, jobs, limits)} == {hunt.render(alone[2])}


def test_success_done_and_reward_are_the_engines():
    hidden = None
    options = dict(id="test/Hunt-v0", success_reward=1.0, split=None)
    hunt = make_env("gymnasium", arguments={"most": 20}, **options)
    state = hunt.reset(11)
    for guess in range(1, 200):
        step = hunt.step(state, str(guess), None)
        assert (step.reward, step.done) == (float(step.info["success"]), step.info["success"])
        if step.done:
            hidden = guess
            break
        assert step.info["success"] is False
        state = step.state
    assert hidden is not None
    short = make_env("gymnasium", arguments={"steps": 1}, **options)
    step = short.step(short.reset(0), "0", None)
    assert step.done and step.info == {"success": False}  # the turn limit ended it


class Pays(Hunt):
    """Two steps, each with a reward and an info; it ends in one of two ways."""

    def __init__(self, rewards=(0.0, 1.0), infos=({}, {}), ends="terminated"):
        self._moves, self._ends = iter(zip(rewards, infos, strict=True)), ends
        self._left = len(rewards)

    def reset(self, *, seed=None, options=None):
        return f"begin {seed}", {}

    def step(self, action):
        reward, info = next(self._moves)
        self._left -= 1
        ended = self._left == 0
        cut = self._ends == "truncated"
        return "on", reward, ended and not cut, ended and cut, info


def paid(rewards=(0.0, 1.0), infos=({}, {}), ends="terminated", **options):
    """The infos of the two steps of `Pays`."""

    class Maker:
        @staticmethod
        def make(id):
            return Pays(rewards, infos, ends)

    sys.modules["pays_maker"] = Maker
    try:
        own = make_env("gymnasium", id="pays", maker="pays_maker:make", split=None, **options)
    finally:
        del sys.modules["pays_maker"]
    first = own.step(own.reset(0), "a", None)
    return first.info, own.step(first.state, "b", None).info


UNDEFINED = {"success": False, SUCCESS_UNDEFINED: True}


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("rewards", [(0.0, 1.0), (5.0, 5.0), (0.0, 0.0), (-1.0, 0.01)])
def test_a_reward_alone_is_no_success(rewards, ends, capsys):
    assert paid(rewards, ends=ends) == (UNDEFINED, UNDEFINED)
    said = capsys.readouterr().out
    assert said == (
        "pays does not say whether an episode is solved (no success or is_success in its info), so "
        "there are no figures of success; to have them, give --config.env.options.success_reward="
        "NUMBER, the sum of an episode's rewards that solves it\n"
    )


@pytest.mark.parametrize("key", ["success", "is_success"])
@pytest.mark.parametrize("value", [True, np.bool_(True), np.array(True), 1, 1.0, np.float32(1)])
def test_success_is_what_the_info_says(key, value, capsys):
    infos = ({}, {key: value, "other": 3})
    assert paid((0.0, 0.0), infos)[1] == {**infos[1], "success": True}
    assert paid((0.0, 9.0), ({}, {key: np.zeros_like(value)[()]}))[1]["success"] is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "last", "figure"),
    [
        ({}, {}, None),
        ({"success_reward": 1.0}, {}, 1.0),
        ({}, {"is_success": True}, 1.0),
        ({}, {"success": False}, 0.0),
    ],
)
def test_figures_of_success_need_a_verdict(options, last, figure, make_turn, make_episode):
    infos = paid(infos=({}, last), **options)
    turns = [dataclasses.replace(make_turn([3], [4, 5]), info=info) for info in infos]
    episodes = [make_episode(0, 0, turns, success=infos[-1]["success"])]
    played = summarise(episodes, samples=1, format_penalty=0.0)
    assert played.get("eval/success") == figure
    figures = rollout_metrics(episodes, np.ones((1, 1)))
    assert figures.get("rollout/success") == figure


def test_a_verdict_that_is_none_is_refused():
    for value in ("yes", 0.5, [True], 2):
        with pytest.raises(TypeError, match="success True or False, got"):
            paid(infos=({}, {"success": value}))
    assert paid(infos=({}, {"success": None}))[1][SUCCESS_UNDEFINED]


def test_success_reward_is_the_users_threshold():
    """The threshold applies to the sum of rewards at an episode's end, whatever the info."""
    assert [x["success"] for x in paid((0.5, 0.5), success_reward=1.0)] == [False, True]
    assert [x["success"] for x in paid((0.5, 0.49), success_reward=1.0)] == [False, False]
    assert [x["success"] for x in paid((2.0, -1.5), success_reward=1.0)] == [False, False]
    assert [x["success"] for x in paid((-1.0, -1.0), success_reward=-2.0)] == [False, True]
    assert [x["success"] for x in paid((-1.0, -1.5), success_reward=-2)] == [False, False]
    told = ({}, {"success": True})
    assert paid((0.0, 0.0), told, success_reward=1.0)[1] == {"success": False}


def test_an_engine_played_again_has_the_sum_of_its_rewards():
    class Maker:
        make = staticmethod(lambda id: Pays((0.5, 0.5)))

    sys.modules["pays_maker"] = Maker
    try:
        own = make_env(
            "gymnasium", id="pays", maker="pays_maker:make", split=None, success_reward=1
        )
    finally:
        del sys.modules["pays_maker"]
    first = own.step(own.reset(0), "a", None).state
    for _ in range(2):  # the second time with a new engine
        assert own.step(first, "b", None).info["success"]


def test_states_are_the_same_in_another_process(tmp_path, hunt):
    script = """
import sys, gymnasium
sys.path.insert(0, sys.argv[1])
from test_engines import Hunt, walk
from ragen_jax.envs import make_env
gymnasium.register("test/Hunt-v0", entry_point=Hunt)
for split in ("imitation", "train", "eval"):
    hunt = make_env("gymnasium", id="test/Hunt-v0", split=split)
    for seed in (0, 1, 2**62):
        print(*walk(hunt, hunt.reset(seed), "5", "6"), sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = []
    for split in ("imitation", "train", "eval"):
        own = make_env("gymnasium", id="test/Hunt-v0", split=split)
        lines += ["|".join(map(str, walk(own, own.reset(s), "5", "6"))) for s in (0, 1, 2**62)]
    assert done.stdout.splitlines() == lines


def test_splits_share_no_problem():
    found = {}
    for split in ("imitation", "train", "eval"):
        own = make_env("gymnasium", id="test/Hunt-v0", split=split)
        found[split] = {own.identity(own.reset(seed)) for seed in range(150)}
    assert not found["train"] & found["eval"] and not found["imitation"] & found["eval"]


def test_problems_that_begin_alike_are_told_apart_by_their_seeds():
    class Alike(Counts):
        def reset(self, seed):
            return "Guess."

    options = dict(name="alike", instructions="", split="eval")
    with pytest.raises(ValueError, match="lies in split .*split_by='seed'"):
        EngineEnvironment(Alike, **(options | {"split": empty_split(Alike)})).reset(0)
    own = EngineEnvironment(Alike, split_by="seed", **options)
    assert len({own.identity(own.reset(seed)) for seed in range(50)}) == 50


def empty_split(engine):
    """A split without the only problem of an engine."""
    for split in ("train", "eval"):
        try:
            EngineEnvironment(engine, name="alike", instructions="", split=split).reset(0)
        except ValueError:
            return split
    raise AssertionError


def test_an_isolated_engine_has_generators_of_its_own():
    own = EngineEnvironment(Rolls, name="rolls", instructions="", split=None, isolated=True)
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    a = walk(own, own.reset(1), "x", "y")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.random()  # other code draws meanwhile
    b = own.reset(1)
    c = own.reset(2)
    for action in "xy":
        b, c = own.step(b, action, None).state, own.step(c, action, None).state
    assert b == a[-1] and c.observation != b.observation
    # Replayed in the middle of another episode, it gives the same state.
    assert own.step(a[1], "y", None).state == a[2]
    with pytest.raises(RuntimeError, match="uses an unseeded random source"):
        loose = EngineEnvironment(Rolls, name="rolls", instructions="", split=None)
        loose.step(loose.reset(1), "x", None)


def test_what_an_isolated_engine_draws_when_it_is_made_is_its_own():
    class Made(Rolls):
        def __init__(self):
            self._first = self._roll()

        def reset(self, seed):
            return self._first

    own = EngineEnvironment(Made, name="made", instructions="", split=None, isolated=True)
    random.seed(5)
    before = random.getstate()
    state = own.reset(1)
    assert random.getstate() == before
    random.seed(6)
    assert own.reset(1) == state and own.reset(2).observation != state.observation


def test_isolated_engines_wait_for_each_other():
    own = EngineEnvironment(Rolls, name="rolls", instructions="", split=None, isolated=True)
    limits = Limits(time_limit=20.0, workers=8)
    states = begin(own, range(40), limits)
    jobs = [StepRequest(state, ("a", "b", "c"), np.random.default_rng(0), 5) for state in states]
    together = [x.observation for x in act(own, jobs, limits)]
    assert together == [walk(own, state, "a", "b", "c")[-1].observation for state in states]


def test_a_live_engine_is_stepped_once():
    own = EngineEnvironment(Counts, name="counts", instructions="", split=None, replay=False)
    assert not own.resumable
    state = own.reset(0)
    first = own.step(state, "a", None).state
    second = own.step(first, "a", None).state
    assert int(second.observation) == int(first.observation) + 1
    # a new engine starts over
    assert own.step(state, "a", None).state.observation != first.observation
    with pytest.raises(RuntimeError, match="cannot be played again"):
        own.step(first, "a", None)


def test_what_an_engine_raises_or_shows_stays_in_its_episode(hunt):
    states = begin(hunt, [1, 2], Limits())
    good, bad = act(
        hunt,
        [
            StepRequest(state, (word,), None, 5)
            for state, word in zip(states, ("5", "?"), strict=True)
        ],
        Limits(),
    )
    assert good.observation and "ValueError: invalid literal" in bad.error


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        (lambda: (np.zeros(3), {}), "shows a ndarray at first; only text can be read"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_one_that_does_not_begin_is_refused_before_a_run(begins, message):
    class Numbers(Hunt):
        def reset(self, *, seed=None, options=None):
            return begins()

    gymnasium.register("test/Numbers-v0", entry_point=Numbers)
    try:
        with pytest.raises(
            ValueError, match=f"gymnasium:make makes no 'test/Numbers-v0': .*{message}"
        ):
            make_env("gymnasium", id="test/Numbers-v0", split=None)
    finally:
        del gymnasium.registry["test/Numbers-v0"]


def test_the_example_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "hunt.py").write_text(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)[0])
    monkeypatch.syspath_prepend(tmp_path)
    options = dict(id="mine/Hunt-v0", module="hunt", split_by="seed")
    try:
        found = {}
        for split in ("train", "eval"):
            own = make_env("gymnasium", split=split, **options)
            state, low, high = own.reset(5), 1, 100
            while True:
                step = own.step(state, str((low + high) // 2), None)
                if step.done:
                    break
                state, middle = step.state, (low + high) // 2
                low, high = (
                    (middle + 1, high) if "higher" in own.render(state) else (low, middle - 1)
                )
            assert step.info["success"] and step.reward == 1.0
            found[split] = {own.identity(own.reset(seed)) for seed in range(50)}
        assert not found["train"] & found["eval"]
    finally:
        sys.modules.pop("hunt", None)
        gymnasium.registry.pop("mine/Hunt-v0", None)


def test_another_maker_of_the_same_convention(monkeypatch):
    """As in GEM: a separate `make`, five values per step, actions as text."""

    class Maker:
        @staticmethod
        def make(id, most):
            return Hunt(most) if id == "game:Hunt" else None

    monkeypatch.setitem(sys.modules, "other", Maker)
    own = make_env(
        "gymnasium", id="game:Hunt", maker="other:make", arguments={"most": 5}, split=None
    )
    assert 1 <= int(re.findall(r"\d+", own.render(own.reset(0)))[0]) <= 5


def test_what_gem_tells_apart_from_an_observation_is_shown(monkeypatch):
    class Board(Hunt):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {"suffix": "The board: 1 2"}

        def step(self, action):
            *moved, _ = super().step(action)
            return *moved, {"suffix": "The board: 2 1"}

    class Maker:
        make = staticmethod(lambda id: Board())

    monkeypatch.setitem(sys.modules, "other", Maker)
    own = make_env("gymnasium", id="game:Board", maker="other:make", split=None)
    states = walk(own, own.reset(0), "5")
    assert [own.render(state).split("\n")[1:] for state in states] == [
        ["The board: 1 2"],
        ["The board: 2 1"],
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "id must be a text, got ''"),
        ({"id": 3}, "id must be a text, got 3"),
        ({"id": "nothing/None-v0"}, "gymnasium:make makes no 'nothing/None-v0': "),
        ({"id": "test/Hunt-v0", "module": "nowhere"}, "module 'nowhere' cannot be imported"),
        ({"id": "test/Hunt-v0", "maker": "nowhere:make"}, "maker 'nowhere' cannot be imported"),
        ({"id": "test/Hunt-v0", "maker": "gymnasium"}, "maker must be MODULE:FUNCTION"),
        ({"id": "test/Hunt-v0", "maker": "gymnasium:none"}, "maker must be MODULE:FUNCTION"),
        ({"id": "test/Hunt-v0", "arguments": {"size": 3}}, "unexpected keyword argument 'size'"),
        ({"id": "test/Hunt-v0", "replay": 1}, "replay must be True or False, got 1"),
        ({"id": "test/Hunt-v0", "split_by": "turn"}, "split_by must be one of"),
        ({"id": "test/Hunt-v0", "instructions": None}, "instructions must be a text"),
        *(
            (
                {"id": "test/Hunt-v0", "success_reward": value},
                f"success_reward must be a number from -1e+06 to 1e+06, got {value!r}",
            )
            for value in ("1", True, float("nan"), float("inf"))
        ),
    ],
)
def test_unusable_options_are_named(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make_env("gymnasium", split="train", **options)


def test_a_pool_of_live_problems_is_refused():
    config = gymnasium_config.get_config()
    config.env.options.id = "test/Hunt-v0"
    config.env.pool = 64
    build_environment(config.env, "train")
    config.env.options.replay = False
    with pytest.raises(ValueError, match="config.env.pool is 64; accepted: 0, because .*repeat"):
        build_environment(config.env, "train")


def test_the_config(language_model):
    import jax

    with pytest.raises(ValueError, match="has no preset 'tiny'"):
        gymnasium_config.get_config("tiny")
    config = gymnasium_config.get_config("llm+ppo")
    config.model.path = str(language_model)
    config.env.options.id = "test/Hunt-v0"
    fill_auto_fields(config, jax.devices())
    check(config)
    assert config.algorithm.name == "ppo" and "ppo" in recipes.RECIPES


@pytest.mark.long
def test_a_run_goes_on_exactly_with_replayed_engines(language_model, tmp_path, monkeypatch, capsys):
    """Runs the command's function: three steps at once, and with a stop after the first step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def config(steps, **options):
        config = base.get_config()
        config.env.update(name="gymnasium", max_turns=2, actions_per_turn=1, max_actions=2)
        config.env.options = {"id": "test/Hunt-v0"} | options
        config.model.path = str(language_model)
        config.steps = steps
        config.rollout.update(groups=2, group_size=2, max_new_tokens=8, compact=False)
        config.optimizer.update(minibatches=1, micro_batch=2)
        config.diagnose.flow_every = 0
        config.checkpoint.update(every=1, export=False)
        config.eval.update(episodes=4, every=3)
        config.env.max_error_share = 1.0
        for rule in ("variance", "success", "empty"):
            config.stopping[rule].action = "off"
        return config

    def rows(folder):
        left_out = ("time/", "throughput/")
        return [
            {k: v for k, v in row.items() if not k.startswith(left_out)}
            for row in read_metrics(folder / "metrics.jsonl")
        ]

    assert train.train(config(3), tmp_path / "whole") == 0
    assert train.train(config(1), tmp_path / "parts") == 0
    assert train.train(config(3), tmp_path / "parts") == 0
    assert "is not reproducible" not in capsys.readouterr().out
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert whole[2:] == parts[2:] and len(whole) == 4
    assert train.train(config(1, replay=False), tmp_path / "live") == 0
    assert train.train(config(2, replay=False), tmp_path / "live") == 0
    said = "warning: gymnasium is not reproducible: resumed numbers will differ"
    assert said in capsys.readouterr().out
