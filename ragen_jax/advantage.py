"""Advantages: from returns (group-relative, leave-one-out) and their whitening.

Axes: G groups (prompts), K episodes a group, B rows, T tokens. Everything here is pure, has
static shapes and returns float32, so it works under jit and vmap.
"""

import functools

import chex
import jax.numpy as jnp
from jax import lax

WHITEN_EPS = 1e-8


def deviations(x_GK):
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


def sample_variance(x_GK):
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


def group_relative(return_GK, *, normalize_by_std=True, eps=1e-6):
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


def leave_one_out(return_GK):
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


def whiten(x_BT, mask_BT):
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


# algorithm -> advantages of a group's returns
GROUP_ADVANTAGES = {
    "grpo": group_relative,
    "dr_grpo": functools.partial(group_relative, normalize_by_std=False),
    "rloo": leave_one_out,
}
