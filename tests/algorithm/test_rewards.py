"""rewards.py against numbers computed by hand and against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm import rewards
from ragen_jax.algorithm.rewards import GROUPINGS, METHODS, PLACEMENTS

pytestmark = pytest.mark.fast

# Jitted once: without jit, JAX would compile each operation at each shape.
place_rewards = jax.jit(rewards.place_rewards, static_argnames="level")
place_returns = jax.jit(rewards.place_returns)
next_rows = jax.jit(rewards.next_rows)
normalize_returns = jax.jit(rewards.normalize_returns, static_argnames=("method", "grouping"))
overlong_penalty = jax.jit(rewards.overlong_penalty, static_argnames=("max_length", "buffer"))
penalize_kl = jax.jit(rewards.penalize_kl)
adapt_kl_coef = jax.jit(rewards.adapt_kl_coef, static_argnames=("target", "gain"))


# ---------------------------------------------------------------- placement

# Row 0: turns 0 and 1 of episode 0; row 1: turn 2 of episode 0; row 2: the only turn of episode 1;
# row 3: padding.
TURN_BT = np.array([[-1, 0, 0, -1, 1, -1], [-1, -1, 2, 2, 2, 2], [-1, 0, -1, -1, -1, -1], [-1] * 6])
MASK_BT = (TURN_BT >= 0).astype(np.float32)
END_BT = np.array([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0], [0] * 6], bool)
EPISODE_B = np.array([0, 0, 1, -1])
REWARD_BT = np.array([[0, 0, 1, 0, 2, 0], [0, 0, 0, 0, 0, 8], [0, 5, 0, 0, 0, 0], [0.0] * 6])


def test_placement_by_hand():
    want = {
        "turn": REWARD_BT,
        # 1 over two tokens, 2 over one, 8 over four
        "token": [[0, 0.5, 0.5, 0, 2, 0], [0, 0, 2, 2, 2, 2], [0, 5, 0, 0, 0, 0], [0] * 6],
        # 1 + 2 + 8 at the end of the later row
        "episode": [[0] * 6, [0, 0, 0, 0, 0, 11], [0, 5, 0, 0, 0, 0], [0] * 6],
    }
    assert want.keys() == PLACEMENTS.keys()
    for level, want_BT in want.items():
        got_BT = place_rewards(REWARD_BT, MASK_BT, TURN_BT, END_BT, EPISODE_B, level=level)
        assert got_BT.dtype == jnp.float32
        np.testing.assert_allclose(got_BT, want_BT, rtol=1e-6, err_msg=level)


def test_returns_and_next_rows_by_hand():
    got_BT = place_returns(np.array([-3.0, -3.0, 7.0, 99.0]), TURN_BT, END_BT, EPISODE_B)
    want_BT = np.zeros((4, 6))
    want_BT[1, 5], want_BT[2, 1] = -3.0, 7.0
    np.testing.assert_array_equal(got_BT, want_BT)
    found_B = next_rows(TURN_BT, EPISODE_B)
    assert found_B.dtype == jnp.int32 and found_B.tolist() == [1, -1, -1, -1]


def random_rows(seed, episodes=5, T=20):
    """Return episodes split into rows of one to three turns, in random order, with a padding
    row."""
    rng = np.random.default_rng(seed)
    rows = []  # (episode, turns of the row)
    for episode in range(episodes):
        turn = 0
        for _ in range(rng.integers(1, 4)):
            count = int(rng.integers(1, 4))
            rows.append((episode, range(turn, turn + count)))
            turn += count
    rows = [rows[i] for i in rng.permutation(len(rows))] + [(-1, range(0))]
    turn_BT = np.full((len(rows), T), -1)
    end_BT = np.zeros((len(rows), T), bool)
    for b, (_, turns) in enumerate(rows):
        t = 0
        for turn in turns:
            start = t + int(rng.integers(1, 3))
            t = start + int(rng.integers(1, 5))
            turn_BT[b, start:t], end_BT[b, t - 1] = turn, True
    reward_BT = np.where(end_BT, rng.normal(size=end_BT.shape), 0.0).astype(np.float32)
    return reward_BT, turn_BT >= 0, turn_BT, end_BT, np.array([episode for episode, _ in rows])


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
def test_placement_against_reference(seed):
    reward_BT, mask_BT, turn_BT, end_BT, episode_B = random_rows(seed)
    token_BT, episode_BT = np.zeros((2, *reward_BT.shape))
    last = {}  # episode -> (turn, row, token) of its last turn end
    for b, t in zip(*np.nonzero(end_BT), strict=True):
        u = t
        while u >= 0 and turn_BT[b, u] == turn_BT[b, t]:
            u -= 1
        token_BT[b, u + 1 : t + 1] = reward_BT[b, t] / (t - u)
        last[episode_B[b]] = max(last.get(episode_B[b], (-1, 0, 0)), (turn_BT[b, t], b, t))
    for b, t in zip(*np.nonzero(end_BT), strict=True):
        _, row, token = last[episode_B[b]]
        episode_BT[row, token] += reward_BT[b, t]
    rows = reward_BT, mask_BT, turn_BT, end_BT, episode_B
    want = {"turn": reward_BT, "token": token_BT, "episode": episode_BT}
    for level in PLACEMENTS:
        for function in (place_rewards, rewards.place_rewards):
            got_BT = function(*rows, level=level)
            np.testing.assert_allclose(got_BT, want[level], rtol=1e-5, atol=1e-5, err_msg=level)
        np.testing.assert_allclose(np.sum(got_BT), reward_BT.sum(), atol=1e-5)  # no reward is lost
    next_B = np.asarray(next_rows(turn_BT, episode_B))
    for b, episode in enumerate(episode_B):
        turn_B = np.where(episode_B == episode, turn_BT.max(1), -1)
        later = np.flatnonzero(turn_B > turn_BT[b].max())
        assert next_B[b] == (later[np.argmin(turn_B[later])] if len(later) else -1)


def test_row_order_and_padding_do_not_matter():
    rows = random_rows(7)
    order_B = np.random.default_rng(0).permutation(len(rows[0]))
    pads = [((0, 2), (0, 3))] * 4 + [((0, 2),)]
    fills = [0, 0, -1, 0, -1]
    padded = [np.pad(x, p, constant_values=f) for x, p, f in zip(rows, pads, fills, strict=True)]
    B, T = rows[0].shape
    functions = [
        lambda r, m, u, e, b, level=level: place_rewards(r, m, u, e, b, level=level)
        for level in PLACEMENTS
    ]
    for function in functions:
        want_BT = np.asarray(function(*rows))
        shuffled_BT = function(*(x[order_B] for x in rows))
        np.testing.assert_allclose(shuffled_BT, want_BT[order_B], rtol=1e-6, atol=1e-6)
        got_BT = np.asarray(function(*padded))
        np.testing.assert_allclose(got_BT[:B, :T], want_BT, rtol=1e-6, atol=1e-6)
        assert not np.any(got_BT[B:]) and not np.any(got_BT[:, T:])


def test_placement_errors():
    with pytest.raises(ValueError, match="'row'; known: turn, token, episode"):
        rewards.place_rewards(REWARD_BT, MASK_BT, TURN_BT, END_BT, EPISODE_B, level="row")
    with pytest.raises(AssertionError):
        rewards.place_rewards(REWARD_BT, MASK_BT[:1], TURN_BT, END_BT, EPISODE_B, level="turn")
    with pytest.raises(AssertionError):
        rewards.place_returns(REWARD_BT, TURN_BT, END_BT, EPISODE_B)
    with pytest.raises(AssertionError):
        rewards.next_rows(TURN_BT, EPISODE_B[:1])


# ---------------------------------------------------------------- normalization


def test_normalisation_by_hand():
    # group 0: mean 2, sample variance 2; group 1: dead; group 2: mean 5, variance 50
    return_GK = np.array([[1.0, 3.0], [4.0, 4.0], [0.0, 10.0]])
    half = 0.5**0.5
    for method, want in {
        "identity": return_GK,
        "mean": [[-1, 1], [0, 0], [-5, 5]],
        "mean_std": [[-half, half], [0, 0], [-half, half]],
    }.items():
        got_GK = normalize_returns(return_GK, method=method)
        np.testing.assert_allclose(got_GK, want, rtol=1e-5, atol=1e-6, err_msg=method)
    # groups 0 and 2 form one environment: mean 3.5, squares 6.25 + 0.25 + 12.25 + 42.25 = 61
    got_GK = normalize_returns(
        return_GK, method="mean_std", grouping="environment", environment_G=np.array([7, 2, 7])
    )
    want_GK = np.array([[-2.5, -0.5], [0, 0], [-3.5, 6.5]]) / (61 / 3) ** 0.5
    np.testing.assert_allclose(got_GK, want_GK, rtol=1e-5, atol=1e-6)
    # all groups: mean 22 / 6
    got_GK = normalize_returns(return_GK, method="mean", grouping="batch")
    np.testing.assert_allclose(got_GK, return_GK - 22 / 6, rtol=1e-5, atol=1e-6)


def test_asymmetric_clip_by_hand():
    # 15 zeros and one 16: mean 1, sample variance (15 + 225) / 15 = 16: -1/4 and 15/4 -> 3
    return_GK = np.zeros((2, 16))
    return_GK[:, 5] = 16.0, -16.0  # mirrored: 1/4 and -15/4 -> -1
    got_GK = normalize_returns(return_GK, method="asymmetric_clip")
    want_GK = np.where(return_GK == 0, [[-0.25], [0.25]], [[3.0], [-1.0]])
    np.testing.assert_allclose(got_GK, want_GK, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("K", [1, 2, 7])
def test_normalisation_against_reference(grouping, K):
    rng = np.random.default_rng(K)
    return_GK = rng.normal(2.0, 3.0, size=(6, K)).astype(np.float32)
    environment_G = np.array([3, 1, 3, 0, 1, 3])
    want = {method: np.zeros((6, K)) for method in METHODS}
    for g, k in np.ndindex(6, K):
        block = []
        for h in range(6):
            together = {
                "state": g == h,
                "environment": environment_G[g] == environment_G[h],
                "batch": True,
            }
            block += return_GK[h].tolist() if together[grouping] else []
        mean = sum(block) / len(block)
        std = (sum((x - mean) ** 2 for x in block) / max(len(block) - 1, 1)) ** 0.5
        away = float(return_GK[g, k]) - mean
        scaled = away / (std + 1e-6) if len(block) > 1 else 0.0
        want["identity"][g, k], want["mean"][g, k] = return_GK[g, k], away
        want["mean_std"][g, k] = scaled
        want["asymmetric_clip"][g, k] = min(max(scaled, -1.0), 3.0)
    for method in METHODS:
        for function in (normalize_returns, rewards.normalize_returns):
            options = dict(method=method, grouping=grouping, environment_G=environment_G)
            got_GK = function(return_GK, **options)
            assert got_GK.dtype == jnp.float32
            np.testing.assert_allclose(got_GK, want[method], rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_equal_returns_are_exactly_zero():
    return_GK = np.full((40, 16), 10.9)  # the float32 mean need not be 10.9
    for grouping in ("state", "batch"):
        for method in ("mean", "mean_std", "asymmetric_clip"):
            assert not np.any(normalize_returns(return_GK, method=method, grouping=grouping))


def test_order_of_groups_does_not_matter():
    return_GK = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    environment_G, order_G = np.array([0, 1, 0, 1, 0, 0]), np.array([4, 1, 5, 0, 3, 2])
    for grouping in GROUPINGS:
        options = dict(method="mean_std", grouping=grouping)
        want_GK = normalize_returns(return_GK, environment_G=environment_G, **options)
        got_GK = normalize_returns(
            return_GK[order_G], environment_G=environment_G[order_G], **options
        )
        np.testing.assert_allclose(got_GK, want_GK[order_G], rtol=1e-6, atol=1e-6)


def test_normalisation_errors():
    return_GK = np.ones((2, 3))
    with pytest.raises(ValueError, match="'std'; known: identity, mean, mean_std, asymmetric_clip"):
        rewards.normalize_returns(return_GK, method="std")
    with pytest.raises(ValueError, match="'seed'; known: state, environment, batch"):
        rewards.normalize_returns(return_GK, method="mean", grouping="seed")
    with pytest.raises(ValueError, match="needs environment_G"):
        rewards.normalize_returns(return_GK, method="mean", grouping="environment")
    with pytest.raises(AssertionError):
        rewards.normalize_returns(return_GK, method="mean", environment_G=np.zeros(3))
    with pytest.raises(AssertionError):
        rewards.normalize_returns(np.ones(3), method="mean")


# ---------------------------------------------------------------- penalties


def test_overlong_penalty():
    # no penalty up to 100 - 20 = 80 tokens, -1/2 at 90, -1 from 100 on
    length = np.array([[0, 80, 81], [90, 100, 130]])
    got = overlong_penalty(length, max_length=100, buffer=20)
    np.testing.assert_allclose(got, [[0, 0, -0.05], [-0.5, -1, -1]], rtol=1e-6)
    for n in range(0, 40):
        want = 0.0 if n <= 23 else ((30 - 7) - n) / 7 if n <= 30 else -1.0
        np.testing.assert_allclose(overlong_penalty(n, max_length=30, buffer=7), want, rtol=1e-5)
    for buffer in (0, 31):
        with pytest.raises(ValueError, match=f"from 1 to max_length = 30, got {buffer}"):
            rewards.overlong_penalty(length, max_length=30, buffer=buffer)


def test_kl_in_reward():
    reward_BT, kl_BT = np.array([[0.0, 0.0, 2.0]]), np.array([[np.nan, 0.5, -1.0]])
    got_BT = penalize_kl(reward_BT, kl_BT, np.array([[0, 1, 1]]), coef=0.1)
    assert got_BT.dtype == jnp.float32
    np.testing.assert_allclose(got_BT, [[0.0, -0.05, 2.1]], rtol=1e-6)
    rng = np.random.default_rng(0)
    reward_BT, kl_BT = rng.normal(size=(2, 4, 5)).astype(np.float32)
    mask_BT = rng.random((4, 5)) < 0.5
    want_BT = reward_BT.copy()
    for b, t in np.ndindex(4, 5):
        if mask_BT[b, t]:
            want_BT[b, t] -= 0.3 * kl_BT[b, t]
    np.testing.assert_allclose(penalize_kl(reward_BT, kl_BT, mask_BT, coef=0.3), want_BT, rtol=1e-5)
    with pytest.raises(AssertionError):
        rewards.penalize_kl(reward_BT, kl_BT[:1], mask_BT, coef=0.3)


def test_adaptive_kl_coefficient():
    # at the target, no change; 10 % above it: 1 + 0.1 * 0.1; far away: the error is clipped to 0.2
    for kl, factor in [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (5.4, 0.99), (-3.0, 0.98)]:
        got = adapt_kl_coef(0.2, kl, target=6.0)
        np.testing.assert_allclose(got, 0.2 * factor, rtol=1e-6)
    # 256 episodes and a horizon of 10,000, as in the released code
    got = adapt_kl_coef(0.2, 60.0, target=6.0, gain=256 / 10_000)
    np.testing.assert_allclose(got, 0.2 * (1 + 0.2 * 0.0256), rtol=1e-6)
    # a policy whose KL falls as the coefficient grows stays at the target
    coef = jnp.float32(0.01)
    for _ in range(300):
        coef = adapt_kl_coef(coef, 1.0 / coef, target=6.0)
    np.testing.assert_allclose(1.0 / coef, 6.0, rtol=1e-3)
    with pytest.raises(ValueError, match="target must be > 0"):
        rewards.adapt_kl_coef(0.2, 1.0, target=0.0)
