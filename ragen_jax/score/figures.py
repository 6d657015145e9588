"""The metrics of each step, with the names of a run's metrics.jsonl, and the alarm."""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from ragen_jax.configs.base import Regimes
from ragen_jax.core.types import Episode, Metrics, Params
from ragen_jax.diagnostics.anatomy import action_metrics, anatomy_metrics
from ragen_jax.diagnostics.regimes import init_regimes, update_regimes
from ragen_jax.diagnostics.rollouts import rollout_metrics
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, Scores, collapse_metrics
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.diagnostics.symptoms import Text, symptom_metrics
from ragen_jax.model.qwen import Qwen
from ragen_jax.score.episodes import ScoredStep


@dataclasses.dataclass(frozen=True)
class ScoringSettings:
    """Which of a step's reasonings are scored."""

    first_turn_samples: int  # 0: all
    trajectory_samples: int  # 0: a turn of every episode
    micro_batch: int
    seed: int


def step_metrics(
    model: Qwen,
    params: Params,
    step: ScoredStep,
    sampling: ScoringSettings,
    keep: Callable[[Scores], None] | None = None,
) -> Metrics:
    """Return the collapse/, flow/, anatomy/, action/ and rollout/ metrics that the rows allow.

    The trajectory scope needs an episode of several turns, flow needs answers, and anatomy needs
    groups whose rows all have a reward; without success/, anatomy has only `mixed`. `keep` is
    called with the first-turn scores, if any.
    """
    metrics = collapse_metrics(
        model,
        params,
        step.episodes,
        scope_sizes(step, sampling),
        ScopeKey(seed=sampling.seed, step=step.number),
        flow=any(turn.answer[1] for episode in step.episodes for turn in episode.turns),
        keep=keep,
    )
    return finite_metrics(metrics) | recorded_metrics(step)


def scope_sizes(step: ScoredStep, sampling: ScoringSettings) -> ScopeSizes:
    """Return the numbers of samples of a step; only episodes of several turns have trajectories."""
    episodes = len(step.episodes)
    several = any(len(episode.turns) > 1 for episode in step.episodes)
    return ScopeSizes(
        first_turn_samples=sampling.first_turn_samples or episodes,
        # A scope needs two samples: 1 turns it off.
        trajectory_samples=(sampling.trajectory_samples or episodes) if several else 1,
        micro_batch=sampling.micro_batch,
    )


def finite_metrics(metrics: Metrics) -> Metrics:
    """Return the metrics that are finite, as Python floats."""
    return {name: float(x) for name, x in metrics.items() if math.isfinite(x)}


def recorded_metrics(step: ScoredStep) -> Metrics:
    """Return the figures that need no model: the anatomy/, action/ and rollout/ metrics."""
    episodes = step.episodes
    metrics = _rollout(step)
    if any(turn.actions for episode in episodes for turn in episode.turns):
        metrics |= measure_by_size(episodes, step.reward_E, lambda e, r: action_metrics(e, len(r)))
    reward_given = list(zip(episodes, np.isfinite(step.reward_E), strict=True))
    unrewarded = {episode.group for episode, has_reward in reward_given if not has_reward}
    rewarded = [i for i, episode in enumerate(episodes) if episode.group not in unrewarded]
    anatomy = measure_by_size(
        [episodes[i] for i in rewarded], step.reward_E[rewarded], anatomy_metrics, least=2
    )
    if not step.success:
        anatomy = {k: v for k, v in anatomy.items() if k.startswith("anatomy/mixed")}
    metrics |= anatomy
    return finite_metrics(metrics)


def step_symptoms(step: ScoredStep, text: Text, tags: tuple[str, str]) -> Metrics:
    """Return the symptoms/ metrics of a step, without those that need log-probabilities.

    Args:
      text, tags: as in `symptom_metrics`.
    """
    return symptom_metrics(step.episodes, text, tags=tags, outcomes=step.success, logps=False)


def _rollout(step: ScoredStep) -> Metrics:
    reward_given = step.reward_E[np.isfinite(step.reward_E)]
    metrics = rollout_metrics(
        step.episodes, reward_given if len(reward_given) else np.array([np.nan])
    )
    for name, is_recorded in (("success", step.success), ("valid_rate", step.valid)):
        if not is_recorded:
            metrics = {k: v for k, v in metrics.items() if not k.startswith(f"rollout/{name}")}
    del metrics["rollout/errors"], metrics["rollout/lost_groups"]  # not recorded by other trainers
    return metrics


def measure_by_size(
    episodes: Sequence[Episode],
    reward_E: np.ndarray,
    measure: Callable[[Sequence[Episode], np.ndarray], Metrics],
    least: int = 1,
) -> Metrics:
    """Return measure(episodes, reward_GK) for groups of different sizes.

    Groups of equal size are measured together. Counts (names in _count) are summed, other metrics
    are averaged over groups.

    Args:
      episodes: group by group.
      least: smaller groups are left out.
    """
    size = collections.Counter(episode.group for episode in episodes)
    sums: Metrics = {}
    groups = 0
    for K in sorted(set(size.values())):
        if K < least:
            continue
        indices = [i for i, episode in enumerate(episodes) if size[episode.group] == K]
        reward_GK = np.reshape(reward_E[indices], (-1, K))
        groups += len(reward_GK)
        for name, value in measure([episodes[i] for i in indices], reward_GK).items():
            part = value if name.endswith("_count") else value * len(reward_GK)
            sums[name] = sums.get(name, 0.0) + part
    return {k: v if k.endswith("_count") else v / groups for k, v in sums.items()}


def add_alarm(
    rows: Sequence[Metrics], settings: Regimes
) -> tuple[list[Metrics], list[tuple[int, Fired]]]:
    """Return the rows of consecutive steps with regime/* metrics, and [(step, alarm event)].

    Args:
      settings: the config's regimes section.
    """
    state, judged, fired = init_regimes(), [], []
    for index, row in enumerate(rows):
        state, (regime,), found = update_regimes(state, settings, [row])
        judged.append(row | regime)
        fired += [(index, each) for each in found]
    return judged, fired
