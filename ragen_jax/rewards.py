"""Rewards of turns and returns of episodes."""

import numpy as np


def turn_reward(turn, *, format_penalty):
    """The environment's reward of a turn, plus `format_penalty` (<= 0) for an invalid reply."""
    return turn.reward + (0.0 if turn.valid else format_penalty)


def add_rewards(batch, episodes, *, format_penalty):
    """Puts each turn's reward on its last sampled token and sums them up by episode.

    Args:
      batch: `batch.make_batch(episodes)`.
      episodes: G * K episodes, group by group.
      format_penalty: added to an invalid turn, at most 0.

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
        raise ValueError(f"{len(episodes)} episodes are not {G} groups of equal size, in order")
    reward_BT = np.zeros_like(batch.reward_BT)
    for b, t in zip(*np.nonzero(batch.turn_end_BT), strict=True):
        turn = episodes[batch.episode_B[b]].turns[batch.turn_BT[b, t]]
        reward_BT[b, t] = turn_reward(turn, format_penalty=format_penalty)
    totals = [
        sum(turn_reward(turn, format_penalty=format_penalty) for turn in episode.turns)
        for episode in episodes
    ]
    return_GK = np.asarray(totals, np.float32).reshape(G, -1)
    return batch.replace(reward_BT=reward_BT), return_GK
