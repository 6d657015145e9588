"""losses.py against numbers computed by hand, loops, and the required gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.losses import AGGREGATIONS, KL_KINDS

pytestmark = pytest.mark.fast

# Jitted once: without jit, JAX would compile each operation at each shape.
CLIP_NAMES = ("clip_low", "clip_high", "clip_c")
policy_terms = jax.jit(losses.policy_terms, static_argnames=CLIP_NAMES)
policy_loss = jax.jit(losses.policy_loss, static_argnames=(*CLIP_NAMES, "aggregation"))
kl = jax.jit(losses.kl, static_argnames="kind")
token_weights = jax.jit(losses.token_weights, static_argnames=("mode", "norm_length"))
aggregate = jax.jit(losses.aggregate, static_argnames="mode")
value_terms = jax.jit(losses.value_terms, static_argnames="clip")
value_loss = jax.jit(losses.value_loss, static_argnames=("clip", "aggregation"))
exact_kl = jax.jit(losses.exact_kl)

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
    """Compute one token with the cases of the objective distinguished: (term, clipped, lower
    clipped)."""
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
    # without the clamp, exp(300) would be inf
    arguments = (np.array([[300.0, -300.0]]), np.zeros((1, 2)), np.array([[-1.0, 1.0]]))
    terms, _ = policy_terms(*arguments, **CLIPS | dict(clip_c=None))
    np.testing.assert_allclose(terms, [[math.exp(20), -math.exp(-20)]], rtol=1e-5)


@pytest.mark.medium
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
        estimates = {"k1": gap, "abs": abs(gap), "k2": gap * gap / 2, "k3": k3}
        want_BT[b, t] = estimates[kind.removesuffix("+")]
    got_BT = kl(logp_BT, ref_BT, kind)
    assert got_BT.dtype == jnp.float32
    np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-6)
    rows = jax.vmap(lambda a, b: kl(a[None], b[None], kind)[0])(logp_BT, ref_BT)
    np.testing.assert_allclose(rows, got_BT, rtol=1e-6)


@pytest.mark.parametrize("kind", ["k1+", "abs+", "k3+"])
def test_straight_through_kl_has_the_gradient_of_k2(kind):
    logp_BT, ref_BT, _, _ = random_batch(9)
    grad_BT = jax.jit(jax.grad(lambda x: kl(x, ref_BT, kind).sum()))(logp_BT)
    np.testing.assert_allclose(grad_BT, logp_BT - ref_BT, rtol=1e-5, atol=1e-6)


def softmax_pair(seed, V=6):
    return np.random.default_rng(seed).normal(size=(2, V)).astype(np.float32)


@pytest.mark.medium
def test_mean_gradients_of_the_kl_estimates():
    logit_V, ref_logit_V = softmax_pair(0)
    p_V, ref_V = jax.nn.softmax(logit_V), jax.nn.log_softmax(ref_logit_V)

    @jax.jit
    @jax.jacrev
    def means(logit_V):  # mean over all tokens, weighted by the policy's probabilities
        logp_V = jax.nn.log_softmax(logit_V)
        estimates = [kl(logp_V[None], ref_V[None], kind)[0] @ p_V for kind in KL_KINDS]
        ref_p_V = jnp.exp(ref_V)
        return *estimates, exact_kl(logp_V, ref_V), ref_p_V @ (ref_V - logp_V)

    *estimates, forward_V, reverse_V = means(logit_V)
    gradient = dict(zip(KL_KINDS, estimates, strict=True))
    for kind in ("k2", "k1+", "k3+"):
        np.testing.assert_allclose(gradient[kind], forward_V, atol=1e-5, err_msg=kind)
    np.testing.assert_allclose(gradient["k1"], 0.0, atol=1e-6)
    np.testing.assert_allclose(gradient["k3"], reverse_V, atol=1e-5)


@pytest.mark.medium
def test_exact_kl():
    # p = (1/2, 1/2), q = (1/4, 3/4): 1/2 log 2 + 1/2 log 2/3 = 0.143841
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    np.testing.assert_allclose(exact_kl(p, q), 0.143841, rtol=1e-5)
    np.testing.assert_allclose(exact_kl(np.stack([p, q]), np.stack([q, q])), [0.143841, 0.0], 1e-5)
    # A token that the policy cannot sample adds 0, whatever the reference's probability.
    never, unsure = np.array([0.0, -np.inf]), np.log([0.5, 0.5])
    np.testing.assert_allclose(exact_kl(never, unsure), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(exact_kl(never, never), 0.0)
    assert np.all(np.isfinite(jax.grad(losses.exact_kl)(never, unsure)))
    assert exact_kl(unsure, never) == np.inf
    logit_V, ref_logit_V = np.random.default_rng(1).normal(size=(2, 3, 4, 9)) * 3
    logp, ref = jax.nn.log_softmax(logit_V), jax.nn.log_softmax(ref_logit_V)
    want = np.zeros((3, 4))
    for *at, v in np.ndindex(3, 4, 9):
        lp, lr = float(logp[*at, v]), float(ref[*at, v])
        want[*at] += math.exp(lp) * (lp - lr)
    np.testing.assert_allclose(exact_kl(logp, ref), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(losses.exact_kl(logp, ref), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        losses.exact_kl(p, q[:1])


# ---------------------------------------------------------------- value loss


def test_value_terms_by_hand():
    # old 1, clip 0.5 throughout
    # V        1.2    2      2      0     -1
    # R        3      3      0      0      3
    # clipped  1.2    1.5    1.5    0.5    0.5
    # errors   1.8^2  1;1.5^2  4;1.5^2  0;0.5^2  16;2.5^2
    value_BT = np.array([[1.2, 2.0, 2.0, 0.0, -1.0]])
    return_BT = np.array([[3.0, 3.0, 0.0, 0.0, 3.0]])
    term_BT, metrics = value_terms(value_BT, np.ones((1, 5)), return_BT, clip=0.5)
    np.testing.assert_allclose(term_BT, [[1.62, 1.125, 2.0, 0.125, 8.0]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["value_clip_fraction"], [[0, 1, 0, 1, 0]])
    np.testing.assert_allclose(metrics["value_error"], [[3.24, 1, 4, 0, 16]], rtol=1e-5)
    np.testing.assert_allclose(metrics["value_mean"], value_BT)


@pytest.mark.medium
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss_against_reference(aggregation):
    value_BT, old_BT, return_BT, mask_BT = random_batch(10)
    row_terms, clipped, errors, values = [], 0, 0.0, 0.0
    for b in range(5):
        terms = []
        for t in np.flatnonzero(mask_BT[b]):
            v, old, target = (float(x[b, t]) for x in (value_BT, old_BT, return_BT))
            near = min(max(v, old - 0.4), old + 0.4)
            terms.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
            clipped += (near - target) ** 2 > (v - target) ** 2
            errors, values = errors + (v - target) ** 2, values + v
        row_terms.append(terms)
    options = dict(clip=0.4, aggregation=aggregation)
    want = reference_aggregate(row_terms, aggregation, T=7)
    junk = [np.where(mask_BT > 0, x, np.nan) for x in (value_BT, old_BT, return_BT)]
    pads = [np.pad(x, ((0, 2), (0, 0))) for x in (value_BT, old_BT, return_BT, mask_BT)]
    order_B = [4, 2, 0, 1, 3]
    for arrays in [
        (value_BT, old_BT, return_BT, mask_BT),
        (*junk, mask_BT),
        pads,
        [x[order_B] for x in (value_BT, old_BT, return_BT, mask_BT)],
    ]:
        for function in (value_loss, losses.value_loss):
            loss, metrics = function(*arrays, **options)
            assert loss.dtype == jnp.float32 and loss.shape == ()
            np.testing.assert_allclose(loss, want, rtol=1e-5)
        tokens = mask_BT.sum()
        want_metrics = dict(value_mean=values, value_error=errors, value_clip_fraction=clipped)
        assert metrics.keys() == want_metrics.keys()
        for name, total in want_metrics.items():
            np.testing.assert_allclose(metrics[name], total / tokens, rtol=1e-5, err_msg=name)


def test_gradient_of_the_value_loss():
    value_BT, old_BT, return_BT, mask_BT = random_batch(11)

    def loss(*arrays):
        return value_loss(*arrays, mask_BT, clip=0.4, aggregation="token-mean")[0]

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    # at the old values, the gradient is that of the plain squared error
    grad_BT, _, _ = gradient(old_BT, old_BT, return_BT)
    want_BT = (old_BT - return_BT) * mask_BT / mask_BT.sum()
    np.testing.assert_allclose(grad_BT, want_BT, rtol=1e-5, atol=1e-7)
    # elsewhere it is the same, or zero where the clip is active; only the values get a gradient
    grad_BT, *others = gradient(value_BT, old_BT, return_BT)
    clip_BT = value_terms(value_BT, old_BT, return_BT, clip=0.4)[1]["value_clip_fraction"]
    want_BT = (value_BT - return_BT) * mask_BT * (1 - np.asarray(clip_BT)) / mask_BT.sum()
    np.testing.assert_allclose(grad_BT, want_BT, rtol=1e-5, atol=1e-7)
    assert 0 < np.sum(clip_BT * mask_BT) < mask_BT.sum()
    assert not any(np.any(x) for x in others)


def test_value_errors():
    x_BT = np.zeros((2, 3))
    with pytest.raises(ValueError, match="clip must be > 0"):
        losses.value_terms(x_BT, x_BT, x_BT, clip=0.0)
    with pytest.raises(ValueError, match="'mean'; known: token-mean"):
        losses.value_loss(x_BT, x_BT, x_BT, x_BT, clip=0.2, aggregation="mean")
    with pytest.raises(AssertionError):
        losses.value_loss(x_BT, x_BT, x_BT[:1], x_BT, clip=0.2, aggregation="token-mean")


# ---------------------------------------------------------------- aggregation


def reference_aggregate(row_terms, mode, T):
    """row_terms: the list of masked terms of each row."""
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


@pytest.mark.medium
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
