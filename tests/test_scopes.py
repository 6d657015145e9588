"""diagnostics/scopes.py: which reasonings are scored under which prompts."""

import collections
import dataclasses

import numpy as np
import pytest
from numpy.random import default_rng as fresh

from ragen_jax.diagnostics import scopes
from ragen_jax.diagnostics.intervals import confidence_intervals, retrieval_p
from ragen_jax.diagnostics.scopes import (
    collapse_metrics,
    first_turns,
    reasoning_ids,
    trajectory_turns,
)
from ragen_jax.randomness import Purpose, generator

G, K, TURNS = 5, 4, 3
FIGURES = ("mi", "mi_seq", "h_cond", "h_cond_seq", "h_marginal", "h_marginal_seq", "retrieval_acc")


@pytest.fixture
def episodes(make_turn, make_episode):
    """G * K episodes; a reasoning's first id tells group, member and turn: 100 g + 10 k + t."""
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
    """(group, member, turn) of each turn, by its reasoning."""
    first = [int(reasoning_ids(turn)[0]) for turn in turns]
    return [(z // 100, z // 10 % 10, z % 10) for z in first]


def without_reasoning(episode, turns=range(TURNS)):
    """The episode with some turns' reasonings unclosed."""
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
    prompts, turns, prompt_M = first_turns(episodes, samples=7)
    assert [prompt.tolist() for prompt in prompts] == [[g, 0] for g in range(G)]
    assert named(turns) == [*((g, 0, 0) for g in range(G)), (0, 1, 0), (1, 1, 0)]
    assert prompt_M.tolist() == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize("samples", [1, 4, 5, 12, 20, 64])
def test_first_turns_are_spread_evenly_and_at_most_samples(episodes, samples):
    prompts, turns, prompt_M = first_turns(episodes, samples=samples)
    assert len(prompts) == G
    assert len(turns) == len(prompt_M) == min(samples, G * K)
    counts = np.bincount(prompt_M, minlength=G)
    assert counts.max() - counts.min() <= 1
    for (g, _, _), n in zip(named(turns), prompt_M, strict=True):
        assert prompts[n][0] == g  # the prompt that it was sampled under


def test_first_turns_skip_empty_reasonings_but_keep_their_prompts(episodes):
    episodes[0] = without_reasoning(episodes[0])  # group 0, member 0
    for k in range(K):
        episodes[2 * K + k] = without_reasoning(episodes[2 * K + k])  # all of group 2
    prompts, turns, prompt_M = first_turns(episodes, samples=6)
    assert len(prompts) == G
    assert named(turns) == [
        *((1, 0, 0), (3, 0, 0), (4, 0, 0)),
        *((0, 1, 0), (1, 1, 0), (3, 1, 0)),
    ]
    assert prompt_M.tolist() == [1, 3, 4, 0, 1, 3]


# ---- trajectory ---------------------------------------------------------------------------------


def test_trajectory_turns_come_with_their_own_prompts(episodes):
    prompts, turns, prompt_M = trajectory_turns(episodes, samples=12, rng=fresh([1, 2]))
    assert len(prompts) == len(turns) == 12
    np.testing.assert_array_equal(prompt_M, np.arange(12))
    for prompt, (g, k, t) in zip(prompts, named(turns), strict=True):
        assert prompt.tolist() == [g, t, *([k] if t else [])]


@pytest.mark.parametrize("samples", [3, 5, 7, 10, 20, 64])
def test_trajectory_turns_draw_episodes_without_replacement_over_groups(episodes, samples):
    for step in range(10):
        _, turns, _ = trajectory_turns(episodes, samples=samples, rng=fresh([0, step]))
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
        options = dict(first_turn_samples=8, trajectory_samples=10, micro_batch=4)
        collapse_metrics(None, None, episodes, **options, **words)
        return drawn[-1]  # the trajectory scope comes last

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
        _, turns, _ = trajectory_turns(episodes, samples=G, rng=fresh([0, step]))
        counts.update(named(turns))
    # 3000 draws over 60 turns: 50 each, standard deviation 7.
    assert len(counts) == G * K * TURNS
    assert min(counts.values()) > 50 - 5 * 7 and max(counts.values()) < 50 + 5 * 7


def test_trajectory_turns_skip_empty_reasonings(episodes):
    lame = [without_reasoning(episode, turns=(0, 1)) for episode in episodes]
    _, turns, prompt_M = trajectory_turns(lame, samples=20, rng=fresh([0, 0]))
    assert 0 < len(turns) < 20
    assert {t for _, _, t in named(turns)} == {2}
    np.testing.assert_array_equal(prompt_M, np.arange(len(turns)))
    mute = [without_reasoning(episode) for episode in episodes]
    prompts, turns, prompt_M = trajectory_turns(mute, samples=20, rng=fresh([0, 0]))
    assert prompts == turns == [] and len(prompt_M) == 0


# ---- metrics ------------------------------------------------------------------------------------


def test_collapse_metrics_names_scopes_and_tells_equal_prompts(episodes, monkeypatch):
    seen = {}

    def cross_score(model, params, prompts, reasonings, *, micro_batch):
        return np.zeros((len(reasonings), len(prompts))), np.ones(len(reasonings))

    def information_metrics(score_MN, length_M, prompt_M, *, prompt_id_N):
        seen[len(seen)] = prompt_id_N.tolist()
        return {"mi": float(len(seen))}

    monkeypatch.setattr(scopes, "cross_score", cross_score)
    monkeypatch.setattr(scopes, "information_metrics", information_metrics)
    options = dict(first_turn_samples=8, trajectory_samples=20, micro_batch=4, seed=0, step=0)
    metrics = collapse_metrics(None, None, episodes, **options)
    assert metrics.keys() == {
        f"collapse/{scope}/{name}"
        for scope in ("first_turn", "trajectory")
        for name in ("mi", "retrieval_p", *(f"{figure}_ci95" for figure in FIGURES))
    }
    assert metrics["collapse/first_turn/mi"] == 1.0 and metrics["collapse/trajectory/mi"] == 2.0
    assert seen[0] == list(range(G))
    # First turns of a group show the same prompt: their columns have one id, all others their own.
    prompts, _, _ = trajectory_turns(episodes, samples=20, rng=generator(Purpose.TRAJECTORY, 0, 0))
    distinct = {tuple(prompt.tolist()) for prompt in prompts}
    assert len(distinct) < 20
    assert len(set(seen[1])) == len(distinct)
    assert len({(tuple(p.tolist()), i) for p, i in zip(prompts, seen[1], strict=True)}) == len(
        distinct
    )

    mute = [without_reasoning(episode) for episode in episodes]
    assert collapse_metrics(None, None, mute, **options) == {}
    # One group has one first prompt: nothing to tell it from.
    metrics = collapse_metrics(None, None, episodes[:K], **options)
    assert {name.split("/")[1] for name in metrics} == {"trajectory"}


def test_intervals_and_p_values_are_of_the_scopes_own_scores(episodes, monkeypatch):
    def cross_score(model, params, prompts, reasonings, *, micro_batch):
        rng = np.random.default_rng(len(reasonings))
        prompt_of = {tuple(prompt): rng.normal() for prompt in map(np.ndarray.tolist, prompts)}
        score_N = [prompt_of[tuple(prompt.tolist())] for prompt in prompts]
        return rng.normal(size=(len(reasonings), 1)) * score_N, np.full(len(reasonings), 2)

    monkeypatch.setattr(scopes, "cross_score", cross_score)
    options = dict(first_turn_samples=8, trajectory_samples=20, micro_batch=4, seed=3, step=7)
    metrics = collapse_metrics(None, None, episodes, **options)
    for index, (scope, (prompts, reasonings, prompt_M)) in enumerate(
        {
            "first_turn": first_turns(episodes, samples=8),
            "trajectory": trajectory_turns(
                episodes, samples=20, rng=generator(Purpose.TRAJECTORY, 3, 7)
            ),
        }.items()
    ):
        scores = cross_score(None, None, prompts, reasonings, micro_batch=4)
        ids = [str(prompt) for prompt in prompts]
        want = confidence_intervals(*scores, prompt_M, prompt_id_N=ids)
        permutations = generator(Purpose.PERMUTATIONS, 3, 7, 0, index)
        want["retrieval_p"] = retrieval_p(scores[0], prompt_M, prompt_id_N=ids, rng=permutations)
        assert want["mi_ci95"] > 0 and want["retrieval_p"] < 1
        for name, value in want.items():
            assert metrics[f"collapse/{scope}/{name}"] == pytest.approx(value, rel=1e-9)
