"""A step's diagnostics, of each environment by itself: what the episodes say about the policy.

To add one, write a function (Step, TrainState, metrics so far) -> (TrainState, metrics) and give it
a row of DIAGNOSTICS, which says when it is due.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ragen_jax.diagnostics.anatomy import action_metrics, anatomy_metrics, reasoning_metrics
from ragen_jax.diagnostics.gradients import gradient_report
from ragen_jax.diagnostics.scopes import collapse_metrics
from ragen_jax.diagnostics.zscores import update_zscores
from ragen_jax.envs.types import GroundedEnvironment, ReversibleEnvironment
from ragen_jax.groups import combine_metrics
from ragen_jax.randomness import Purpose, stream_key
from ragen_jax.rollout.play import Sampling
from ragen_jax.run.build import build_budgets
from ragen_jax.run.heldout import play_problems
from ragen_jax.run.sizes import due, step_rows
from ragen_jax.run.stages import rewarded_batch
from ragen_jax.sharding import place


@dataclasses.dataclass(frozen=True)
class Step:
    """What a diagnostic may look at."""

    run: Any  # `training.Run`
    learner: Any  # `learner.Learner`
    policy: Any  # the parameters that sampled the episodes
    played: Any  # `stages.Played`
    batch: Any  # of the episodes that the step learns from
    outcomes: Any  # and their `Outcomes`
    number: int


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """When something is measured, and what."""

    every: Callable  # (config.diagnose) -> steps between two; 0: never
    measure: Callable  # (Step, TrainState, metrics so far) -> (TrainState, metrics)


def diagnose(run, learner, policy, state, played, batch, outcomes, step):
    """The diagnostics of a step's episodes that are due.

    Args: as in `Step`; state: `TrainState`, step: number of the iteration.

    Returns:
      (TrainState with the moving averages, metrics of DIAGNOSTICS).
    """
    seen, metrics = Step(run, learner, policy, played, batch, outcomes, step), {}
    for diagnostic in DIAGNOSTICS.values():
        if due(diagnostic.every(run.config.diagnose), step):
            state, found = diagnostic.measure(seen, state, metrics)
            metrics |= found
    return state, metrics


def of_each_task(step, measure):
    """measure(index, task, its episodes, their return_GK) of each task, combined."""
    listed = zip(step.run.tasks, step.played.episodes_E, step.played.returns_E, strict=True)
    return combine_metrics(step.run.tasks, [measure(i, *each) for i, each in enumerate(listed)])


def collapse(step, state, metrics):
    """collapse/* and, where they are due, flow/* figures."""
    c = step.run.config
    flow = due(c.diagnose.flow_every, step.number)

    def measure(index, task, episodes, return_GK):
        return collapse_metrics(
            step.run.model,
            step.policy,
            episodes,
            first_turn_samples=c.diagnose.first_turn_samples,
            trajectory_samples=c.diagnose.trajectory_samples,
            micro_batch=c.diagnose.micro_batch,
            seed=c.seed,
            step=step.number,
            environment=index,
            flow=flow,
            chat=task.chat if flow else None,
        )

    with jax.set_mesh(step.run.sampling_mesh):
        return state, of_each_task(step, measure)


def behaviour(step, state, metrics):
    """anatomy/*, action/* and reasoning/* figures, as far as an environment offers the checks."""

    def measure(index, task, episodes, return_GK):
        environment = task.environment
        reversible = isinstance(environment, ReversibleEnvironment)
        found = anatomy_metrics(episodes, return_GK)
        found |= action_metrics(
            episodes, len(return_GK), opposites=environment.opposites if reversible else None
        )
        if isinstance(environment, GroundedEnvironment):
            found |= reasoning_metrics(episodes, environment.grounded, task.chat.text)
        return found

    return state, of_each_task(step, measure)


def zscores(step, state, metrics):
    """collapse/*/mi_zscore*_ema: of the collapse figures of this step, over what went before."""
    averages, found = update_zscores(jax.device_get(state.zscores), metrics)
    return state.replace(zscores=place(averages, state.step.sharding)), found


def gradients(step, state, metrics):
    """gradient/* figures, by reward variance."""
    run = step.run
    if run.config.diagnose.gradients_groups:
        return state, heldout_gradients(step.learner, state, step.policy, run.tasks)
    (task,) = run.tasks  # one environment (check.py)
    with jax.set_mesh(run.mesh):
        return_GK = step.outcomes.return_GK
        return state, task_gradients(step.learner, state, step.batch, return_GK, task)


DIAGNOSTICS = {
    "collapse": Diagnostic(lambda d: d.every, collapse),
    "behaviour": Diagnostic(lambda d: d.every, behaviour),
    "zscores": Diagnostic(lambda d: d.every, zscores),  # behind collapse, which it reads
    "gradients": Diagnostic(lambda d: d.gradients_every, gradients),
}


# ------------------------------------------------------------------------------ gradients


def task_gradients(learner, state, batch, return_GK, task):
    """gradient/* metrics of a batch of one task; run under the mesh of training."""
    d = task.config.diagnose
    return gradient_report(
        learner,
        state,
        batch,
        return_GK,
        group_rows=step_rows(task.config) // task.groups,
        buckets=d.gradients_buckets,
        edges=d.gradients_edges,
    )


def play_groups(model, params, task):
    """(`Batch` with rewards, return_GK) of groups on held-out problems, sampled as training does.

    The first diagnose.gradients_groups of the held-out problems, as far as there are so many, with
    the same noise every time: buckets of two policies can be compared.

    Args:
      params: those for sampling.
      task: `tasks.Task`.
    """
    c = task.config
    groups = c.diagnose.gradients_groups or task.groups
    episodes = play_problems(
        model,
        params,
        task.chat,
        task.heldout_environment,
        *(x[:groups] for x in task.heldout),
        samples=c.rollout.group_size,
        rows=c.rollout.groups * c.rollout.group_size,
        key=stream_key(Purpose.GRADIENTS, c.eval.seed),
        budgets=build_budgets(c),
        sampling=Sampling(temperature=c.rollout.temperature),
        compact=c.rollout.compact,
    )
    return rewarded_batch(c, episodes, format_penalty=c.env.format_penalty)


def heldout_gradients(learner, state, params, tasks):
    """gradient/* metrics of the policy on each task's `play_groups`; `params` are for sampling."""
    metrics_E = []
    for task in tasks:
        with jax.set_mesh(learner.sampling_mesh):
            batch, return_GK = play_groups(learner.model, params, task)
        with jax.set_mesh(learner.mesh):
            metrics_E.append(task_gradients(learner, state, batch, return_GK, task))
    return combine_metrics(tasks, metrics_E)
