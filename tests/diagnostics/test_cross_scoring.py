"""Shared-prompt scoring against a forward pass for every pair."""

import jax
import numpy as np
import pytest
from layer_kinds import hybrid, mixture, windowed

from ragen_jax.diagnostics import cross_scoring
from ragen_jax.diagnostics.cross_scoring import (
    ScoredReply,
    blocks,
    cross_score,
    cross_score_actions,
    cross_score_pairs,
)
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

V = 50


@pytest.fixture(
    scope="module",
    params=[
        *((2, {}), (5, {}), (3, windowed(3)), (5, windowed(5, window=40)), (2, mixture(2))),
        pytest.param((2, hybrid(2, every=2)), marks=pytest.mark.medium),
    ],
    ids=["unrolled", "scanned", "windowed", "windowed-scanned", "experts", "hybrid"],
)
def policy(request):
    layers, kinds = request.param
    config = ModelConfig(
        vocab_size=V,
        width=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=48,
        **kinds,
    )
    params = jax.tree.map(lambda x: 2.0 * x, init_params(config, jax.random.key(0)))
    return Qwen(config), params


def ids(rng, rows, low, high):
    return [rng.integers(0, V, rng.integers(low, high)).tolist() for _ in range(rows)]


@pytest.mark.parametrize("micro_batch", [1, 6, 512])
def test_shared_prompts_equal_naive_pairs(policy, micro_batch):
    rng = np.random.default_rng(0)
    prompts = ids(rng, 5, 3, 40)
    prompts[3] = prompts[1]  # a duplicate prompt
    reasonings = ids(rng, 7, 1, 20)
    score, length = cross_score(*policy, prompts, reasonings, micro_batch=micro_batch)
    naive, naive_length = cross_score_pairs(*policy, prompts, reasonings, micro_batch=16)
    assert score.shape == (7, 5)
    assert length.tolist() == naive_length.tolist() == [len(z) for z in reasonings]
    np.testing.assert_allclose(score / length[:, None], naive / length[:, None], atol=3e-5)
    assert np.array_equal(score[:, 3], score[:, 1])


@pytest.mark.parametrize("common, shared", [(40, 0), (70, 64), (200, 192)])
def test_a_common_start_is_read_once(policy, monkeypatch, common, shared):
    rng = np.random.default_rng(3)
    start = rng.integers(0, V, common).tolist()
    # Two prompts are the start and one token; the others diverge right after the start.
    prompts = [start + [t] for t in (1, 2)] + [start + row for row in ids(rng, 3, 5, 40)]
    reasonings = ids(rng, 4, 1, 20)
    read = []
    inner = cross_scoring.read_prompts

    def reading(model, params, tokens, length, prefix=None):
        read.append(length.tolist())
        return inner(model, params, tokens, length, prefix)

    monkeypatch.setattr(cross_scoring, "read_prompts", reading)
    score, length = cross_score(*policy, prompts, reasonings, micro_batch=64)
    naive, _ = cross_score_pairs(*policy, prompts, reasonings, micro_batch=20)
    np.testing.assert_allclose(score / length[:, None], naive / length[:, None], atol=3e-5)
    own = [len(prompt) - shared for prompt in prompts]
    assert read == ([[shared]] if shared else []) + [own + own[:1] * 3]
    # The length of the shared prefix; 0 for a single prompt.
    assert cross_scoring._common_prefix_length([tuple(prompt) for prompt in prompts]) == shared
    assert cross_scoring._common_prefix_length([tuple(prompts[0])]) == 0


@pytest.mark.parametrize("actions", [False, True])
def test_what_stands_twice_is_scored_once(policy, monkeypatch, actions):
    """Equal reasonings share a row; with actions, equal pairs of a reasoning and an action do."""
    rng = np.random.default_rng(6)
    prompts, kinds, other = ids(rng, 3, 3, 40), ids(rng, 4, 3, 20), ids(rng, 1, 3, 20)[0]
    which = [0, 1, 0, 2, 3, 1, 0, 2]
    scored = []
    inner = cross_scoring.score_block

    def scoring(model, params, segment, last, tokens, *spans):
        scored.append(tokens.shape)
        return inner(model, params, segment, last, tokens, *spans)

    monkeypatch.setattr(cross_scoring, "score_block", scoring)
    if actions:
        # A reasoning ends in its action; the last three replies have a shorter action.
        spoken = [
            ScoredReply(np.array(kinds[k]), 1, 2 if i < 5 else 1) for i, k in enumerate(which)
        ]
        swaps = [(0, 2), (1, 2), (0, 2), (0, 1)]  # (prompt, tokens of the action)
        swapped = [(n, ScoredReply(np.array(other), 0, most)) for n, most in swaps]
        score, action, swap = cross_score_actions(*policy, prompts, spoken, swapped, micro_batch=8)
        groups, rows = [(0, 2), (1,), (3,), (4,), (5,), (6,), (7,)], 7
        assert np.array_equal(action[0], action[2]) and (action[0] != action[6]).all()
        assert swap[0] == swap[2] and len(set(swap.tolist())) == 3
        assert len(scored) == rows + 2  # two swapped rows of prompt 0 and one of prompt 1
    else:
        score, _ = cross_score(*policy, prompts, [kinds[k] for k in which], micro_batch=8)
        groups, rows = [(0, 2, 6), (1, 5), (3, 7), (4,)], 4
        assert len(scored) == rows  # micro_batch holds the three prompts with one reasoning
    for group in groups:
        assert (score[list(group)] == score[group[0]]).all()
    naive, _ = cross_score_pairs(
        *policy, prompts, [kinds[k][:1] if actions else kinds[k] for k in which], micro_batch=24
    )
    np.testing.assert_allclose(score, naive, atol=1e-4)


def test_actions_ride_along(policy):
    """Reasonings, actions under every prompt, and actions after other reasonings."""
    rng = np.random.default_rng(4)
    prompts, reasonings, tags, actions = (
        ids(rng, *sizes) for sizes in ((3, 70, 90), (5, 1, 9), (5, 2, 4), (5, 1, 4))
    )
    prompts = [prompts[0][:66] + prompt[66:] for prompt in prompts]  # read after a common start
    actions[2] = []
    spoken = [
        ScoredReply(np.array(z + (tag + a if a else [])), len(z), len(a))
        for z, tag, a in zip(reasonings, tags, actions, strict=True)
    ]
    swaps = [(2, 0, 1), (0, 0, 3), (2, 4, 0), (2, 4, 1), (2, 1, 4)]  # (prompt, action, reasoning)
    swapped = [
        (n, ScoredReply(np.array(reasonings[z] + tags[m] + actions[m]), 0, len(actions[m])))
        for n, m, z in swaps
    ]
    found = cross_score_actions(*policy, prompts, spoken, swapped, micro_batch=32)
    score, action, swap = found
    alone, _ = cross_score(*policy, prompts, reasonings, micro_batch=32)
    np.testing.assert_allclose(score, alone, atol=1e-4)

    def naive(n, m, z):
        before = prompts[n] + reasonings[z] + tags[m]
        logps, _ = cross_score_pairs(*policy, [before], [actions[m]], micro_batch=1)
        return logps[0, 0]

    expected = [[naive(n, m, m) if actions[m] else 0 for n in range(3)] for m in range(5)]
    np.testing.assert_allclose(action, expected, atol=1e-4)
    np.testing.assert_allclose(swap, [naive(*which) for which in swaps], atol=1e-4)


def test_blocks_fill_the_call_and_divide_over_the_mesh():
    assert blocks(8, 64, 512) == (8, 64)  # the first turns of the tiny agent: one call
    assert blocks(16, 16, 512) == (16, 16)
    assert blocks(64, 64, 64) == (8, 8)
    # A prompt for each part of the mesh, even if there are more parts than rows.
    assert blocks(64, 64, 64, shards=128) == (128, 1) and blocks(64, 64, 2, shards=4) == (4, 1)
    assert blocks(64, 64, 64, shards=16) == (16, 4) and blocks(64, 64, 64, shards=3) == (9, 7)
    assert blocks(64, 128, 512) == (8, 64)
    assert blocks(5, 7, 6) == (6, 1) and blocks(3, 3, 1) == (1, 1)


def test_lengths_come_from_few_buckets():
    lengths = {cross_scoring.padded_length(length, 16) for length in range(1, 1025)}
    assert len(lengths) == 16 + 8 + 8  # eight per octave above 256
    assert {cross_scoring.padded_length(n, 16) for n in (1, 16)} == {16}
    spoken = [cross_scoring.padded_reasoning(n) for n in (1, 16, 17, 25, 33, 80, 81)]
    assert spoken == [16, 16, 24, 32, 48, 80, 96]
    assert cross_scoring.padded_length(80, 16) == 80 and cross_scoring.padded_length(900, 32) == 960
    assert all(
        n <= cross_scoring.padded_length(n, 32) <= max(32, n * 1.13 + 31) for n in range(1, 4096)
    )


def test_at_most_two_calls_are_under_way(policy, monkeypatch):
    """The memory of a step does not grow with the number of calls."""
    under_way, most = [0], [0]

    class Result:
        def __init__(self):
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])

        def __array__(self, dtype=None, copy=None):
            under_way[0] -= 1
            return np.zeros((1, 2, 8), np.float32)

    monkeypatch.setattr(cross_scoring, "score_block", lambda *args, **kwargs: Result())
    cross_score(*policy, [[1], [2]], [[i] for i in range(12)], micro_batch=16)
    assert under_way[0] == 0 and most[0] == 2


def test_score_is_the_sum_of_token_logps(policy):
    prompt, reasoning = [3, 1, 4, 1, 5], [9, 2, 6]
    score, _ = cross_score(*policy, [prompt], [reasoning], micro_batch=8)
    logps = token_logps(*policy, np.array([prompt + reasoning]))
    np.testing.assert_allclose(score[0, 0], logps[0, 5:].sum(), atol=1e-5)


def test_row_order_does_not_matter(policy):
    rng = np.random.default_rng(1)
    prompts, reasonings = ids(rng, 6, 3, 20), ids(rng, 9, 1, 20)
    score, _ = cross_score(*policy, prompts, reasonings, micro_batch=64)
    turned, _ = cross_score(*policy, prompts[::-1], reasonings[::-1], micro_batch=64)
    np.testing.assert_allclose(turned[::-1, ::-1], score, atol=1e-4)


@pytest.mark.parametrize(
    "prompts, reasonings, message",
    [([], [[1]], "0 and 1"), ([[1]], [], "1 and 0"), ([[1], []], [[1]], "prompt 1 is empty")],
)
def test_nothing_to_score_is_refused(policy, prompts, reasonings, message):
    with pytest.raises(ValueError, match=message):
        cross_score(*policy, prompts, reasonings, micro_batch=4)
