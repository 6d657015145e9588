"""Learning from groups of equal returns: RL-ZVP's entropy-shaped advantages, virtual rewards.

In such groups a group-relative advantage is 0. RL-ZVP (Le et al., arXiv 2509.21880) rewards groups
that all members solved, most where the policy was uncertain, and punishes groups that no member
solved, least where the policy was uncertain:

    all solved    A_t =  coef * H_t
    all failed    A_t = -coef * (max over the reply of H - H_t)

with H_t the policy's entropy over the vocabulary at token t during sampling, a constant in the
loss. The formulas are taken from two public write-ups that agree. Constant entropies and a maximum
over one reply follow one implementation. The text of the paper was not available. Here a reply is
a row: with several turns in a row, the maximum is taken over all of them.

AVSPO (He et al., arXiv 2605.21125) adds virtual rewards to the statistics of such groups, which
contribute no gradient themselves. Here V virtual members with the opposite outcome join the K
members of a group that all solved or all failed, and all members get GRPO's advantage in that group
of K + V, whatever the size of the rewards:

    all solved    A =  sqrt(V (K + V - 1) / (K (K + V)))        V = 1: 1 / sqrt(K + 1)
    all failed    A = -sqrt(V (K + V - 1) / (K (K + V)))

The paper adapts the number of virtual rewards to the current rate of such groups. Its formulas were
not available, so here V is constant.

Axes: B rows, T tokens, G groups, K episodes per group.
"""

import chex
import jax
import jax.numpy as jnp

from ragen_jax.algorithm.advantage import comparable_members, has_variance
from ragen_jax.core.types import Array


def zero_variance_signs(
    return_GK: Array,
    success_GK: Array,
    *,
    environment_G: Array | None = None,
    sound_GK: Array | None = None,
) -> jax.Array:
    """Return which groups have no variance of returns, and whether they were solved or failed.

    Args:
      return_GK: undiscounted episode returns, penalties included.
      success_GK: bool, whether the episode solved its problem.
      environment_G: int, the environment of each group; None: all groups are of one.
      sound_GK: bool, the episodes whose environment did not break; the others are ignored. None:
        all.

    Returns:
      sign_G float32: 1 where all returns are equal and all members succeeded, -1 where all returns
      are equal and no member succeeded, 0 elsewhere. It is 0 in a group of two or more with fewer
      than two sound members.

    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    chex.assert_rank([return_GK, success_GK], 2)
    chex.assert_equal_shape([return_GK, success_GK])
    success_GK = jnp.asarray(success_GK, bool)
    if sound_GK is None:
        sound_GK = jnp.ones(success_GK.shape, bool)
    chex.assert_equal_shape([return_GK, sound_GK])
    member_GK = comparable_members(sound_GK)
    varied_G = has_variance(return_GK, environment_G=environment_G, sound_GK=member_GK)
    judged_G = member_GK.any(1) & ~varied_G
    solved_G, failed_G = (success_GK | ~member_GK).all(1), ~(success_GK & member_GK).any(1)
    sign_G = jnp.where(solved_G, 1.0, jnp.where(failed_G, -1.0, 0.0))
    return jnp.where(judged_G, sign_G, 0.0)


def virtual_reward_advantage(
    return_GK: Array, sign_G: Array, *, virtual: int, sound_GK: Array | None = None
) -> jax.Array:
    """Return the advantages from virtual rewards, to be added to those of groups with variance.

    Args:
      return_GK: undiscounted episode returns; only its shape is read.
      sign_G: `zero_variance_signs`.
      virtual: V, the number of virtual members of each such group, >= 1.
      sound_GK: bool, the episodes whose environment did not break, which are the K members; None:
        all.

    Returns:
      advantage_GK float32; 0 in groups of sign 0 and for episodes that broke.

    Raises:
      AssertionError: return_GK is not of rank 2, or sound_GK of another shape.
    """
    chex.assert_rank(return_GK, 2)
    if sound_GK is None:
        sound_GK = jnp.ones(jnp.shape(return_GK), bool)
    chex.assert_equal_shape([return_GK, sound_GK])
    K_G1 = jnp.maximum(jnp.sum(jnp.asarray(sound_GK, bool), axis=1, keepdims=True), 1)
    size_G1 = jnp.sqrt(virtual * (K_G1 + virtual - 1) / (K_G1 * (K_G1 + virtual)))
    return jnp.where(sound_GK, jnp.asarray(sign_G)[:, None] * size_G1, 0.0).astype(jnp.float32)


def zero_variance_advantage(
    entropy_BT: Array, mask_BT: Array, sign_B: Array, *, coef: float
) -> jax.Array:
    """Return RL-ZVP's advantages, to be added to the advantages of groups with variance.

    Args:
      entropy_BT: entropy of the policy that sampled, in nats; ignored outside the mask, even if
        NaN.
      mask_BT: nonzero where the policy sampled the token.
      sign_B: `zero_variance_signs` of each row's group.
      coef: alpha of the paper.

    Returns:
      advantage_BT float32; 0 outside the mask and on rows of sign 0.

    Raises:
      AssertionError: ranks are not 2, 2, 1, or shapes differ.
    """
    chex.assert_rank([entropy_BT, mask_BT, sign_B], [2, 2, 1])
    chex.assert_equal_shape([entropy_BT, mask_BT])
    inside_BT = jnp.asarray(mask_BT) != 0
    entropy_BT = jnp.where(inside_BT, jnp.asarray(entropy_BT, jnp.float32), 0.0)
    below_BT = entropy_BT - entropy_BT.max(axis=1, keepdims=True)
    sign_B1 = jnp.asarray(sign_B)[:, None]
    shaped_BT = jnp.where(sign_B1 > 0, entropy_BT, jnp.where(sign_B1 < 0, below_BT, 0.0))
    return coef * jnp.where(inside_BT, shaped_BT, 0.0)
