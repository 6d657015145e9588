"""How many programs 200 steps of varying lengths meet: of rollouts without the model, and of the
updates on what they played."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ragen_jax.envs.types import Step
from ragen_jax.padding import length_bucket
from ragen_jax.rollout import play, slots
from ragen_jax.rollout.chat import Reply
from ragen_jax.update import cutting

STOP = 1
GROUPS, MEMBERS, TURNS, TOKENS = 8, 16, 5, 400  # of the paper
MINIBATCHES, MICRO_BATCH = 4, 4
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
        tokens_BT, logp_BT, count_B = self.replies(np.full(rows, TOKENS), TOKENS)
        return SimpleNamespace(tokens_BT=tokens_BT, logp_BT=logp_BT, count_B=count_B, reply=rows)

    def replies(self, budget_B, most):
        """(tokens, log-probs, counts) of up to `most` tokens a row; the mean is 0.3 of the limit,
        wherever a reply stands, since it is geometric."""
        length_B = self.rng.geometric(1 / (0.3 * TOKENS), len(budget_B))
        count_B = np.minimum(length_B, np.minimum(budget_B, most))
        tokens_BT = np.full((len(budget_B), most), 2, np.int32)
        for row in np.flatnonzero((count_B == length_B) & (count_B > 0)):
            tokens_BT[row, count_B[row] - 1] = STOP
        return tokens_BT, np.zeros(tokens_BT.shape, np.float32), count_B

    # Of slots. A page is (rows, positions).

    def empty_page(self, model, params, *, rows, positions):
        self.shapes["empty_page", rows, positions] += 1
        return rows, positions

    def keep_rows(self, page, rows_B):
        self.shapes["keep_rows", page, len(rows_B)] += 1
        return len(rows_B), page[1]

    def read(self, model, params, pages, rows_R, start_R, tokens_RE):
        self.shapes["read", tuple(pages), tokens_RE.shape] += 1
        return tokens_RE.shape

    def fold(self, pages, new, start_R, count_R, reader_B):
        self.shapes["fold", tuple(pages), new, len(reader_B)] += 1
        return pages

    def decode_chunk(self, model, params, pages, *columns, chunk, **settings):
        self.shapes["decode_chunk", tuple(pages), chunk] += 1
        token_B, length_B, drawn_B, budget_B, *_ = columns
        return (pages, *self.replies(budget_B, chunk))


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


def met(monkeypatch, ends, steps=200, **settings):
    """{program: how many shapes of it so many steps meet}; settings: slots and chunk."""
    rng = np.random.default_rng(0)
    found = Met(rng)
    for name in ("prefill", "extend", "decode"):
        monkeypatch.setattr(play, name, getattr(found, name))
    for name in ("empty_page", "keep_rows", "read", "fold", "decode_chunk"):
        monkeypatch.setattr(slots, name, getattr(found, name))
    for module in (play, slots):
        monkeypatch.setattr(
            module, "episode_keys", lambda key, seeds, members, turn: np.array(seeds)
        )
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
            **settings,
        )
        length_B = np.array([len(e.turns[-1].prompt) + len(e.turns[-1].sampled) for e in episodes])
        minibatches = np.array_split(rng.permutation(len(episodes)), MINIBATCHES)
        T = length_bucket(length_B.max())
        for pieces in cutting.cut(minibatches, length_B, T, micro_batch=MICRO_BATCH):
            for piece in pieces:
                found.shapes["update", piece.length] += 1
    return collections.Counter(program for program, *_ in found.shapes)


@pytest.mark.long
@pytest.mark.parametrize("ends, most", [(0.1, 41), (0.3, 45)])
def test_two_hundred_steps_of_the_lock_step_meet_no_more_programs(monkeypatch, ends, most):
    programs = met(monkeypatch, ends)
    # What a grid of half as many lengths would save, and cost, is in benchmarks/NOTES.md.
    assert set(programs) == {"prefill", "extend", "decode", "update"}
    assert sum(programs.values()) <= most, programs
    assert programs["update"] <= 9


@pytest.mark.long
@pytest.mark.parametrize("ends, most", [(0.1, 28), (0.3, 24)])
def test_two_hundred_steps_of_slots_meet_fewer(monkeypatch, ends, most):
    programs = met(monkeypatch, ends, slots=64)
    assert sum(programs.values()) <= most, programs
    # Those with the model in them: the others move the cache.
    assert sum(programs[name] for name in ("read", "decode_chunk", "update")) <= 20, programs
