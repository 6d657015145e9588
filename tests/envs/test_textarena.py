"""envs/textarena_games.py with the package itself, which `.ci/run` installs."""

import random
import re
import sys
import types

import numpy as np
import pytest

from ragen_jax.envs import make_env
from ragen_jax.rollout.env_calls import Limits, StepRequest, act, begin

GUESS = "GuessTheNumber-v0-raw"


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ValueError, match=r"TextArena cannot be imported.*ragen_jax\[textarena\]"):
        make_env("textarena", id=GUESS, split="train")


class Game:
    """A game of one turn whose reward is the number in the reply."""

    def reset(self, num_players, seed):
        pass

    def get_observation(self):
        return 0, "Say a reward."

    def step(self, action):
        self._reward = float(action)
        return True, {}

    def close(self):
        return {0: self._reward}, {}


def test_a_game_is_won_from_the_threshold_on(monkeypatch):
    module = types.SimpleNamespace(make=lambda id: Game())
    monkeypatch.setitem(sys.modules, "textarena", module)
    for options, reward, won in [
        ({}, "0.99", False),
        ({}, "1", True),
        ({"success_reward": 0.5}, "0.5", True),
        ({"success_reward": 0.5}, "0.49", False),
        ({"success_reward": 2}, "1", False),
    ]:
        own = make_env("textarena", id="game", split=None, **options)
        step = own.step(own.reset(0), reward, None)
        assert step.info == {"success": won} and step.reward == float(reward)
    for value in ("1", True, float("nan")):
        with pytest.raises(ValueError, match="success_reward must be a number from"):
            make_env("textarena", id="game", success_reward=value, split=None)


def search(environment, state, low=1, high=20):
    """(guesses, last step) of a player that bisects."""
    guesses = []
    while True:
        guesses.append((low + high) // 2)
        step = environment.step(state, f"[{guesses[-1]}]", None)
        if step.done:
            return guesses, step
        state = step.state
        if "higher" in environment.render(state):
            low = guesses[-1] + 1
        else:
            assert "lower" in environment.render(state)
            high = guesses[-1] - 1


@pytest.fixture(scope="module")
def guess():
    pytest.importorskip("textarena", reason="pip install ragen_jax[textarena]")
    return make_env("textarena", id=GUESS, split="train")


def test_a_game_is_won(guess):
    for seed in range(10):
        guesses, step = search(guess, guess.reset(seed))
        assert step.info["success"] and step.reward == 1.0 and len(guesses) <= 5


def test_the_process_keeps_its_generators_and_a_game_its_own(guess):
    random.seed(1)
    before = random.getstate()
    states = [guess.reset(seed) for seed in range(5)]
    found = [search(guess, state)[0][-1] for state in states]
    assert random.getstate() == before
    random.seed(2)
    assert [search(guess, guess.reset(seed))[0][-1] for seed in reversed(range(5))] == found[::-1]
    assert len(set(found)) > 1


def test_members_go_their_own_ways(guess):
    states = begin(guess, [3] * 4, Limits())
    words = ["[1]", "[20]", "no number", "\ud800[5]" * 1000]
    jobs = [
        StepRequest(state, (word,), np.random.default_rng(0), 5)
        for state, word in zip(states, words, strict=True)
    ]
    acted = act(guess, jobs, Limits())
    assert re.search("higher|right", acted[0].observation) and acted[0].observation.count("\n") < 2
    assert "lower" in acted[1].observation and "nvalid" in acted[2].observation


def test_the_whole_history_without_raw(guess):
    whole = make_env("textarena", id="GuessTheNumber-v0", split="train")
    state = whole.step(whole.reset(0), "[1]", None).state
    assert "[1]" in whole.render(state) and "You are playing Guess" in whole.render(state)


def test_splits_share_no_seed(guess):
    heldout = make_env("textarena", id=GUESS, split="eval")
    found = [{e.identity(e.reset(seed)) for seed in range(100)} for e in (guess, heldout)]
    assert not found[0] & found[1] and len(found[0]) == 100


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("", "id must be a text, got ''"),
        ("Nothing-v0", "game 'Nothing-v0' does not begin for one player"),
        ("TicTacToe-v0", "game 'TicTacToe-v0' does not begin for one player"),
    ],
)
def test_unusable_games_are_named(guess, id, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make_env("textarena", id=id, split="train")
