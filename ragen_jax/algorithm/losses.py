"""Losses as plain functions of token arrays: a term for each token, and how the terms are weighed.

Axes: B rows, T tokens; entry t of every _BT array is about token t. Everything here is pure, has
static shapes and returns float32, so it works under jit, vmap and grad. Weights do not depend on
the terms: a caller that computes `minibatch_weights` once on a whole minibatch may hand its pieces
to the losses one by one, and what they return adds up to the minibatch's.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ragen_jax.core.tables import look_up
from ragen_jax.core.types import Array

MAX_LOG_RATIO = 20.0  # exp(20) is still far from float32's limit
MAX_K3 = 10.0

TokenTerms = tuple[jax.Array, dict[str, jax.Array]]  # term_BT, metrics of each token


def policy_terms(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = 3.0,
) -> TokenTerms:
    """Dual-clip PPO objective of each token, to be minimised.

    With r = exp(clip(logp - old_logp, -20, 20)) and A = advantage:
    term = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 also
    term = min(term, -A clip_c), which bounds what one unlucky token can cost.
    At r = 1 its gradient is REINFORCE's, -A d logp.

    Args:
      logp_BT: log-probs under the current policy; the only argument that gets a gradient.
      old_logp_BT: log-probs under the policy that sampled.
      advantage_BT: advantages.
      clip_low, clip_high: how far r may fall below, rise above 1 (paper: 0.2, 0.28).
      clip_c: bound of the second clip, > 1; None switches it off.
    Returns:
      term_BT float32, and per-token metrics without gradient, all float32 [B, T]; their averages
      over masked tokens are the metrics of policy_loss:
      - ratio_mean: r
      - clip_fraction: 1 where the first clip decides the term
      - lower_clip_fraction: 1 where the second clip does
      - approx_kl: k3 of KL(old || new), r - 1 - log r >= 0
    Raises:
      ValueError: clip_c <= 1.
      AssertionError: ranks are not 2 or shapes differ.
    """
    arrays = [logp_BT, old_logp_BT, advantage_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    if clip_c is not None and clip_c <= 1:
        raise ValueError(f"clip_c must be > 1 (it bounds the ratio from above), got {clip_c}")
    logp_BT, old_logp_BT, advantage_BT = (jnp.asarray(x, jnp.float32) for x in arrays)
    old_logp_BT, advantage_BT = lax.stop_gradient((old_logp_BT, advantage_BT))

    log_ratio_BT = jnp.clip(logp_BT - old_logp_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = jnp.exp(log_ratio_BT)
    plain_BT = -advantage_BT * ratio_BT
    clipped_BT = -advantage_BT * jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    # where, not maximum: at a tie the gradient of maximum is the mean of both sides.
    clip_active_BT = clipped_BT > plain_BT
    term_BT = jnp.where(clip_active_BT, clipped_BT, plain_BT)
    lower_active_BT = jnp.zeros_like(clip_active_BT)
    if clip_c is not None:
        bound_BT = -advantage_BT * clip_c
        lower_active_BT = (advantage_BT < 0) & (bound_BT < term_BT)
        term_BT = jnp.where(lower_active_BT, bound_BT, term_BT)
    metrics = {
        "ratio_mean": ratio_BT,
        "clip_fraction": clip_active_BT.astype(jnp.float32),
        "lower_clip_fraction": lower_active_BT.astype(jnp.float32),
        "approx_kl": jnp.expm1(log_ratio_BT) - log_ratio_BT,
    }
    return term_BT, lax.stop_gradient(metrics)


def ppo_terms(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    mask_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = 3.0,
) -> TokenTerms:
    """policy_terms; 0 outside the mask, whatever lies there."""
    _, *arrays = inside(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    return policy_terms(*arrays, clip_low=clip_low, clip_high=clip_high, clip_c=clip_c)


def policy_loss(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    mask_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = 3.0,
    aggregation: str,
    terms: Callable[..., TokenTerms] = ppo_terms,
    weights: "Weights | None" = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The policy's loss, dual-clip PPO by default: sum(weight * terms(...)).

    Args:
      logp_BT, old_logp_BT, advantage_BT, clip_low, clip_high, clip_c: as in policy_terms.
      mask_BT: nonzero where the policy sampled the token.
      aggregation: a key of AGGREGATIONS.
      terms: of a row of objectives.OBJECTIVES.
      weights: of the minibatch of which these rows are a piece; None: they are all of it.
    Returns:
      loss, a float32 scalar; metrics, averages over the masked tokens (0 if there are none) of
      what `terms` returns, whatever the aggregation. Of a piece both are what it adds to the
      minibatch's.
    Raises:
      ValueError: unknown aggregation; clip_c <= 1.
      AssertionError: ranks are not 2 or shapes differ.
    """
    term_BT, metrics = terms(
        logp_BT,
        old_logp_BT,
        advantage_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )
    return _weigh(term_BT, metrics, mask_BT, aggregation, weights)


def value_terms(
    value_BT: Array, old_value_BT: Array, return_BT: Array, *, clip: float
) -> TokenTerms:
    """Clipped squared error of the critic at each token, to be minimised.

    term = 0.5 max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2): moving further than clip
    from the old value earns nothing. Schulman et al., arXiv 1707.06347, as verl's PPO does.

    Args:
      value_BT: values of the critic; the only argument that gets a gradient.
      old_value_BT: values from before the update, of which the advantages were made.
      return_BT: what the values should be (the second result of advantage.gae).
      clip: how far a value may move, in units of reward, > 0.
    Returns:
      term_BT float32, and per-token metrics without gradient, all float32 [B, T]:
      - value_mean: V
      - value_error: (V - R)^2
      - value_clip_fraction: 1 where the clipped error decides the term
    Raises:
      ValueError: clip <= 0.
      AssertionError: ranks are not 2 or shapes differ.
    """
    arrays = [value_BT, old_value_BT, return_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    if clip <= 0:
        raise ValueError(f"clip must be > 0 (a value may move that far), got {clip}")
    value_BT, old_value_BT, return_BT = (jnp.asarray(x, jnp.float32) for x in arrays)
    old_value_BT, return_BT = lax.stop_gradient((old_value_BT, return_BT))

    near_BT = old_value_BT + jnp.clip(value_BT - old_value_BT, -clip, clip)
    error_BT = (value_BT - return_BT) ** 2
    clipped_BT = (near_BT - return_BT) ** 2
    # where, not maximum: at a tie (V = old, the first update) its gradient is the plain one.
    clip_active_BT = clipped_BT > error_BT
    term_BT = 0.5 * jnp.where(clip_active_BT, clipped_BT, error_BT)
    metrics = {
        "value_mean": value_BT,
        "value_error": error_BT,
        "value_clip_fraction": clip_active_BT.astype(jnp.float32),
    }
    return term_BT, lax.stop_gradient(metrics)


def value_loss(
    value_BT: Array,
    old_value_BT: Array,
    return_BT: Array,
    mask_BT: Array,
    *,
    clip: float,
    aggregation: str,
    weights: "Weights | None" = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The critic's loss: sum(weight * value_terms(...)).

    Args:
      value_BT, old_value_BT, return_BT, clip: as in value_terms.
      mask_BT: nonzero where the policy sampled the token.
      aggregation, weights: as in policy_loss.
    Returns:
      loss, a float32 scalar; metrics, averages of value_terms' over the masked tokens (0 if there
      are none), whatever the aggregation. Of a piece both are what it adds to the minibatch's.
    Raises:
      ValueError: unknown aggregation; clip <= 0.
      AssertionError: ranks are not 2 or shapes differ.
    """
    _, *arrays = inside(mask_BT, value_BT, old_value_BT, return_BT)
    term_BT, metrics = value_terms(*arrays, clip=clip)
    return _weigh(term_BT, metrics, mask_BT, aggregation, weights)


def _weigh(
    term_BT: jax.Array,
    metrics: dict[str, jax.Array],
    mask_BT: Array,
    aggregation: str,
    weights: "Weights | None",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, averages of the metrics) of terms and metrics of each token."""
    if weights is None:
        weights = minibatch_weights(mask_BT, aggregation)

    def mean(x_BT):
        return weighted_sum(x_BT, mask_BT, weights.mean_BT)

    loss = weighted_sum(term_BT, mask_BT, weights.loss_BT)
    return loss, {name: mean(x_BT) for name, x_BT in metrics.items()}


Estimate = Callable[[jax.Array, jax.Array], jax.Array]  # (logp_BT, ref_logp_BT) -> kl_BT


def _k1(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    return logp_BT - ref_logp_BT


def _abs(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    return jnp.abs(logp_BT - ref_logp_BT)


def _k2(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    return 0.5 * (logp_BT - ref_logp_BT) ** 2


def _k3(logp_BT: jax.Array, ref_logp_BT: jax.Array) -> jax.Array:
    d_BT = jnp.clip(ref_logp_BT - logp_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(d) - 1 loses where the policies almost agree.
    return jnp.clip(jnp.expm1(d_BT) - d_BT, -MAX_K3, MAX_K3)


def _with_gradient_of_k2(estimate: Estimate) -> Estimate:
    def straight_through(logp_BT, ref_logp_BT):
        k2_BT = _k2(logp_BT, ref_logp_BT)
        # k2 - k2 is 0 in value, and only the first of the two has a gradient.
        return k2_BT + lax.stop_gradient(estimate(logp_BT, ref_logp_BT) - k2_BT)

    return straight_through


KL_KINDS = {
    "k1": _k1,
    "abs": _abs,
    "k2": _k2,
    "k3": _k3,
    "k1+": _with_gradient_of_k2(_k1),
    "abs+": _with_gradient_of_k2(_abs),
    "k3+": _with_gradient_of_k2(_k3),
}


def kl(logp_BT: Array, ref_logp_BT: Array, kind: str) -> jax.Array:
    """Estimate of KL(policy || reference) at each token sampled by the policy.

    k1 = logp - ref (unbiased, any sign); abs = |k1|; k2 = k1^2 / 2;
    k3 = exp(d) - d - 1 with d = clip(ref - logp, -20, 20), result clipped to +-10 as verl does.
    k1+, abs+, k3+: the value of that estimate with the gradient of k2, k1 d logp, as verl does.
    On the policy's own samples the mean gradient of k2 is that of the KL, whereas the mean
    gradient of k1 is 0 and that of k3 is the gradient of KL(reference || policy).

    Args:
      logp_BT, ref_logp_BT: log-probs under the policy and under the reference.
      kind: a key of KL_KINDS.
    Returns:
      kl_BT float32.
    Raises:
      ValueError: unknown kind.
      AssertionError: ranks are not 2 or shapes differ.
    """
    chex.assert_rank([logp_BT, ref_logp_BT], 2)
    chex.assert_equal_shape([logp_BT, ref_logp_BT])
    estimate = look_up(KL_KINDS, "kl kind", kind)
    return estimate(jnp.asarray(logp_BT, jnp.float32), jnp.asarray(ref_logp_BT, jnp.float32))


def exact_kl(logp_V: Array, ref_logp_V: Array) -> jax.Array:
    """KL(policy || reference) over the whole vocabulary: sum_v p_v (log p_v - log ref_v).

    No estimate: its gradient is the KL's whatever was sampled. Tokens of probability 0 under the
    policy count 0; one that the reference alone rules out makes the KL infinite.

    Args:
      logp_V, ref_logp_V: float [..., V], normalised log-probs; -inf is allowed.
    Returns:
      float32 [...], nats; at least 0 up to rounding.
    Raises:
      AssertionError: shapes differ, or there is no axis V.
    """
    chex.assert_equal_shape([logp_V, ref_logp_V])
    chex.assert_axis_dimension_gt(logp_V, -1, 0)
    logp_V, ref_logp_V = (jnp.asarray(x, jnp.float32) for x in (logp_V, ref_logp_V))
    possible_V = logp_V > -jnp.inf
    # Replaced before the product: 0 * inf would be NaN, in the gradient too.
    gap_V = jnp.where(possible_V, logp_V, 0.0) - jnp.where(possible_V, ref_logp_V, 0.0)
    return jnp.sum(jnp.where(possible_V, jnp.exp(logp_V) * gap_V, 0.0), axis=-1)


def _token_mean(inside_BT: jax.Array, norm_length: float | None) -> jax.Array:
    return inside_BT / jnp.maximum(jnp.sum(inside_BT), 1.0)


def _seq_mean_token_mean(inside_BT: jax.Array, norm_length: float | None) -> jax.Array:
    tokens_B1 = jnp.sum(inside_BT, axis=1, keepdims=True)
    return inside_BT / (tokens_B1 + 1e-8) / _rows_with_tokens(inside_BT)


def _seq_mean_token_sum(inside_BT: jax.Array, norm_length: float | None) -> jax.Array:
    return inside_BT / _rows_with_tokens(inside_BT)


def _seq_mean_token_sum_norm(inside_BT: jax.Array, norm_length: float | None) -> jax.Array:
    return inside_BT / (inside_BT.shape[1] if norm_length is None else norm_length)


AGGREGATIONS = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
SUMMED = ("seq-mean-token-sum-norm",)  # those whose loss grows with the number of rows


def token_weights(mask_BT: Array, mode: str, *, norm_length: float | None = None) -> jax.Array:
    """Weight of each token, so that a loss is sum(weight * term).

    With n_b the masked tokens of row b, and R the number of rows with n_b > 0:

    | mode | weight of a masked token of row b |
    | --- | --- |
    | token-mean | 1 / sum_b n_b |
    | seq-mean-token-mean | 1 / (n_b + 1e-8) / R |
    | seq-mean-token-sum | 1 / R |
    | seq-mean-token-sum-norm | 1 / norm_length |

    Rows without tokens (weight-0 padding) count nowhere; an empty mask gives weights 0.

    Args:
      mask_BT: nonzero where the term counts.
      mode: a key of AGGREGATIONS.
      norm_length: constant of the last mode; None is T. Pass it when T may be padded
        differently from one minibatch to the next. The other modes ignore it.
    Returns:
      weight_BT float32.
    Raises:
      ValueError: unknown mode.
      AssertionError: mask_BT is not of rank 2.
    """
    chex.assert_rank(mask_BT, 2)
    weigh = look_up(AGGREGATIONS, "aggregation", mode)
    return weigh((jnp.asarray(mask_BT) != 0).astype(jnp.float32), norm_length)


class Weights(NamedTuple):
    """Of each token of a minibatch, or of a piece of it."""

    loss_BT: Array  # `token_weights` of the aggregation: of terms of the loss
    mean_BT: Array  # those of "token-mean": of metrics


def minibatch_weights(
    mask_BT: Array, aggregation: str, *, norm_length: float | None = None
) -> Weights:
    """The `Weights` of a whole minibatch; arguments and errors as in `token_weights`."""
    return Weights(
        token_weights(mask_BT, aggregation, norm_length=norm_length),
        token_weights(mask_BT, "token-mean"),
    )


def weighted_sum(x_BT: Array, mask_BT: Array, weight_BT: Array) -> jax.Array:
    """sum(weight * x) over the mask, a float32 scalar; what lies outside does not matter."""
    inside_BT, x_BT = inside(mask_BT, x_BT)
    return jnp.sum(jnp.where(inside_BT, weight_BT, 0.0) * x_BT)


def aggregate(x_BT: Array, mask_BT: Array, mode: str) -> jax.Array:
    """sum(token_weights(mask, mode) * x); entries outside the mask do not matter, even if NaN.

    Args:
      x_BT: a term for each token.
      mask_BT: nonzero where the term counts.
      mode: a key of AGGREGATIONS.
    Returns:
      float32 scalar.
    Raises:
      ValueError: unknown mode.
      AssertionError: ranks are not 2 or shapes differ.
    """
    return weighted_sum(x_BT, mask_BT, token_weights(mask_BT, mode))


def inside(mask_BT: Array, *arrays: Array) -> tuple[jax.Array, ...]:
    """The mask as bool, and each array in float32 with 0 outside of it.

    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    chex.assert_rank([mask_BT, *arrays], 2)
    chex.assert_equal_shape([mask_BT, *arrays])
    inside_BT = jnp.asarray(mask_BT) != 0
    # Before exp, so that junk under the mask cannot put NaN into the gradient.
    masked = (jnp.where(inside_BT, jnp.asarray(x_BT, jnp.float32), 0.0) for x_BT in arrays)
    return inside_BT, *masked


def _rows_with_tokens(inside_BT: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(jnp.any(inside_BT > 0, axis=1)), 1).astype(jnp.float32)
