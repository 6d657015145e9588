"""advantage.py against numbers worked out by hand and against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import advantage

# Jitted once: op by op, JAX would compile each operation at each shape.
group_relative = jax.jit(advantage.group_relative, static_argnames=("normalize_by_std", "eps"))
leave_one_out = jax.jit(advantage.leave_one_out)
sample_variance = jax.jit(advantage.sample_variance)
whiten = jax.jit(advantage.whiten)


def test_group_relative_by_hand():
    # 1, 2, 3, 6: mean 3, sample variance (4 + 1 + 0 + 9) / 3 = 14 / 3, std 2.160247
    return_GK = np.array([[1.0, 2.0, 3.0, 6.0]])
    np.testing.assert_allclose(
        group_relative(return_GK), [[-0.925820, -0.462910, 0.0, 1.388730]], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        group_relative(return_GK, normalize_by_std=False), [[-2.0, -1.0, 0.0, 3.0]], atol=1e-6
    )
    # eps enters beside the std: 3 / (2.160247 + 1)
    np.testing.assert_allclose(group_relative(return_GK, eps=1.0)[0, 3], 0.949293, rtol=1e-5)


def test_leave_one_out_by_hand():
    # others of 1: (2 + 3 + 6) / 3 = 11/3; of 2: 10/3; of 3: 3; of 6: 2
    np.testing.assert_allclose(
        leave_one_out(np.array([[1.0, 2.0, 3.0, 6.0]])),
        [[1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0]],
        rtol=1e-6,
        atol=1e-6,
    )


def test_groups_of_one():
    return_GK = np.array([[3.0], [-2.0]])
    np.testing.assert_allclose(group_relative(return_GK), return_GK, rtol=2e-6)  # R / (1 + 1e-6)
    np.testing.assert_array_equal(group_relative(return_GK, normalize_by_std=False), return_GK)
    np.testing.assert_array_equal(leave_one_out(return_GK), return_GK)
    np.testing.assert_array_equal(sample_variance(return_GK), [0.0, 0.0])


def reference_group_relative(return_GK, normalize_by_std):
    rows = []
    for group in return_GK.astype(float):
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        rows.append([(r - mean) / (std + 1e-6) if normalize_by_std else r - mean for r in group])
    return np.array(rows)


def reference_leave_one_out(return_GK):
    rows = []
    for group in return_GK.astype(float):
        row = []
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i]
            row.append(r - sum(others) / len(others))
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize("K", [2, 5, 16])
def test_against_reference(K):
    return_GK = np.random.default_rng(K).normal(2.0, 3.0, size=(6, K)).astype(np.float32)
    for normalize in (True, False):
        got_GK = group_relative(return_GK, normalize_by_std=normalize)
        want_GK = reference_group_relative(return_GK, normalize)
        np.testing.assert_allclose(got_GK, want_GK, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.sum(got_GK, axis=1), 0.0, atol=1e-5)
    got_GK = leave_one_out(return_GK)
    np.testing.assert_allclose(got_GK, reference_leave_one_out(return_GK), rtol=1e-5, atol=1e-5)


def test_vmap_over_environments():
    return_EGK = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    for function in (group_relative, leave_one_out, sample_variance):
        together = jax.vmap(function)(return_EGK)
        for alone, return_GK in zip(together, return_EGK, strict=True):
            np.testing.assert_allclose(function(return_GK), alone, rtol=1e-6, atol=1e-7)


def test_order_shift_and_scale():
    rng = np.random.default_rng(1)
    return_GK = rng.normal(size=(4, 6)).astype(np.float32)
    advantage_GK = np.asarray(group_relative(return_GK))
    order_G, order_K = rng.permutation(4), rng.permutation(6)
    np.testing.assert_allclose(
        group_relative(return_GK[order_G][:, order_K]),
        advantage_GK[order_G][:, order_K],
        rtol=1e-5,
        atol=1e-6,
    )
    # affine in the returns: normalised advantages stay, up to eps beside the std
    np.testing.assert_allclose(
        group_relative(4 * return_GK + 7), advantage_GK, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(
        leave_one_out(4 * return_GK + 7), 4 * leave_one_out(return_GK), rtol=1e-3, atol=1e-5
    )


def test_a_dead_group_has_no_advantage():
    # 16 copies of a number whose float32 mean is off by an ulp must not become 0.1 of advantage
    return_GK = np.full((40, 16), 0.1) + np.arange(40)[:, None] * 27.3
    assert not np.any(group_relative(return_GK))
    assert not np.any(leave_one_out(return_GK))


def test_integer_returns():
    assert group_relative(np.array([[0, 1]])).dtype == jnp.float32
    np.testing.assert_allclose(leave_one_out(np.array([[0, 1]])), [[-1.0, 1.0]])


def test_whiten_by_hand():
    # masked 1, 3, 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4; 9 is outside: (9 - 3) / 2 = 3
    x_BT = np.array([[1.0, 9.0], [3.0, 5.0]])
    mask_BT = np.array([[1, 0], [1, 1]])
    np.testing.assert_allclose(whiten(x_BT, mask_BT), [[-1.0, 3.0], [0.0, 1.0]], atol=1e-6)
    # 1e-8 stands beside the variance: 0 and 2e-4 have mean 1e-4, variance 2e-8 -> 1e-4 / sqrt(3e-8)
    tiny = whiten(np.array([[0.0, 2e-4]]), np.ones((1, 2)))
    np.testing.assert_allclose(tiny, [[-(3**-0.5), 3**-0.5]], rtol=1e-4)


def test_whiten_against_reference():
    rng = np.random.default_rng(2)
    x_BT = rng.normal(5.0, 2.0, size=(4, 9)).astype(np.float32)
    mask_BT = rng.random((4, 9)) < 0.6
    inside = [float(x) for x, m in zip(x_BT.flat, mask_BT.flat, strict=True) if m]
    mean = sum(inside) / len(inside)
    variance = sum((x - mean) ** 2 for x in inside) / (len(inside) - 1)
    want_BT = (x_BT.astype(float) - mean) / (variance + 1e-8) ** 0.5
    for mask in (mask_BT, mask_BT.astype(np.float32), mask_BT.astype(np.int32)):
        np.testing.assert_allclose(whiten(x_BT, mask), want_BT, rtol=1e-5, atol=1e-5)


def test_whiten_edges():
    x_BT = np.array([[2.0, np.nan, 4.0]])
    # what lies outside the mask cannot reach the inside, not even NaN
    np.testing.assert_allclose(
        whiten(x_BT, np.array([[1, 0, 1]]))[0, np.array([0, 2])],
        [-(0.5**0.5), 0.5**0.5],
        rtol=1e-6,
    )
    assert whiten(x_BT, np.array([[1, 0, 0]]))[0, 0] == 0.0
    assert np.all(np.isfinite(whiten(np.ones((1, 3)), np.zeros((1, 3)))))


def test_shape_errors():
    for function in (group_relative, leave_one_out):
        with pytest.raises(AssertionError):
            function(np.ones(3))
    with pytest.raises(AssertionError):
        whiten(np.ones((2, 3)), np.ones((2, 1)))
