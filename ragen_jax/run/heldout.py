"""Playing a fixed set of problems, and what the episodes say about a policy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.algorithm.rewards import episode_returns, success_is_defined
from ragen_jax.core.progress import advance, enter_phase
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.task_shares import combine_metrics
from ragen_jax.core.types import Episode, Metrics, Params
from ragen_jax.diagnostics.intervals import pass_at_k, wilson_interval
from ragen_jax.envs.types import State
from ragen_jax.model.qwen import Qwen
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.rollout.task import Task


def play_problems(
    model: Qwen,
    params: Params,
    settings: PlaySettings,
    seeds: Sequence[int],
    states: Sequence[State],
    *,
    samples: int,
    rows: int,
    key: jax.Array,
) -> list[Episode]:
    """Plays every problem `samples` times: about `rows` episodes at a time, or in slots.

    The noise of a problem depends on `key`, its seed and the member alone, so that two policies
    meet the same problems with the same noise.

    Args:
      settings: as in `rollout`; with slots or a chunk, all problems are played in `slots` (0: as
        many as `rows`), so that a problem's end lets the next one begin.

    Returns:
      the episodes, problem by problem; `group` counts problems.
    """
    at_a_time = max(1, rows // samples)
    if settings.slots or settings.chunk:
        at_a_time = len(seeds)
        settings = dataclasses.replace(settings, slots=settings.slots or rows)
    episodes = []
    for start in range(0, len(seeds), at_a_time):
        part = slice(start, start + at_a_time)
        played = rollout(
            model, params, settings, seeds[part], states[part], group_size=samples, key=key
        )
        episodes += [dataclasses.replace(e, group=e.group + start) for e in played]
        advance(len(played))
    return episodes


def play_heldout(
    model: Qwen,
    params: Params,
    task: "Task",
    purpose: Purpose,
    *,
    sampling: Sampling,
    problems: slice = slice(None),
    samples: int = 1,
) -> list[Episode]:
    """`play_problems` of a task's held-out problems, with the same noise every time.

    Args:
      purpose: what they are played for, which has noise of its own.
      problems: which of them.
    """
    settings = task.heldout_settings(sampling)
    seeds, states = task.heldout or ((), ())
    return play_problems(
        model,
        params,
        settings,
        seeds[problems],
        states[problems],
        samples=samples,
        rows=task.groups * task.group_size,
        key=stream_key(purpose, task.eval_seed),
    )


def evaluate(
    model: Qwen, params: Params, tasks: Sequence["Task"], *, samples: int = 1
) -> tuple[Metrics, list[list[Episode]]]:
    """eval/* metrics on the held-out problems of each task, and the episodes.

    Args:
      samples: episodes a problem.

    Returns:
      (metrics, [episodes of the first task, ...]). Where there are several tasks, each has figures
      under its label, and eval/success is their mean.
    """
    enter_phase("evaluating", total=_count_episodes(tasks, samples), unit="episodes")
    metrics_E, episodes_E = [], []
    for task in tasks:
        episodes = play_heldout(
            model, params, task, Purpose.EVALUATE, sampling=task.eval_sampling, samples=samples
        )
        penalty = task.penalties.format_penalty
        metrics = summarise(episodes, samples=samples, format_penalty=penalty)
        metrics_E.append(metrics | success_by_style(model, params, task))
        episodes_E.append(episodes)
    return combine_metrics(tasks, metrics_E), episodes_E


def _count_episodes(tasks: Sequence["Task"], samples: int) -> int:
    """Number of episodes of an evaluation; 0 if slots play them all in one batch."""
    if any(task.settings.slots or task.settings.chunk for task in tasks):
        return 0
    return sum(
        len(task.heldout[0]) * (samples + sum(bool(s.openings) for s in task.styles.values()))
        for task in tasks
        if task.heldout is not None
    )


def success_by_style(model: Qwen, params: Params, task: "Task") -> Metrics:
    """eval/style/<name>/success of a task's held-out problems, its replies begun in that style.

    Every problem is played once a style, its openings in turn: with the first word given, the agent
    goes on in that style, so that success does not depend on which it would have chosen. Styles
    without an opening are left out; {} where the agent knows but one way to think.
    """
    metrics: Metrics = {}
    for name, style in task.styles.items():
        episodes = []
        for index, opening in enumerate(style.openings):
            chat = task.settings.chat
            chat = dataclasses.replace(chat, opening=tuple(chat.template.plain(opening).tolist()))
            episodes += play_heldout(
                model,
                params,
                dataclasses.replace(task, settings=dataclasses.replace(task.settings, chat=chat)),
                Purpose.EVALUATE,
                sampling=task.eval_sampling,
                problems=slice(index, None, len(style.openings)),
            )
        if episodes:
            found = summarise(episodes, samples=1, format_penalty=task.penalties.format_penalty)
            for figure in ("success", "success_ci95"):
                if f"eval/{figure}" in found:
                    metrics[f"eval/style/{name}/{figure}"] = found[f"eval/{figure}"]
    return metrics


def summarise(episodes: Sequence[Episode], *, samples: int, format_penalty: float) -> Metrics:
    """eval/* metrics of episodes: success with its 95 % interval, return, replies, pass@k.

    An episode whose environment broke is no failure of the policy: it is counted in eval/errors and
    enters no other figure. Figures without a sound episode are left out.

    success +- success_ci95 holds `wilson_interval`, whose farther end it reaches. pass@k is the
    unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), eq. 1, for k = 1, 2, 4, ... up to
    `samples`, over the problems that have k sound episodes. All three are left out where the
    environment does not say what is solved.
    """
    sound = [episode for episode in episodes if not episode.error]
    metrics: dict[str, Any] = {  # of Python's floats and NumPy's
        "eval/errors": len(episodes) - len(sound)
    }
    if not sound:
        return metrics
    success_NK = np.array([episode.success for episode in episodes], float).reshape(-1, samples)
    sound_NK = np.array([not episode.error for episode in episodes]).reshape(-1, samples)
    turns = [turn for episode in sound for turn in episode.turns]
    returns = episode_returns(sound, format_penalty=format_penalty)
    if success_is_defined(episodes):
        success = float(success_NK[sound_NK].mean())
        low, high = wilson_interval(success_NK, sound_NK)
        metrics["eval/success"] = success
        metrics["eval/success_ci95"] = max(success - low, high - success)
    metrics |= {
        "eval/return": np.mean(returns),
        "eval/valid_rate": np.mean([turn.valid for turn in turns]),
        "eval/turns": len(turns) / len(sound),
        "eval/response_length": np.mean([len(turn.sampled) for turn in turns]),
    }
    solved_N, played_N = (success_NK * sound_NK).sum(1), sound_NK.sum(1)
    k = 1
    while samples > 1 and k <= samples and "eval/success" in metrics:
        enough_N = played_N >= k
        if enough_N.any():
            metrics[f"eval/pass_at_{k}"] = pass_at_k(solved_N[enough_N], played_N[enough_N], k)
        k *= 2
    return metrics
