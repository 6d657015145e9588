"""Advantages: of episodes within their group, of tokens with a critic (GAE) or without, whitening.

Axes: G groups (prompts), K episodes a group, B rows, T tokens. Everything here is pure, has
static shapes and returns float32, so it works under jit and vmap.
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ragen_jax.types import Array

WHITEN_EPS = 1e-8


def deviations(x_GK: Array) -> jax.Array:
    """Each member minus the mean of its group: x_gk - mean_j x_gj.

    Args:
      x_GK: any real dtype.
    Returns:
      float32 [G, K]; exactly 0 where all members of a group are equal.
    Raises:
      AssertionError: x_GK is not of rank 2.
    """
    chex.assert_rank(x_GK, 2)
    x_GK = jnp.asarray(x_GK, jnp.float32)
    # Subtracting the first member changes nothing on paper. In float32 the mean of K equal
    # numbers may be off by one unit in the last place, and a dead group would then show a tiny
    # spread that the division by a tiny standard deviation blows up again.
    shifted_GK = x_GK - x_GK[:, :1]
    return shifted_GK - jnp.mean(shifted_GK, axis=1, keepdims=True)


def sample_variance(x_GK: Array) -> jax.Array:
    """Variance inside each group: sum_k (x_gk - mean_g)^2 / (K - 1); groups of one: 0.

    Args:
      x_GK: any real dtype.
    Returns:
      float32 [G]; exactly 0 where all members of a group are equal.
    Raises:
      AssertionError: x_GK is not of rank 2.
    """
    deviation_GK = deviations(x_GK)
    return jnp.sum(deviation_GK**2, axis=1) / max(deviation_GK.shape[1] - 1, 1)


def group_relative(
    return_GK: Array, *, normalize_by_std: bool = True, eps: float = 1e-6
) -> jax.Array:
    """GRPO's advantage: (R - mean of the group) / (sample std of the group + eps).

    A group of one has nothing to be compared with: mean 0 and std 1, so R / (1 + eps).
    RAGEN-2, section 4.1 (GRPO); without the division it is Dr.GRPO.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      normalize_by_std: False leaves the deviation as it is.
      eps: added to the standard deviation.
    Returns:
      advantage_GK float32; each group sums to 0 up to rounding (K > 1).
    Raises:
      AssertionError: return_GK is not of rank 2.
    """
    chex.assert_rank(return_GK, 2)
    return_GK = jnp.asarray(return_GK, jnp.float32)
    if return_GK.shape[1] == 1:
        return return_GK / (1.0 + eps) if normalize_by_std else return_GK
    deviation_GK = deviations(return_GK)
    if not normalize_by_std:
        return deviation_GK
    std_G = jnp.sqrt(sample_variance(return_GK))
    return deviation_GK / (std_G[:, None] + eps)


def leave_one_out(return_GK: Array) -> jax.Array:
    """RLOO's advantage: R_i - mean of the other members of its group.

    A group of one has no others: the baseline is 0 and the advantage is R itself.

    Args:
      return_GK: undiscounted episode returns.
    Returns:
      advantage_GK float32 = K / (K - 1) * (R - mean of all K).
    Raises:
      AssertionError: return_GK is not of rank 2.
    """
    chex.assert_rank(return_GK, 2)
    K = return_GK.shape[1]
    if K == 1:
        return jnp.asarray(return_GK, jnp.float32)
    return deviations(return_GK) * (K / (K - 1))


def whiten(x_BT: Array, mask_BT: Array) -> jax.Array:
    """(x - masked mean) * rsqrt(masked unbiased variance + 1e-8), over the whole batch.

    Applied to every entry; those outside the mask take part in neither statistic and mean
    nothing afterwards. With one masked token the variance is 0, with none the mean is 0 too.

    Args:
      x_BT: numbers to whiten, usually advantages.
      mask_BT: nonzero where x counts.
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
    return (x_BT - mean) * lax.rsqrt(variance + WHITEN_EPS)


def soft_weights(
    return_GK: Array, *, environment_G: Array | None = None, eps: float = 1e-6
) -> jax.Array:
    """Weight of each group: its sample std of returns / (largest std of the batch + eps).

    Multiplied into the advantages it is the soft form of filtering by reward variance: a group
    that says little counts little, a dead one nothing. RAGEN's released code offers it for
    Dr.GRPO; behind a division by the group's own std it restores what that division took away.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      environment_G: int in 0..G-1, the environment of each group: the largest is then that of its
        own environment, whose rewards may have another scale. None: all have the same.
      eps: keeps a batch of dead groups at weight 0.
    Returns:
      weight_G float32 in [0, 1).
    Raises:
      AssertionError: return_GK is not of rank 2.
    """
    std_G = jnp.sqrt(sample_variance(return_GK))
    largest_G = jnp.max(std_G)
    if environment_G is not None:
        of_environment = jax.ops.segment_max(std_G, environment_G, num_segments=len(std_G))
        largest_G = of_environment[environment_G]
    return std_G / (largest_G + eps)


def gae(
    reward_BT: Array, value_BT: Array, mask_BT: Array, *, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation over the sampled tokens of each row.

    With t' the next sampled token of the row, however many observation tokens lie between
    (nothing is discounted for those), and V = A = 0 behind the last one:
    delta_t = r_t + gamma V_t' - V_t;  A_t = delta_t + gamma lam A_t'.
    Schulman et al., arXiv 1506.02438, equation 16. Advantages are not whitened.

    Args:
      reward_BT: rewards; those outside the mask are not read.
      value_BT: the critic's values; those outside the mask are not read, even if NaN.
      mask_BT: nonzero where the policy sampled the token.
      gamma: discount per sampled token.
      lam: lambda, 0 (one step ahead) to 1 (the whole rest of the row).
    Returns:
      (advantage_BT, return_BT = advantage + value), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    arrays = [reward_BT, value_BT, mask_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    return _backward(*arrays, jnp.zeros(jnp.shape(mask_BT), bool), gamma, lam)


def bi_level_gae(
    reward_BT: Array,
    value_BT: Array,
    mask_BT: Array,
    turn_end_BT: Array,
    *,
    gamma: float,
    lam: float,
    turn_gamma: float,
) -> tuple[jax.Array, jax.Array]:
    """GAE over turns, then over the tokens of each turn.

    1. Over the turn ends alone, with n the next turn end of the row:
       delta = r + turn_gamma V_n - V;  A = delta + turn_gamma lam A_n;  R = A + V.
    2. Each turn end's reward is replaced by its R; then `gae` inside each turn with gamma and
       lam, and nothing is bootstrapped across a turn end.

    So a discount per token need not bury a reward some turns away. RAGEN's bi-level GAE, except
    that turns end where turn_end_BT says: the released code takes tokens with a reward other than
    zero, and loses the turns that earned nothing. Rewards within a turn (a KL penalty, say) enter
    the second stage only.

    Args:
      reward_BT, value_BT, mask_BT, gamma, lam: as in `gae`.
      turn_end_BT: nonzero on the last sampled token of each turn.
      turn_gamma: discount per turn.
    Returns:
      (advantage_BT, return_BT = advantage + value), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    arrays = [reward_BT, value_BT, mask_BT, turn_end_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    end_BT = (jnp.asarray(turn_end_BT) != 0) & (jnp.asarray(mask_BT) != 0)
    _, turn_return_BT = gae(reward_BT, value_BT, end_BT, gamma=turn_gamma, lam=lam)
    reward_BT = jnp.where(end_BT, turn_return_BT, jnp.asarray(reward_BT, jnp.float32))
    return _backward(reward_BT, value_BT, mask_BT, end_BT, gamma, lam)


def _backward(
    reward_BT: Array, value_BT: Array, mask_BT: Array, end_BT: Array, gamma: float, lam: float
) -> tuple[jax.Array, jax.Array]:
    """The recursion of `gae`, begun anew (V = A = 0) at each token of end_BT."""
    inside_BT = jnp.asarray(mask_BT) != 0
    # Masked out here, so that junk under the mask cannot enter as 0 * NaN.
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
    _, advantage_TB = lax.scan(step, (zero_B, zero_B), tokens, reverse=True)
    return advantage_TB.T, advantage_TB.T + value_BT


def reinforce_plus_plus(
    reward_BT: Array, mask_BT: Array, *, gamma: float
) -> tuple[jax.Array, jax.Array]:
    """REINFORCE++: discounted returns-to-go of the tokens, whitened over the whole batch.

    G_t = r_t + gamma G_t', with t' the next sampled token of the row. Hu, arXiv 2501.03262; its
    token rewards hold the KL penalty (rewards.penalize_kl).

    Args:
      reward_BT: rewards; those outside the mask are not read.
      mask_BT: nonzero where the policy sampled the token.
      gamma: discount per sampled token.
    Returns:
      (advantage_BT, return_BT before whitening), float32, 0 outside the mask.
    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    # GAE without a critic and with lambda 1 is the discounted return.
    _, return_BT = gae(reward_BT, jnp.zeros(jnp.shape(reward_BT)), mask_BT, gamma=gamma, lam=1.0)
    return _whiten_inside(return_BT, mask_BT), return_BT


def reinforce_plus_plus_baseline(return_GK: Array, episode_B: Array, mask_BT: Array) -> jax.Array:
    """REINFORCE++ with a group baseline: R - mean of its group on each token, whitened.

    The spread is the whole batch's, not the group's as in GRPO: a group of nearly equal returns
    is not blown up. Hu, arXiv 2501.03262. A group of one has no baseline but the batch's mean.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      episode_B: int, index of each row's episode into return_GK.reshape(-1); any on padding rows.
      mask_BT: nonzero where the policy sampled the token.
    Returns:
      advantage_BT float32, 0 outside the mask; weighed by tokens, it sums to 0.
    Raises:
      AssertionError: return_GK or mask_BT is not of rank 2, episode_B not of rank 1, or the
        numbers of rows differ.
    """
    chex.assert_rank([episode_B, mask_BT], [1, 2])
    chex.assert_equal_shape_prefix([episode_B, mask_BT], 1)
    advantage_E = group_relative(return_GK, normalize_by_std=False).reshape(-1)
    advantage_B1 = advantage_E[jnp.asarray(episode_B)][:, None]
    return _whiten_inside(jnp.broadcast_to(advantage_B1, jnp.shape(mask_BT)), mask_BT)


def _whiten_inside(x_BT: Array, mask_BT: Array) -> jax.Array:
    return jnp.where(jnp.asarray(mask_BT) != 0, whiten(x_BT, mask_BT), 0.0)
