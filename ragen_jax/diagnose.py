"""A step's diagnostics, of each environment by itself: what the episodes say about the policy."""

import jax

from ragen_jax.diagnostics.anatomy import action_metrics, anatomy_metrics, reasoning_metrics
from ragen_jax.diagnostics.scopes import collapse_metrics
from ragen_jax.diagnostics.zscores import update_zscores
from ragen_jax.envs.types import GroundedEnvironment, ReversibleEnvironment
from ragen_jax.run.tasks import joined
from ragen_jax.sharding import place


def diagnose(config, model, policy, tasks, played, returns, state, step):
    """The diagnostics of a step's episodes, before the filter.

    Args:
      policy: the parameters that sampled them.
      played: the episodes of each task, its groups numbered from 0.
      returns: return_GK of each task, undiscounted, penalties included.
      state: `TrainState`.
      step: number of the iteration.

    Returns:
      (TrainState with the moving averages, collapse/*, flow/*, anatomy/*, action/* and
      reasoning/* metrics).
    """
    d = config.diagnose
    flow = d.flow_every > 0 and step % d.flow_every == 0
    found = []
    for index, (task, episodes, return_GK) in enumerate(zip(tasks, played, returns, strict=True)):
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
        found.append(metrics | behaviour_metrics(episodes, return_GK, task.environment, task.chat))
    metrics = joined(tasks, found)
    zscores, found = update_zscores(jax.device_get(state.zscores), metrics)
    state = state.replace(zscores=place(zscores, state.step.sharding))
    return state, metrics | found


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
