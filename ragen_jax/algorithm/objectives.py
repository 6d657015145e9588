"""Policy terms built on importance weights, in addition to losses.ppo_terms (dual-clip PPO).

Axes: B rows, T tokens. All take (logp, old_logp, advantage, mask) of shape [B, T] and return a term
for each token and per-token metrics; losses.policy_loss combines them into a loss. A row is
one sequence, so it must not be split across micro-batches. To add an objective, write such a
function and add a row to OBJECTIVES.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ragen_jax.algorithm.losses import MAX_LOG_RATIO, TokenTerms, inside, policy_terms, ppo_terms
from ragen_jax.core.tables import look_up
from ragen_jax.core.types import Array


def gspo_terms(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    mask_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> TokenTerms:
    """Return GSPO's terms: PPO's clipped objective with one ratio per row.

    The ratio of a row is the geometric mean of its tokens' ratios,
    s_b = exp(mean over the row's sampled tokens of (logp - old_logp)). Each token's ratio is
    stop_gradient(s_b) * p / stop_gradient(p): its value is s_b, its gradient the token's. With
    aggregation "seq-mean-token-mean" and one advantage per row this is the sequence objective.
    Zheng et al., arXiv 2507.18071, equations 5, 7 and 14.

    Args:
      logp_BT: log-probs under the current policy; the only argument that gets a gradient.
      old_logp_BT: log-probs under the policy that sampled.
      advantage_BT: advantages.
      mask_BT: nonzero where the policy sampled the token; the tokens of all turns count.
      clip_low, clip_high: how far s_b may fall below 1 or rise above 1 (paper: 3e-4, 4e-4).
      clip_c: the second clip of losses.policy_terms, on s_b; None (the paper) switches it off.
    Returns:
      term_BT float32, and the metrics of losses.policy_terms, with s_b as the ratio.
    Raises:
      ValueError: clip_c <= 1.
      AssertionError: ranks are not 2 or shapes differ.
    """
    inside_BT, *arrays = inside(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    logp_BT, old_logp_BT, advantage_BT = arrays
    tokens_B1 = jnp.maximum(jnp.sum(inside_BT, axis=1, keepdims=True), 1)
    mean_B1 = jnp.sum(logp_BT - old_logp_BT, axis=1, keepdims=True) / tokens_B1
    log_ratio_BT = lax.stop_gradient(mean_B1) + (logp_BT - lax.stop_gradient(logp_BT))
    return policy_terms(
        log_ratio_BT,
        jnp.zeros_like(log_ratio_BT),
        advantage_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )


def cispo_terms(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    mask_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> TokenTerms:
    """Return CISPO's terms: REINFORCE with clipped importance weights.

    No token loses its gradient to a clip:
    term = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp, r = exp(logp - old_logp)
    with the log-ratio clamped to +-20. MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    Args:
      logp_BT, old_logp_BT, advantage_BT, mask_BT: as in gspo_terms.
      clip_low: how far the weight may fall below 1; the paper has no lower bound: 1 or more.
      clip_high: how far the weight may rise above 1.
      clip_c: must be None; CISPO has no second clip.
    Returns:
      term_BT float32, and per-token metrics without gradient, all float32 [B, T]: ratio_mean,
      approx_kl as in losses.policy_terms; clip_fraction: 1 where the weight was clipped;
      lower_clip_fraction: 1 where it was clipped at the lower bound.
    Raises:
      ValueError: clip_c is given.
      AssertionError: ranks are not 2 or shapes differ.
    """
    if clip_c is not None:
        raise ValueError(f"cispo has no dual clip: clip_c must be None, got {clip_c}")
    _, *arrays = inside(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    logp_BT, old_logp_BT, advantage_BT = arrays
    old_logp_BT, advantage_BT = lax.stop_gradient((old_logp_BT, advantage_BT))
    log_ratio_BT = lax.stop_gradient(jnp.clip(logp_BT - old_logp_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    ratio_BT = jnp.exp(log_ratio_BT)
    weight_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    metrics = {
        "ratio_mean": ratio_BT,
        "clip_fraction": (weight_BT != ratio_BT).astype(jnp.float32),
        "lower_clip_fraction": (weight_BT > ratio_BT).astype(jnp.float32),
        "approx_kl": jnp.expm1(log_ratio_BT) - log_ratio_BT,
    }
    return -weight_BT * advantage_BT * logp_BT, metrics


def reinforce_terms(
    logp_BT: Array,
    old_logp_BT: Array,
    advantage_BT: Array,
    mask_BT: Array,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> TokenTerms:
    """Return REINFORCE's terms, -A * logp: no importance weights and no clip.

    With an advantage of 1 it is the negative log-likelihood, the loss of supervised fine-tuning and
    of rejection sampling. Williams 1992, "Simple statistical gradient-following algorithms".

    Args:
      logp_BT, old_logp_BT, advantage_BT, mask_BT: as in gspo_terms; old_logp_BT only enters the
        metrics.
      clip_low, clip_high: not read.
      clip_c: must be None.
    Returns:
      term_BT float32, and the metrics of losses.policy_terms, with no token clipped.
    Raises:
      ValueError: clip_c is given.
      AssertionError: ranks are not 2 or shapes differ.
    """
    if clip_c is not None:
        raise ValueError(f"reinforce has no dual clip: clip_c must be None, got {clip_c}")
    del clip_low, clip_high
    _, *arrays = inside(mask_BT, logp_BT, old_logp_BT, advantage_BT)
    logp_BT, old_logp_BT, advantage_BT = arrays
    old_logp_BT, advantage_BT = lax.stop_gradient((old_logp_BT, advantage_BT))
    log_ratio_BT = lax.stop_gradient(jnp.clip(logp_BT - old_logp_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    none_BT = jnp.zeros_like(log_ratio_BT)
    metrics = {
        "ratio_mean": jnp.exp(log_ratio_BT),
        "clip_fraction": none_BT,
        "lower_clip_fraction": none_BT,
        "approx_kl": jnp.expm1(log_ratio_BT) - log_ratio_BT,
    }
    return -advantage_BT * logp_BT, metrics


@dataclasses.dataclass(frozen=True)
class Objective:
    """A policy term, and the settings that it reads."""

    terms: Callable[..., TokenTerms]  # a function like those above
    clips: bool = True  # whether it reads clip_low and clip_high
    second_clip: bool = True  # whether it takes a clip_c
    of_sequence: bool = False  # whether its ratios are per sequence, which need narrow clips


OBJECTIVES = {
    "ppo": Objective(ppo_terms),
    "gspo": Objective(gspo_terms, of_sequence=True),
    "cispo": Objective(cispo_terms, second_clip=False),
    "reinforce": Objective(reinforce_terms, clips=False, second_clip=False),
}


def mismatch_weights(
    logp_BT: Array, sampler_logp_BT: Array, mask_BT: Array, *, cap: float, level: str = "token"
) -> jax.Array:
    """Return truncated importance weights for a sampler whose log-probs differ from the trainer's.

    token: min(exp(logp_t - sampler_t), cap), which corrects each token separately;
    sequence: min(exp(sum over the row's sampled tokens), cap), the same for all its tokens, which
    corrects the whole row at a larger variance. Multiply the policy terms by it. Truncation:
    Ionides 2008, "Truncated importance sampling"; for samplers of language models: Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training". The log-weight is
    first clamped to +-20.

    Args:
      logp_BT: the trainer's log-probs under the parameters that sampled, before any update.
      sampler_logp_BT: the sampler's log-probs under the same parameters.
      mask_BT: nonzero where the policy sampled the token.
      cap: largest weight, >= 1.
      level: a key of LEVELS.
    Returns:
      weight_BT float32 without gradient, 0 outside the mask.
    Raises:
      ValueError: cap < 1; unknown level.
      AssertionError: ranks are not 2 or shapes differ.
    """
    if cap < 1:
        raise ValueError(f"cap must be >= 1 (the weight of equal log-probs is 1), got {cap}")
    of_level = look_up(LEVELS, "level", level)
    inside_BT, logp_BT, sampler_logp_BT = inside(mask_BT, logp_BT, sampler_logp_BT)
    gap_BT = of_level(logp_BT - sampler_logp_BT)
    weight_BT = jnp.minimum(jnp.exp(jnp.clip(gap_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cap)
    return lax.stop_gradient(jnp.where(inside_BT, weight_BT, 0.0))


def mismatch_kl(logp_BT: np.ndarray, sampler_logp_BT: np.ndarray, mask_BT: np.ndarray) -> float:
    """Estimate KL(sampler || trainer) on the sampled tokens, in nats per token.

    Mean of r - 1 - log r, r = p_trainer / p_sampler: unbiased, each term at least 0 (Schulman 2020,
    "Approximating KL divergence", k3).

    Args:
      logp_BT, sampler_logp_BT, mask_BT: as in mismatch_weights, on the host.
    """
    log_ratio = (logp_BT - sampler_logp_BT)[mask_BT > 0].astype(np.float64)
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def _of_token(gap_BT: jax.Array) -> jax.Array:
    return gap_BT


def _of_sequence(gap_BT: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.sum(gap_BT, axis=1, keepdims=True), gap_BT.shape)


LEVELS = {"token": _of_token, "sequence": _of_sequence}
