"""losses.py against numbers worked out by hand, loops, and the gradients that they must have."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import losses
from ragen_jax.losses import AGGREGATIONS, KL_KINDS

# Jitted once: op by op, JAX would compile each operation at each shape.
CLIP_NAMES = ("clip_low", "clip_high", "clip_c")
policy_terms = jax.jit(losses.policy_terms, static_argnames=CLIP_NAMES)
policy_loss = jax.jit(losses.policy_loss, static_argnames=(*CLIP_NAMES, "aggregation"))
kl = jax.jit(losses.kl, static_argnames="kind")
token_weights = jax.jit(losses.token_weights, static_argnames=("mode", "norm_length"))
aggregate = jax.jit(losses.aggregate, static_argnames="mode")

CLIPS = dict(clip_low=0.2, clip_high=0.28, clip_c=3.0)


def random_batch(seed, B=5, T=7):
    rng = np.random.default_rng(seed)
    old_BT = -rng.exponential(size=(B, T))
    logp_BT = old_BT + rng.normal(0.0, 0.8, size=(B, T))
    advantage_BT = rng.normal(size=(B, T))
    mask_BT = (rng.random((B, T)) < 0.6).astype(np.float32)
    mask_BT[1] = 0.0  # a padding row
    return *(x.astype(np.float32) for x in (logp_BT, old_BT, advantage_BT)), mask_BT


# ---------------------------------------------------------------- policy loss


def reference_term(logp, old, advantage, *, clip_low, clip_high, clip_c):
    """One token, with the cases of the objective told apart: (term, clipped, lower clipped)."""
    ratio = math.exp(min(max(float(logp) - float(old), -20.0), 20.0))
    advantage = float(advantage)
    if advantage >= 0:
        if ratio > 1 + clip_high and advantage > 0:
            return -advantage * (1 + clip_high), 1, 0
        return -advantage * ratio, 0, 0
    if ratio < 1 - clip_low:
        return -advantage * (1 - clip_low), 1, 0
    if clip_c is not None and ratio > clip_c:
        return -advantage * clip_c, 0, 1
    return -advantage * ratio, 0, 0


def test_terms_by_hand():
    # ratio      2       2      0.5     0.5     4 (> c = 3)
    # advantage  1      -1      1      -1      -1
    # term    -1.28     2     -0.5     0.8     3
    ratio_BT = np.array([[2.0, 2.0, 0.5, 0.5, 4.0]])
    advantage_BT = np.array([[1.0, -1.0, 1.0, -1.0, -1.0]])
    term_BT, metrics = policy_terms(np.log(ratio_BT), np.zeros((1, 5)), advantage_BT, **CLIPS)
    np.testing.assert_allclose(term_BT, [[-1.28, 2.0, -0.5, 0.8, 3.0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio_mean"], ratio_BT, rtol=1e-6)
    np.testing.assert_array_equal(metrics["clip_fraction"], [[1, 0, 0, 1, 0]])
    np.testing.assert_array_equal(metrics["lower_clip_fraction"], [[0, 0, 0, 0, 1]])
    # r - 1 - log r: 2 - 1 - 0.693147, 0.5 - 1 + 0.693147, 4 - 1 - 1.386294
    np.testing.assert_allclose(
        metrics["approx_kl"], [[0.306853, 0.306853, 0.193147, 0.193147, 1.613706]], rtol=1e-5
    )


def test_dual_clip_can_be_switched_off():
    arguments = (np.log([[4.0]]), np.zeros((1, 1)), np.array([[-1.0]]))
    term_BT, metrics = policy_terms(*arguments, **CLIPS | dict(clip_c=None))
    np.testing.assert_allclose(term_BT, [[4.0]], rtol=1e-6)
    assert metrics["lower_clip_fraction"][0, 0] == 0.0


def test_log_ratio_is_clamped():
    # without the clamp exp(300) would be inf
    arguments = (np.array([[300.0, -300.0]]), np.zeros((1, 2)), np.array([[-1.0, 1.0]]))
    terms, _ = policy_terms(*arguments, **CLIPS | dict(clip_c=None))
    np.testing.assert_allclose(terms, [[math.exp(20), -math.exp(-20)]], rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip_c", [3.0, None])
def test_policy_loss_against_reference(aggregation, clip_c):
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(0)
    clips = CLIPS | dict(clip_c=clip_c)
    row_terms, clipped, lower, ratios, kls = [], 0, 0, 0.0, 0.0
    for b in range(5):
        terms = []
        for t in range(7):
            if mask_BT[b, t]:
                token = logp_BT[b, t], old_BT[b, t], advantage_BT[b, t]
                term, clip, low = reference_term(*token, **clips)
                terms.append(term)
                clipped, lower = clipped + clip, lower + low
                log_ratio = float(logp_BT[b, t]) - float(old_BT[b, t])
                ratios += math.exp(log_ratio)
                kls += math.exp(log_ratio) - 1 - log_ratio
        row_terms.append(terms)
    tokens = mask_BT.sum()
    loss, metrics = policy_loss(
        logp_BT, old_BT, advantage_BT, mask_BT, aggregation=aggregation, **clips
    )
    assert loss.dtype == jnp.float32 and loss.shape == ()
    np.testing.assert_allclose(
        loss, reference_aggregate(row_terms, aggregation, T=7), rtol=1e-5, atol=1e-6
    )
    want = dict(
        ratio_mean=ratios / tokens,
        clip_fraction=clipped / tokens,
        lower_clip_fraction=lower / tokens,
        approx_kl=kls / tokens,
    )
    assert metrics.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("clips", [CLIPS, dict(clip_low=0.0, clip_high=0.0, clip_c=3.0)])
def test_gradient_at_ratio_one_is_reinforce(clips):
    logp_BT, _, advantage_BT, mask_BT = random_batch(1)

    def loss(x_BT):
        return policy_loss(x_BT, logp_BT, advantage_BT, mask_BT, aggregation="token-mean", **clips)[
            0
        ]

    want_BT = -advantage_BT * mask_BT / mask_BT.sum()
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logp_BT), want_BT, rtol=1e-5, atol=1e-7)


def test_gradient_is_zero_where_clipped_and_reaches_only_logp():
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(2)

    def loss(*arrays):
        return policy_loss(*arrays, mask_BT, aggregation="token-mean", **CLIPS)[0]

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(logp_BT, old_BT, advantage_BT)
    for b, t in np.ndindex(5, 7):
        token = logp_BT[b, t], old_BT[b, t], advantage_BT[b, t]
        _, clip, low = reference_term(*token, **CLIPS)
        live = mask_BT[b, t] and not clip and not low
        assert (grads[0][b, t] != 0) == bool(live)
    grads = [np.asarray(g_BT) for g_BT in grads]
    assert not np.any(grads[1]) and not np.any(grads[2])


def test_junk_under_the_mask_is_harmless():
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(3)

    @jax.jit
    @jax.value_and_grad
    def loss(x_BT, old_BT, advantage_BT):
        value, metrics = policy_loss(
            x_BT, old_BT, advantage_BT, mask_BT, aggregation="seq-mean-token-mean", **CLIPS
        )
        return value + 0 * sum(metrics.values())

    junk = [np.where(mask_BT > 0, x, bad) for x, bad in ((old_BT, -np.inf), (advantage_BT, np.nan))]
    value, grad_BT = loss(logp_BT, old_BT, advantage_BT)
    spoilt_BT = np.where(mask_BT > 0, logp_BT, np.nan)
    value_junk, grad_junk_BT = loss(spoilt_BT, *junk)
    assert value == value_junk
    np.testing.assert_array_equal(grad_BT, grad_junk_BT)


def test_policy_loss_is_the_weighted_sum_over_micro_batches():
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(4)
    for aggregation in AGGREGATIONS:
        weight_BT = np.asarray(token_weights(mask_BT, aggregation))
        parts = [
            np.sum(weight_BT[s] * policy_terms(logp_BT[s], old_BT[s], advantage_BT[s], **CLIPS)[0])
            for s in (slice(b, b + 1) for b in range(5))
        ]
        loss, _ = policy_loss(
            logp_BT, old_BT, advantage_BT, mask_BT, aggregation=aggregation, **CLIPS
        )
        np.testing.assert_allclose(sum(parts), loss, rtol=1e-5, atol=1e-7)


def test_row_order_and_advantage_scale():
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(5)
    order_B = np.array([4, 2, 0, 1, 3])
    for aggregation in AGGREGATIONS:
        options = dict(aggregation=aggregation, **CLIPS)
        loss, _ = policy_loss(logp_BT, old_BT, advantage_BT, mask_BT, **options)
        arrays = [x[order_B] for x in (logp_BT, old_BT, advantage_BT, mask_BT)]
        np.testing.assert_allclose(policy_loss(*arrays, **options)[0], loss, rtol=1e-5)
        scaled, _ = policy_loss(logp_BT, old_BT, 4 * advantage_BT, mask_BT, **options)
        np.testing.assert_allclose(scaled, 4 * loss, rtol=1e-6)


# ---------------------------------------------------------------- KL


@pytest.mark.parametrize(
    "kind, want",
    [
        # logp - ref = 0.5, -0.5, 0
        ("k1", [0.5, -0.5, 0.0]),
        ("abs", [0.5, 0.5, 0.0]),
        ("k2", [0.125, 0.125, 0.0]),
        # d = -0.5, 0.5, 0: exp(-0.5) + 0.5 - 1 = 0.106531, exp(0.5) - 0.5 - 1 = 0.148721
        ("k3", [0.106531, 0.148721, 0.0]),
    ],
)
def test_kl_by_hand(kind, want):
    got_BT = kl(np.array([[-1.0, -1.5, -2.0]]), np.array([[-1.5, -1.0, -2.0]]), kind)
    np.testing.assert_allclose(got_BT, [want], rtol=1e-5, atol=1e-7)


def test_k3_clamps():
    # d = 3: e^3 - 4 = 16.09 -> 10; d = 50: clamped to 20, then 10; d = -50: e^-20 + 20 - 1 -> 10;
    # d = -5: 0.006738 + 4 = 4.006738; d = -25 is clamped before it counts: 19 -> 10
    d_BT = np.array([[3.0, 50.0, -50.0, -5.0, -25.0]])
    got_BT = kl(np.zeros((1, 5)), d_BT, "k3")
    np.testing.assert_allclose(got_BT, [[10.0, 10.0, 10.0, 4.006738, 10.0]], rtol=1e-6)
    assert np.isfinite(kl(np.zeros((1, 1)), np.full((1, 1), 1e4), "k3")[0, 0])


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_against_reference(kind):
    logp_BT, ref_BT, _, _ = random_batch(6)
    want_BT = np.zeros((5, 7))
    for b, t in np.ndindex(5, 7):
        gap = float(logp_BT[b, t]) - float(ref_BT[b, t])
        k3 = min(max(math.exp(min(max(-gap, -20), 20)) + gap - 1, -10), 10)
        want_BT[b, t] = {"k1": gap, "abs": abs(gap), "k2": gap * gap / 2, "k3": k3}[kind]
    got_BT = kl(logp_BT, ref_BT, kind)
    assert got_BT.dtype == jnp.float32
    np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-6)
    rows = jax.vmap(lambda a, b: kl(a[None], b[None], kind)[0])(logp_BT, ref_BT)
    np.testing.assert_allclose(rows, got_BT, rtol=1e-6)


# ---------------------------------------------------------------- aggregation


def reference_aggregate(row_terms, mode, T):
    """row_terms: for each row the list of its masked terms."""
    rows = [terms for terms in row_terms if terms]
    if mode == "token-mean":
        return sum(sum(terms) for terms in rows) / sum(len(terms) for terms in rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(terms) / len(terms) for terms in rows) / len(rows)
    if mode == "seq-mean-token-sum":
        return sum(sum(terms) for terms in rows) / len(rows)
    return sum(sum(terms) for terms in rows) / T


def test_weights_by_hand():
    # rows of 2, 0 and 1 tokens; T = 4
    mask_BT = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    want = {
        "token-mean": (1 / 3, 1 / 3),
        "seq-mean-token-mean": (1 / 4, 1 / 2),
        "seq-mean-token-sum": (1 / 2, 1 / 2),
        "seq-mean-token-sum-norm": (1 / 4, 1 / 4),
    }
    assert want.keys() == AGGREGATIONS.keys()
    for mode, (first, last) in want.items():
        weight_BT = token_weights(mask_BT, mode)
        assert weight_BT.dtype == jnp.float32
        np.testing.assert_allclose(weight_BT, mask_BT * [[first], [0], [last]], rtol=1e-6)
    weight_BT = token_weights(mask_BT, "seq-mean-token-sum-norm", norm_length=10)
    np.testing.assert_allclose(weight_BT, mask_BT / 10, rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregate_against_reference(mode):
    x_BT, _, _, mask_BT = random_batch(7)
    row_terms = [
        [float(x) for x, m in zip(*row, strict=True) if m]
        for row in zip(x_BT, mask_BT, strict=True)
    ]
    want = reference_aggregate(row_terms, mode, T=7)
    got = aggregate(x_BT, mask_BT, mode)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(np.sum(token_weights(mask_BT, mode) * x_BT), want, rtol=1e-5)
    for mask in (mask_BT.astype(bool), mask_BT.astype(np.int32)):
        np.testing.assert_allclose(aggregate(x_BT, mask, mode), want, rtol=1e-5)
    assert aggregate(x_BT, np.zeros_like(mask_BT), mode) == 0.0
    # Not jitted: XLA turns a product with a 0/1 mask into a select, which would hide a 0 / 0.
    assert not np.any(losses.token_weights(np.zeros_like(mask_BT), mode))  # np.any(NaN) is true
    stacked = jax.vmap(lambda x, m: aggregate(x, m, mode))(
        np.stack([x_BT, 2 * x_BT]), np.stack([mask_BT, mask_BT])
    )
    np.testing.assert_allclose(stacked, [want, 2 * want], rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_rows_do_not_count(mode):
    x_BT, _, _, mask_BT = random_batch(8)
    pad_BT = np.zeros((3, 7), np.float32)
    padded = aggregate(np.concatenate([x_BT, pad_BT + 9]), np.concatenate([mask_BT, pad_BT]), mode)
    np.testing.assert_allclose(padded, aggregate(x_BT, mask_BT, mode), rtol=1e-6)


def test_errors():
    x_BT = np.zeros((2, 3))
    with pytest.raises(ValueError, match="'mean'; known: token-mean, seq-mean-token-mean"):
        token_weights(x_BT, "mean")
    with pytest.raises(ValueError, match="'mean'; known: token-mean"):
        policy_loss(x_BT, x_BT, x_BT, x_BT, aggregation="mean", **CLIPS)
    with pytest.raises(ValueError, match="'k4'; known: k1, abs, k2, k3"):
        kl(x_BT, x_BT, "k4")
    with pytest.raises(ValueError, match="clip_c must be > 1"):
        policy_terms(x_BT, x_BT, x_BT, **CLIPS | dict(clip_c=1.0))
    with pytest.raises(AssertionError):
        policy_terms(x_BT, x_BT[:1], x_BT, **CLIPS)
    with pytest.raises(AssertionError):
        aggregate(x_BT[0], x_BT[0], "token-mean")
    with pytest.raises(AssertionError):
        kl(x_BT, x_BT[:, :1], "k1")
