"""diagnostics/scopes.py: which reasonings are scored under which prompts."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
from numpy.random import default_rng as fresh

from ragen_jax.config.build_environment import build_chat
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.diagnostics import scopes
from ragen_jax.diagnostics.cross_scoring import cross_score_pairs
from ragen_jax.diagnostics.information import information_metrics, within_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, log_margin
from ragen_jax.diagnostics.permutation import retrieval_p
from ragen_jax.diagnostics.scopes import (
    ScopeKey,
    ScopeSizes,
    collapse_metrics,
    first_turns,
    reasoning_ids,
    trajectory_turns,
)
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.play import rollout

G, K, TURNS = 5, 4, 3
FIGURES = (
    "mi",
    "mi_seq",
    "mi_released",
    "own_margin",
    "h_cond",
    "h_cond_seq",
    "h_marginal",
    "h_marginal_seq",
)
FIGURES = (*FIGURES, "retrieval_acc")


@pytest.fixture
def episodes(make_turn, make_episode):
    """G * K episodes; a reasoning's first id encodes group, member and turn: 100 g + 10 k + t."""
    return [
        make_episode(
            g,
            k,
            [
                make_turn([g, t, *([k] if t else [])], [100 * g + 10 * k + t, 7], reasoning=(0, 1))
                for t in range(TURNS)
            ],
        )
        for g in range(G)
        for k in range(K)
    ]


def named(turns):
    """(group, member, turn) of each turn, read from its reasoning."""
    first = [int(reasoning_ids(turn)[0]) for turn in turns]
    return [(z // 100, z // 10 % 10, z % 10) for z in first]


def without_reasoning(episode, turns=range(TURNS)):
    """The episode with unclosed reasonings in the given turns."""
    changed = [
        dataclasses.replace(turn, reasoning=(0, 0)) if t in turns else turn
        for t, turn in enumerate(episode.turns)
    ]
    return dataclasses.replace(episode, turns=tuple(changed))


def test_reasoning_ids_by_hand(make_turn):
    turn = make_turn([1], [5, 6, 7, 8], reasoning=(1, 3))
    assert reasoning_ids(turn).tolist() == [6, 7]
    assert len(reasoning_ids(make_turn([1], [5, 6]))) == 0


# ---- first turn ---------------------------------------------------------------------------------


def test_first_turns_take_every_member_before_the_next(episodes):
    sample = first_turns(episodes, samples=7)
    prompts, turns, prompt_M = sample.prompts, sample.turns, sample.prompt_M
    assert sample.group_N.tolist() == list(range(G)) and sample.before_N == [()] * G
    assert [prompt.tolist() for prompt in prompts] == [[g, 0] for g in range(G)]
    assert named(turns) == [*((g, 0, 0) for g in range(G)), (0, 1, 0), (1, 1, 0)]
    assert prompt_M.tolist() == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("samples", [1, 4, 5, 12, 20, 64])
def test_first_turns_are_spread_evenly_and_at_most_samples(episodes, samples):
    sample = first_turns(episodes, samples=samples)
    prompts, turns, prompt_M = sample.prompts, sample.turns, sample.prompt_M
    assert len(prompts) == G
    assert len(turns) == len(prompt_M) == min(samples, G * K)
    counts = np.bincount(prompt_M, minlength=G)
    assert counts.max() - counts.min() <= 1
    for (g, _, _), n in zip(named(turns), prompt_M, strict=True):
        assert prompts[n][0] == g  # the prompt that it was sampled from


def test_first_turns_skip_empty_reasonings_but_keep_their_prompts(episodes):
    episodes[0] = without_reasoning(episodes[0])  # group 0, member 0
    for k in range(K):
        episodes[2 * K + k] = without_reasoning(episodes[2 * K + k])  # all of group 2
    sample = first_turns(episodes, samples=6)
    prompts, turns, prompt_M = sample.prompts, sample.turns, sample.prompt_M
    assert len(prompts) == G
    assert named(turns) == [
        *((1, 0, 0), (3, 0, 0), (4, 0, 0)),
        *((0, 1, 0), (1, 1, 0), (3, 1, 0)),
    ]
    assert prompt_M.tolist() == [1, 3, 4, 0, 1, 3]


# ---- trajectory ---------------------------------------------------------------------------------


def test_trajectory_turns_come_with_their_own_prompts(episodes):
    sample = trajectory_turns(episodes, samples=12, rng=fresh([1, 2]))
    assert len(sample.prompts) == len(sample.turns) == 12
    np.testing.assert_array_equal(sample.prompt_M, np.arange(12))
    names = named(sample.turns)
    for prompt, (g, k, t) in zip(sample.prompts, names, strict=True):
        assert prompt.tolist() == [g, t, *([k] if t else [])]
    assert sample.group_N.tolist() == [g for g, _, _ in names]
    for before, (g, k, t) in zip(sample.before_N, names, strict=True):
        assert named(before) == [(g, k, earlier) for earlier in range(t)]


@pytest.mark.parametrize("samples", [3, 5, 7, 10, 20, 64])
def test_trajectory_turns_draw_episodes_without_replacement_over_groups(episodes, samples):
    for step in range(10):
        turns = trajectory_turns(episodes, samples=samples, rng=fresh([0, step])).turns
        drawn = [name[:2] for name in named(turns)]
        assert len(drawn) == len(set(drawn)) == min(samples, G * K)
        counts = np.bincount([g for g, _ in drawn], minlength=G)
        assert counts.max() - counts.min() <= 1


def test_draws_depend_on_seed_step_and_environment_alone(episodes, monkeypatch):
    drawn = []

    def cross_score(model, params, prompts, reasonings, *, micro_batch):
        drawn.append(tuple(tuple(prompt.tolist()) for prompt in prompts))
        return np.zeros((len(reasonings), len(prompts))), np.ones(len(reasonings))

    monkeypatch.setattr(scopes, "cross_score", cross_score)

    def draw(**words):
        sizes = ScopeSizes(first_turn_samples=8, trajectory_samples=10, micro_batch=4)
        collapse_metrics(None, None, episodes, sizes, ScopeKey(**words))
        return drawn[-1]  # the trajectory scope is scored last

    words = [
        dict(seed=seed, step=step, environment=environment)
        for seed in (0, 3, 2**29 - 1)
        for step in (1, 2)
        for environment in (0, 1)
    ]
    assert [draw(**one) for one in words] == [draw(**one) for one in words]
    assert len({draw(**one) for one in words}) == len(words)


def test_members_and_turns_are_drawn_uniformly(episodes):
    counts = collections.Counter()
    for step in range(600):
        sample = trajectory_turns(episodes, samples=G, rng=fresh([0, step]))
        counts.update(named(sample.turns))
    # 3000 draws over 60 turns: 50 each, standard deviation 7.
    assert len(counts) == G * K * TURNS
    assert min(counts.values()) > 50 - 5 * 7 and max(counts.values()) < 50 + 5 * 7


def test_trajectory_turns_skip_empty_reasonings(episodes):
    lame = [without_reasoning(episode, turns=(0, 1)) for episode in episodes]
    sample = trajectory_turns(lame, samples=20, rng=fresh([0, 0]))
    assert 0 < len(sample.turns) < 20
    assert {t for _, _, t in named(sample.turns)} == {2}
    np.testing.assert_array_equal(sample.prompt_M, np.arange(len(sample.turns)))
    assert len(sample.group_N) == len(sample.before_N) == len(sample.turns)
    mute = [without_reasoning(episode) for episode in episodes]
    sample = trajectory_turns(mute, samples=20, rng=fresh([0, 0]))
    assert sample.prompts == sample.turns == [] and len(sample.prompt_M) == 0


# ---- metrics ------------------------------------------------------------------------------------

SIZES = ScopeSizes(first_turn_samples=8, trajectory_samples=20, micro_batch=4)


def random_scores(model, params, prompts, reasonings, *, micro_batch):
    """Finite scores, equal for equal prompts."""
    rng = np.random.default_rng(len(reasonings))
    prompt_of = {tuple(prompt): rng.normal() for prompt in map(np.ndarray.tolist, prompts)}
    score_N = [prompt_of[tuple(prompt.tolist())] for prompt in prompts]
    return rng.normal(size=(len(reasonings), 1)) * score_N, np.full(len(reasonings), 2)


class BareChat:
    """Removes the last id of a prompt that shows an earlier turn."""

    def without_reasoning(self, turns, message, prompt, spans):
        assert all(len(reasoning_ids(turn)) for turn in turns)
        return prompt[:-1] if turns else prompt


def figures_of(scope, scores, sample, ids, index, **case):
    """collapse/<scope>/*, computed by hand."""
    score_MN, length_M = scores
    case = dict(prompt_id_N=ids, **case)
    part_N = case.get("part_N")
    if part_N is None:
        found = information_metrics(score_MN, length_M, sample.prompt_M, prompt_id_N=ids)
        found |= log_margin(score_MN, sample.prompt_M, prompt_id_N=ids, group_N=sample.group_N)
    else:
        found = within_metrics(score_MN, length_M, sample.prompt_M, part_N, prompt_id_N=ids)
    intervals = confidence_intervals(
        score_MN, length_M, sample.prompt_M, **case | dict(group_N=sample.group_N)
    )
    rng = generator(Purpose.PERMUTATIONS, 3, 7, 0, index)
    p = retrieval_p(score_MN, sample.prompt_M, rng=rng, **case)
    assert len(intervals) == len(FIGURES) and 0 < p < 1
    found |= intervals | {"retrieval_p": p}
    return {f"collapse/{scope}/{name}": value for name, value in found.items()}


def test_figures_are_of_the_scopes_own_scores_prompts_groups_and_depths(episodes, monkeypatch):
    monkeypatch.setattr(scopes, "cross_score", random_scores)
    got = collapse_metrics(None, None, episodes, SIZES, ScopeKey(3, 7), chat=BareChat())
    first = first_turns(episodes, samples=8)
    later = trajectory_turns(episodes, samples=20, rng=generator(Purpose.TRAJECTORY, 3, 7))
    depth_N = [t for _, _, t in named(later.turns)]
    assert len(set(depth_N)) == TURNS
    bare = [p[:-1] if t else p for p, t in zip(later.prompts, depth_N, strict=True)]
    by_room = dict(group_N=later.group_N)
    within = by_room | dict(part_N=np.array(depth_N))
    want = {}
    for index, (scope, sample, shown, case) in enumerate(
        [
            ("first_turn", first, first.prompts, {}),
            ("trajectory", later, later.prompts, by_room),
            ("trajectory_within_depth", later, later.prompts, within),
            ("trajectory_stripped", later, bare, by_room),
            ("trajectory_stripped_within_depth", later, bare, within),
        ]
    ):
        reasonings = [reasoning_ids(turn) for turn in sample.turns]
        scores = random_scores(None, None, shown, reasonings, micro_batch=4)
        ids = [str(prompt) for prompt in shown]
        want |= figures_of(scope, scores, sample, ids, index, **case)
    assert got == pytest.approx(want, rel=1e-9)
    # First turns of a group show the same prompt, and so do its later turns after stripping.
    prompts = [tuple(prompt.tolist()) for prompt in later.prompts]
    assert len(set(prompts)) < 20 and len({p[:2] for p in prompts}) < len(set(prompts))


def test_which_forms_there_are(episodes, monkeypatch):
    calls = []

    def counted(*args, **keywords):
        calls.append(args)
        return random_scores(*args, **keywords)

    monkeypatch.setattr(scopes, "cross_score", counted)

    def forms(episodes, **options):
        calls.clear()
        found = collapse_metrics(None, None, episodes, SIZES, ScopeKey(0, 0), **options)
        return {name.split("/")[1] for name in found}, len(calls)

    plain = {"first_turn", "trajectory", "trajectory_within_depth"}
    assert forms(episodes) == (plain, 2)
    stripped = {"trajectory_stripped", "trajectory_stripped_within_depth"}
    assert forms(episodes, chat=BareChat()) == (plain | stripped, 3)

    class NoHistory:  # like single turns, whose prompts show no earlier reply
        def without_reasoning(self, turns, message, prompt, spans):
            return prompt

    assert forms(episodes, chat=NoHistory()) == (plain, 2)
    # One group has one first prompt; single turns show no earlier reply.
    assert "first_turn" in forms(episodes[: 2 * K])[0]
    assert "first_turn" not in forms(episodes[:K])[0]
    single = [dataclasses.replace(episode, turns=episode.turns[:1]) for episode in episodes]
    assert forms(single, chat=BareChat()) == (plain, 2)
    assert forms(single[:K])[0] == {"trajectory"}
    mute = [without_reasoning(episode) for episode in episodes]
    assert forms(mute) == (set(), 0)


@pytest.mark.parametrize(
    "context",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "window")), "single_turn"],
)
def test_forms_of_real_rollouts(agent, context):
    config = agent.config.copy_and_resolve_references()
    config.env.update(context=context, window=2)
    chat = build_chat(config, agent.tokenizer, agent.environment)
    seeds = range(4)
    episodes = rollout(
        agent.model,
        agent.params,
        PlaySettings(
            chat,
            agent.environment,
            budgets=Budgets(max_turns=3, max_actions=6, max_new_tokens=22),
            sampling=Sampling(temperature=1.0),
        ),
        list(seeds),
        [agent.environment.reset(seed) for seed in seeds],
        group_size=4,
        key=jax.random.key(3),
    )
    sizes = ScopeSizes(first_turn_samples=16, trajectory_samples=16, micro_batch=64)
    given = agent.model, agent.params, episodes, sizes, ScopeKey(3, 7)
    found = collapse_metrics(*given, flow=True, chat=chat)
    plain = collapse_metrics(*given)
    forms = {name.split("/")[1] for name in found}
    stripped = {"trajectory_stripped", "trajectory_stripped_within_depth"}
    assert {name.split("/")[1] for name in plain} == forms - stripped
    assert forms & stripped == (set() if context == "single_turn" else stripped)
    # Each depth holds fewer prompts, so its bound is lower.
    bounds = [
        found[f"collapse/{form}/mi_upper_bound"]
        for form in ("trajectory_within_depth", "trajectory")
    ]
    assert bounds[0] < bounds[1]
    if context == "single_turn":
        return

    sample = trajectory_turns(episodes, samples=16, rng=generator(Purpose.TRAJECTORY, 3, 7))
    bare, closed = [], r"<think>[^<]*</think>"
    for before, turn in zip(sample.before_N, sample.turns, strict=True):
        ids = chat.without_reasoning(before, turn.message, turn.prompt)
        bare.append(ids)
        shown = before[-1 if context == "window" else -9 :]
        if any("</think>" not in chat.text(turn.sampled) for turn in shown):
            continue  # the agent, which varies between machines, left a reasoning open
        assert len(ids) == len(turn.prompt) - sum(turn.reasoning[1] for turn in shown)
        text = re.sub(closed, "<think></think>", chat.text(turn.prompt))
        assert chat.text(ids) == text
    assert sum(len(a) < len(b) for a, b in zip(bare, sample.prompts, strict=True)) > 4
    reasonings = [reasoning_ids(turn) for turn in sample.turns]
    scores = cross_score_pairs(agent.model, agent.params, bare, reasonings, micro_batch=16)
    ids = [str(prompt) for prompt in bare]
    want = information_metrics(*scores, sample.prompt_M, prompt_id_N=ids)
    want |= confidence_intervals(*scores, sample.prompt_M, prompt_id_N=ids, group_N=sample.group_N)
    for name, value in want.items():
        got = found[f"collapse/trajectory_stripped/{name}"]
        assert got == pytest.approx(value, rel=2e-3, abs=2e-4), name
    # The agent names the state that it sees. Its replies after an unfamiliar history are arbitrary,
    # so stripped likelihoods are not checked here.
    for form in forms - stripped:
        assert found[f"collapse/{form}/retrieval_acc"] > found[f"collapse/{form}/retrieval_chance"]
