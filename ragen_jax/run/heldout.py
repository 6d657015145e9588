"""Plays the fixed set of held-out problems and computes the evaluation metrics."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.algorithm.rewards import episode_returns, success_is_defined
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.randomness import Purpose, generator, stream_key
from ragen_jax.core.task_shares import combine_metrics
from ragen_jax.core.types import Episode, Metrics, Params
from ragen_jax.diagnostics.asking import ask_metrics
from ragen_jax.diagnostics.intervals import pass_at_k, wilson_interval
from ragen_jax.envs.types import AskingEnvironment, SolvableEnvironment
from ragen_jax.model.qwen import Qwen
from ragen_jax.rollout.env_calls import EnvFailure, StepRequest, act, attempt
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.rollout.task import Task

CHANCE_PROBLEMS = 256  # largest number of problems that `chance_success` plays


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
    """Play a task's held-out problems, as many episodes at a time as in training.

    The random noise of an episode depends only on the purpose, the problem's seed and the member,
    so two policies play the same problems with the same noise.

    Args:
      purpose: selects the stream of random noise.
      problems: which of the held-out problems to play.
      samples: episodes per problem.

    Returns:
      the episodes, problem by problem; `group` is the index of the problem.
    """
    settings = task.heldout_settings(sampling)
    seeds, states = task.heldout or ((), ())
    return rollout(
        model,
        params,
        settings,
        seeds[problems],
        states[problems],
        group_size=samples,
        rows=task.groups * task.group_size,
        key=stream_key(purpose, task.eval_seed),
    )


def evaluate(
    model: Qwen, params: Params, tasks: Sequence["Task"], *, samples: int = 1
) -> tuple[Metrics, list[list[Episode]]]:
    """Evaluate the policy on the held-out problems of each task.

    Args:
      samples: episodes per problem.

    Returns:
      (eval/* metrics, [episodes of the first task, ...]). With several tasks, each task has metrics
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
        metrics |= _asking(task, episodes) | success_by_style(model, params, task)
        metrics_E.append(metrics)
        episodes_E.append(episodes)
    return combine_metrics(tasks, metrics_E), episodes_E


def chance_success(tasks: Sequence["Task"]) -> Metrics:
    """Return eval/chance_success: success of answers that do not depend on their problem.

    Each of the first CHANCE_PROBLEMS held-out problems is played with the expert's actions for the
    next one. An agent whose answers are good but ignore the prompt reaches this rate. {} if a task
    has no expert, or does not define success.
    """
    metrics_E = []
    for task in tasks:
        environment, (_, all_states) = task.heldout_environment, task.heldout or ((), ())
        if not isinstance(environment, SolvableEnvironment):
            return {}
        states = [state for state in all_states if not isinstance(state, EnvFailure)]
        states = states[:CHANCE_PROBLEMS]
        plans = [attempt(functools.partial(environment.solve, state)) for state in states]
        most = task.settings.budgets.max_actions
        requests = [
            StepRequest(state, plan, generator(Purpose.CHANCE_ANSWERS, task.eval_seed, index), most)
            for index, (state, plan) in enumerate(zip(states, plans[1:] + plans[:1], strict=True))
            if plan and not isinstance(plan, EnvFailure)
        ]
        results = act(environment, requests, task.settings.limits)
        ended = [result.info for result in results if not isinstance(result, EnvFailure)]
        if not ended or not all("success" in info for info in ended):
            return {}
        metrics_E.append({"eval/chance_success": np.mean([bool(x["success"]) for x in ended])})
    return combine_metrics(tasks, metrics_E)


def _asking(task: "Task", episodes: Sequence[Episode]) -> Metrics:
    """Return eval/ask/* metrics; {} if the environment does not say what its agent must ask for."""
    environment, (_, states) = task.heldout_environment, task.heldout or ((), ())
    if not isinstance(environment, AskingEnvironment):
        return {}
    needed = [() if isinstance(s, EnvFailure) else environment.needed(s) for s in states]
    return ask_metrics(episodes, [needed[e.group] for e in episodes], environment.asks)


def _count_episodes(tasks: Sequence["Task"], samples: int) -> int:
    """Return the number of episodes of an evaluation; 0 if slots play all of them in one batch."""
    if any(task.settings.slots or task.settings.chunk for task in tasks):
        return 0
    return sum(
        len(task.heldout[0]) * (samples + sum(bool(s.openings) for s in task.styles.values()))
        for task in tasks
        if task.heldout is not None
    )


def success_by_style(model: Qwen, params: Params, task: "Task") -> Metrics:
    """Return eval/style/<name>/success: success when all replies begin in a given reasoning style.

    Every held-out problem is played once per style. Its replies begin with one of the style's
    openings (in turn), and the agent continues in that style; success then does not depend on which
    style the agent would choose. Styles without an opening are left out. Return {} if the agent has
    a single style.
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
    """Return the eval/* metrics of episodes: success, return, pass@k and statistics of the replies.

    An episode whose environment broke is not a failure of the policy: it is counted in eval/errors
    and left out of all other metrics. Without any sound episode, only eval/errors is returned.

    success ± success_ci95 contains `wilson_interval`: success_ci95 is the distance to its farther
    bound. pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), eq. 1, for
    k = 1, 2, 4, ... up to `samples`, over the problems that have k sound episodes. All three are
    left out if the environment does not define success.
    """
    sound = [episode for episode in episodes if not episode.error]
    metrics: dict[str, Any] = {  # values are Python or NumPy floats
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
