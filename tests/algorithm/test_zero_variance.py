"""zero_variance.py: RL-ZVP's advantages and virtual rewards, by hand and against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm.advantage import group_relative
from ragen_jax.algorithm.zero_variance import (
    virtual_reward_advantage,
    zero_variance_advantage,
    zero_variance_signs,
)

pytestmark = pytest.mark.fast


@pytest.mark.medium
def test_signs_by_hand():
    return_GK = np.array(
        [[1.0, 1.0], [0.0, 0.0], [-0.3, -0.3], [0.0, 1.0], [2.0, 2.0], [1.0, 1.1], [5.0, 5.0]]
    )
    success_GK = np.array([[1, 1], [0, 0], [0, 0], [0, 1], [0, 1], [1, 1], [0, 0]], bool)
    # Solved; failed twice (the second time with penalties); both kinds of member; equal returns,
    # but only one member solved it; different returns; failed with a positive return.
    expected = [1, -1, -1, 0, 0, 0, -1]
    found = zero_variance_signs(return_GK, success_GK)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(zero_variance_signs)(return_GK, success_GK), expected)


def test_advantages_by_hand():
    entropy_BT = [[9.0, 0.5, 2.0, np.nan], [9.0, 0.5, 2.0, 1.5], [9.0, 0.5, 2.0, 1.5]]
    mask_BT = [[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 1, 1]]
    found = zero_variance_advantage(
        np.array(entropy_BT), np.array(mask_BT), np.array([1.0, -1.0, 0.0]), coef=0.1
    )
    # Solved: 0.1 * H. Failed: -0.1 * (2 - H), which is 0 at the least certain token. 9 is outside
    # the mask.
    expected = [[0, 0.05, 0.2, 0], [0, -0.15, 0, -0.05], [0, 0, 0, 0]]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-7)


def test_agrees_with_numpy():
    rng = np.random.default_rng(0)
    B, T = 6, 9
    for _ in range(20):
        entropy_BT = rng.gamma(1.0, 1.0, (B, T)).astype(np.float32)
        mask_BT = rng.integers(0, 2, (B, T))
        sign_B = rng.integers(-1, 2, B)
        expected = np.zeros((B, T))
        for b in range(B):
            inside = np.flatnonzero(mask_BT[b])
            for t in inside:
                if sign_B[b] == 1:
                    expected[b, t] = 0.2 * entropy_BT[b, t]
                if sign_B[b] == -1:
                    expected[b, t] = -0.2 * (entropy_BT[b, inside].max() - entropy_BT[b, t])
        found = jax.jit(zero_variance_advantage, static_argnames="coef")(
            entropy_BT, mask_BT, sign_B.astype(np.float32), coef=0.2
        )
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_row_without_sampled_tokens_has_no_advantage():
    zeros = np.zeros((2, 3))
    found = zero_variance_advantage(zeros + 1.0, zeros, np.array([1.0, -1.0]), coef=1.0)
    np.testing.assert_array_equal(found, zeros)


@pytest.mark.parametrize("virtual", [1, 2, 5])
def test_virtual_rewards_are_those_of_a_larger_group(virtual):
    """The advantages are GRPO's in a group to which failures, or successes, were added."""
    solved_K, failed_K = np.full(4, 3.0), np.zeros(4)
    return_GK = np.array([solved_K, failed_K, [0.0, 3.0, 3.0, 0.0]])
    found = virtual_reward_advantage(return_GK, np.array([1.0, -1.0, 0.0]), virtual=virtual)
    joined = [np.r_[solved_K, np.zeros(virtual)], np.r_[failed_K, np.full(virtual, 3.0)]]
    expected = group_relative(np.array(joined))[:, :4]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[:2], expected, atol=1e-5)
    assert not np.any(found[2])
    if virtual == 1:
        np.testing.assert_allclose(found[0], 1 / np.sqrt(5), atol=1e-6)


def test_virtual_rewards_ignore_broken_episodes():
    sound_GK = np.array([[True, True, False, True]])
    found = virtual_reward_advantage(np.ones((1, 4)), np.ones(1), virtual=1, sound_GK=sound_GK)
    np.testing.assert_allclose(found, [[0.5, 0.5, 0.0, 0.5]], atol=1e-6)  # K = 3
