"""Advantages of episodes within their group and of tokens, with or without a critic; whitening.

Axes: G groups (prompts), K episodes per group, B rows, T tokens. Everything here is pure, has
static shapes and returns float32, so it works under jit and vmap.
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ragen_jax.core.types import Array

STD_EPS = 1e-6  # added to standard deviations, in units of `reward_unit`
VARIANCE_EPS = 1e-8  # added to variances, in squared units
TIE = 1e-5  # difference of returns that rounding can make, in units of `reward_unit`
ZERO_VARIANCE = 1e-10  # variances up to this count as zero, in squared units


def comparable_members(sound_GK: Array) -> jax.Array:
    """Return the sound members of the groups in which a comparison is possible.

    A group of two or more members needs two sound members; a group of one needs its only member.

    Args:
      sound_GK: bool, the episodes whose environment did not break.
    Returns:
      bool [G, K]; False throughout a group with too few sound members.
    Raises:
      AssertionError: sound_GK is not of rank 2.
    """
    chex.assert_rank(sound_GK, 2)
    sound_GK = jnp.asarray(sound_GK, bool)
    enough_G = jnp.sum(sound_GK, axis=1) >= min(2, sound_GK.shape[1])
    return sound_GK & enough_G[:, None]


def deviations(x_GK: Array, *, sound_GK: Array | None = None) -> jax.Array:
    """Return each member minus the mean of its group: x_gk - mean_j x_gj.

    Args:
      x_GK: any real dtype; ignored where sound_GK is False, even if NaN.
      sound_GK: bool, the members that the mean is taken over; None: all.
    Returns:
      float32 [G, K]; exactly 0 where all members of a group are equal, and where sound_GK is False.
    Raises:
      AssertionError: x_GK is not of rank 2, or sound_GK has another shape.
    """
    chex.assert_rank(x_GK, 2)
    x_GK = jnp.asarray(x_GK, jnp.float32)
    # Mathematically, subtracting the first member changes nothing. In float32 the mean of K equal
    # numbers may be off by one unit in the last place. A dead group would then have a tiny spread,
    # which the division by a tiny standard deviation would blow up.
    if sound_GK is None:
        shifted_GK = x_GK - x_GK[:, :1]
        return shifted_GK - jnp.mean(shifted_GK, axis=1, keepdims=True)
    sound_GK = jnp.asarray(sound_GK, bool)
    chex.assert_equal_shape([x_GK, sound_GK])
    first_G1 = jnp.argmax(sound_GK, axis=1, keepdims=True)
    shifted_GK = x_GK - jnp.take_along_axis(x_GK, first_G1, axis=1)
    shifted_GK = jnp.where(sound_GK, shifted_GK, 0.0)
    members_G1 = jnp.maximum(jnp.sum(sound_GK, axis=1, keepdims=True), 1)
    mean_G1 = jnp.sum(shifted_GK, axis=1, keepdims=True) / members_G1
    return jnp.where(sound_GK, shifted_GK - mean_G1, 0.0)


def sample_variance(x_GK: Array, *, sound_GK: Array | None = None) -> jax.Array:
    """Return the variance inside each group: sum_k (x_gk - mean_g)^2 / (n - 1) over its n members.

    Args:
      x_GK, sound_GK: as in `deviations`.
    Returns:
      float32 [G]; exactly 0 for groups of equal members or of fewer than two members.
    Raises:
      AssertionError: as in `deviations`.
    """
    deviation_GK = deviations(x_GK, sound_GK=sound_GK)
    return jnp.sum(deviation_GK**2, axis=1) / jnp.maximum(_members(x_GK, sound_GK) - 1, 1)


def _members(x_GK: Array, sound_GK: Array | None) -> jax.Array | int:
    """Return the number of counted members: int32 [G], or K if all members count."""
    return jnp.shape(x_GK)[1] if sound_GK is None else jnp.sum(jnp.asarray(sound_GK, bool), axis=1)


def reward_unit(
    return_GK: Array, *, environment_G: Array | None = None, sound_GK: Array | None = None
) -> jax.Array:
    """Return the size of each group's rewards: the largest |return| of its environment.

    Thresholds for rounding errors are multiples of it, so that rewards of any size give the same
    selection and the same advantages.

    Args:
      return_GK: undiscounted episode returns.
      environment_G: int in 0..G-1, the environment of each group; None: all groups are of one.
      sound_GK: bool, the members that count; None: all.
    Returns:
      unit_G float32; 1 where all returns of the environment are 0.
    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    chex.assert_rank(return_GK, 2)
    size_GK = jnp.abs(_sound_or_zero(jnp.asarray(return_GK, jnp.float32), sound_GK))
    unit_G = _largest(jnp.max(size_GK, axis=1), environment_G)
    return jnp.where(unit_G > 0, unit_G, 1.0)


def _largest(x_G: jax.Array, environment_G: Array | None) -> jax.Array:
    """Return the largest x of each group's environment, [G]."""
    if environment_G is None:
        return jnp.full_like(x_G, jnp.max(x_G))
    return jax.ops.segment_max(x_G, environment_G, num_segments=len(x_G))[environment_G]


def has_variance(
    return_GK: Array, *, environment_G: Array | None = None, sound_GK: Array | None = None
) -> jax.Array:
    """Return whether the returns of a group differ by more than rounding errors.

    Args:
      return_GK, environment_G, sound_GK: as in `reward_unit`.
    Returns:
      bool [G]: whether the sample variance is above 1e-10 * reward_unit ** 2.
    Raises:
      AssertionError: as in `reward_unit`.
    """
    unit_G = reward_unit(return_GK, environment_G=environment_G, sound_GK=sound_GK)
    return sample_variance(return_GK, sound_GK=sound_GK) > ZERO_VARIANCE * unit_G**2


def group_relative(
    return_GK: Array,
    *,
    normalize_by_std: bool = True,
    eps: Array | float = STD_EPS,
    sound_GK: Array | None = None,
) -> jax.Array:
    """Return GRPO's advantage: (R - mean of the group) / (sample std of the group + eps).

    A group of one has no baseline: mean 0 and std 1, so the advantage is R / (1 + eps).
    RAGEN-2, section 4.1 (GRPO); without the division this is Dr.GRPO.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      normalize_by_std: False skips the division.
      eps: added to the standard deviation; one number, or one per group.
      sound_GK: bool, the members that are compared (`deviations`); None: all.
    Returns:
      advantage_GK float32; each group sums to 0 up to rounding (K > 1). 0 where sound_GK is False,
      and in a group of two or more with fewer than two sound members.
    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    chex.assert_rank(return_GK, 2)
    return_GK = jnp.asarray(return_GK, jnp.float32)
    eps_G1 = jnp.broadcast_to(eps, return_GK.shape[:1])[:, None]
    if return_GK.shape[1] == 1:
        return_GK = _sound_or_zero(return_GK, sound_GK)
        return return_GK / (1.0 + eps_G1) if normalize_by_std else return_GK
    deviation_GK = deviations(return_GK, sound_GK=sound_GK)
    if not normalize_by_std:
        return deviation_GK
    std_G = jnp.sqrt(sample_variance(return_GK, sound_GK=sound_GK))
    return deviation_GK / (std_G[:, None] + eps_G1)


def leave_one_out(return_GK: Array, *, sound_GK: Array | None = None) -> jax.Array:
    """Return RLOO's advantage: R_i - mean of the other members of its group.

    In a group of one the baseline is 0 and the advantage is R.

    Args:
      return_GK: undiscounted episode returns.
      sound_GK: bool, the members that are compared (`deviations`); None: all.
    Returns:
      advantage_GK float32 = n / (n - 1) * (R - mean of the n members). 0 where sound_GK is False,
      and in a group of two or more with fewer than two sound members.
    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    chex.assert_rank(return_GK, 2)
    if jnp.shape(return_GK)[1] == 1:
        return _sound_or_zero(jnp.asarray(return_GK, jnp.float32), sound_GK)
    if sound_GK is None:
        K = jnp.shape(return_GK)[1]
        return deviations(return_GK) * (K / (K - 1))
    n_G = jnp.sum(jnp.asarray(sound_GK, bool), axis=1)
    factor_G = n_G / jnp.maximum(n_G - 1, 1)
    return deviations(return_GK, sound_GK=sound_GK) * factor_G[:, None]


def best_of_group(
    return_GK: Array, *, eps: Array | float = TIE, sound_GK: Array | None = None
) -> jax.Array:
    """Return RAFT's advantage: 1 for the members with the highest return of their group, else 0.

    A group of equal returns has no best member, so all its advantages are 0: an update never
    imitates replies that are no better than the others. A group of one is imitated. Rejection
    sampling, Dong et al. 2023 (arXiv 2304.06767), there with a single best member.

    Args:
      return_GK: undiscounted episode returns.
      eps: difference up to which returns count as equal; one number, or one per group.
      sound_GK: bool, the members that are compared (`deviations`); None: all.
    Returns:
      advantage_GK float32, 0 or 1. 0 where sound_GK is False, and in a group of two or more with
      fewer than two sound members.
    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    deviation_GK = deviations(return_GK, sound_GK=sound_GK)
    if deviation_GK.shape[1] == 1:
        return _sound_or_zero(jnp.ones_like(deviation_GK), sound_GK)
    eps_G1 = jnp.broadcast_to(eps, deviation_GK.shape[:1])[:, None]
    best_G1 = jnp.max(deviation_GK, axis=1, keepdims=True)
    best_GK = (deviation_GK >= best_G1 - eps_G1) & (best_G1 > eps_G1)
    return _sound_or_zero(best_GK.astype(jnp.float32), sound_GK)


def _sound_or_zero(x_GK: jax.Array, sound_GK: Array | None) -> jax.Array:
    """Return x, with 0 where sound_GK is False."""
    if sound_GK is None:
        return x_GK
    sound_GK = jnp.asarray(sound_GK, bool)
    chex.assert_equal_shape([x_GK, sound_GK])
    return jnp.where(sound_GK, x_GK, 0.0)


def whiten(x_BT: Array, mask_BT: Array, *, eps: Array | float = VARIANCE_EPS) -> jax.Array:
    """Return (x - masked mean) * rsqrt(masked unbiased variance + eps), over the whole batch.

    The formula is applied to every entry. Entries outside the mask do not enter the statistics and
    are meaningless afterwards. With one masked token the variance is 0; with no masked token the
    mean and the variance are 0.

    Args:
      x_BT: numbers to whiten, usually advantages.
      mask_BT: nonzero where x counts.
      eps: added to the variance.
    Returns:
      x_BT float32.
    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    chex.assert_rank([x_BT, mask_BT], 2)
    chex.assert_equal_shape([x_BT, mask_BT])
    x_BT = jnp.asarray(x_BT, jnp.float32)
    counts_BT = jnp.asarray(mask_BT) != 0
    tokens = jnp.sum(counts_BT).astype(jnp.float32)
    mean = jnp.sum(jnp.where(counts_BT, x_BT, 0.0)) / jnp.maximum(tokens, 1.0)
    square = jnp.sum(jnp.where(counts_BT, (x_BT - mean) ** 2, 0.0))
    variance = square / jnp.maximum(tokens - 1.0, 1.0)
    return (x_BT - mean) * lax.rsqrt(variance + eps)


def soft_weights(
    return_GK: Array,
    *,
    environment_G: Array | None = None,
    eps: Array | float = STD_EPS,
    sound_GK: Array | None = None,
) -> jax.Array:
    """Return each group's weight: its sample std of returns / (largest std of the batch + eps).

    Multiplied into the advantages, these weights are a soft form of filtering by reward variance:
    a group with little signal counts little, and a dead group counts nothing. RAGEN's released code
    offers them for Dr.GRPO. After a division by the group's std they restore the scale that the
    division removed.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      environment_G: int in 0..G-1, the environment of each group. The largest std is then taken
        within the environment, since rewards of environments may differ in scale. None: all groups
        are of the same environment.
      eps: keeps the weights of a batch of dead groups at 0; one number, or one per group.
      sound_GK: bool, the members that the stds are taken over (`deviations`); None: all.
    Returns:
      weight_G float32 in [0, 1).
    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    std_G = jnp.sqrt(sample_variance(return_GK, sound_GK=sound_GK))
    return std_G / (_largest(std_G, environment_G) + eps)


def gae(
    reward_BT: Array,
    value_BT: Array,
    mask_BT: Array,
    *,
    gamma: float,
    lam: float,
    next_row_B: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Estimate generalized advantages over the sampled tokens of each row or sequence of rows.

    With t' the next sampled token (observation tokens in between are skipped and not discounted),
    and V = A = 0 after the last sampled token:
    delta_t = r_t + gamma V_t' - V_t;  A_t = delta_t + gamma lam A_t'.
    Schulman et al., arXiv 1506.02438, equation 16. Advantages are not whitened.

    Rows that continue each other form one sequence: the last sampled token of a row is followed by
    the first sampled token of its next row, as if the episode were a single row.

    Args:
      reward_BT: rewards; ignored outside the mask.
      value_BT: the critic's values; ignored outside the mask, even if NaN.
      mask_BT: nonzero where the policy sampled the token.
      gamma: discount per sampled token.
      lam: lambda, 0 (one step ahead) to 1 (the whole rest of the sequence).
      next_row_B: int, the row that continues each row, -1 if none (`rewards.next_rows`); has no
        cycles. None: every row is a separate sequence.
    Returns:
      (advantage_BT, return_BT = advantage + value), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 (next_row_B: 1) or shapes differ.
    """
    arrays = [reward_BT, value_BT, mask_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    end_BT = jnp.zeros(jnp.shape(mask_BT), bool)
    return _backward(*arrays, end_BT, gamma, lam, next_row_B)


def bi_level_gae(
    reward_BT: Array,
    value_BT: Array,
    mask_BT: Array,
    turn_end_BT: Array,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
    next_row_B: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Estimate advantages over turns, then over the tokens of each turn.

    1. Over the turn ends only, with n the next turn end in the row or in the rows after it:
       delta = r + turn_gamma V_n - V;  A = delta + turn_gamma lam A_n;  R = A + V.
    2. Each turn end's reward is replaced by its R; then `gae` inside each turn with gamma and
       lam, and nothing is bootstrapped across a turn end.

    This way a discount per token does not wipe out a reward that is several turns away. It is
    RAGEN's bi-level GAE, except that turn_end_BT marks the turn ends: the released code uses the
    tokens with a nonzero reward, and so misses turns without a reward. Rewards within a turn (for
    example a KL penalty) enter only the second stage.

    Args:
      reward_BT, value_BT, mask_BT, gamma, lam, next_row_B: as in `gae`.
      turn_end_BT: nonzero on the last sampled token of each turn.
      turn_gamma: discount per turn.
    Returns:
      (advantage_BT, return_BT = advantage + value), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 (next_row_B: 1) or shapes differ.
    """
    arrays = [reward_BT, value_BT, mask_BT, turn_end_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    end_BT = (jnp.asarray(turn_end_BT) != 0) & (jnp.asarray(mask_BT) != 0)
    _, turn_return_BT = gae(
        reward_BT, value_BT, end_BT, gamma=turn_gamma, lam=lam, next_row_B=next_row_B
    )
    reward_BT = jnp.where(end_BT, turn_return_BT, jnp.asarray(reward_BT, jnp.float32))
    return _backward(reward_BT, value_BT, mask_BT, end_BT, gamma, lam, next_row_B)


def _backward(
    reward_BT: Array,
    value_BT: Array,
    mask_BT: Array,
    end_BT: Array,
    gamma: float,
    lam: float,
    next_row_B: Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Run the recursion of `gae`, restarted (V = A = 0) at each token of end_BT."""
    inside_BT = jnp.asarray(mask_BT) != 0
    # Mask here, so that arbitrary values outside the mask cannot enter as 0 * NaN.
    reward_BT, value_BT = (
        jnp.where(inside_BT, jnp.asarray(x_BT, jnp.float32), 0.0) for x_BT in (reward_BT, value_BT)
    )

    def step(carry, token):
        next_value_B, next_advantage_B = carry
        reward_B, value_B, inside_B, end_B = token
        bootstrap_B = jnp.where(end_B, 0.0, next_value_B)
        running_B = jnp.where(end_B, 0.0, next_advantage_B)
        advantage_B = reward_B + gamma * bootstrap_B - value_B + gamma * lam * running_B
        carry = (
            jnp.where(inside_B, value_B, next_value_B),
            jnp.where(inside_B, advantage_B, next_advantage_B),
        )
        return carry, jnp.where(inside_B, advantage_B, 0.0)

    tokens = tuple(x_BT.T for x_BT in (reward_BT, value_BT, inside_BT, end_BT))
    zero_B = jnp.zeros(inside_BT.shape[0], jnp.float32)
    last = zero_B, zero_B
    if next_row_B is None:
        _, advantage_TB = lax.scan(step, last, tokens, reverse=True)
        return advantage_TB.T, advantage_TB.T + value_BT

    chex.assert_shape(next_row_B, inside_BT.shape[:1])
    next_row_B = jnp.asarray(next_row_B)
    continues_B = next_row_B >= 0

    def from_next_row(first):
        return tuple(jnp.where(continues_B, x_B[next_row_B], 0.0) for x_B in first)

    # Each pass carries values back by one row: after pass n, the last n + 1 rows of each sequence
    # start from the correct values. The additions are the same as along a single row.
    def hand_back(_, carry):
        return from_next_row(lax.scan(step, carry, tokens, reverse=True)[0])

    last = lax.fori_loop(0, _longest_sequence(next_row_B) - 1, hand_back, last)
    _, advantage_TB = lax.scan(step, last, tokens, reverse=True)
    return advantage_TB.T, advantage_TB.T + value_BT


def _longest_sequence(next_row_B: jax.Array) -> jax.Array:
    """Return the number of rows of the longest sequence, int32 scalar."""

    def goes_on(carry):
        row_B, rows = carry
        return jnp.any(row_B >= 0) & (rows < len(next_row_B))

    def advance(carry):
        row_B, rows = carry
        return jnp.where(row_B >= 0, next_row_B[row_B], -1), rows + 1

    return lax.while_loop(goes_on, advance, (next_row_B, jnp.int32(1)))[1]


def reinforce_plus_plus(
    reward_BT: Array,
    mask_BT: Array,
    *,
    gamma: float,
    next_row_B: Array | None = None,
    eps: Array | float = VARIANCE_EPS,
) -> tuple[jax.Array, jax.Array]:
    """Return REINFORCE++'s advantages: discounted returns-to-go, whitened over the whole batch.

    G_t = r_t + gamma G_t', with t' the next sampled token of the row or of the rows after it. Hu,
    arXiv 2501.03262; its token rewards include the KL penalty (rewards.penalize_kl).

    Args:
      reward_BT: rewards; ignored outside the mask.
      mask_BT: nonzero where the policy sampled the token.
      gamma: discount per sampled token.
      next_row_B: as in `gae`.
      eps: as in `whiten`.
    Returns:
      (advantage_BT, return_BT before whitening), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 (next_row_B: 1) or shapes differ.
    """
    # GAE without a critic and with lambda 1 is the discounted return.
    value_BT = jnp.zeros(jnp.shape(reward_BT))
    _, return_BT = gae(reward_BT, value_BT, mask_BT, gamma=gamma, lam=1.0, next_row_B=next_row_B)
    return _whiten_inside(return_BT, mask_BT, eps), return_BT


def reinforce_plus_plus_baseline(
    return_GK: Array,
    episode_B: Array,
    mask_BT: Array,
    *,
    sound_GK: Array | None = None,
    eps: Array | float = VARIANCE_EPS,
) -> jax.Array:
    """Return REINFORCE++ advantages with a group baseline: R - group mean on each token, whitened.

    The std is that of the whole batch, not of the group as in GRPO, so a group of nearly equal
    returns is not blown up. Hu, arXiv 2501.03262. For a group of one, the only baseline is the
    mean of the batch.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      episode_B: int, index of each row's episode into return_GK.reshape(-1); not used for
        padding rows.
      mask_BT: nonzero where the policy sampled the token.
      sound_GK: bool, the members that the baseline is taken over (`deviations`); None: all.
      eps: as in `whiten`.
    Returns:
      advantage_BT float32, 0 outside the mask; its sum over all tokens is 0.
    Raises:
      AssertionError: return_GK or mask_BT is not of rank 2, episode_B not of rank 1, or the
        numbers of rows differ.
    """
    chex.assert_rank([episode_B, mask_BT], [1, 2])
    chex.assert_equal_shape_prefix([episode_B, mask_BT], 1)
    advantage_GK = group_relative(return_GK, normalize_by_std=False, sound_GK=sound_GK)
    advantage_E = advantage_GK.reshape(-1)
    episode_B = jnp.asarray(episode_B)
    advantage_B1 = advantage_E[episode_B][:, None]
    if sound_GK is not None:
        mask_BT = mask_BT * jnp.asarray(sound_GK, bool).reshape(-1)[episode_B][:, None]
    return _whiten_inside(jnp.broadcast_to(advantage_B1, jnp.shape(mask_BT)), mask_BT, eps)


def _whiten_inside(x_BT: Array, mask_BT: Array, eps: Array | float) -> jax.Array:
    return jnp.where(jnp.asarray(mask_BT) != 0, whiten(x_BT, mask_BT, eps=eps), 0.0)
