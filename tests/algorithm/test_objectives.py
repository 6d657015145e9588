"""objectives.py against numbers computed by hand, loops, and the required gradients.

A test checks the bound of RAGEN-2, appendix H.2, on the gradient of a group, with the library's own
advantage, score and loss.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm import losses, objectives
from ragen_jax.algorithm.advantage import group_relative
from ragen_jax.algorithm.filter import group_scores
from ragen_jax.algorithm.objectives import LEVELS, OBJECTIVES

pytestmark = pytest.mark.fast

# Jitted once: without jit, JAX would compile each operation at each shape.
CLIP_NAMES = ("clip_low", "clip_high", "clip_c")
JITTED = {name: jax.jit(row.terms, static_argnames=CLIP_NAMES) for name, row in OBJECTIVES.items()}
mismatch_weights = jax.jit(objectives.mismatch_weights, static_argnames=("cap", "level"))

CLIPS = dict(clip_low=0.2, clip_high=0.28)


def random_batch(seed, B=5, T=7):
    rng = np.random.default_rng(seed)
    old_BT = -rng.exponential(size=(B, T))
    logp_BT = old_BT + rng.normal(0.0, 0.5, size=(B, T))
    advantage_BT = rng.normal(size=(B, T))
    mask_BT = (rng.random((B, T)) < 0.6).astype(np.float32)
    mask_BT[1] = 0.0  # a padding row
    return *(x.astype(np.float32) for x in (logp_BT, old_BT, advantage_BT)), mask_BT


@pytest.mark.medium
def test_gspo_by_hand():
    # row 0: ratios 2 and 1/8, geometric mean 1/2; row 1: 2 (the 16 is masked)
    log_ratio_BT = np.log([[2.0, 1 / 8], [2.0, 16.0]])
    advantage_BT, mask_BT = np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1, 1], [1, 0]])
    term_BT, metrics = JITTED["gspo"](
        log_ratio_BT, np.zeros((2, 2)), advantage_BT, mask_BT, **CLIPS
    )
    # A = 1: -min(1/2, 0.8); A = -1: max(1/2, 0.8); row 1: -min(2, 1.28)
    np.testing.assert_allclose(term_BT, [[-0.5, 0.8], [-1.28, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_mean"] * mask_BT, [[0.5, 0.5], [2.0, 0.0]], 1e-5)
    np.testing.assert_array_equal(metrics["clip_fraction"] * mask_BT, [[0, 1], [1, 0]])
    # with the optional dual clip: ratio 4, A = -1: 4 without, 3 with
    arguments = np.log([[4.0]]), np.zeros((1, 1)), -np.ones((1, 1)), np.ones((1, 1))
    for clip_c, want in [(None, 4.0), (3.0, 3.0)]:
        term_BT, _ = objectives.gspo_terms(*arguments, clip_c=clip_c, **CLIPS)
        np.testing.assert_allclose(term_BT, [[want]], rtol=1e-5)


@pytest.mark.medium
def test_cispo_by_hand():
    # ratios 2, 1/2, 1.1; weights 1.28, 0.8, 1.1; logp -1, -2, -3; A 1, -1, 2
    # terms  1.28 * 1, -0.8 * 2, 1.1 * 2 * 3
    logp_BT = np.array([[-1.0, -2.0, -3.0]])
    old_BT = logp_BT - np.log([[2.0, 0.5, 1.1]])
    advantage_BT, mask_BT = np.array([[1.0, -1.0, 2.0]]), np.ones((1, 3))
    term_BT, metrics = JITTED["cispo"](logp_BT, old_BT, advantage_BT, mask_BT, **CLIPS)
    np.testing.assert_allclose(term_BT, [[1.28, -1.6, 6.6]], rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_mean"], [[2.0, 0.5, 1.1]], rtol=1e-5)
    np.testing.assert_array_equal(metrics["clip_fraction"], [[1, 1, 0]])
    np.testing.assert_array_equal(metrics["lower_clip_fraction"], [[0, 1, 0]])
    # r - 1 - log r of 2 and 1/2
    np.testing.assert_allclose(metrics["approx_kl"][0, :2], [0.306853, 0.193147], rtol=1e-5)
    # the paper's form: no lower bound
    term_BT, _ = objectives.cispo_terms(
        logp_BT, old_BT, advantage_BT, mask_BT, clip_low=1.0, clip_high=0.28
    )
    np.testing.assert_allclose(term_BT, [[1.28, -1.0, 6.6]], rtol=1e-5)


def test_reinforce_by_hand():
    # logp -1, -2, -3; A 1, -1, 2: terms 1 * 1, -1 * 2, 2 * 3, whatever the ratios
    logp_BT, advantage_BT = np.array([[-1.0, -2.0, -3.0]]), np.array([[1.0, -1.0, 2.0]])
    old_BT, mask_BT = logp_BT - np.log([[2.0, 0.5, 1.1]]), np.ones((1, 3))
    term_BT, metrics = JITTED["reinforce"](logp_BT, old_BT, advantage_BT, mask_BT, **CLIPS)
    np.testing.assert_allclose(term_BT, [[1.0, -2.0, 6.0]], rtol=1e-6)
    np.testing.assert_allclose(metrics["ratio_mean"], [[2.0, 0.5, 1.1]], rtol=1e-5)
    assert not np.any(metrics["clip_fraction"]) and not np.any(metrics["lower_clip_fraction"])
    with pytest.raises(ValueError, match="reinforce has no dual clip"):
        objectives.reinforce_terms(logp_BT, old_BT, advantage_BT, mask_BT, clip_c=3.0, **CLIPS)


def reference_terms(name, logp_BT, old_BT, advantage_BT, mask_BT):
    """Compute terms and their gradients with respect to logp, token by token."""
    term_BT, grad_BT = np.zeros((2, *mask_BT.shape))
    for b in range(len(mask_BT)):
        inside = np.flatnonzero(mask_BT[b])
        gaps = [float(logp_BT[b, t]) - float(old_BT[b, t]) for t in inside]
        for gap, t in zip(gaps, inside, strict=True):
            a, logp = float(advantage_BT[b, t]), float(logp_BT[b, t])
            ratio = math.exp(sum(gaps) / len(gaps) if name == "gspo" else gap)
            clipped = min(max(ratio, 0.8), 1.28)
            if name == "reinforce":
                term_BT[b, t], grad_BT[b, t] = -a * logp, -a
            elif name == "cispo":
                term_BT[b, t], grad_BT[b, t] = -clipped * a * logp, -clipped * a
            elif -a * clipped > -a * ratio:
                term_BT[b, t] = -a * clipped
            else:
                term_BT[b, t] = grad_BT[b, t] = -a * ratio
    return term_BT, grad_BT


@pytest.mark.medium
@pytest.mark.parametrize("name", OBJECTIVES)
def test_terms_and_gradients_against_reference(name):
    *arrays, mask_BT = random_batch(0)
    want_BT, want_grad_BT = reference_terms(name, *arrays, mask_BT)

    def total(function, *arrays):
        term_BT, metrics = function(*arrays, mask_BT, clip_c=None, **CLIPS)
        return jnp.sum(term_BT) + sum(x.sum() for x in metrics.values()), term_BT

    for function in (JITTED[name], OBJECTIVES[name].terms):
        gradient = jax.grad(lambda *a, f=function: total(f, *a), argnums=(0, 1, 2), has_aux=True)
        (grad_BT, *others), term_BT = gradient(*map(jnp.asarray, arrays))
        assert term_BT.dtype == jnp.float32
        np.testing.assert_allclose(term_BT, want_BT, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(grad_BT, want_grad_BT, rtol=1e-5, atol=1e-5)
        assert not any(np.any(x) for x in others)  # only the current policy is trained


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_at_ratio_one_is_reinforce(name):
    logp_BT, _, advantage_BT, mask_BT = random_batch(1)
    terms = JITTED[name]
    grad_BT = jax.grad(
        lambda x: jnp.sum(terms(x, logp_BT, advantage_BT, mask_BT, clip_c=None, **CLIPS)[0])
    )(logp_BT)
    np.testing.assert_allclose(grad_BT, -advantage_BT * mask_BT, rtol=1e-5, atol=1e-7)


def test_gspo_is_the_sequence_objective():
    logp_BT, old_BT, advantage_BT, mask_BT = random_batch(2)
    advantage_B1 = advantage_BT[:, :1]

    def by_token(logp_BT):
        advantage_BT = jnp.broadcast_to(advantage_B1, mask_BT.shape)
        term_BT, _ = objectives.gspo_terms(logp_BT, old_BT, advantage_BT, mask_BT, **CLIPS)
        return losses.aggregate(term_BT, mask_BT, "seq-mean-token-mean")

    def by_sequence(logp_BT):  # equation 5; equation 7 for the ratio
        tokens_B = jnp.maximum(mask_BT.sum(1), 1)
        ratio_B = jnp.exp(((logp_BT - old_BT) * mask_BT).sum(1) / tokens_B)
        clipped_B = jnp.clip(ratio_B, 0.8, 1.28)
        a_B = advantage_B1[:, 0]
        objective_B = jnp.minimum(ratio_B * a_B, clipped_B * a_B) * (mask_BT.sum(1) > 0)
        return -objective_B.sum() / 4  # row 1 of the five is padding

    got, want = (jax.jit(jax.value_and_grad(f))(logp_BT) for f in (by_token, by_sequence))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-7)


@pytest.mark.medium
@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_order_and_junk_do_not_matter(name):
    *arrays, mask_BT = random_batch(3)

    @jax.jit
    @jax.value_and_grad
    def loss(logp_BT, old_BT, advantage_BT, mask_BT):
        terms = OBJECTIVES[name].terms(logp_BT, old_BT, advantage_BT, mask_BT, clip_c=None, **CLIPS)
        return losses.aggregate(terms[0], mask_BT, "token-mean")

    value, grad_BT = loss(*arrays, mask_BT)
    order_B = np.array([3, 0, 4, 2, 1])
    for other, rows in [
        ([x[order_B] for x in (*arrays, mask_BT)], np.argsort(order_B)),
        ([np.pad(x, ((0, 2), (0, 3))) for x in (*arrays, mask_BT)], slice(5)),
        ([*(np.where(mask_BT > 0, x, np.nan) for x in arrays), mask_BT], slice(5)),
    ]:
        got, got_BT = loss(*other)
        np.testing.assert_allclose(got, value, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got_BT[rows, :7], grad_BT, rtol=1e-6, atol=1e-6)


def test_mismatch_weights_by_hand():
    # ratios 2, 1/2, 3 of three sampled tokens; the row's product is 3
    logp_BT = np.log([[1.0, 2.0, 0.5, 3.0]])
    mask_BT = np.array([[0, 1, 1, 1]])
    for level, cap, want in [
        ("token", 2.5, [0, 2, 0.5, 2.5]),
        ("sequence", 9.0, [0, 3, 3, 3]),
        ("sequence", 2.0, [0, 2, 2, 2]),
    ]:
        got_BT = mismatch_weights(logp_BT, np.zeros((1, 4)), mask_BT, cap=cap, level=level)
        assert got_BT.dtype == jnp.float32
        np.testing.assert_allclose(got_BT, [want], rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_mismatch_weights_against_reference(level):
    logp_BT, sampler_BT, _, mask_BT = random_batch(4)
    want_BT = np.zeros(mask_BT.shape)
    for b, t in zip(*np.nonzero(mask_BT), strict=True):
        tokens = np.flatnonzero(mask_BT[b]) if level == "sequence" else [t]
        gap = sum(float(logp_BT[b, u]) - float(sampler_BT[b, u]) for u in tokens)
        want_BT[b, t] = min(math.exp(gap), 1.5)
    junk = [np.where(mask_BT > 0, x, np.inf) for x in (logp_BT, sampler_BT)]
    for function in (mismatch_weights, objectives.mismatch_weights):
        for pair in ((logp_BT, sampler_BT), junk):
            got_BT = function(*pair, mask_BT, cap=1.5, level=level)
            np.testing.assert_allclose(got_BT, want_BT, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(
        lambda x: mismatch_weights(x, sampler_BT, mask_BT, cap=1.5, level=level).sum()
    )
    assert not np.any(gradient(logp_BT))
    far_BT = mismatch_weights(np.full((1, 2), 300.0), np.zeros((1, 2)), np.ones((1, 2)), cap=1e9)
    np.testing.assert_allclose(far_BT, math.exp(20), rtol=1e-5)  # not inf


def test_errors():
    x_BT = np.zeros((2, 3))
    with pytest.raises(ValueError, match="cap must be >= 1"):
        objectives.mismatch_weights(x_BT, x_BT, x_BT, cap=0.5)
    with pytest.raises(ValueError, match="'turn'; known: token, sequence"):
        objectives.mismatch_weights(x_BT, x_BT, x_BT, cap=2.0, level="turn")
    with pytest.raises(ValueError, match="clip_c must be None, got 3.0"):
        objectives.cispo_terms(x_BT, x_BT, x_BT, x_BT, clip_c=3.0, **CLIPS)
    with pytest.raises(ValueError, match="clip_c must be > 1"):
        objectives.gspo_terms(x_BT, x_BT, x_BT, x_BT, clip_c=0.5, **CLIPS)
    for terms in (row.terms for row in OBJECTIVES.values()):
        with pytest.raises(AssertionError):
            terms(x_BT, x_BT, x_BT, x_BT[:, :2], clip_c=None, **CLIPS)


# ---------------------------------------------------------------- the bound on a group's gradient


@pytest.mark.medium
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_reward_variance_bounds_the_task_gradient(spread):
    # A softmax policy over 8 replies to one prompt; K samples from it, with Dr.GRPO's advantages:
    # ||g|| = ||mean_k (R_k - mean R) s_k|| <= sqrt(RV) * sqrt(mean_k ||s_k||^2)   (Cauchy-Schwarz)
    rng = np.random.default_rng(0)
    K, V = 16, 8
    logit_V = rng.normal(size=V).astype(np.float32)
    p_V = np.exp(logit_V.astype(float))
    p_V /= p_V.sum()
    reply_K = rng.choice(V, size=K, p=p_V)
    return_GK = (2.0 + spread * rng.normal(size=V)[reply_K])[None]
    advantage_B1 = np.asarray(group_relative(return_GK, normalize_by_std=False)).reshape(K, 1)
    old_B1 = jax.nn.log_softmax(logit_V)[reply_K][:, None]

    def loss(logit_V):
        logp_B1 = jax.nn.log_softmax(logit_V)[reply_K][:, None]
        options = dict(clip_c=3.0, aggregation="token-mean", **CLIPS)
        return losses.policy_loss(logp_B1, old_B1, advantage_B1, np.ones((K, 1)), **options)[0]

    task = np.linalg.norm(jax.jit(jax.grad(loss))(logit_V))
    score_KV = np.eye(V)[reply_K] - p_V  # d log p(reply) / d logit
    variance = float(group_scores(return_GK, "reward_variance")[0])
    bound = variance**0.5 * np.mean(np.sum(score_KV**2, axis=1)) ** 0.5
    assert task <= bound * (1 + 1e-5)
    if spread == 0:
        assert task == 0  # a group without variance has no gradient
    else:
        assert task > 0.05 * bound  # the bound is not vacuous
