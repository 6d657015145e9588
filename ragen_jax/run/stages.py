"""The stages of a step that depend on the environments: play, make batches, watch for collapse.

    play -> make_batch -> diagnose -> inform -> ... -> watch

The mathematics is in other modules; the functions here call it with parts of a `Task` or `Run`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ragen_jax.algorithm import batch as rows
from ragen_jax.algorithm.advantage import comparable_members, sample_variance
from ragen_jax.algorithm.bonus import entropy_gate, pointwise_information, scatter_to_reasoning
from ragen_jax.algorithm.rewards import (
    Penalties,
    add_rewards,
    broken_episodes,
    success_is_defined,
    sum_turns,
    turn_rewards,
)
from ragen_jax.core.clean_text import last_line
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import place
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.task_shares import (
    combine_metrics,
    concatenate_episodes,
    label_metrics,
    measure_each,
    metrics_of_each,
)
from ragen_jax.core.types import LIMIT, Array, Batch, Episode, Metrics, Params
from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.regimes import information_share, update_regimes
from ragen_jax.diagnostics.rollouts import cut_off_metrics, rollout_metrics, selected_metrics
from ragen_jax.diagnostics.stopping import Fired, update_stopping
from ragen_jax.model.rounding import EXACT, round_params
from ragen_jax.rollout.collect import collect, mark_played
from ragen_jax.rollout.env_calls import Clock, begin
from ragen_jax.rollout.episode import is_prompt_error
from ragen_jax.rollout.play import rollout
from ragen_jax.rollout.task import Task
from ragen_jax.run.step import Played
from ragen_jax.run.training import Run
from ragen_jax.update.learner import Learner, Outcomes, sampled_entropy
from ragen_jax.update.state import PlayedProblems, TrainState


def play(
    run: Run, policy: Params, problems: PlayedProblems, step: int
) -> tuple[PlayedProblems, Played, Metrics]:
    """Play the groups of a step; call it under the sampling mesh.

    Args:
      policy: parameters in the form that sampling needs.
      problems: the problems that earlier steps played.
      step: number of the step.

    Returns:
      (problems updated with those of the step, `Played`, rollout/* and collect/* metrics).
    """
    clock = Clock()
    run.tasks[0].settings.chat.images.begin_epoch()  # all tasks share the run's images
    if run.sampler_weights != EXACT:
        policy = round_params(policy, run.sampler_weights)
    play_task = episodes_of(run, policy, clock)
    collected = [collect(task, play_task, problems, step) for task in run.tasks]
    selected = concatenate_episodes(part.episodes for part in collected)
    episodes_E = [part.played for part in collected]
    returns_E = [
        played_returns(episodes, task.penalties)
        for task, episodes in zip(run.tasks, episodes_E, strict=True)
    ]
    metrics = combine_metrics(run.tasks, [part.metrics() for part in collected])
    # The metrics cover all played episodes, not only those that dynamic sampling keeps.
    limit = run.tasks[0].settings.budgets.max_new_tokens
    everything = concatenate_episodes(episodes_E)
    metrics |= rollout_metrics(everything, np.concatenate(returns_E))
    metrics |= cut_off_metrics(everything, limit)
    if len(run.tasks) > 1:
        metrics |= label_metrics(run.tasks, list(map(rollout_metrics, episodes_E, returns_E)))
        cut_E = [cut_off_metrics(episodes, limit) for episodes in episodes_E]
        metrics |= label_metrics(run.tasks, cut_E)
        if not all(map(success_is_defined, episodes_E)):  # undefined for some environment
            for name in ("rollout/success", "rollout/success_ci95"):
                metrics.pop(name, None)
    metrics["time/environment"] = clock.seconds
    problems = mark_played(problems, run.tasks, collected)
    fired = [
        found
        for task, episodes in zip(run.tasks, episodes_E, strict=True)
        for found in errors(task, episodes)
    ]
    return problems, Played(selected, episodes_E, returns_E, fired), metrics


def errors(task: "Task", episodes: Sequence[Episode]) -> list[Fired]:
    """Report broken episodes, and those whose program failed at a limit.

    An environment that breaks too often stops the run. Unusable prompts never stop it: each affects
    a single episode, which is left out and counted.
    """
    all_errors = [episode.error for episode in episodes if episode.error]
    fired = []
    unusable = [error for error in all_errors if is_prompt_error(error)]
    if unusable:
        words = f"{len(unusable)} of {len(episodes)} episodes of {task.name} left out; the first: "
        if len(unusable) == len(episodes):
            words = (
                f"all {len(episodes)} episodes of {task.name} were left out, so there is "
                "nothing to learn from; the first: "
            )
        fired.append(Fired("prompts", "warn", words + unusable[0]))
    limits = [turn.info[LIMIT] for e in episodes for turn in e.turns if LIMIT in turn.info]
    if limits:
        words = f"the programs of {len(limits)} of {len(episodes)} episodes of {task.name} failed "
        fired.append(Fired("errors", "warn", f"{words}at a limit; the first: {limits[0]}"))
    broken = [error for error in all_errors if not is_prompt_error(error)]
    if not broken:
        return fired
    words = f"{len(broken)} of {len(episodes)} episodes of {task.name} failed; the first: "
    if len(broken) <= task.max_error_share * len(episodes):
        return [*fired, Fired("errors", "warn", words + last_line(broken[0]))]
    words = f"more than env.max_error_share = {task.max_error_share:g}: {words}\n{broken[0]}"
    return [*fired, Fired("errors", "stop", words)]


def episodes_of(
    run: Run, policy: Params, clock: Clock | None = None
) -> Callable[[Task, Sequence[int], jax.Array], list[Episode]]:
    """Return a function that plays a policy: (task, seeds_G, key) -> episodes.

    Args:
      clock: as in `rollout`.
    """

    def play_task(task, seeds_G, key):
        states_G = begin(task.settings.environment, seeds_G, task.settings.limits, clock)
        return rollout(
            run.model,
            policy,
            task.training_settings,
            seeds_G,
            states_G,
            group_size=task.group_size,
            key=key,
            clock=clock,
        )

    return play_task


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The episodes of a step and their context: the input of `diagnose` and `inform`."""

    run: Run
    learner: Learner
    policy: Params  # parameters that sampled the episodes
    played: Played
    batch: Batch  # rows of the episodes that the step learns from
    outcomes: Outcomes  # outcomes of the same episodes
    number: int  # number of the step


def make_batch(run: Run, played: Played) -> tuple[Batch, Outcomes, Metrics]:
    """Return the rows and outcomes of the episodes that a step learns from.

    Returns:
      (`Batch` with rewards, padded to per_task.step_rows, `Outcomes`, collect/* metrics, and with
      rollout.replay_experts rollout/not_replayed, the episodes without a record of experts).
    """
    episodes, (first, *_) = played.selected, run.tasks
    penalty_G = np.concatenate([np.full(t.groups, t.penalties.format_penalty) for t in run.tasks])
    batch, return_GK = rewarded_batch(episodes, first.penalties, format_penalty_G=penalty_G)
    batch = rows.take_rows(batch, np.arange(len(batch.weight_B)), size=run.step_rows)
    lengths = [sum(len(turn.sampled) for turn in episode.turns) for episode in episodes]
    solved_GK = np.reshape([episode.success for episode in episodes], return_GK.shape)
    defined = all(map(success_is_defined, played.episodes_E))
    outcomes = Outcomes(
        return_GK=return_GK,
        length_GK=np.reshape(lengths, return_GK.shape),
        success_GK=solved_GK if defined else None,
        broken_GK=broken_episodes(episodes),
        task_return_GK=sum_turns([[turn.reward for turn in e.turns] for e in episodes], episodes),
    )
    metrics: Metrics = {}
    if first.settings.replay_experts:
        metrics["rollout/not_replayed"] = sum(
            any(turn.experts is None for turn in episode.turns) for episode in episodes
        )
    if first.collecting.max_rounds > 1:
        metrics |= selected_metrics(episodes, return_GK)
        metrics |= measure_each(run.tasks, selected_metrics, episodes, return_GK)
    return batch, outcomes, metrics


def inform(step: StepContext) -> tuple[Outcomes, Metrics]:
    """Add the inputs of bonuses to the outcomes of a step; call it under the sampling mesh.

    bonus_BT (mi_coef) rewards reasoning for its information about the prompt. It covers the first
    turn, and later turns if prompts show no earlier replies, which would identify the prompt.
    sampled_entropy_BT (zvp_coef with rollout.ahead) is the entropy of the sampling policy, which
    the advantages of RL-ZVP need.

    Returns:
      (`Outcomes`, metrics: bonus/mi, the mean information in nats per reasoning; {} if mi_coef is
      0).
    """
    learner, policy, played = step.learner, step.policy, step.played
    batch, outcomes = step.batch, step.outcomes
    if learner.zvp_coef and learner.ahead:
        entropy_BT = sampled_entropy(learner, policy, batch, outcomes)
        outcomes = dataclasses.replace(outcomes, sampled_entropy_BT=entropy_BT)
    if not learner.mi_coef:
        return outcomes, {}
    episodes = played.selected
    value_EU = np.zeros((len(episodes), max(len(episode.turns) for episode in episodes)))
    sound = [(e, episode) for e, episode in enumerate(episodes) if not episode.error]
    first_G = {episode.group: episode.turns[0].prompt for _, episode in reversed(sound)}
    metrics_E = []
    for number, task in enumerate(step.run.tasks):
        groups = [g for g in np.flatnonzero(learner.environment_G == number) if g in first_G]
        is_single_turn = task.settings.chat.format.context == "single_turn"
        scored = [
            (e, u, turn)
            for e, episode in sound
            if episode.group in groups
            for u, turn in enumerate(episode.turns)
            if (u == 0 or is_single_turn) and turn.reasoning[1] > turn.reasoning[0]
        ]
        if not scored or len(groups) < 2:  # there are no other prompts to compare with
            metrics_E.append({})
            continue
        reasonings = [turn.sampled[slice(*turn.reasoning)] for *_, turn in scored]
        prompts = [first_G[group] for group in groups]
        seen = task.settings.chat.images.attach(policy, *prompts)
        score_MN, _ = cross_score(
            step.run.model, seen, prompts, reasonings, micro_batch=step.run.diagnosis.micro_batch
        )
        own_M = np.array([turn.logp[slice(*turn.reasoning)].sum() for *_, turn in scored])
        group_M = np.searchsorted(groups, [episodes[e].group for e, *_ in scored])
        information_M = pointwise_information(own_M, score_MN, group_M)
        at = tuple(np.array([(e, u) for e, u, _ in scored]).T)
        value_EU[at] = learner.mi_coef * (information_M - information_M.mean())
        metrics_E.append({"bonus/mi": information_M.mean()})
    bonus_BT = scatter_to_reasoning(value_EU, batch)
    return dataclasses.replace(outcomes, bonus_BT=bonus_BT), combine_metrics(
        step.run.tasks, metrics_E
    )


def add_entropy_gate(learner: Learner, state: TrainState, outcomes: Outcomes) -> Outcomes:
    """Return the outcomes with gate_E, if algorithm.entropy_gate is set.

    gate_E scales the entropy bonus by the remaining fraction of the information, as measured by the
    collapse alarm up to the previous step.
    """
    if not learner.entropy_gate or state.regimes is None:
        return outcomes
    share_E = information_share(jax.device_get(state.regimes))
    return dataclasses.replace(outcomes, gate_E=entropy_gate(share_E, learner.entropy_gate))


def rewarded_batch(
    episodes: Sequence[Episode],
    penalties: Penalties,
    *,
    format_penalty_G: np.ndarray | None = None,
) -> tuple[Batch, np.ndarray]:
    """Return (`Batch` with rewards, return_GK); rows are padded to a bucket length.

    Args:
      episodes: G * K episodes, group by group.
      format_penalty_G: format penalty of each group, if it differs between environments; None:
        `penalties.format_penalty`.
    """
    longest = max(len(t.prompt) + len(t.sampled) for e in episodes for t in e.turns)
    return add_rewards(
        rows.make_batch(episodes, length=length_bucket(longest)),
        episodes,
        format_penalty=penalties.format_penalty if format_penalty_G is None else format_penalty_G,
        max_length=penalties.max_length,
        overlong_buffer=penalties.overlong_buffer,
    )


def played_returns(episodes: Sequence[Episode], penalties: Penalties) -> np.ndarray:
    """Return return_GK of an environment's episodes, penalties included."""
    return sum_turns(turn_rewards(episodes, **vars(penalties)), episodes)


def mean_variance(return_GK: np.ndarray, sound_GK: np.ndarray) -> float:
    """Return the mean variance of the returns within groups.

    Only groups with enough sound members count; NaN if there are no such groups.
    """
    variance_G, counts_G = jax.device_get(_variances(return_GK, sound_GK))
    return variance_G[counts_G].mean() if counts_G.any() else np.nan


@stored()
def _variances(return_GK: Array, sound_GK: Array) -> tuple[jax.Array, jax.Array]:
    """Return (variance of each group's returns, whether it has enough sound members)."""
    member_GK = comparable_members(sound_GK)
    return sample_variance(return_GK, sound_GK=member_GK), member_GK.any(1)


def watch(
    run: Run,
    state: TrainState,
    metrics: Metrics,
    returns_E: Sequence[np.ndarray],
    sound_E: Sequence[np.ndarray] | None = None,
) -> tuple[TrainState, list[Fired], Metrics]:
    """Apply the stopping rules and the collapse alarm to a step.

    Args:
      metrics: the step's metrics so far.
      returns_E: return_GK of each environment, over all played episodes.
      sound_E: bool [G, K] of each environment, whether the episode did not break; None: all sound.

    Returns:
      (TrainState, list of `Fired`, regime/* metrics).
    """
    labels = [task.label for task in run.tasks]
    sound_E = sound_E or [np.ones(return_GK.shape, bool) for return_GK in returns_E]
    stopping, fired = update_stopping(
        jax.device_get(state.stopping),
        run.stopping,
        variance_E=list(map(mean_variance, returns_E, sound_E)),
        kept=metrics["filter/kept_ratio"],
        skipped=metrics.get("update/skipped", 0) + metrics.get("critic/skipped", 0),
        success=metrics.get("eval/success"),
        labels=labels,
    )
    regimes, metrics_E, alarms = update_regimes(
        jax.device_get(state.regimes),
        run.regimes,
        metrics_of_each(run.tasks, metrics),
        labels,
    )
    state = dataclasses.replace(
        state,
        stopping=place(stopping, state.step.sharding),
        regimes=place(regimes, state.step.sharding),
    )
    if len(run.tasks) == 1:
        return state, fired + alarms, metrics_E[0]
    names = ("regime/signs", "regime/alarm")
    worst = {name: max(metrics[name] for metrics in metrics_E) for name in names}
    return state, fired + alarms, worst | label_metrics(run.tasks, metrics_E)
