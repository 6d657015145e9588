"""Credit assignment: from rewards to the advantage of each token.

    reward_BT, return_GK -> placed, normalised, minus the KL -> advantage_BT, the critic's target

To add an algorithm, write the function that computes its advantages and add a row to ALGORITHMS.

Axes: G groups, K episodes per group, B rows, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.algorithm import advantage, rewards
from ragen_jax.algorithm.advantage import STD_EPS, TIE, VARIANCE_EPS
from ragen_jax.algorithm.pairs import Pairs, pair_groups, pair_relative
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Array, Batch

DISTILL = "distill"  # the algorithm that learns from no reward, only from the KL to its reference


@dataclasses.dataclass(frozen=True)
class Credit:
    """Settings; see configs/base.py (algorithm, reward)."""

    name: str  # a key of ALGORITHMS
    gamma: float
    lam: float
    bi_level: bool
    turn_gamma: float
    soft_weights: bool
    level: str
    normalize: str
    grouping: str


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm's advantage function, and the inputs that it takes."""

    # of_tokens: (credit, reward_BT, value_BT, mask_BT, turn_end_BT, next_row_B) -> (advantage_BT,
    # target_BT), where next_row_B is the row that continues each row (rewards.next_rows);
    # otherwise: (return_GK, episode_B, mask_BT) -> advantage_BT
    advantages: Callable[..., Any]
    of_tokens: bool = False  # whether it reads the rewards along rows, not the episodes' returns
    # Whether it takes the keyword sound_GK, the episodes whose environment did not break. If not, a
    # broken episode gets the mean return of the sound episodes in its group.
    takes_sound: bool = False
    # Whether it takes the keyword unit_G, the size of the rewards (advantage.reward_unit), of which
    # its tolerances are multiples.
    takes_unit: bool = False
    takes_pairs: bool = False  # whether it takes the keyword pairs (pairs.pair_groups)
    critic: bool = False  # whether it trains a critic, with target_BT as the target


@stored(static_argnames="credit")
def token_advantages(
    credit: Credit,
    batch: Batch,
    keep_GK: Array,
    return_GK: Array,
    *,
    value_BT: Array | None = None,
    kl_BT: Array | None = None,
    kl_coef: Array | float = 0.0,
    environment_G: Array | None = None,
    sound_GK: Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the advantages of the kept episodes' tokens.

    - ppo: rewards are placed as credit.level says; then GAE (bi-level or plain), then whitening.
      If returns are normalised, an episode's normalised return is on its last token instead.
      The rows of an episode are one sequence: the recursion continues in the next row, discounted
      as inside a row, KL included.
    - reinforce_plus_plus: the same rewards; discounted returns-to-go, whitened.
    - reinforce_plus_plus_baseline, grpo, dr_grpo, rloo, raft: computed from the (normalised)
      returns, the same for all tokens of an episode.
    - weighted_grpo: the same, over pairs of groups whose order is that of the returns before any
      normalisation.
    - distill: 0.

    Statistics over tokens, environments and the batch use the kept episodes; statistics of a group
    use all its sound episodes. A KL in the reward is subtracted before the statistics are computed;
    soft weights use the returns without the KL.

    Args:
      batch: with reward_BT; rows of any number, padding included.
      keep_GK: bool, the episodes that the update reads.
      return_GK: undiscounted episode returns, penalties included.
      value_BT: the critic's values (ppo).
      kl_BT: KL to the reference at each token, for KL in the reward; needed for all episodes of the
        groups with a kept episode. kl_coef: its weight.
      environment_G: int, the environment of each group (for reward.grouping "environment" and soft
        weights); None: all groups are of one environment.
      sound_GK: bool, the episodes whose environment did not break; None: all.

    Returns:
      (advantage_BT, target_BT): float32, 0 outside the kept episodes' sampled tokens; target_BT is
      the critic's target, None without a critic.
    """
    algorithm = ALGORITHMS[credit.name]
    keep_GK = jnp.asarray(keep_GK)
    keep_B = keep_GK.reshape(-1)[batch.episode_B] & (batch.weight_B > 0)
    mask_BT = batch.mask_BT * keep_B[:, None]
    rewarded_GK = return_GK
    if kl_BT is not None and not algorithm.of_tokens:
        kl_B = (batch.mask_BT * kl_BT).sum(1)
        kl_E = jax.ops.segment_sum(kl_B, batch.episode_B, num_segments=return_GK.size)
        rewarded_GK = return_GK - kl_coef * kl_E.reshape(return_GK.shape)
    unit_G = advantage.reward_unit(return_GK, environment_G=environment_G, sound_GK=sound_GK)
    normal_GK = rewards.normalize_returns(
        rewarded_GK,
        unit_G=unit_G,
        method=credit.normalize,
        grouping=credit.grouping,
        environment_G=environment_G,
        keep_GK=keep_GK,
        sound_GK=sound_GK,
    )
    options: dict[str, Any] = {}
    if algorithm.takes_sound:
        options["sound_GK"] = sound_GK
    if algorithm.takes_unit:
        scaled = credit.normalize in rewards.SCALED
        options["unit_G"] = jnp.ones_like(unit_G) if scaled else unit_G
    if algorithm.takes_pairs:
        options["pairs"] = pair_groups(
            return_GK,
            keep_GK.any(1),
            unit_G=unit_G,
            environment_G=environment_G,
            sound_GK=sound_GK,
        )
    target_BT = None
    if algorithm.of_tokens:
        reward_BT = _placed_rewards(credit, batch, normal_GK)
        if kl_BT is not None:
            reward_BT = rewards.penalize_kl(reward_BT, kl_BT, batch.mask_BT, coef=kl_coef)
        next_row_B = rewards.next_rows(batch.turn_BT, batch.episode_B)
        advantage_BT, target_BT = algorithm.advantages(
            credit, reward_BT, value_BT, mask_BT, batch.turn_end_BT, next_row_B, **options
        )
    else:
        advantage_BT = algorithm.advantages(normal_GK, batch.episode_B, mask_BT, **options)
    if credit.soft_weights:
        weight_G = advantage.soft_weights(
            return_GK, environment_G=environment_G, eps=STD_EPS * unit_G, sound_GK=sound_GK
        )
        advantage_BT = advantage_BT * weight_G[batch.group_B][:, None]
    return jnp.where(mask_BT > 0, advantage_BT, 0.0), target_BT


def _placed_rewards(credit: Credit, batch: Batch, normal_GK: jax.Array) -> jax.Array:
    """Return the rewards as credit.level places them, or normalised returns on last tokens."""
    places = batch.turn_BT, batch.turn_end_BT, batch.episode_B
    if credit.normalize == "identity":
        return rewards.place_rewards(batch.reward_BT, batch.mask_BT, *places, level=credit.level)
    return rewards.place_returns(normal_GK.reshape(-1)[batch.episode_B], *places)


# ------------------------------------------------------------------------------ the algorithms


def _ppo(
    credit: Credit,
    reward_BT: Array,
    value_BT: Array,
    mask_BT: Array,
    turn_end_BT: Array,
    next_row_B: Array,
    *,
    unit_G: Array,
) -> tuple[jax.Array, jax.Array]:
    arrays = reward_BT, value_BT, mask_BT
    options: dict[str, Any] = dict(gamma=credit.gamma, lam=credit.lam, next_row_B=next_row_B)
    if credit.bi_level:
        advantage_BT, target_BT = advantage.bi_level_gae(
            *arrays, turn_end_BT, **options, turn_gamma=credit.turn_gamma
        )
    else:
        advantage_BT, target_BT = advantage.gae(*arrays, **options)
    return advantage.whiten(advantage_BT, mask_BT, eps=_variance_eps(unit_G)), target_BT


def _reinforce_plus_plus(
    credit: Credit,
    reward_BT: Array,
    value_BT: None,
    mask_BT: Array,
    turn_end_BT: Array,
    next_row_B: Array,
    *,
    unit_G: Array,
) -> tuple[jax.Array, None]:
    advantage_BT, _ = advantage.reinforce_plus_plus(
        reward_BT,
        mask_BT,
        gamma=credit.gamma,
        next_row_B=next_row_B,
        eps=_variance_eps(unit_G),
    )
    return advantage_BT, None


def _reinforce_plus_plus_baseline(
    return_GK: Array,
    episode_B: Array,
    mask_BT: Array,
    *,
    unit_G: Array,
    sound_GK: Array | None,
) -> jax.Array:
    return advantage.reinforce_plus_plus_baseline(
        return_GK, episode_B, mask_BT, sound_GK=sound_GK, eps=_variance_eps(unit_G)
    )


def _variance_eps(unit_G: Array) -> jax.Array:
    """Return the tolerance of a variance over the whole batch, whose environments may differ."""
    return VARIANCE_EPS * jnp.max(unit_G) ** 2


def _same_for_all_tokens(of_groups: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Repeat the advantages of `of_groups`, (return_GK) -> advantage_GK, on each episode's tokens.

    Keywords are passed to `of_groups`: those that the algorithm takes.
    """

    def advantages(return_GK, episode_B, mask_BT, **options):
        return of_groups(return_GK, **options).reshape(-1)[episode_B][:, None]

    return advantages


def _grpo(return_GK: Array, *, unit_G: Array, sound_GK: Array | None) -> jax.Array:
    return advantage.group_relative(return_GK, eps=STD_EPS * unit_G, sound_GK=sound_GK)


def _weighted_grpo(
    return_GK: Array, *, pairs: Pairs, unit_G: Array, sound_GK: Array | None
) -> jax.Array:
    return pair_relative(return_GK, pairs, eps=STD_EPS * unit_G, sound_GK=sound_GK)


def _raft(return_GK: Array, *, unit_G: Array, sound_GK: Array | None) -> jax.Array:
    return advantage.best_of_group(return_GK, eps=TIE * unit_G, sound_GK=sound_GK)


_dr_grpo = functools.partial(advantage.group_relative, normalize_by_std=False)

ALGORITHMS = {
    "ppo": Algorithm(_ppo, of_tokens=True, takes_unit=True, critic=True),
    "reinforce_plus_plus": Algorithm(_reinforce_plus_plus, of_tokens=True, takes_unit=True),
    "reinforce_plus_plus_baseline": Algorithm(
        _reinforce_plus_plus_baseline, takes_sound=True, takes_unit=True
    ),
    "grpo": Algorithm(_same_for_all_tokens(_grpo), takes_sound=True, takes_unit=True),
    "dr_grpo": Algorithm(_same_for_all_tokens(_dr_grpo), takes_sound=True),
    "rloo": Algorithm(_same_for_all_tokens(advantage.leave_one_out), takes_sound=True),
    "raft": Algorithm(_same_for_all_tokens(_raft), takes_sound=True, takes_unit=True),
    "weighted_grpo": Algorithm(
        _same_for_all_tokens(_weighted_grpo), takes_sound=True, takes_unit=True, takes_pairs=True
    ),
    DISTILL: Algorithm(_same_for_all_tokens(jnp.zeros_like)),
}
OF_TOKENS = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.of_tokens)
