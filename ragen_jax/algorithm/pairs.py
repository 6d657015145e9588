"""Weighted GRPO: advantages over a pair of a hard and an easy prompt, which amplify rare outcomes.

Sheng et al. (arXiv 2602.03452) train on a prompt that is rarely solved together with one that is
rarely failed, reweight the outcomes of the pair, and normalise them. Only the paper's abstract was
known here; its weights are our reading: in the harder group of a pair only success counts, in the
easier group only failure, and both are normalised over the members of the pair.

    outcome    x = R - min of the group's R (harder), R - max of the group's R (easier)
    advantage  A = (x - mean of the pair) / (sample std of the pair + eps)

With binary rewards, a success on the hard prompt has x = 1, a failure on the easy prompt x = -1,
and the usual outcome of either prompt 0, so that almost only the rare outcomes have a gradient.
GRPO normalises each group for itself, which undoes any weights of two outcomes.

Axes: G groups, K episodes per group.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from ragen_jax.algorithm.advantage import comparable_members, group_relative, has_variance
from ragen_jax.algorithm.filter import round_scores
from ragen_jax.core.types import Array


class Pairs(NamedTuple):
    """The pairs of groups of a step."""

    partner_G: jax.Array  # int32, the other group of the pair; the group itself if it has none
    # int32: 1 in the harder group of a pair, -1 in the easier, 0 in a group that is compared with
    # no other
    side_G: jax.Array
    paired_G: jax.Array  # bool, whether the group has an advantage


def pair_groups(
    return_GK: Array,
    keep_G: Array,
    *,
    unit_G: Array | float = 1.0,
    environment_G: Array | None = None,
    sound_GK: Array | None = None,
) -> Pairs:
    """Pair the group of lowest mean return with that of the highest, and so on inwards.

    Only kept groups with variance of returns are paired, within their environment. With an odd
    number of them, the middle group is alone.

    Args:
      return_GK: undiscounted episode returns, penalties included, before any normalisation.
      keep_G: bool, the groups that the update reads.
      unit_G: size of a return that counts as 1 (advantage.reward_unit); means that differ by less
        than a millionth of it are ties, which go to the lower index.
      environment_G: int, the environment of each group; None: all groups are of one.
      sound_GK: bool, the episodes whose environment did not break; None: all.

    Raises:
      AssertionError: return_GK is not of rank 2, or shapes differ.
    """
    chex.assert_rank(return_GK, 2)
    return_GK = jnp.asarray(return_GK, jnp.float32)
    if sound_GK is None:
        sound_GK = jnp.ones(return_GK.shape, bool)
    chex.assert_equal_shape([return_GK, sound_GK])
    sound_GK = jnp.asarray(sound_GK, bool)
    alive_G = jnp.asarray(keep_G, bool) & has_variance(
        return_GK, environment_G=environment_G, sound_GK=comparable_members(sound_GK)
    )
    mean_G = round_scores(jnp.mean(return_GK, axis=1, where=sound_GK), unit_G)
    index_G = jnp.arange(len(mean_G))
    together_GG = alive_G[:, None] & alive_G[None, :]
    if environment_G is not None:
        environment_G = jnp.asarray(environment_G)
        together_GG &= environment_G[:, None] == environment_G[None, :]
    lower_GG = (mean_G[None, :] < mean_G[:, None]) | (
        (mean_G[None, :] == mean_G[:, None]) & (index_G[None, :] < index_G[:, None])
    )
    rank_G = jnp.sum(together_GG & lower_GG, axis=1)
    opposite_G = jnp.sum(together_GG, axis=1) - 1 - rank_G
    is_partner_GG = together_GG & (rank_G[None, :] == opposite_G[:, None])
    partner_G = jnp.where(alive_G, jnp.argmax(is_partner_GG, axis=1), index_G)
    side_G = jnp.where(alive_G, jnp.sign(opposite_G - rank_G), 0)
    return Pairs(partner_G, side_G, alive_G)


def pair_relative(
    return_GK: Array, pairs: Pairs, *, eps: Array | float, sound_GK: Array | None = None
) -> jax.Array:
    """Return the advantages of Weighted GRPO; those of GRPO in a group without a partner.

    Args:
      return_GK: episode returns, normalised or not.
      pairs: `pair_groups`.
      eps: added to the standard deviation; one number, or one per group.
      sound_GK: bool, the episodes whose environment did not break; None: all.

    Returns:
      advantage_GK float32; each pair sums to 0 up to rounding. 0 in groups without variance or that
      are not kept, and where sound_GK is False.

    Raises:
      AssertionError: return_GK is not of rank 2, or shapes differ.
    """
    chex.assert_rank(return_GK, 2)
    return_GK = jnp.asarray(return_GK, jnp.float32)
    alone_GK = group_relative(return_GK, eps=eps, sound_GK=sound_GK)
    if sound_GK is None:
        sound_GK = jnp.ones(return_GK.shape, bool)
    chex.assert_equal_shape([return_GK, sound_GK])
    sound_GK = jnp.asarray(sound_GK, bool)
    low_G1 = jnp.min(return_GK, axis=1, keepdims=True, where=sound_GK, initial=jnp.inf)
    high_G1 = jnp.max(return_GK, axis=1, keepdims=True, where=sound_GK, initial=-jnp.inf)
    base_G1 = jnp.where(pairs.side_G[:, None] > 0, low_G1, high_G1)
    x_GK = jnp.where(sound_GK, return_GK - base_G1, 0.0)
    # Both groups see the members of the pair in one order, so that they get the same statistics.
    first_G = jnp.minimum(jnp.arange(len(x_GK)), pairs.partner_G)
    second_G = jnp.maximum(jnp.arange(len(x_GK)), pairs.partner_G)
    member_GP = jnp.concatenate([x_GK[first_G], x_GK[second_G]], axis=1)  # P = 2 K
    sound_GP = jnp.concatenate([sound_GK[first_G], sound_GK[second_G]], axis=1)
    mean_G1 = jnp.mean(member_GP, axis=1, keepdims=True, where=sound_GP)
    std_G1 = jnp.std(member_GP, axis=1, keepdims=True, where=sound_GP, ddof=1)
    eps_G1 = jnp.broadcast_to(eps, x_GK.shape[:1])[:, None]
    paired_GK = (x_GK - mean_G1) / (std_G1 + eps_G1)
    advantage_GK = jnp.where(pairs.side_G[:, None] != 0, paired_GK, alone_GK)
    return jnp.where(pairs.paired_G[:, None] & sound_GK, advantage_GK, 0.0)
