"""envs/types.py is the whole contract: a class with only its members can be trained."""

import dataclasses
import inspect
import json
import threading
import time

import pytest

from ragen_jax import envs, train
from ragen_jax.config.build_environment import TINY_NEEDS
from ragen_jax.configs import base, sokoban
from ragen_jax.envs.types import Environment, SolvableEnvironment, Step
from ragen_jax.run.imitate import tiny_model
from ragen_jax.storage.metrics_reader import read_metrics


@dataclasses.dataclass(frozen=True)
class Number:
    """A state: the number to repeat."""

    value: int


class Guess:
    """Say the number that is shown: exactly the members of `Environment`."""

    actions = ("1", "2", "3", "4")
    instructions = "Say the number."

    def __init__(self, *, split):
        self._offset = {"train": 0, "eval": 1}[split]

    def reset(self, seed):
        return Number(2 * (seed % 1000) + self._offset)

    def render(self, state):
        return f"The number is {state.value}."

    def identity(self, state):
        return str(state.value)

    def step(self, state, action, rng):
        right = int(action) == state.value % 4 + 1
        return Step(state, float(right), right, {"success": right})


@pytest.fixture
def config(language_model, monkeypatch, tmp_path):
    monkeypatch.setitem(envs.ENVS, "guess", Guess)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = base.get_config()
    config.env.update(name="guess", max_turns=2, actions_per_turn=1, max_actions=2)
    config.model.path = str(language_model)
    config.steps = 2
    config.rollout.update(groups=2, group_size=2, max_new_tokens=8, save_every=1, compact=False)
    config.optimizer.update(minibatches=1, micro_batch=2)
    config.diagnose.flow_every = 0
    config.eval.update(episodes=4, every=2)
    # Random weights give no valid replies, so they learn nothing.
    for rule in ("variance", "success", "empty"):
        config.stopping[rule].action = "off"
    return config


def documented(protocol):
    """The members of a protocol and of the protocols that it extends."""
    names = {name for c in protocol.__mro__ for name in (*vars(c), *inspect.get_annotations(c))}
    return {name for name in names if not name.startswith("_")}


def test_the_class_has_the_documented_members_alone():
    members = {name for name in vars(Guess) if not name.startswith("_")}
    assert members == documented(Environment)
    assert isinstance(Guess(split="train"), Environment)
    assert set(TINY_NEEDS) == documented(SolvableEnvironment) - members


@pytest.mark.long
def test_a_language_model_trains_on_a_minimal_environment(config, tmp_path):
    assert train.train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/success" in rows[2] and rows[2]["rollout/replies"] == 8
    (episode, *_) = (tmp_path / "run" / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    system, user, _ = (m["content"] for m in json.loads(episode)["turns"][0]["messages"])
    assert Guess.instructions in system and "The number is" in user


def breaking(does, of=3):
    """A `Guess` that does something else for every `of`-th problem of the training split."""

    class Breaking(Guess):
        def render(self, state):
            if (state.value // 2) % of == of - 1 and not self._offset:  # only in the training split
                does()
            return super().render(state)

    return Breaking


def rows_of(folder):
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.long
def test_what_hangs_costs_its_episodes_alone(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(envs.ENVS, "guess", breaking(lambda: time.sleep(60)))
    config.env.update(time_limit=0.3, max_error_share=1.0)
    config.rollout.groups = 3
    config.filter.strategy = "none"  # so groups are left out only because their episodes failed
    start = time.perf_counter()
    assert train.train(config, tmp_path / "run") == 0
    assert time.perf_counter() - start < 60
    rows = rows_of(tmp_path / "run")
    assert [row["rollout/errors"] for row in rows[1:]] == [2, 2]
    # The fraction of the sound episodes, which are two groups of three.
    assert [row["filter/kept_ratio"] for row in rows[1:]] == [1.0, 1.0]
    assert [row["rollout/lost_groups"] for row in rows[1:]] == [1, 1]
    assert all(0.3 <= row["time/environment"] < row["time/rollout"] for row in rows[1:])
    assert rows[2]["eval/errors"] == 0  # held-out problems never fail
    said = capsys.readouterr().out
    expected = (
        "warning: 2 of 6 episodes of guess failed; the first: TimeoutError: a step took longer"
    )
    assert said.count(expected) == 2
    lines = (tmp_path / "run/rollouts/step_000002.jsonl").read_text().splitlines()
    errors = [json.loads(line).get("error", "") for line in lines]
    assert ["TimeoutError" in error for error in errors] == [False] * 4 + [True] * 2


@pytest.mark.slow
@pytest.mark.long
def test_as_many_wait_at_a_time_as_there_are_workers(config, tmp_path, monkeypatch):
    under_way, most = set(), []

    def wait():
        me = threading.get_ident()
        under_way.add(me)
        most.append(len(under_way))
        time.sleep(0.2)
        under_way.remove(me)

    monkeypatch.setitem(envs.ENVS, "guess", breaking(wait, of=1))
    config.env.update(time_limit=10.0, workers=3)
    config.rollout.groups = 6
    assert train.train(config, tmp_path / "run") == 0
    assert max(most) == 3 and rows_of(tmp_path / "run")[1]["rollout/errors"] == 0


@pytest.mark.long
def test_a_run_stops_where_too_much_breaks(config, tmp_path, monkeypatch, capsys):
    """A third of the episodes fail: below a limit of 0.34, above a limit of 0.33."""

    def does():
        raise RuntimeError("the engine is gone")

    monkeypatch.setitem(envs.ENVS, "guess", breaking(does))
    config.rollout.groups = 3
    config.env.max_error_share = 0.34
    assert train.train(config, tmp_path / "goes_on") == 0
    config.env.max_error_share = 0.33
    capsys.readouterr()
    assert train.train(config, tmp_path / "stops") == 3
    said = capsys.readouterr().out
    assert "stopped: more than env.max_error_share = 0.33: 2 of 6 episodes of guess failed" in said
    assert "Traceback" in said and 'raise RuntimeError("the engine is gone")' in said
    assert [row["step"] for row in rows_of(tmp_path / "stops")] == [0, 1]
    # The learnt weights are saved: the run resumes there and stops at the next failing step.
    assert train.train(config, tmp_path / "stops") == 3
    assert [row["step"] for row in rows_of(tmp_path / "stops")] == [0, 1, 2]


def test_what_the_tiny_agent_needs_besides_is_named(config, tmp_path, capsys):
    config.model.path = "tiny"
    with pytest.raises(ValueError, match="environment 'guess' has no words, solve, explain"):
        tiny_model(config, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert "environment 'guess' has no words, solve, explain (envs/types.py" in line
    Guess.words = ("number",)
    try:
        with pytest.raises(SystemExit, match="2"):
            train.train(config, tmp_path / "run")
    finally:
        del Guess.words
    assert "environment 'guess' has no solve, explain (" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_language_model_is_not_trained_on_terse_prompts(config, language_model, tmp_path, capsys):
    config.env.prompt = "terse"  # this environment lists no words
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    assert "(guess has no words), but config.env.prompt is 'terse'" in capsys.readouterr().err
    config = sokoban.get_config()
    config.model.path = str(language_model)
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert "not that of a tiny agent (it splits '√' of sokoban)" in line
    command = f"--config=configs/sokoban.py:llm --config.model.path={language_model}"
    assert line.endswith(command)
    assert not (tmp_path / "run").exists()
