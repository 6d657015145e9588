"""SNR-aware filtering: score each group of episodes, then keep the groups worth learning from.

Axes: G groups (prompts), K episodes per group. A filter returns a mask, never a smaller batch.
The strings metric, strategy, mode and keep and the numbers value and eps are static; arrays are
traced, so the functions work under jit and vmap. Source: RAGEN-2, section 3.3 and appendix G.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from ragen_jax.algorithm.advantage import ZERO_VARIANCE, comparable_members, sample_variance
from ragen_jax.core.tables import look_up
from ragen_jax.core.types import Array

# Scores up to this size count as zero; also the tolerance of min_p. In the unit of the scores.
ZERO_SCORE = ZERO_VARIANCE
PAIRS = "pairs"  # the strategy whose candidates are only groups with variance of returns
SLACK = 1e-3  # relative tolerance of the linear threshold, as a fraction of the total mass


def _std(x_GK: Array, *, sound_GK: Array | None) -> jax.Array:
    return jnp.sqrt(sample_variance(x_GK, sound_GK=sound_GK))


def _sum(x_GK: Array, *, sound_GK: Array | None) -> jax.Array:
    x_GK = jnp.asarray(x_GK, jnp.float32)
    if sound_GK is None:
        return jnp.sum(x_GK, axis=1)
    return _mean(x_GK, sound_GK=sound_GK) * x_GK.shape[1]


def _mean(x_GK: Array, *, sound_GK: Array | None) -> jax.Array:
    where_GK = None if sound_GK is None else jnp.asarray(sound_GK, bool)
    return jnp.mean(jnp.asarray(x_GK, jnp.float32), axis=1, where=where_GK)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A score of groups: a statistic over the sound members of a group."""

    source: str  # the argument of group_scores that it reads
    statistic: Callable[..., jax.Array]  # (x_GK, *, sound_GK) -> score_G
    power: int = 0  # of the reward: rewards times c give scores times c ** power


METRICS = {
    "reward_variance": Metric("return_GK", sample_variance, power=2),
    "reward_std": Metric("return_GK", _std, power=1),
    "reward_sum": Metric("return_GK", _sum, power=1),
    "reward_mean": Metric("return_GK", _mean, power=1),
    "entropy": Metric("entropy_GK", _mean),
    "entropy_variance": Metric("entropy_GK", sample_variance),
    "length": Metric("length_GK", _mean),
}


def group_scores(
    return_GK: Array,
    metric: str = "reward_variance",
    *,
    entropy_GK: Array | None = None,
    length_GK: Array | None = None,
    sound_GK: Array | None = None,
) -> jax.Array:
    """Return the score of each group, by which select_groups ranks the groups.

    | metric | formula over the K members, or over the sound members |
    | --- | --- |
    | reward_variance | sum (R - mean R)^2 / (K - 1); 0 if K = 1 (as in the paper) |
    | reward_std | square root of reward_variance (as in the paper's released code) |
    | reward_sum, reward_mean | sum R (with sound_GK: K * mean over sound members), mean R |
    | entropy, entropy_variance | mean, sample variance of entropy_GK |
    | length | mean of length_GK |

    Args:
      return_GK: undiscounted episode returns, penalties included, before any normalisation.
      metric: a key of METRICS.
      entropy_GK: mean policy entropy of each episode; needed by the entropy metrics.
      length_GK: sampled tokens of each episode; needed by `length`.
      sound_GK: bool, whether the episode's environment did not break; None: all True.
    Returns:
      score_G float32; NaN for a group of two or more with fewer than two sound members, which is
      never a candidate for selection.
    Raises:
      ValueError: unknown metric, or the array that the metric reads is missing.
      AssertionError: an array is not of rank 2, or shapes differ.
    """
    inputs = {"return_GK": return_GK, "entropy_GK": entropy_GK, "length_GK": length_GK}
    given = [x_GK for x_GK in (*inputs.values(), sound_GK) if x_GK is not None]
    chex.assert_rank(given, 2)
    chex.assert_equal_shape(given)
    score = look_up(METRICS, "metric", metric)
    x_GK = inputs[score.source]
    if x_GK is None:
        raise ValueError(f"metric {metric!r} needs {score.source}")
    score_G = score.statistic(x_GK, sound_GK=sound_GK)
    if sound_GK is None:
        return score_G
    return jnp.where(comparable_members(sound_GK).any(axis=1), score_G, jnp.nan)


def round_scores(score_G: Array, unit_G: Array | float) -> jax.Array:
    """Return the scores without their rounding errors, so that equal scores are ties.

    The variances of 1 and of 5 solved episodes out of 6 are equal, but their float32 values may
    differ in the last bit, and which is larger depends on the size of the rewards.

    Args:
      score_G: real numbers.
      unit_G: size of a score that counts as 1.
    Returns:
      score_G float32, rounded to multiples of unit_G / 2**20; scores up to that size are unchanged.
    """
    score_G = jnp.asarray(score_G, jnp.float32)
    step_G = jnp.asarray(unit_G, jnp.float32) * 2.0**-20
    rounded_G = jnp.round(score_G / step_G) * step_G
    return jnp.where(jnp.abs(score_G) > step_G, rounded_G, score_G)


def select_groups(
    score_G: Array,
    *,
    strategy: str = "top_p",
    value: float = 0.9,
    mode: str = "linear",
    keep: str = "largest",
    include_zero: bool = False,
    eps: float | None = 0.01,
    unit: Array | float = 1.0,
) -> jax.Array:
    """Return the mask of the groups to learn from; if it is empty, the batch is skipped.

    Candidates are all groups, or with include_zero=False the groups with |score| > 1e-10 * unit.
    Without candidates nothing is kept. Ties go to the lower index. "First" below means largest
    score first, or smallest first with keep="smallest".

    - top_p, value >= 1: every candidate.
    - top_p, linear: threshold = value * (sum of candidate scores) - eps. Add up the positive
      scores, first to last, until the running sum reaches the threshold. Keep the added groups if
      the sum reached it, otherwise none. If value * sum is at most eps, the threshold is reached
      before the first addition and no group is kept. With eps=None it is 0.001 times the sum of
      the candidate scores, so that the selection does not depend on the unit of the scores.
    - top_p, softmax: the shortest prefix, at least one group, whose softmax probabilities (of the
      negated scores for keep="smallest") sum to value. As in the released code, the selection
      depends on the unit of the scores.
    - top_k: the first int(value * G) candidates; top_k_abs: the first int(value); at least one.
    - min_p: score >= value * max - 1e-10 * unit, or score <= min / value + 1e-10 * unit.
    - quarter: the value-th quarter of the n candidates, that is the ranks
      n * (value - 1) / 4 <= rank < n * value / 4 (rank from 0, first to last).
    - pairs: the int(value) smallest and the int(value) largest candidates, whatever `keep` is; all
      candidates if there are fewer. By reward_mean, and among groups with variance as in
      select_episodes, these are hard but solvable and easy but brittle prompts (Sheng et al.,
      arXiv 2602.03452).
    - none: every group, candidate or not.

    Args:
      score_G: real numbers; a group with a NaN score is never a candidate.
      strategy, mode, keep: keys of STRATEGIES, MODES, KEEP.
      value: static number.
      include_zero: whether groups with score zero are candidates.
      eps: tolerance of the linear threshold; static. The default is that of the paper's code.
      unit: size of a score that counts as 1 when scores are compared with 0; a scalar.
    Returns:
      keep_G bool.
    Raises:
      ValueError: unknown strategy, mode or keep; min_p with keep="smallest" and value <= 0.
      AssertionError: score_G is not of rank 1.
    """
    chex.assert_rank(score_G, 1)
    select = look_up(STRATEGIES, "strategy", strategy).select
    accumulate = look_up(MODES, "mode", mode)
    sign = look_up(KEEP, "keep", keep)
    score_G = jnp.asarray(score_G, jnp.float32)
    candidate_G = ~jnp.isnan(score_G)
    zero = ZERO_SCORE * unit
    if not include_zero:
        candidate_G &= jnp.abs(score_G) > zero
    return select(
        score_G, candidate_G, value=value, sign=sign, accumulate=accumulate, eps=eps, zero=zero
    )


def select_by_environment(
    score_G: Array,
    groups_E: Sequence[int],
    *,
    value: float | Sequence[float] = 0.9,
    unit_E: Array | float = 1.0,
    **options: Any,
) -> jax.Array:
    """Run select_groups on each environment separately, so that none crowds out another.

    Args:
      score_G: scores, listed environment by environment.
      groups_E: static, number of groups of each environment; they sum to G. If all numbers are
        equal and all values are equal, this is jax.vmap of select_groups over
        score_G.reshape(E, -1).
      value: static; one number, or one number per environment.
      unit_E: `unit` of select_groups; one number, or one number per environment.
      options: further keyword arguments of select_groups, the same for all environments.
    Returns:
      keep_G bool.
    Raises:
      ValueError: groups_E do not sum to G, or select_groups raises it.
      AssertionError: score_G is not of rank 1.
    """
    chex.assert_rank(score_G, 1)
    score_G = jnp.asarray(score_G, jnp.float32)
    if sum(groups_E) != score_G.shape[0]:
        raise ValueError(f"groups_E {groups_E} sum to {sum(groups_E)}, got {len(score_G)} scores")
    ends = list(itertools.accumulate(groups_E))
    parts = jnp.split(score_G, ends[:-1])
    value_E = np.broadcast_to(value, len(groups_E)).tolist()
    unit_E = jnp.broadcast_to(unit_E, (len(groups_E),))
    return jnp.concatenate(
        [
            select_groups(score_G, value=value, unit=unit, **options)
            for score_G, value, unit in zip(parts, value_E, unit_E, strict=True)
        ]
    )


def select_members(
    return_GK: Array, *, top: int, bottom: int, sound_GK: Array | None = None
) -> jax.Array:
    """Return the mask of the best and the worst members of each group.

    This filters episodes, not prompts. Members are ranked by decreasing return, ties by index. The
    first `top` and the last `bottom` of the ranking are kept, or all members if there are at most
    top + bottom. RAGEN-2, table 7 (trajectory level).

    Args:
      return_GK: undiscounted episode returns, penalties included.
      top, bottom: static, at least 0, not both 0.
      sound_GK: bool, whether the episode's environment did not break; only sound episodes are
        ranked. None: all True.
    Returns:
      keep_GK bool; groups with the same number of sound members keep the same number.
    Raises:
      ValueError: top or bottom is negative, or both are 0.
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    chex.assert_rank(return_GK, 2)
    if min(top, bottom) < 0 or top + bottom == 0:
        raise ValueError(f"top and bottom must be >= 0 and not both 0, got {top} and {bottom}")
    return_GK = jnp.asarray(return_GK, jnp.float32)
    K = return_GK.shape[1]
    if sound_GK is None:
        sound_GK = jnp.ones(return_GK.shape, bool)
    chex.assert_equal_shape([return_GK, sound_GK])
    sound_GK = jnp.asarray(sound_GK, bool)
    order_GK = jax.vmap(_order, in_axes=(0, 0, None))(return_GK, sound_GK, KEEP["largest"])
    members_G1 = sound_GK.sum(axis=1, keepdims=True)
    rank_GK = jnp.arange(K)[None, :]
    wanted_GK = (rank_GK < top) | (rank_GK >= members_G1 - bottom)
    return jax.vmap(_unsort)(wanted_GK & (rank_GK < members_G1), order_GK)


# keep rate -> (factor of the whole loss, factor of the advantages)
LOSS_SCALES = {
    "none": lambda kept: (1.0, 1.0),
    "linear": lambda kept: (kept, 1.0),
    "sqrt": lambda kept: (kept**0.5, 1.0),
    "advantage": lambda kept: (1.0, kept),
}


# Factors for a loss that is a sum over the rows, and so already falls with the keep rate.
SUMMED_LOSS_SCALES = {
    "none": lambda kept: (1.0, 1.0),
    "linear": lambda kept: (1.0, 1.0),
    "sqrt": lambda kept: (kept**-0.5, 1.0),
    "advantage": lambda kept: (1.0 / kept, kept),
}


def loss_scales(kept: float, mode: str, *, summed: bool = False) -> tuple[float, float]:
    """Return the factors that scale down a step in which only some groups were kept.

    linear: the loss times the keep rate (RAGEN-2, section 3.3). sqrt: the loss times the square
    root of the keep rate. none: unscaled. advantage: only the policy term times the keep rate, with
    KL and entropy at full weight, as in the released code.

    A loss that is a sum over the rows and not a mean (losses.SUMMED) has already fallen with the
    keep rate. Its factors apply only the remaining scaling, so that linear, sqrt and advantage give
    the same weights as for a mean; none leaves the loss as it is.

    Args:
      kept: fraction of the groups that was kept, from 0 to 1; above 0 if summed.
      mode: a key of LOSS_SCALES.
      summed: whether the loss is a sum over the kept rows.
    Returns:
      (factor of the whole loss, factor of the advantages).
    Raises:
      ValueError: unknown mode.
    """
    scales = SUMMED_LOSS_SCALES if summed else LOSS_SCALES
    return look_up(scales, "loss_scale", mode)(kept)


# keep -> sign that makes an ascending sort put the wanted scores first
KEEP = {"largest": -1.0, "smallest": 1.0}


def _none(score_G: jax.Array, candidate_G: jax.Array, **_: Any) -> jax.Array:
    return jnp.ones_like(candidate_G)


def _top_p(
    score_G: jax.Array,
    candidate_G: jax.Array,
    *,
    value: float,
    sign: float,
    accumulate: Callable[..., jax.Array],
    eps: float | None,
    zero: Array,
) -> jax.Array:
    del zero  # used only by min_p
    if value >= 1:
        return candidate_G
    return accumulate(score_G, candidate_G, value=value, sign=sign, eps=eps)


def _linear(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, eps: float | None
) -> jax.Array:
    walkable_G = candidate_G & (score_G > 0)
    order_G = _order(score_G, walkable_G, sign)
    mass_G = jnp.where(candidate_G, score_G, 0.0)[order_G]
    before_G, after_G = _running_sum(mass_G)
    # The total is the last running sum, not jnp.sum: with another order of addition, rounding could
    # put the threshold out of reach, and a good batch would be rejected. Negative scores come after
    # the positive scores and only lower the total.
    total = jnp.sum(after_G[-1:])
    threshold = value * total - (SLACK * total if eps is None else eps)
    # The scores of walkable_G are positive and sorted to the front, so walked_G is a prefix.
    walked_G = walkable_G[order_G] & (before_G < threshold)
    reached = jnp.any(walked_G & (after_G >= threshold))
    return _unsort(walked_G & reached, order_G)


def _softmax(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, eps: float | None
) -> jax.Array:
    del eps  # used only by the linear threshold
    order_G = _order(score_G, candidate_G, sign)
    logit_G = jnp.where(candidate_G, -sign * score_G, jnp.finfo(jnp.float32).min)
    before_G, _ = _running_sum(nn.softmax(logit_G)[order_G])
    first_G = jnp.arange(score_G.shape[0]) == 0
    return _unsort(first_G | (before_G < value), order_G) & candidate_G


def _top_k(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, **_: Any
) -> jax.Array:
    return _first(score_G, candidate_G, int(value * score_G.shape[0]), sign)


def _top_k_abs(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, **_: Any
) -> jax.Array:
    return _first(score_G, candidate_G, int(value), sign)


def _quarter(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, **_: Any
) -> jax.Array:
    rank_G = jnp.arange(score_G.shape[0])
    of_G = 4 * rank_G // jnp.maximum(candidate_G.sum(), 1)
    return _unsort(of_G == int(value) - 1, _order(score_G, candidate_G, sign)) & candidate_G


def _pairs(score_G: jax.Array, candidate_G: jax.Array, *, value: float, **_: Any) -> jax.Array:
    ends = [_first(score_G, candidate_G, int(value), sign) for sign in KEEP.values()]
    return ends[0] | ends[1]


def _min_p(
    score_G: jax.Array, candidate_G: jax.Array, *, value: float, sign: float, zero: Array, **_: Any
) -> jax.Array:
    if sign == KEEP["largest"]:
        best = jnp.max(score_G, initial=-jnp.inf, where=candidate_G)
        return candidate_G & (score_G >= value * best - zero)
    if value <= 0:
        raise ValueError(f"min_p with keep='smallest' divides by value: need > 0, got {value}")
    best = jnp.min(score_G, initial=jnp.inf, where=candidate_G)
    return candidate_G & (score_G <= best / value + zero)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A selection strategy: a function of the scores and the values it accepts."""

    # (score_G, candidate_G, *, value, sign, accumulate, eps, zero) -> keep_G
    select: Callable[..., jax.Array]
    accepts: Callable[[float], bool]  # value -> whether it is allowed
    what: str  # the allowed values, in words to follow "it must be"
    tightened: bool = False  # whether a lower value keeps fewer groups


MODES = {"linear": _linear, "softmax": _softmax}  # accumulation of top_p
STRATEGIES = {
    "top_p": Strategy(
        _top_p,
        lambda value: 0 < value <= 1,
        "a fraction of the mass above 0, at most 1",
        tightened=True,
    ),
    "top_k": Strategy(
        _top_k,
        lambda value: 0 < value <= 1,
        "a fraction of the groups above 0, at most 1",
        tightened=True,
    ),
    "top_k_abs": Strategy(
        _top_k_abs,
        lambda value: value >= 1 and value % 1 == 0,
        "a whole number from 1",
        tightened=True,
    ),
    "min_p": Strategy(
        _min_p, lambda value: value <= 1, "a fraction of the largest score from 0 to 1"
    ),
    "quarter": Strategy(_quarter, lambda value: value in (1, 2, 3, 4), "1, 2, 3 or 4"),
    PAIRS: Strategy(
        _pairs, lambda value: value >= 1 and value % 1 == 0, "a number of pairs, a whole number"
    ),
    "none": Strategy(_none, lambda value: True, ""),
}


def _first(score_G: jax.Array, candidate_G: jax.Array, count: int, sign: float) -> jax.Array:
    # Candidates are sorted to the front, so the mask also caps count at their number.
    first_G = jnp.arange(score_G.shape[0]) < max(count, 1)
    order_G = _order(score_G, candidate_G, sign)
    return _unsort(first_G, order_G) & candidate_G


def _order(score_G: jax.Array, front_G: jax.Array, sign: float) -> jax.Array:
    """Return group indices: first those of front_G, each part by sign * score, ties by index."""
    by_score_G = jnp.argsort(sign * score_G, stable=True)
    # Sort again by membership instead of giving the other groups infinite keys: a group with an
    # infinite score would tie with them.
    return by_score_G[jnp.argsort(~front_G[by_score_G], stable=True)]


def _unsort(x_G: jax.Array, order_G: jax.Array) -> jax.Array:
    return jnp.zeros_like(x_G).at[order_G].set(x_G)


def _running_sum(x_G: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sums before and after each element, added sequentially.

    jnp.cumsum adds in a tree whose shape depends on the backend. The last bit of the sum, and so
    the group that crosses the threshold, would depend on the machine.
    """
    return lax.scan(_add, jnp.float32(0), x_G)[1]


def _add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return total + x, (total, total + x)
