"""advantage.py against numbers computed by hand and against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm import advantage

pytestmark = pytest.mark.fast

# Jitted once: without jit, JAX would compile each operation at each shape.
group_relative = jax.jit(advantage.group_relative, static_argnames=("normalize_by_std", "eps"))
leave_one_out = jax.jit(advantage.leave_one_out)
sample_variance = jax.jit(advantage.sample_variance)
whiten = jax.jit(advantage.whiten)
soft_weights = jax.jit(advantage.soft_weights)
gae = jax.jit(advantage.gae)
bi_level_gae = jax.jit(advantage.bi_level_gae)
reinforce_plus_plus = jax.jit(advantage.reinforce_plus_plus)
reinforce_plus_plus_baseline = jax.jit(advantage.reinforce_plus_plus_baseline)


def test_group_relative_by_hand():
    # 1, 2, 3, 6: mean 3, sample variance (4 + 1 + 0 + 9) / 3 = 14 / 3, std 2.160247
    return_GK = np.array([[1.0, 2.0, 3.0, 6.0]])
    np.testing.assert_allclose(
        group_relative(return_GK), [[-0.925820, -0.462910, 0.0, 1.388730]], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        group_relative(return_GK, normalize_by_std=False), [[-2.0, -1.0, 0.0, 3.0]], atol=1e-6
    )
    # eps is added to the std: 3 / (2.160247 + 1)
    np.testing.assert_allclose(group_relative(return_GK, eps=1.0)[0, 3], 0.949293, rtol=1e-5)


def test_leave_one_out_by_hand():
    # mean of the others: of 1: (2 + 3 + 6) / 3 = 11/3; of 2: 10/3; of 3: 3; of 6: 2
    np.testing.assert_allclose(
        leave_one_out(np.array([[1.0, 2.0, 3.0, 6.0]])),
        [[1 - 11 / 3, 2 - 10 / 3, 0.0, 4.0]],
        rtol=1e-6,
        atol=1e-6,
    )


def test_best_of_group_by_hand():
    return_GK = np.array([[0.0, 1.0, 0.5], [1.0, 0.0, 1.0], [2.0, 2.0, 2.0], [-1.0, -3.0, -1.5]])
    want = [[0, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]]  # no best among equal returns
    np.testing.assert_array_equal(advantage.best_of_group(return_GK), want)
    # returns that differ by rounding are equal, and `eps` is in the unit of the rewards
    rounded_GK = np.array([[0.1 + 0.2, 0.3, 0.0], [0.3, 0.1 + 0.2, 0.3]], np.float32) * 1e3
    found = advantage.best_of_group(rounded_GK, eps=np.array([1e-2, 1e-2]))
    np.testing.assert_array_equal(found, [[1, 1, 0], [0, 0, 0]])
    # a broken member is neither best nor a reason to call another one best
    sound_GK = np.array([[1, 0, 1], [1, 1, 0], [1, 1, 0], [0, 0, 1]], bool)
    want = [[0, 0, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    found = advantage.best_of_group(np.where(sound_GK, return_GK, np.nan), sound_GK=sound_GK)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(advantage.best_of_group(np.array([[3.0], [-1.0]])), [[1], [1]])


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
    # Under an affine map of the returns, normalized advantages stay equal, up to the eps added to
    # the std.
    np.testing.assert_allclose(
        group_relative(4 * return_GK + 7), advantage_GK, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(
        leave_one_out(4 * return_GK + 7), 4 * leave_one_out(return_GK), rtol=1e-3, atol=1e-5
    )


def test_a_dead_group_has_no_advantage():
    # The advantage of 16 copies of a number whose float32 mean is off by an ulp must be 0, not 0.1.
    return_GK = np.full((40, 16), 0.1) + np.arange(40)[:, None] * 27.3
    assert not np.any(group_relative(return_GK))
    assert not np.any(leave_one_out(return_GK))


def test_integer_returns():
    assert group_relative(np.array([[0, 1]])).dtype == jnp.float32
    np.testing.assert_allclose(leave_one_out(np.array([[0, 1]])), [[-1.0, 1.0]])


def test_whiten_by_hand():
    # masked values 1, 3, 5: mean 3, unbiased variance (4 + 0 + 4) / 2 = 4; 9 is outside the mask:
    # (9 - 3) / 2 = 3
    x_BT = np.array([[1.0, 9.0], [3.0, 5.0]])
    mask_BT = np.array([[1, 0], [1, 1]])
    np.testing.assert_allclose(whiten(x_BT, mask_BT), [[-1.0, 3.0], [0.0, 1.0]], atol=1e-6)
    # 1e-8 is added to the variance: 0 and 2e-4 have mean 1e-4, variance 2e-8 -> 1e-4 / sqrt(3e-8)
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


@pytest.mark.medium
def test_whiten_edges():
    x_BT = np.array([[2.0, np.nan, 4.0]])
    # Values outside the mask, even NaN, do not affect the values inside.
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


@pytest.mark.medium
def test_soft_weights():
    # sample stds: of 0, 2: sqrt 2; of 1, 1: 0; of 0, 1: sqrt(1/2)
    return_GK = np.array([[0.0, 2.0], [1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(soft_weights(return_GK), [1.0, 0.0, 0.5], rtol=1e-5)
    assert not np.any(soft_weights(np.ones((3, 4))))  # all stds are 0: no division by 0
    # eps is added to the largest std
    weights = advantage.soft_weights(return_GK, eps=2**0.5)
    np.testing.assert_allclose(weights, [0.5, 0.0, 0.25], rtol=1e-5)
    # The last group belongs to another environment, so the largest std of its environment is its
    # own.
    weights = soft_weights(return_GK, environment_G=np.array([0, 0, 1]))
    np.testing.assert_allclose(weights, [1.0, 0.0, 1.0], rtol=1e-5)


# ---------------------------------------------------------------- advantages along a row


def test_gae_by_hand():
    # one row; token 0 is a prompt, token 3 an observation; gamma 0.9, lambda 0.5
    #   t        0    1    2    3    4
    #   mask     0    1    1    0    1
    #   r        7    0    1    9    2     (7 and 9 are not read)
    #   V        5    1    2    8    3     (5 and 8 are not read)
    # A4 = 2 - 3 = -1
    # A2 = 1 + 0.9 * 3 - 2 + 0.45 * -1 = 1.25      (V and A of token 4, not of the observation)
    # A1 = 0 + 0.9 * 2 - 1 + 0.45 * 1.25 = 1.3625
    rows = [[7.0, 0, 1, 9, 2]], [[5.0, 1, 2, 8, 3]], [[0, 1, 1, 0, 1]]
    advantage_BT, return_BT = gae(*map(np.array, rows), gamma=0.9, lam=0.5)
    np.testing.assert_allclose(advantage_BT, [[0, 1.3625, 1.25, 0, -1]], rtol=1e-6)
    np.testing.assert_allclose(return_BT, [[0, 2.3625, 3.25, 0, 2]], rtol=1e-6)


def test_bi_level_gae_by_hand():
    # two turns of two tokens, an observation in between; turn_gamma 0.5, gamma 0.9, lambda 0.8
    #   t        0    1    2    3    4
    #   mask     1    1    0    1    1
    #   end           x              x     (the first turn ends without a reward)
    #   r        0    0    9    0    4
    #   V        1    2    8    1    3
    # turns:  A4 = 4 - 3 = 1, R4 = 4;  A1 = 0 + 0.5 * 3 - 2 + 0.5 * 0.8 * 1 = -0.1, R1 = 1.9
    # tokens: A4 = 4 - 3 = 1;          A3 = 0.9 * 3 - 1 + 0.72 * 1 = 2.42
    #         A1 = 1.9 - 2 = -0.1;     A0 = 0.9 * 2 - 1 + 0.72 * -0.1 = 0.728
    reward_BT, value_BT = np.array([[0.0, 0, 9, 0, 4]]), np.array([[1.0, 2, 8, 1, 3]])
    mask_BT, end_BT = np.array([[1, 1, 0, 1, 1]]), np.array([[0, 1, 0, 0, 1]])
    options = dict(gamma=0.9, lam=0.8, turn_gamma=0.5)
    advantage_BT, return_BT = bi_level_gae(reward_BT, value_BT, mask_BT, end_BT, **options)
    np.testing.assert_allclose(advantage_BT, [[0.728, -0.1, 0, 2.42, 1]], rtol=1e-5)
    np.testing.assert_allclose(return_BT, [[1.728, 1.9, 0, 3.42, 4]], rtol=1e-5)


def reference_gae(rewards, values, gamma, lam):
    """For a list of sampled tokens: A_t = sum_l (gamma lam)^l delta_(t+l), term by term."""
    n = len(rewards)
    values = [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)]


def reference_bi_level(rewards, values, ends, gamma, lam, turn_gamma):
    """Bi-level GAE for a list of sampled tokens, the last of which ends a turn."""
    at = [t for t, end in enumerate(ends) if end]
    turns = reference_gae([rewards[t] for t in at], [values[t] for t in at], turn_gamma, lam)
    advantages, start = [], 0
    for t, turn in zip(at, turns, strict=True):
        inside = [*rewards[start:t], turn + values[t]]
        advantages += reference_gae(inside, values[start : t + 1], gamma, lam)
        start = t + 1
    return advantages


def random_rows(seed, B=6, T=17):
    """Return rows of several turns with gaps: (reward, value, mask, turn_end); row 1 is padding."""
    rng = np.random.default_rng(seed)
    mask_BT = rng.random((B, T)) < 0.7
    mask_BT[1] = False
    end_BT = mask_BT & (rng.random((B, T)) < 0.3)
    for b in np.flatnonzero(mask_BT.any(axis=1)):
        end_BT[b, np.flatnonzero(mask_BT[b])[-1]] = True
    reward_BT = np.where(end_BT & (rng.random((B, T)) < 0.6), rng.normal(size=(B, T)), 0.0)
    reward_BT += 0.01 * mask_BT * rng.normal(size=(B, T))  # a KL penalty on each token
    arrays = reward_BT, rng.normal(size=(B, T)), mask_BT
    return *(x.astype(np.float32) for x in arrays), end_BT


@pytest.mark.medium
@pytest.mark.parametrize("gamma, lam, turn_gamma", [(1.0, 1.0, 1.0), (0.97, 0.9, 0.8), (1, 0, 0)])
def test_recursions_against_reference(gamma, lam, turn_gamma):
    reward_BT, value_BT, mask_BT, end_BT = random_rows(0)
    one_BT, bi_BT = np.zeros((2, *mask_BT.shape))
    for b in range(len(mask_BT)):
        inside = np.flatnonzero(mask_BT[b])
        rewards, values, ends = (x[b, inside].tolist() for x in (reward_BT, value_BT, end_BT))
        one_BT[b, inside] = reference_gae(rewards, values, gamma, lam)
        bi_BT[b, inside] = reference_bi_level(rewards, values, ends, gamma, lam, turn_gamma)
    scalars = dict(gamma=gamma, lam=lam)
    found = [
        (gae(reward_BT, value_BT, mask_BT, **scalars), one_BT),
        (advantage.gae(reward_BT, value_BT, mask_BT, **scalars), one_BT),
        (
            bi_level_gae(reward_BT, value_BT, mask_BT, end_BT, turn_gamma=turn_gamma, **scalars),
            bi_BT,
        ),
    ]
    for (advantage_BT, return_BT), want_BT in found:
        assert advantage_BT.dtype == return_BT.dtype == jnp.float32
        np.testing.assert_allclose(advantage_BT, want_BT, rtol=1e-5, atol=1e-5)
        want_return_BT = want_BT + value_BT * mask_BT
        np.testing.assert_allclose(return_BT, want_return_BT, rtol=1e-5, atol=1e-5)


def test_bi_level_of_one_turn_is_gae():
    reward_BT, value_BT, mask_BT, _ = random_rows(1)
    end_BT = np.zeros_like(mask_BT, bool)
    for b in np.flatnonzero(mask_BT.any(axis=1)):
        end_BT[b, np.flatnonzero(mask_BT[b])[-1]] = True
    got = bi_level_gae(reward_BT, value_BT, mask_BT, end_BT, gamma=0.9, lam=0.8, turn_gamma=0.3)
    want = gae(reward_BT, value_BT, mask_BT, gamma=0.9, lam=0.8)
    for got_BT, want_BT in zip(got, want, strict=True):
        np.testing.assert_allclose(got_BT, want_BT, rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_by_hand():
    # returns-to-go at gamma 0.5, skipping the observation: 3, 0.5 * 3 + 1 = 2.5; row 1: 1
    # mean 6.5 / 3, deviations 1/3, 5/6, -7/6: squares 4/36 + 25/36 + 49/36 = 78/36, variance 39/36
    reward_BT, mask_BT = np.array([[1.0, 9, 3], [1, 0, 0]]), np.array([[1, 0, 1], [1, 0, 0]])
    advantage_BT, return_BT = reinforce_plus_plus(reward_BT, mask_BT, gamma=0.5)
    np.testing.assert_allclose(return_BT, [[2.5, 0, 3], [1, 0, 0]], rtol=1e-6)
    std = (39 / 36) ** 0.5
    want_BT = np.array([[1 / 3, 0, 5 / 6], [-7 / 6, 0, 0]]) / std
    np.testing.assert_allclose(advantage_BT, want_BT, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
    # groups 1, 3 and 0, 10: minus their means -1, 1, -5, 5. Each has one token, except for the
    # first with two tokens, which counts twice: mean -1/5, squares 2 * 0.64 + 1.44 + 23.04 + 27.04
    # = 52.8, over 4: 13.2
    return_GK = np.array([[1.0, 3.0], [0.0, 10.0]])
    episode_B = np.array([2, 0, 1, 3, -1])  # any order; padding is last
    mask_BT = np.array([[0, 1], [1, 1], [1, 0], [0, 1], [0, 0]])
    got_BT = reinforce_plus_plus_baseline(return_GK, episode_B, mask_BT)
    want_BT = np.array([[0, -4.8], [-0.8, -0.8], [1.2, 0], [0, 5.2], [0, 0]]) / 13.2**0.5
    np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_reinforce_plus_plus_against_reference():
    reward_BT, _, mask_BT, _ = random_rows(2)
    return_GK = np.random.default_rng(3).normal(size=(3, 2)).astype(np.float32)
    episode_B = np.array([5, 0, 0, 1, 3, 2])
    to_go_BT, centred_BT = np.zeros((2, *mask_BT.shape))
    for b in range(len(mask_BT)):
        inside = np.flatnonzero(mask_BT[b])
        for i, t in enumerate(inside):
            to_go_BT[b, t] = sum(0.9**j * reward_BT[b, u] for j, u in enumerate(inside[i:]))
        group = return_GK[episode_B[b] // 2]
        centred_BT[b, inside] = group[episode_B[b] % 2] - sum(group) / 2

    def whitened(x_BT):
        inside = x_BT[mask_BT > 0]
        variance = sum((x - inside.mean()) ** 2 for x in inside) / (len(inside) - 1)
        return (x_BT - inside.mean()) / variance**0.5 * mask_BT

    for function in (reinforce_plus_plus, advantage.reinforce_plus_plus):
        advantage_BT, return_BT = function(reward_BT, mask_BT, gamma=0.9)
        np.testing.assert_allclose(return_BT, to_go_BT, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(advantage_BT, whitened(to_go_BT), rtol=1e-5, atol=1e-5)
    for function in (reinforce_plus_plus_baseline, advantage.reinforce_plus_plus_baseline):
        got_BT = function(return_GK, episode_B, mask_BT)
        np.testing.assert_allclose(got_BT, whitened(centred_BT), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_padding_order_and_junk_do_not_matter_along_a_row():
    reward_BT, value_BT, mask_BT, end_BT = random_rows(4)
    return_GK, episode_B = np.arange(6.0).reshape(3, 2) ** 2, np.arange(6)

    def everything(reward_BT, value_BT, mask_BT, end_BT, episode_B):
        scalars = dict(gamma=0.97, lam=0.9)
        return [
            *gae(reward_BT, value_BT, mask_BT, **scalars),
            *bi_level_gae(reward_BT, value_BT, mask_BT, end_BT, turn_gamma=0.8, **scalars),
            *reinforce_plus_plus(reward_BT, mask_BT, gamma=0.97),
            reinforce_plus_plus_baseline(return_GK, episode_B, mask_BT),
        ]

    def check(found, rows, columns):
        for got_BT, want_BT in zip(found, want, strict=True):
            assert np.all(np.isfinite(got_BT))
            got_BT = np.asarray(got_BT)[rows][:, columns]
            np.testing.assert_allclose(got_BT, want_BT, rtol=1e-6, atol=1e-6)

    arrays = reward_BT, value_BT, mask_BT, end_BT
    want = everything(*arrays, episode_B)
    order_B = np.array([3, 5, 0, 2, 1, 4])
    shuffled = everything(*(x[order_B] for x in arrays), episode_B[order_B])
    check(shuffled, np.argsort(order_B), slice(None))
    padded = [np.pad(x, ((0, 2), (0, 5))) for x in arrays]
    padded = everything(*padded, np.pad(episode_B, (0, 2), constant_values=-1))
    check(padded, slice(6), slice(17))
    junk = [np.where(mask_BT > 0, x, np.nan) for x in arrays[:2]]
    check(everything(*junk, mask_BT, end_BT, episode_B), slice(None), slice(None))


def test_shape_errors_along_a_row():
    x_BT = np.ones((2, 3))
    with pytest.raises(AssertionError):
        advantage.gae(x_BT, x_BT[:, :2], x_BT, gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError):
        advantage.bi_level_gae(x_BT, x_BT, x_BT, x_BT[0], gamma=1.0, lam=1.0, turn_gamma=1.0)
    with pytest.raises(AssertionError):
        advantage.reinforce_plus_plus(x_BT, x_BT[:1], gamma=1.0)
    with pytest.raises(AssertionError):
        advantage.reinforce_plus_plus_baseline(x_BT, np.zeros(3, int), x_BT)
