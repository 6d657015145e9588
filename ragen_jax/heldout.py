"""Playing a fixed set of problems, and what the episodes say about a policy."""

import dataclasses
import math

import numpy as np

from ragen_jax.rewards import turn_reward
from ragen_jax.rollout import rollout


def play_problems(
    model,
    params,
    chat,
    environment,
    seeds,
    states,
    *,
    samples,
    rows,
    key,
    budgets,
    sampling,
    compact=True,
):
    """Plays every problem `samples` times, in chunks of about `rows` episodes.

    The noise of a problem depends on `key`, its seed and the member alone, so that two policies
    meet the same problems with the same noise.

    Returns:
      list of `Episode`, problem by problem; `group` counts problems.
    """
    chunk = max(1, rows // samples)
    episodes = []
    for start in range(0, len(seeds), chunk):
        played = rollout(
            model,
            params,
            chat,
            environment,
            seeds[start : start + chunk],
            states[start : start + chunk],
            group_size=samples,
            key=key,
            budgets=budgets,
            sampling=sampling,
            compact=compact,
        )
        episodes += [dataclasses.replace(e, group=e.group + start) for e in played]
    return episodes


def summarise(episodes, *, samples, format_penalty):
    """eval/* metrics of episodes: success with its 95 % half-width, return, replies, pass@k.

    The half-width is 1.96 standard errors over problems. pass@k is the unbiased estimate of
    Chen et al. 2021 (arXiv 2107.03374), eq. 1, for k = 1, 2, 4, ... up to `samples`.
    """
    success_NK = np.array([episode.success for episode in episodes], float).reshape(-1, samples)
    per_problem = success_NK.mean(1)
    turns = [turn for episode in episodes for turn in episode.turns]
    returns = [
        sum(turn_reward(turn, format_penalty=format_penalty) for turn in episode.turns)
        for episode in episodes
    ]
    error = per_problem.std(ddof=1) / math.sqrt(len(per_problem)) if len(per_problem) > 1 else 0.0
    metrics = {
        "eval/success": success_NK.mean(),
        "eval/success_ci95": 1.96 * error,
        "eval/return": np.mean(returns),
        "eval/valid_rate": np.mean([turn.valid for turn in turns]),
        "eval/turns": len(turns) / len(episodes),
        "eval/response_length": np.mean([len(turn.sampled) for turn in turns]),
    }
    k = 1
    while samples > 1 and k <= samples:
        metrics[f"eval/pass_at_{k}"] = pass_at_k(success_NK.sum(1), samples, k)
        k *= 2
    return metrics


def pass_at_k(solved_N, samples, k):
    """Mean over problems of 1 - C(samples - solved, k) / C(samples, k)."""
    total = math.comb(samples, k)
    return float(np.mean([1 - math.comb(samples - int(s), k) / total for s in solved_N]))


def paired_gain(before_N, after_EN):
    """Gain in success over the same problems, and its 95 % half-width (1.96 standard errors).

    Args:
      before_N: success of each problem at first. after_EN: at E later evaluations, averaged.
    """
    difference_N = np.mean(after_EN, 0) - np.asarray(before_N)
    error = difference_N.std(ddof=1) / math.sqrt(len(difference_N))
    return float(difference_N.mean()), float(1.96 * error)
