"""Rewards of turns and episodes: their placement, normalisation and penalties.

Axes: B rows, T tokens, G groups (prompts), K episodes per group. The functions on arrays are pure,
have static shapes and return float32, so they work under jit. The functions on episodes run on the
host.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.tables import look_up
from ragen_jax.core.types import SUCCESS_UNDEFINED, Array, Batch, Episode, Turn

DEAD_STD = 1e-6  # a block with a std up to this is not scaled; in units of advantage.reward_unit
ASYMMETRIC_CLIP = (-1.0, 3.0)  # as in the released code: rare successes are bounded less


@dataclasses.dataclass(frozen=True)
class Penalties:
    """Penalties on an environment's rewards: the arguments of `turn_rewards`."""

    format_penalty: float  # added to an invalid turn, at most 0
    max_length: int  # tokens of a reply at which the overlong penalty reaches -1
    overlong_buffer: int  # tokens over which the penalty grows; 0: no penalty


def turn_reward(turn: Turn, *, format_penalty: float) -> float:
    """Return the reward of a turn, plus `format_penalty` (<= 0) for an invalid reply."""
    return turn.reward + (0.0 if turn.valid else format_penalty)


def turn_rewards(
    episodes: Sequence[Episode],
    *,
    format_penalty: float | np.ndarray,
    max_length: int = 0,
    overlong_buffer: int = 0,
) -> list[list[float]]:
    """Return the reward of each turn of each episode as used in training, penalties included.

    The arguments are as in add_rewards. An episode's return is the sum of its list.
    """
    groups = max(episode.group for episode in episodes) + 1
    format_G = np.broadcast_to(format_penalty, groups).tolist()
    penalties: Iterator[float] = itertools.repeat(0.0)
    if overlong_buffer:
        lengths = np.array([len(turn.sampled) for e in episodes for turn in e.turns])
        penalty = overlong_penalty(lengths, max_length=max_length, buffer=overlong_buffer)
        penalties = iter(np.asarray(penalty, float))
    return [
        [turn_reward(turn, format_penalty=format_G[e.group]) + next(penalties) for turn in e.turns]
        for e in episodes
    ]


def episode_returns(
    episodes: Sequence[Episode],
    *,
    format_penalty: float | np.ndarray,
    max_length: int = 0,
    overlong_buffer: int = 0,
) -> list[float]:
    """Return each episode's undiscounted return: the sum of its `turn_rewards`."""
    rewards = turn_rewards(
        episodes,
        format_penalty=format_penalty,
        max_length=max_length,
        overlong_buffer=overlong_buffer,
    )
    return [sum(turns) for turns in rewards]


def add_rewards(
    batch: Batch,
    episodes: Sequence[Episode],
    *,
    format_penalty: float | np.ndarray,
    max_length: int = 0,
    overlong_buffer: int = 0,
) -> tuple[Batch, np.ndarray]:
    """Put each turn's reward on its last sampled token, and sum the rewards of each episode.

    Args:
      batch: `batch.make_batch(episodes)`.
      episodes: G * K episodes, group by group.
      format_penalty: added to an invalid turn, at most 0; one number, or one per group.
      max_length, overlong_buffer: settings of `overlong_penalty`, in tokens of a reply; buffer 0:
        no penalty.

    Returns:
      (batch with reward_BT, return_GK): return_GK float32 is the undiscounted sum of an
      episode's rewards, penalties included, before any normalisation.

    Raises:
      ValueError: groups of unequal size.
    """
    G = max(episode.group for episode in episodes) + 1
    if len(episodes) % G or any(
        e.group != i // (len(episodes) // G) for i, e in enumerate(episodes)
    ):
        raise ValueError(f"{len(episodes)} episodes do not form {G} groups of equal size, in order")

    rewards = turn_rewards(
        episodes,
        format_penalty=format_penalty,
        max_length=max_length,
        overlong_buffer=overlong_buffer,
    )
    reward_BT = np.zeros_like(batch.reward_BT)
    for b, t in zip(*np.nonzero(batch.turn_end_BT), strict=True):
        reward_BT[b, t] = rewards[batch.episode_B[b]][batch.turn_BT[b, t]]
    return dataclasses.replace(batch, reward_BT=reward_BT), sum_turns(rewards, episodes)


def sum_turns(rewards: Sequence[Sequence[float]], episodes: Sequence[Episode]) -> np.ndarray:
    """Sum the result of `turn_rewards` per episode: return_GK float32, for G groups of episodes.

    An episode whose environment broke gets the mean of its group's sound episodes (0 without sound
    episodes). This changes neither the mean nor which members are above it: a broken environment
    is no evidence about the policy.
    """
    groups = episodes[-1].group + 1
    return_GK = np.asarray([sum(turns) for turns in rewards], np.float32).reshape(groups, -1)
    sound_GK = ~broken_episodes(episodes)
    for return_K, sound_K in zip(return_GK, sound_GK, strict=True):
        if not sound_K.all():
            return_K[~sound_K] = return_K[sound_K].mean() if sound_K.any() else 0.0
    return return_GK


def broken_episodes(episodes: Sequence[Episode]) -> np.ndarray:
    """Return which episodes, listed group by group, had a broken environment: bool [G, K]."""
    broken = [bool(episode.error) for episode in episodes]
    return np.reshape(broken, (episodes[-1].group + 1, -1))


def success_is_defined(episodes: Sequence[Episode]) -> bool:
    """Return whether the environment defines which episodes are solved.

    If not, the info has envs.types.SUCCESS_UNDEFINED; the info of the last action of each sound
    episode is read. Without any action the result is True: an episode without actions is not
    solved.
    """
    last = [
        next((turn.info for turn in reversed(episode.turns) if turn.info), {})
        for episode in episodes
        if not episode.error
    ]
    undefined = [info[SUCCESS_UNDEFINED] for info in last if SUCCESS_UNDEFINED in info]
    defined = [info for info in last if "success" in info and SUCCESS_UNDEFINED not in info]
    return bool(defined) or not any(undefined)


# ---------------------------------------------------------------- placement


def place_rewards(
    reward_BT: Array,
    mask_BT: Array,
    turn_BT: Array,
    turn_end_BT: Array,
    episode_B: Array,
    *,
    level: str,
) -> jax.Array:
    """Move the rewards of turn ends to the tokens that `level` names; their sum stays the same.

    | level | position of an episode's rewards |
    | --- | --- |
    | turn | each on its turn's last sampled token, where add_rewards puts them |
    | token | each spread evenly over its turn's sampled tokens |
    | episode | all on the last sampled token of the episode's last row |

    Args:
      reward_BT: rewards on turn ends.
      mask_BT: nonzero where the policy sampled the token.
      turn_BT: int, the turn of a sampled token, -1 elsewhere.
      turn_end_BT: bool, the last sampled token of each turn.
      episode_B: int, the episode of each row.
      level: a key of PLACEMENTS.
    Returns:
      reward_BT float32.
    Raises:
      ValueError: unknown level.
      AssertionError: ranks are not 2 (episode_B: 1) or shapes differ.
    """
    arrays = [reward_BT, mask_BT, turn_BT, turn_end_BT]
    chex.assert_rank([*arrays, episode_B], [2, 2, 2, 2, 1])
    chex.assert_equal_shape(arrays)
    place = look_up(PLACEMENTS, "level", level)
    return place(jnp.asarray(reward_BT, jnp.float32), mask_BT, turn_BT, turn_end_BT, episode_B)


def place_returns(
    return_B: Array, turn_BT: Array, turn_end_BT: Array, episode_B: Array
) -> jax.Array:
    """Put each episode's return on the last sampled token of its last row, 0 elsewhere.

    Args:
      return_B: the return of each row's episode, normalised or not.
      turn_BT, turn_end_BT, episode_B: as in place_rewards; padding rows have no turn end.
    Returns:
      reward_BT float32.
    Raises:
      AssertionError: ranks are not 1, 2, 2, 1, or shapes differ.
    """
    chex.assert_rank([return_B, turn_BT, turn_end_BT, episode_B], [1, 2, 2, 1])
    chex.assert_equal_shape([turn_BT, turn_end_BT])
    last_row_B = ~jnp.any(_later_rows(turn_BT, episode_B), axis=1)
    place_BT = _last_end(turn_end_BT) & last_row_B[:, None]
    return jnp.where(place_BT, jnp.asarray(return_B, jnp.float32)[:, None], 0.0)


def next_rows(turn_BT: Array, episode_B: Array) -> jax.Array:
    """Return the row that continues each row: the row with the next turns of its episode.

    If an episode is split into rows (sliding contexts), a recursion within a row would end with
    the row. `advantage.gae` continues it in the next row, so that the rewards and penalties of
    later rows, KL included, are discounted as inside a row.

    Args:
      turn_BT: int, the turn of a sampled token, -1 elsewhere.
      episode_B: int, the episode of each row; rows in any order.
    Returns:
      next_row_B int32, -1 for an episode's last row and for padding rows.
    Raises:
      AssertionError: turn_BT is not of rank 2, episode_B not of rank 1, or the numbers of rows
        differ.
    """
    chex.assert_rank([turn_BT, episode_B], [2, 1])
    chex.assert_equal_shape_prefix([turn_BT, episode_B], 1)
    turn_B = jnp.max(jnp.asarray(turn_BT), axis=1)
    later_BB = _later_rows(turn_BT, episode_B)
    far = jnp.iinfo(turn_B.dtype).max
    next_B = jnp.argmin(jnp.where(later_BB, turn_B[None, :], far), axis=1)
    return jnp.where(jnp.any(later_BB, axis=1), next_B, -1).astype(jnp.int32)


def _on_turns(
    reward_BT: jax.Array, mask_BT: Array, turn_BT: Array, turn_end_BT: Array, episode_B: Array
) -> jax.Array:
    return reward_BT


def _on_tokens(
    reward_BT: jax.Array, mask_BT: Array, turn_BT: Array, turn_end_BT: Array, episode_B: Array
) -> jax.Array:
    T = reward_BT.shape[1]

    def row(reward_T, inside_T, turn_T):
        segment_T = turn_T + 1  # -1, no turn, is segment 0; there are at most T turns
        total_S = jax.ops.segment_sum(reward_T, segment_T, T + 1)
        tokens_S = jax.ops.segment_sum(inside_T, segment_T, T + 1)
        return inside_T * (total_S / jnp.maximum(tokens_S, 1.0))[segment_T]

    inside_BT = (jnp.asarray(mask_BT) != 0).astype(jnp.float32)
    return jax.vmap(row)(reward_BT, inside_BT, jnp.asarray(turn_BT))


def _on_episodes(
    reward_BT: jax.Array, mask_BT: Array, turn_BT: Array, turn_end_BT: Array, episode_B: Array
) -> jax.Array:
    episode_B = jnp.asarray(episode_B)
    same_BB = episode_B[:, None] == episode_B[None, :]
    return_B = jnp.sum(jnp.where(same_BB, jnp.sum(reward_BT, axis=1)[None, :], 0.0), axis=1)
    return place_returns(return_B, turn_BT, turn_end_BT, episode_B)


PLACEMENTS = {"turn": _on_turns, "token": _on_tokens, "episode": _on_episodes}


def _later_rows(turn_BT: Array, episode_B: Array) -> jax.Array:
    """Return later_BB, bool: later_BB[b, c] is True if row c has later turns of row b's episode."""
    episode_B, turn_B = jnp.asarray(episode_B), jnp.max(jnp.asarray(turn_BT), axis=1)
    return (episode_B[:, None] == episode_B[None, :]) & (turn_B[None, :] > turn_B[:, None])


def _last_end(turn_end_BT: Array) -> jax.Array:
    """Return the last turn end of each row, bool [B, T]."""
    end_BT = jnp.asarray(turn_end_BT) != 0
    after_BT = jnp.cumsum(end_BT[:, ::-1], axis=1)[:, ::-1]  # number of turn ends at t and later
    return end_BT & (after_BT == 1)


# ---------------------------------------------------------------- normalisation


def normalize_returns(
    return_GK: Array,
    *,
    method: str,
    grouping: str = "state",
    environment_G: Array | None = None,
    keep_GK: Array | None = None,
    sound_GK: Array | None = None,
    unit_G: Array | float = 1.0,
) -> jax.Array:
    """Normalise the returns of episodes by the statistics of their block.

    Blocks: grouping "state": the sound episodes of the group; "environment": the kept episodes of
    all groups with equal environment_G; "batch": all kept episodes. With m and s the block's mean
    and sample standard deviation:

    | method | result |
    | --- | --- |
    | identity | R |
    | mean | R - m |
    | mean_std | (R - m) / (s + e); 0 where s <= e or the block has at most one episode |
    | asymmetric_clip | the result of mean_std, clipped to [-1, 3] |

    e is 1e-6 times the largest unit of the block's groups (unit_G).

    This is RAGEN's released reward normalisation. The released code leaves out format penalties and
    adds them afterwards; to do the same, pass returns without penalties. Filters read the returns
    before normalisation.

    Args:
      return_GK: undiscounted episode returns.
      method: a key of METHODS. grouping: a key of GROUPINGS.
      environment_G: int, the environment of each group; needed by grouping "environment".
      keep_GK: bool, the episodes that the update reads; None: all.
      sound_GK: bool, the episodes whose environment did not break, which are in no block; None:
        all are sound.
      unit_G: size of each group's rewards (`advantage.reward_unit`).
    Returns:
      float32 [G, K]; episodes that are not kept are also normalised by their block's statistics.
    Raises:
      ValueError: unknown method or grouping, or environment_G is missing.
      AssertionError: return_GK is not of rank 2, environment_G not of shape [G], or keep_GK or
        sound_GK not of return_GK's shape.
    """
    chex.assert_rank(return_GK, 2)
    normalize = look_up(METHODS, "method", method)
    block = look_up(GROUPINGS, "grouping", grouping)
    return_GK = jnp.asarray(return_GK, jnp.float32)
    G, K = return_GK.shape
    if environment_G is not None:
        chex.assert_shape(environment_G, (G,))
    elif grouping == "environment":
        raise ValueError("grouping 'environment' needs environment_G")
    block_G = block(G, environment_G)
    same_GG = block_G[:, None] == block_G[None, :]
    counts_GK = jnp.ones((G, K), bool)
    if keep_GK is not None and grouping != "state":
        chex.assert_shape(keep_GK, (G, K))
        counts_GK = jnp.asarray(keep_GK, bool)
    if sound_GK is not None:
        chex.assert_shape(sound_GK, (G, K))
        counts_GK &= jnp.asarray(sound_GK, bool)

    def block_sum(x_GK):
        sum_G = jnp.sum(jnp.where(counts_GK, x_GK, 0.0), axis=1)
        return jnp.sum(jnp.where(same_GG, sum_G[None, :], 0.0), axis=1, keepdims=True)

    episodes_G1 = block_sum(jnp.ones((G, K)))
    # Subtract the first counted return, so that equal returns deviate by exactly 0 (as in
    # advantage.deviations).
    counts_GGK = same_GG[:, :, None] & counts_GK
    first_G = jnp.argmax(counts_GGK.reshape(G, -1), axis=1)
    shifted_GK = return_GK - return_GK.reshape(-1)[first_G][:, None]
    deviation_GK = shifted_GK - block_sum(shifted_GK) / jnp.maximum(episodes_G1, 1)
    std_G1 = jnp.sqrt(block_sum(deviation_GK**2) / jnp.maximum(episodes_G1 - 1, 1))
    eps_G = DEAD_STD * jnp.broadcast_to(unit_G, (G,))
    eps_G1 = jnp.max(jnp.where(same_GG, eps_G[None, :], 0.0), axis=1, keepdims=True)
    scaled_GK = jnp.where(std_G1 > eps_G1, deviation_GK / (std_G1 + eps_G1), 0.0)
    return normalize(return_GK, deviation_GK, scaled_GK)


GROUPINGS = {
    "state": lambda G, environment_G: jnp.arange(G),
    "environment": lambda G, environment_G: jnp.asarray(environment_G),
    "batch": lambda G, environment_G: jnp.zeros(G, jnp.int32),
}


# method -> function of (the returns, their deviations from the block's mean, the deviations in
# standard deviations)
METHODS = {
    "identity": lambda return_GK, deviation_GK, scaled_GK: return_GK,
    "mean": lambda return_GK, deviation_GK, scaled_GK: deviation_GK,
    "mean_std": lambda return_GK, deviation_GK, scaled_GK: scaled_GK,
    "asymmetric_clip": lambda return_GK, deviation_GK, scaled_GK: jnp.clip(
        scaled_GK, *ASYMMETRIC_CLIP
    ),
}
SCALED = ("mean_std", "asymmetric_clip")  # methods whose results have no unit


# ---------------------------------------------------------------- penalties


def overlong_penalty(length: Array | float, *, max_length: int, buffer: int) -> jax.Array:
    """Return DAPO's soft penalty for long replies, to be added to their reward.

    0 up to max_length - buffer, then linear down to -1 at max_length, and -1 beyond.
    Yu et al., arXiv 2503.14476, equation 13.

    Args:
      length: sampled tokens, any shape and real dtype.
      max_length: tokens from which the penalty is -1.
      buffer: tokens over which the penalty grows, from 1 to max_length.
    Returns:
      float32 of length's shape, from -1 to 0.
    Raises:
      ValueError: buffer is out of range.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to max_length = {max_length}, got {buffer}")
    over = jnp.asarray(length, jnp.float32) - (max_length - buffer)
    return -jnp.clip(over / buffer, 0.0, 1.0)


def penalize_kl(
    reward_BT: Array, kl_BT: Array, mask_BT: Array, *, coef: Array | float
) -> jax.Array:
    """Subtract the KL from the reward: r - coef * KL at each sampled token, r elsewhere.

    Ziegler et al., arXiv 1909.08593, equation 2, token by token. Here the KL is a number, not a
    term of the loss: use the k1 estimate (losses.kl) for the policy that sampled.

    Args:
      reward_BT: rewards.
      kl_BT: KL(policy || reference) at each token; ignored outside the mask, even if NaN.
      mask_BT: nonzero where the policy sampled the token.
      coef: weight of the KL, in reward per nat.
    Returns:
      reward_BT float32.
    Raises:
      AssertionError: ranks are not 2 or shapes differ.
    """
    arrays = [reward_BT, kl_BT, mask_BT]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape(arrays)
    kl_BT = jnp.where(jnp.asarray(mask_BT) != 0, jnp.asarray(kl_BT, jnp.float32), 0.0)
    return jnp.asarray(reward_BT, jnp.float32) - coef * kl_BT


def adapt_kl_coef(
    coef: Array | float, kl: Array | float, *, target: float, gain: float = 0.1
) -> jax.Array:
    """Return the next KL coefficient, which steers the KL towards a target in log space.

    coef * (1 + gain * clip((kl - target) / target, -0.2, 0.2)). Ziegler et al., arXiv 1909.08593,
    section 2.2; their code's gain is episodes of the step / a horizon of 10,000.

    Args:
      coef: the current coefficient.
      kl: the measured KL of the step, in the unit of target: nats per token or nats per episode.
      target: target KL, > 0.
      gain: at least 0; 0 keeps the coefficient.
    Returns:
      float32 scalar.
    Raises:
      ValueError: target <= 0.
    """
    if target <= 0:
        raise ValueError(f"target must be > 0, got {target}")
    error = jnp.clip((jnp.asarray(kl, jnp.float32) - target) / target, -0.2, 0.2)
    return jnp.asarray(coef, jnp.float32) * (1.0 + gain * error)
