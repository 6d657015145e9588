"""The number of programs that 200 steps of varying lengths need: rollouts without a model, and the
updates on their episodes."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ragen_jax.envs.types import Step
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.vision.image_table import NO_IMAGES
from ragen_jax.rollout import expected, pages, play, slots
from ragen_jax.rollout.chat import Reply
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.update.micro_batches import split_rows
from ragen_jax.update.pieces import Grouping, TokenRows

STOP = 1
GROUPS, MEMBERS, TURNS, TOKENS = 8, 16, 5, 400  # from the paper
MINIBATCHES, MICRO_BATCH = 4, 4
PROMPT, OBSERVATION = (780, 830), (180, 221)  # token counts, [low, high)


@dataclasses.dataclass
class Met:
    """Stand-in for the model that counts the shapes of the requested programs."""

    rng: np.random.Generator
    shapes: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def prefill(self, model, params, tokens_NP, length_N, prefix=None, *, members=1):
        self.shapes["prefill", tokens_NP.shape, members] += 1
        return tokens_NP.shape, None

    def extend(self, model, params, segment, reply, rows_B, tokens_BE, count_B, *, capacity):
        self.shapes["extend", segment, reply, tokens_BE.shape, capacity] += 1
        return (len(rows_B), capacity), None

    def decode(self, model, params, segment, logits, keys_B, budget_B, temperature, *, settings):
        rows = len(keys_B)
        self.shapes["decode", segment, rows] += 1
        tokens_BT, logp_BT, count_B = self.replies(np.full(rows, TOKENS), TOKENS)
        return SimpleNamespace(tokens_BT=tokens_BT, logp_BT=logp_BT, count_B=count_B, reply=rows)

    def replies(self, budget_B, most):
        """(tokens, log-probs, counts) of up to `most` tokens per row. The length is geometric,
        so the mean of the remaining length is always 0.3 of the limit."""
        length_B = self.rng.geometric(1 / (0.3 * TOKENS), len(budget_B))
        count_B = np.minimum(length_B, np.minimum(budget_B, most))
        tokens_BT = np.full((len(budget_B), most), 2, np.int32)
        for row in np.flatnonzero((count_B == length_B) & (count_B > 0)):
            tokens_BT[row, count_B[row] - 1] = STOP
        return tokens_BT, np.zeros(tokens_BT.shape, np.float32), count_B


@dataclasses.dataclass
class Chat:
    """Prompts of given lengths that show all turns."""

    rng: np.random.Generator
    stop_ids: tuple = (STOP,)
    images: object = NO_IMAGES
    stops: None = None  # no stop strings
    prefix_ids: tuple = ()  # no system message

    def observe(self, observation, **_):
        return observation

    def check_images(self, observation):
        assert isinstance(observation, str)

    def image_spans(self, observation):
        return ()

    def prompt_ids(self, turns, message, spans=()):
        if not turns:
            return np.zeros(int(message), np.int32)
        news = np.zeros(self.rng.integers(*OBSERVATION), np.int32)
        return np.concatenate([turns[-1].prompt, turns[-1].sampled, news])

    def read(self, sampled):
        return Reply((0, 1), (1, 2), ("go",), True)


@dataclasses.dataclass(frozen=True)
class Game:
    """Ends after each reply with probability `ends`; its state is the first prompt's length."""

    ends: float

    def render(self, state):
        return str(state)

    def step(self, state, action, rng):
        return Step(state, 0.0, bool(rng.random() < self.ends), {})


@dataclasses.dataclass
class MetInSlots:
    """The same for slots, where each reply has its own length."""

    rng: np.random.Generator
    shapes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    length: dict = dataclasses.field(default_factory=dict)  # key of a reply -> its number of tokens

    def empty_page(self, model, params, *, rows, positions):
        return rows, positions

    def keep_rows(self, page, rows_B):
        return len(rows_B), page[1]

    def read(self, model, params, held, rows_R, start_R, tokens_RE):
        self.shapes["read", tuple(held), tokens_RE.shape] += 1
        return tokens_RE.shape, None, None

    def fold(self, page, new, first, start_R, count_R, reader_B):
        self.shapes["fold", page, new, len(reader_B)] += 1
        return page

    def decode_chunk(self, model, params, held, batch, heat, *, settings):
        token, before, chunk = batch.token_B, batch.length_B, settings.max_tokens
        drawn, left, keys = batch.drawn_B, batch.budget_B, batch.keys_B
        self.shapes["decode_chunk", tuple(held), len(token), chunk] += 1
        assert before[left > 0].max() <= sum(size for _, size in held)
        tokens_BC = np.full((len(token), chunk), 2, np.int32)
        count_B = np.zeros(len(token), np.int32)
        for row in np.flatnonzero(left):
            if not drawn[row]:
                self.length[keys[row]] = min(self.rng.geometric(1 / (0.3 * TOKENS)), TOKENS)
            count_B[row] = min(self.length[keys[row]] - drawn[row], chunk)
            if drawn[row] + count_B[row] == self.length[keys[row]]:
                tokens_BC[row, count_B[row] - 1] = STOP
        logp_BC = np.zeros(tokens_BC.shape, np.float32)
        return (len(token), chunk), tokens_BC, logp_BC, count_B, None, None


def rows_of(rng, episodes):
    """Rows of whole episodes with random ids; those of a group share their first prompt."""
    last = [episode.turns[-1] for episode in episodes]
    count_B = np.array([len(turn.prompt) + len(turn.sampled) for turn in last])
    shape = len(episodes), count_B.max()
    tokens_BT, read_BT = rng.integers(0, 2**30, shape).astype(np.int32), np.zeros(shape, bool)
    for b, episode in enumerate(episodes):
        leader = b - b % MEMBERS
        first = len(episode.turns[0].prompt)
        tokens_BT[b, :first] = tokens_BT[leader, :first]
        for turn in episode.turns:
            read_BT[b, len(turn.prompt) : len(turn.prompt) + len(turn.sampled)] = True
    return TokenRows(tokens_BT, read_BT)


def met(monkeypatch, ends, steps=200, **served):
    """{program: number of shapes of it in this number of steps}."""
    shapes = met_shapes(monkeypatch, ends, steps, **served)
    return collections.Counter(program for program, *_ in shapes)


def met_shapes(monkeypatch, ends, steps, **served):
    """{(program, shapes): how often it occurs in this number of steps}."""
    rng = np.random.default_rng(0)
    found = MetInSlots(rng) if served else Met(rng)
    module = pages if served else play
    for name in vars(type(found)).keys() & vars(module).keys():
        monkeypatch.setattr(module, name, getattr(found, name))
    monkeypatch.setattr(play, "episode_keys", lambda key, seeds, members, turn: np.array(seeds))
    monkeypatch.setattr(slots, "episode_keys", lambda key, *words: list(zip(*words, strict=True)))
    sizes = dict(vocab_size=8, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_width=8)
    model = Qwen(ModelConfig(**sizes, max_positions=8192))
    budgets = Budgets(max_turns=TURNS, max_actions=99, max_new_tokens=TOKENS)
    for step in range(steps):
        seeds = [step * GROUPS + group for group in range(GROUPS)]
        episodes = play.rollout(
            model,
            None,
            PlaySettings(Chat(rng), Game(ends), budgets=budgets, sampling=Sampling(1.0), **served),
            seeds,
            [int(rng.integers(*PROMPT)) for _ in seeds],
            group_size=MEMBERS,
            key=jax.random.key(0),
        )
        rows = rows_of(rng, episodes)
        minibatches = np.array_split(rng.permutation(len(episodes)), MINIBATCHES)
        grouping = Grouping(MICRO_BATCH, 1, -(-len(episodes) // MINIBATCHES), "xla")
        for pieces in split_rows(minibatches, rows, grouping).pieces:
            for piece in pieces:
                found.shapes["update", piece.sizes] += 1
    return found.shapes


@pytest.mark.slow
@pytest.mark.parametrize("ends, most", [(0.1, 41), (0.3, 45)])
def test_two_hundred_steps_of_the_lock_step_meet_no_more_programs(monkeypatch, ends, most):
    programs = met(monkeypatch, ends)
    # benchmarks/NOTES.md has the saving and the cost of a grid with half as many lengths.
    assert set(programs) == {"prefill", "extend", "decode", "update"}
    assert sum(programs.values()) <= most, programs
    assert programs["update"] <= 12


@pytest.mark.slow
@pytest.mark.parametrize("served", [{"chunk": 50}, {"slots": 64}])
@pytest.mark.parametrize("ends", [0.0, 0.1, 0.3])
def test_two_hundred_steps_of_slots_meet_few_programs(monkeypatch, served, ends):
    programs = met(monkeypatch, ends, **served)
    assert set(programs) == {"read", "fold", "decode_chunk", "update"}
    updates = programs.pop("update")
    assert updates <= 12 and sum(programs.values()) <= 16, (updates, programs)
    assert updates + sum(programs.values()) <= 28


def test_all_programs_of_slots_are_known_before(monkeypatch):
    config = ModelConfig(
        vocab_size=9, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_width=8
    )
    model = Qwen(config)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    sizes = pages.cache_sizes(
        slots=96, chunk=0, episodes=128, prompt=PROMPT[1], max_new_tokens=TOKENS, compact=True
    )
    lengths = expected.ProgramLengths(
        prompts=tuple(PROMPT[1] + turn * (TOKENS + OBSERVATION[1]) for turn in range(TURNS)),
        news=(1, *OBSERVATION),  # with unchanged rules, little may differ
    )
    listed = expected.expected_programs(
        *(model, params, sizes, lengths),
        max_new_tokens=TOKENS,
        sampling=Sampling(1.0),
        stop_ids=(STOP,),
    )

    def page(kv):
        leaf = jax.tree.leaves(kv)[0]
        return leaf.shape[-4], leaf.shape[-2]

    found = set()
    for program in listed:
        name, args = program.function.__name__, program.args
        if name == "fold":
            found.add((name, page(args[0]), page(args[1]), args[-1].shape[0]))
        elif name == "read":
            found.add((name, tuple(map(page, args[2])), args[-1].shape))
        elif name == "decode_chunk":
            rows, chunk = args[3].token_B.shape[0], program.keywords["settings"].max_tokens
            found.add((name, tuple(map(page, args[2])), rows, chunk))
    met_in = met_shapes(monkeypatch, 0.1, steps=3, slots=96)
    assert {shape for shape in met_in if shape[0] != "update"} <= found
    assert listed[-1].lower().out_info is not None  # each can be compiled from its entry
