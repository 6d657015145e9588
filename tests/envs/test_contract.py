"""envs/types.py is all that the code asks for: a class of no more than that is trained."""

import dataclasses
import inspect
import json

import pytest

from ragen_jax import envs, train
from ragen_jax.configs import base, sokoban
from ragen_jax.envs.types import Environment, SolvableEnvironment, Step
from ragen_jax.run.build import TINY_NEEDS
from ragen_jax.run.log import read_metrics
from ragen_jax.warmstart.imitate import tiny_model


@dataclasses.dataclass(frozen=True)
class Number:
    """A state: the number to be said."""

    value: int


class Guess:
    """Say the number that is shown: the members of `Environment`, and no others."""

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
    # Random weights say nothing readable, and nothing is learnt from that.
    for rule in ("variance", "success", "empty"):
        config.stopping[rule].action = "off"
    return config


def documented(protocol):
    """The members of a protocol and of those that it extends."""
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
    prompt = json.loads(episode)["turns"][0]["messages"][0]["content"]
    assert Guess.instructions in prompt and "The number is" in prompt


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
    config.env.prompt = "terse"  # of an environment without words
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    assert "(guess has no words), but config.env.prompt is 'terse'" in capsys.readouterr().err
    config = sokoban.get_config()
    config.model.path = str(language_model)
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert "no tiny agent's (it splits '√' of sokoban)" in line
    command = f"--config=configs/sokoban.py:llm --config.model.path={language_model}"
    assert line.endswith(command)
    assert not (tmp_path / "run").exists()
