"""A step's diagnostics, of each environment by itself: what the episodes say about the policy."""

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


def diagnose(run, learner, policy, state, played, batch, outcomes, step):
    """The diagnostics of a step's episodes, before the filter, as far as they are due.

    Args:
      run: `training.Run`. learner: `learner.Learner`. state: `TrainState`.
      policy: the parameters that sampled the episodes.
      played: `stages.Played`. batch, outcomes: of those that the step learns from.
      step: number of the iteration.

    Returns:
      (TrainState with the moving averages, collapse/*, flow/*, anatomy/*, action/*, reasoning/* and
      gradient/* metrics).
    """
    d, metrics = run.config.diagnose, {}
    if due(d.every, step):
        with jax.set_mesh(run.sampling_mesh):
            state, metrics = diagnose_policy(
                run.config, run.model, policy, run.tasks, played, state, step
            )
    if due(d.gradients_every, step):
        if d.gradients_groups:
            metrics |= heldout_gradients(learner, state, policy, run.tasks)
        else:  # one environment (check.py)
            with jax.set_mesh(run.mesh):
                metrics |= task_gradients(learner, state, batch, outcomes.return_GK, *run.tasks)
    return state, metrics


def diagnose_policy(config, model, policy, tasks, played, state, step):
    """What the episodes of a step say; run under the mesh of sampling.

    Args: as in `diagnose`.

    Returns:
      (TrainState with the moving averages, metrics).
    """
    d = config.diagnose
    flow = due(d.flow_every, step)
    metrics_E = []
    for index, (task, episodes, return_GK) in enumerate(
        zip(tasks, played.episodes_E, played.returns_E, strict=True)
    ):
        metrics = collapse_metrics(
            model,
            policy,
            episodes,
            first_turn_samples=d.first_turn_samples,
            trajectory_samples=d.trajectory_samples,
            micro_batch=d.micro_batch,
            seed=config.seed,
            step=step,
            environment=index,
            flow=flow,
            chat=task.chat if flow else None,
        )
        behaviour = behaviour_metrics(episodes, return_GK, task.environment, task.chat)
        metrics_E.append(metrics | behaviour)
    metrics = combine_metrics(tasks, metrics_E)
    zscores, smoothed = update_zscores(jax.device_get(state.zscores), metrics)
    return state.replace(zscores=place(zscores, state.step.sharding)), metrics | smoothed


def behaviour_metrics(episodes, return_GK, environment, chat):
    """anatomy/*, action/* and reasoning/* metrics, as far as the environment offers the checks."""
    reversible = isinstance(environment, ReversibleEnvironment)
    metrics = anatomy_metrics(episodes, return_GK)
    metrics |= action_metrics(
        episodes, len(return_GK), opposites=environment.opposites if reversible else None
    )
    if isinstance(environment, GroundedEnvironment):
        metrics |= reasoning_metrics(episodes, environment.grounded, chat.text)
    return metrics


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
