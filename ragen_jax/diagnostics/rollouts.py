"""rollout/* and collect/* figures: what was played for a step, and what of it makes the step."""

from collections.abc import Sequence

import numpy as np

from ragen_jax.diagnostics.intervals import rate_with_interval
from ragen_jax.rewards import success_is_defined
from ragen_jax.types import Episode, Metrics


def rollout_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """rollout/* figures of all episodes that were played for a step, rates with their intervals.

    rollout/success is left out where the environment does not say which episodes are solved.

    Args:
      episodes: of groups numbered from 0, which may differ in size.
      return_GK: their returns, of any shape.
    """
    group_E = [episode.group for episode in episodes]

    def by_group(measure, of_turns=True):
        """Sums over the turns, or the episodes, of each group."""
        values = [
            sum(map(measure, episode.turns)) if of_turns else measure(episode)
            for episode in episodes
        ]
        return np.bincount(group_E, values)

    turns_G = by_group(lambda turn: 1)
    episodes_G = by_group(lambda episode: 1, of_turns=False)
    of_turns = {
        "response_length": lambda turn: len(turn.sampled),
        "valid_rate": lambda turn: turn.valid,
        "valid_think_rate": lambda turn: turn.reasoning[1] > turn.reasoning[0],
    }
    metrics: Metrics = {}
    if success_is_defined(episodes):
        success_G = by_group(lambda episode: episode.success, of_turns=False)
        metrics |= rate_with_interval("rollout/success", success_G, episodes_G)
    for name, measure in of_turns.items():
        metrics |= rate_with_interval(f"rollout/{name}", by_group(measure), turns_G)
    reasoning_G = by_group(lambda turn: turn.reasoning[1] - turn.reasoning[0])
    return metrics | {
        "rollout/return": return_GK.mean(),
        "rollout/errors": sum(bool(episode.error) for episode in episodes),
        "rollout/turns": turns_G.sum() / len(episodes),
        "rollout/replies": turns_G.sum(),
        "rollout/reasoning_length": reasoning_G.sum() / turns_G.sum(),
    }


def selected_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """collect/* figures of the groups that dynamic sampling selected."""
    metrics: Metrics = {"collect/return": return_GK.mean()}
    if success_is_defined(episodes):
        metrics["collect/success"] = np.mean([episode.success for episode in episodes])
    return metrics
