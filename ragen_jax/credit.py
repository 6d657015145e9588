"""From rewards to advantages: which tokens an algorithm credits with what.

    reward_BT, return_GK -> placed, normalised, less the KL -> advantage_BT, the critic's target

Axes: G groups, K episodes a group, B rows, T tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ragen_jax import advantage, rewards

WITH_CRITIC = ("ppo",)
OF_TOKENS = ("ppo", "reinforce_plus_plus")  # made of the rewards along a row
# The others are made of the returns of a group's episodes.
ALGORITHMS = (*OF_TOKENS, "reinforce_plus_plus_baseline", *advantage.GROUP_ADVANTAGES)


@dataclasses.dataclass(frozen=True)
class Credit:
    """Settings; see configs/base.py (algorithm, reward)."""

    name: str  # one of ALGORITHMS
    gamma: float
    lam: float
    bi_level: bool
    turn_gamma: float
    soft_weights: bool
    level: str
    normalize: str
    grouping: str


@functools.partial(jax.jit, static_argnames="credit")
def assign_credit(
    credit, batch, keep_GK, return_GK, *, value_BT=None, kl_BT=None, kl_coef=0.0, environment_G=None
):
    """Advantages of the kept episodes' tokens.

    - ppo: rewards where credit.level puts them, then GAE (bi-level or plain), then whitened.
      Where returns are normalised, an episode's normalised return lies on its last token instead.
      A row ends with the rewards of its episode's later rows (rewards.carry_back).
    - reinforce_plus_plus: the same rewards; discounted returns-to-go, whitened.
    - reinforce_plus_plus_baseline, grpo, dr_grpo, rloo: of the (normalised) returns, the same for
      all tokens of an episode.

    Statistics over tokens, environments and the batch are those of the kept episodes; those of a
    group are of all its episodes. A KL in the reward comes before them; soft weights are about the
    returns without it.

    Args:
      credit: `Credit`.
      batch: `Batch` with reward_BT; rows of any number, padding included.
      keep_GK: bool, the episodes that the update reads.
      return_GK: undiscounted episode returns, penalties included.
      value_BT: the critic's values (ppo).
      kl_BT: KL to the reference at each token, for KL in the reward, of all episodes of the groups
        that hold a kept one; kl_coef: its weight.
      environment_G: int, the environment of each group (for reward.grouping "environment" and soft
        weights); None: all are of one.

    Returns:
      (advantage_BT, target_BT): float32, 0 outside the kept episodes' sampled tokens; target_BT is
      what the critic should have said, None without one.
    """
    keep_GK = jnp.asarray(keep_GK)
    keep_B = keep_GK.reshape(-1)[batch.episode_B] & (batch.weight_B > 0)
    mask_BT = batch.mask_BT * keep_B[:, None]
    of_tokens = credit.name in OF_TOKENS
    rewarded_GK = return_GK
    if kl_BT is not None and not of_tokens:
        kl_B = (batch.mask_BT * kl_BT).sum(1)
        kl_E = jax.ops.segment_sum(kl_B, batch.episode_B, num_segments=return_GK.size)
        rewarded_GK = return_GK - kl_coef * kl_E.reshape(return_GK.shape)
    normal_GK = rewards.normalize_returns(
        rewarded_GK,
        method=credit.normalize,
        grouping=credit.grouping,
        environment_G=environment_G,
        keep_GK=keep_GK,
    )
    target_BT = None
    if of_tokens:
        places = batch.turn_BT, batch.turn_end_BT, batch.episode_B
        if credit.normalize == "identity":
            reward_BT = rewards.place_rewards(
                batch.reward_BT, batch.mask_BT, *places, level=credit.level
            )
        else:
            reward_BT = rewards.place_returns(normal_GK.reshape(-1)[batch.episode_B], *places)
        reward_BT = rewards.carry_back(reward_BT, *places)
        if kl_BT is not None:
            reward_BT = rewards.penalize_kl(reward_BT, kl_BT, batch.mask_BT, coef=kl_coef)
        if credit.name == "reinforce_plus_plus":
            advantage_BT, _ = advantage.reinforce_plus_plus(reward_BT, mask_BT, gamma=credit.gamma)
        else:
            arrays, factors = (reward_BT, value_BT, mask_BT), {"gamma": credit.gamma}
            factors["lam"] = credit.lam
            if credit.bi_level:
                advantage_BT, target_BT = advantage.bi_level_gae(
                    *arrays, batch.turn_end_BT, **factors, turn_gamma=credit.turn_gamma
                )
            else:
                advantage_BT, target_BT = advantage.gae(*arrays, **factors)
            advantage_BT = advantage.whiten(advantage_BT, mask_BT)
    elif credit.name == "reinforce_plus_plus_baseline":
        advantage_BT = advantage.reinforce_plus_plus_baseline(normal_GK, batch.episode_B, mask_BT)
    else:
        advantage_GK = advantage.GROUP_ADVANTAGES[credit.name](normal_GK)
        advantage_BT = advantage_GK.reshape(-1)[batch.episode_B][:, None]
    if credit.soft_weights:
        weight_G = advantage.soft_weights(return_GK, environment_G=environment_G)
        advantage_BT = advantage_BT * weight_G[batch.group_B][:, None]
    return jnp.where(mask_BT > 0, advantage_BT, 0.0), target_BT
