"""rollout/* and collect/* metrics: all episodes played for a step, and the selected episodes."""

from collections.abc import Sequence

import numpy as np

from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.types import LIMIT, Episode, Metrics, Turn
from ragen_jax.diagnostics.intervals import mean_with_interval, rate_with_interval


def rollout_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """Return rollout/* metrics of all episodes played for a step, rates with their intervals.

    Episodes whose environment broke are counted in rollout/errors; all other metrics are about the
    sound episodes. Without sound episodes, only the counts are returned. rollout/success is left
    out if the environment does not define which episodes are solved.

    Args:
      episodes: their groups are numbered from 0 and may differ in size.
      return_GK: returns of the episodes, in their order; any shape.

    Returns:
      rollout/*. rollout/lost_groups is the number of groups of two or more episodes with fewer
      than two sound episodes: they allow no comparison, and no update learns from them.
    """
    group_E = np.array([episode.group for episode in episodes])
    sound_E = np.array([not episode.error for episode in episodes])
    members_G, sound_G = np.bincount(group_E), np.bincount(group_E, sound_E)
    metrics: Metrics = {
        "rollout/errors": len(episodes) - int(sound_E.sum()),
        "rollout/lost_groups": int(np.sum(sound_G < np.minimum(members_G, 2))),
        "rollout/replies": sum(len(e.turns) for e in episodes if not e.error),
    }
    return_E = np.reshape(return_GK, -1)
    if not sound_E.all():
        episodes = [episode for episode in episodes if not episode.error]
        group_E, return_E = group_E[sound_E], return_E[sound_E]
    if not episodes:
        return metrics

    def by_group(measure, of_turns=True):
        """Sum `measure` over the turns, or the episodes, of each group."""
        values = [
            sum(map(measure, episode.turns)) if of_turns else measure(episode)
            for episode in episodes
        ]
        return np.bincount(group_E, values)

    turns_G = by_group(lambda turn: 1)
    episodes_G = by_group(lambda episode: 1, of_turns=False)
    rates = {
        "valid_rate": lambda turn: turn.valid,
        "valid_think_rate": lambda turn: turn.reasoning[1] > turn.reasoning[0],
    }
    if success_is_defined(episodes):
        success_G = by_group(lambda episode: episode.success, of_turns=False)
        metrics |= rate_with_interval("rollout/success", success_G, episodes_G)
    length_G = by_group(lambda turn: len(turn.sampled))
    metrics |= mean_with_interval("rollout/response_length", length_G, turns_G)
    for name, measure in rates.items():
        metrics |= rate_with_interval(f"rollout/{name}", by_group(measure), turns_G)
    reasoning_G = by_group(lambda turn: turn.reasoning[1] - turn.reasoning[0])
    if any(turn.messages for episode in episodes for turn in episode.turns):
        metrics |= request_metrics(episodes)
    return metrics | {
        "rollout/return": return_E.mean(),
        "rollout/turns": turns_G.sum() / len(episodes),
        "rollout/reasoning_length": reasoning_G.sum() / turns_G.sum(),
    }


def request_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Return metrics of episodes whose prompts a client wrote.

    Returns:
      rollout/at_limit, the fraction of episodes whose program failed because a request was refused
      for a limit of the session, or after its last reply was cut off; rollout/prefix_reuse, the
      fraction of the later turns that continue an earlier turn of their episode token by token;
      rollout/forks, further rows of an episode after its first; rollout/untrained_tokens, sampled
      tokens of an episode that no turn holds (retries, side calls). The last two are means over
      episodes; prefix_reuse is left out without later turns.
    """
    later = continued = forks = 0
    for episode in episodes:
        for index, turn in enumerate(episode.turns[1:], 1):
            later += 1
            continued += any(_continues(turn, earlier) for earlier in episode.turns[:index])
            forks += not _continues(turn, episode.turns[index - 1])
    failed = sum(any(LIMIT in turn.info for turn in e.turns) for e in episodes)
    metrics: Metrics = {
        "rollout/at_limit": failed / len(episodes),
        "rollout/forks": forks / len(episodes),
        "rollout/untrained_tokens": sum(e.left_out for e in episodes) / len(episodes),
    }
    return metrics | ({"rollout/prefix_reuse": continued / later} if later else {})


def _continues(turn: Turn, earlier: Turn) -> bool:
    """Whether a turn's prompt begins with an earlier turn's prompt and reply."""
    start = len(earlier.prompt)
    end = start + len(earlier.sampled)
    return (
        len(turn.prompt) >= end
        and np.array_equal(turn.prompt[:start], earlier.prompt)
        and np.array_equal(turn.prompt[start:end], earlier.sampled)
    )


def cut_off_metrics(episodes: Sequence[Episode], max_new_tokens: int) -> Metrics:
    """Return rollout/cut_off_rate: the fraction of replies that are cut off, and so not valid.

    Args:
      max_new_tokens: maximum tokens of a reply.

    Returns:
      {} without any reply of a sound episode.
    """
    turns = [turn for episode in episodes if not episode.error for turn in episode.turns]
    if not turns:
        return {}
    cut = sum(not turn.valid and len(turn.sampled) >= max_new_tokens for turn in turns)
    return {"rollout/cut_off_rate": cut / len(turns)}


def selected_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """Return collect/* metrics of the sound episodes in the groups selected by dynamic sampling."""
    sound_E = np.array([not episode.error for episode in episodes])
    if not sound_E.any():
        return {}
    metrics: Metrics = {"collect/return": np.reshape(return_GK, -1)[sound_E].mean()}
    if success_is_defined(episodes):
        success_E = np.array([episode.success for episode in episodes])
        metrics["collect/success"] = success_E[sound_E].mean()
    return metrics
