"""Shared-prompt scoring against a forward pass for every pair."""

import jax
import numpy as np
import pytest

from ragen_jax.diagnostics.cross_scoring import cross_score, cross_score_pairs
from ragen_jax.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

V = 50


@pytest.fixture(scope="module", params=[2, 5], ids=["unrolled", "scanned"])
def policy(request):
    config = ModelConfig(
        vocab_size=V,
        width=32,
        layers=request.param,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=48,
    )
    params = jax.tree.map(lambda x: 2.0 * x, init_params(config, jax.random.key(0)))
    return Qwen(config), params


def ids(rng, rows, low, high):
    return [rng.integers(0, V, rng.integers(low, high)).tolist() for _ in range(rows)]


@pytest.mark.parametrize("micro_batch", [1, 6, 512])
def test_shared_prompts_equal_naive_pairs(policy, micro_batch):
    rng = np.random.default_rng(0)
    prompts = ids(rng, 5, 3, 40)
    prompts[3] = prompts[1]  # a prompt that stands twice
    reasonings = ids(rng, 7, 1, 20)
    score, length = cross_score(*policy, prompts, reasonings, micro_batch=micro_batch)
    naive, naive_length = cross_score_pairs(*policy, prompts, reasonings, micro_batch=16)
    assert score.shape == (7, 5)
    assert length.tolist() == naive_length.tolist() == [len(z) for z in reasonings]
    np.testing.assert_allclose(score / length[:, None], naive / length[:, None], atol=1e-5)
    assert np.array_equal(score[:, 3], score[:, 1])


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
