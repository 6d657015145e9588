"""How many programs 200 steps of varying lengths meet, of rollouts without the model."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ragen_jax.envs.types import Step
from ragen_jax.padding import length_bucket
from ragen_jax.rollout import play
from ragen_jax.rollout.chat import Reply

STOP = 1
GROUPS, MEMBERS, TURNS, TOKENS = 8, 16, 5, 400  # of the paper
PROMPT, OBSERVATION = (780, 830), (180, 221)  # tokens, from and below


@dataclasses.dataclass
class Met:
    """The shapes of programs that a stand-in of the model was asked for."""

    rng: np.random.Generator
    shapes: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def prefill(self, model, params, tokens_NP, length_N, *, members=1):
        self.shapes["prefill", tokens_NP.shape, members] += 1
        return tokens_NP.shape, None

    def extend(self, model, params, segment, reply, rows_B, tokens_BE, count_B, *, capacity):
        self.shapes["extend", segment, reply, tokens_BE.shape, capacity] += 1
        return (len(rows_B), capacity), None

    def decode(self, model, params, segment, logits, keys_B, budget_B, temperature, **settings):
        rows = len(keys_B)
        self.shapes["decode", segment, rows] += 1
        # Heavy-tailed: the mean is 0.3 of the limit.
        count_B = np.minimum(self.rng.geometric(1 / (0.3 * TOKENS), rows), TOKENS)
        tokens_BT = np.full((rows, TOKENS), 2, np.int32)
        tokens_BT[np.arange(rows), count_B - 1] = STOP
        logp_BT = np.zeros((rows, TOKENS), np.float32)
        return SimpleNamespace(tokens_BT=tokens_BT, logp_BT=logp_BT, count_B=count_B, reply=rows)


@dataclasses.dataclass
class Chat:
    """Prompts of given lengths that show all turns."""

    rng: np.random.Generator
    stop_ids: tuple = (STOP,)

    def observe(self, observation, **_):
        return observation

    def prompt_ids(self, turns, message):
        if not turns:
            return np.zeros(int(message), np.int32)
        news = np.zeros(self.rng.integers(*OBSERVATION), np.int32)
        return np.concatenate([turns[-1].prompt, turns[-1].sampled, news])

    def read(self, sampled):
        return Reply((0, 1), (1, 2), ("go",), True)


@dataclasses.dataclass(frozen=True)
class Game:
    """Over behind a reply with some chance; its state is the length of the first prompt."""

    ends: float

    def render(self, state):
        return str(state)

    def step(self, state, action, rng):
        return Step(state, 0.0, bool(rng.random() < self.ends), {})


def met(monkeypatch, ends, steps=200):
    """{program: how many shapes of it so many steps meet}."""
    rng = np.random.default_rng(0)
    found = Met(rng)
    for name in ("prefill", "extend", "decode"):
        monkeypatch.setattr(play, name, getattr(found, name))
    monkeypatch.setattr(play, "episode_keys", lambda key, seeds, members, turn: np.array(seeds))
    model = SimpleNamespace(config=SimpleNamespace(max_positions=8192))
    budgets = play.Budgets(max_turns=TURNS, max_actions=99, max_new_tokens=TOKENS)
    for step in range(steps):
        seeds = [step * GROUPS + group for group in range(GROUPS)]
        episodes = play.rollout(
            model,
            None,
            Chat(rng),
            Game(ends),
            seeds,
            [int(rng.integers(*PROMPT)) for _ in seeds],
            group_size=MEMBERS,
            key=jax.random.key(0),
            budgets=budgets,
            sampling=play.Sampling(1.0),
        )
        longest = max(len(e.turns[-1].prompt) + len(e.turns[-1].sampled) for e in episodes)
        found.shapes["update", length_bucket(longest)] += 1
    return collections.Counter(program for program, *_ in found.shapes)


@pytest.mark.long
@pytest.mark.parametrize("ends, most", [(0.1, 35), (0.3, 37)])
def test_two_hundred_steps_of_the_lock_step_meet_no_more_programs(monkeypatch, ends, most):
    programs = met(monkeypatch, ends)
    # What a grid of half as many lengths would save, and cost, is in benchmarks/NOTES.md.
    assert set(programs) == {"prefill", "extend", "decode", "update"}
    assert sum(programs.values()) <= most, programs
