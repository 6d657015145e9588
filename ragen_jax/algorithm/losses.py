"""Losses as pure functions of token arrays: a term for each token, and the weights of the terms.

Axes: B rows, T tokens; entry t of every _BT array belongs to token t. Everything here is pure, has
static shapes and returns float32, so it works under jit, vmap and grad. Weights do not depend on
the terms: a caller may compute `minibatch_weights` once on a whole minibatch and call the losses on
its pieces; the results add up to those of the minibatch.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ragen_jax.core.stored_programs import storable
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
    """Return the dual-clip PPO objective of each token, to be minimised.

    With r = exp(clip(logp - old_logp, -20, 20)) and A = advantage:
    term = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0 also
    term = min(term, -A clip_c), which bounds the cost of a single token.
    At r = 1 the gradient is that of REINFORCE, -A d logp.

    Args:
      logp_BT: log-probs under the current policy; the only argument that gets a gradient.
      old_logp_BT: log-probs under the policy that sampled.
      advantage_BT: advantages.
      clip_low, clip_high: how far r may fall below 1 or rise above 1 (paper: 0.2, 0.28).
      clip_c: bound of the second clip, > 1; None switches it off.
    Returns:
      term_BT float32, and per-token metrics without gradient, all float32 [B, T]; their averages
      over masked tokens are the metrics of policy_loss:
      - ratio_mean: r
      - clip_fraction: 1 where the first clip decides the term, else 0
      - lower_clip_fraction: 1 where the second clip decides the term, else 0
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
    # jnp.where, not jnp.maximum: at a tie the gradient of maximum is the mean of both sides.
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
    """Return policy_terms, with 0 outside the mask; inputs outside the mask are ignored."""
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
    """Return the policy's loss, dual-clip PPO by default: sum(weight * terms(...)).

    Args:
      logp_BT, old_logp_BT, advantage_BT, clip_low, clip_high, clip_c: as in policy_terms.
      mask_BT: nonzero where the policy sampled the token.
      aggregation: a key of AGGREGATIONS.
      terms: the function of token terms, as in a row of objectives.OBJECTIVES.
      weights: weights of these rows as a piece of a minibatch; None: they are the whole minibatch.
    Returns:
      loss, a float32 scalar; metrics, averages of the metrics of `terms` over the masked tokens (0
      without masked tokens), for every aggregation. For a piece, both are its contribution to the
      values of the minibatch.
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
    """Return the clipped squared error of the critic at each token, to be minimised.

    term = 0.5 max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2): moving more than clip
    away from the old value gains nothing. Schulman et al., arXiv 1707.06347, as in verl's PPO.

    Args:
      value_BT: values of the critic; the only argument that gets a gradient.
      old_value_BT: values from before the update, which the advantages were computed from.
      return_BT: the targets of the values (the second result of advantage.gae).
      clip: how far a value may move, in units of reward, > 0.
    Returns:
      term_BT float32, and per-token metrics without gradient, all float32 [B, T]:
      - value_mean: V
      - value_error: (V - R)^2
      - value_clip_fraction: 1 where the clipped error decides the term, else 0
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
    # jnp.where, not jnp.maximum: at a tie (V = old, the first update) the gradient is unclipped.
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
    """Return the critic's loss: sum(weight * value_terms(...)).

    Args:
      value_BT, old_value_BT, return_BT, clip: as in value_terms.
      mask_BT: nonzero where the policy sampled the token.
      aggregation, weights: as in policy_loss.
    Returns:
      loss, a float32 scalar; metrics, averages of the metrics of value_terms over the masked tokens
      (0 without masked tokens), for every aggregation. For a piece, both are its contribution to
      the values of the minibatch.
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
    """Return (loss, averages of the metrics) from the terms and metrics of each token."""
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
        # The two k2 cancel in value, and only the first has a gradient.
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
EXACT = "exact"  # the kl_kind that sums over the whole vocabulary instead of estimating


def kl(logp_BT: Array, ref_logp_BT: Array, kind: str) -> jax.Array:
    """Estimate KL(policy || reference) at each token sampled by the policy.

    k1 = logp - ref (unbiased, any sign); abs = |k1|; k2 = k1^2 / 2;
    k3 = exp(d) - d - 1 with d = clip(ref - logp, -20, 20), result clipped to +-10 as in verl.
    k1+, abs+, k3+: the value of that estimate with the gradient of k2, k1 d logp, as in verl.
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
    """Return KL(policy || reference) over the whole vocabulary: sum_v p_v (log p_v - log ref_v).

    This is not an estimate: its gradient is the KL's for any sample. Tokens of probability 0 under
    the policy count 0; a token of probability 0 only under the reference makes the KL infinite.

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
    # Replace before the product: 0 * inf would be NaN, in the value and in the gradient.
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
SUMMED = ("seq-mean-token-sum-norm",)  # aggregations whose loss grows with the number of rows


def token_weights(mask_BT: Array, mode: str, *, norm_length: float | None = None) -> jax.Array:
    """Return the weight of each token, so that a loss is sum(weight * term).

    With n_b the number of masked tokens of row b, and R the number of rows with n_b > 0:

    | mode | weight of a masked token of row b |
    | --- | --- |
    | token-mean | 1 / sum_b n_b |
    | seq-mean-token-mean | 1 / (n_b + 1e-8) / R |
    | seq-mean-token-sum | 1 / R |
    | seq-mean-token-sum-norm | 1 / norm_length |

    Rows without masked tokens (weight-0 padding) do not count; an empty mask gives weights 0.

    Args:
      mask_BT: nonzero where the term counts.
      mode: a key of AGGREGATIONS.
      norm_length: constant of the last mode; None: T. Pass it if T may be padded
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


@storable
class Weights(NamedTuple):
    """Weights of each token of a minibatch, or of a piece of it."""

    loss_BT: Array  # weights of the loss terms: `token_weights` of the aggregation
    mean_BT: Array  # weights of the metrics: `token_weights` of "token-mean"


def minibatch_weights(
    mask_BT: Array, aggregation: str, *, norm_length: float | None = None
) -> Weights:
    """Return the `Weights` of a whole minibatch; arguments and errors as in `token_weights`."""
    return Weights(
        token_weights(mask_BT, aggregation, norm_length=norm_length),
        token_weights(mask_BT, "token-mean"),
    )


def weighted_sum(x_BT: Array, mask_BT: Array, weight_BT: Array) -> jax.Array:
    """Return sum(weight * x) over the mask, a float32 scalar; x outside the mask is ignored."""
    inside_BT, x_BT = inside(mask_BT, x_BT)
    return jnp.sum(jnp.where(inside_BT, weight_BT, 0.0) * x_BT)


def aggregate(x_BT: Array, mask_BT: Array, mode: str) -> jax.Array:
    """Return sum(token_weights(mask, mode) * x); x outside the mask is ignored, even if NaN.

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
    """Return the mask as bool, and each array in float32 with 0 outside the mask.

    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    chex.assert_rank([mask_BT, *arrays], 2)
    chex.assert_equal_shape([mask_BT, *arrays])
    inside_BT = jnp.asarray(mask_BT) != 0
    # Mask before exp, so that values outside the mask cannot put NaN into the gradient.
    masked = (jnp.where(inside_BT, jnp.asarray(x_BT, jnp.float32), 0.0) for x_BT in arrays)
    return inside_BT, *masked


def _rows_with_tokens(inside_BT: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(jnp.any(inside_BT > 0, axis=1)), 1).astype(jnp.float32)
