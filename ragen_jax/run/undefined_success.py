"""Whether environments say which episodes are solved, as far as that is known before a run.

Most do. An engine (Gymnasium's) may not: its episodes then end without a verdict
(envs.types.SUCCESS_UNDEFINED), and what reads success has nothing to read.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.rollout.env_calls import StepRequest, StepResult, act
from ragen_jax.rollout.task import Task
from ragen_jax.storage.console import console

EPISODES = 4  # that are played at most, until one of them ends
ACTIONS = 200  # of an episode, at most
TEXT = "0"  # an action where an environment has no action words


def check_success(config: ConfigDict, tasks: Sequence["Task"]) -> None:
    """Refuse settings that read success where an environment is known not to define it.

    `stopping.success`, which is on by default, only gets a line: it never fires then.

    Raises:
      ValueError: names the field, its value and the environment.
    """
    coef, rule = config.algorithm.zvp_coef, config.stopping.success.action
    if not coef and (rule == "off" or not config.eval.every):
        return
    for task in tasks:
        if not lacks_success(task):
            continue
        if coef:
            raise ValueError(
                f"config.algorithm.zvp_coef is {coef:g}, but environment {task.name!r} does "
                "not define success; accepted: 0, or set env.options.success_reward=NUMBER"
            )
        console(
            f"warning: config.stopping.success.action is {rule!r}, but environment "
            f"{task.name!r} does not define success, so that rule never fires"
        )


def lacks_success(task: "Task") -> bool:
    """Whether a scripted episode of the first training problems ends without a verdict.

    False if none ends within its actions: it is not known then.
    """
    environment, most = task.settings.environment, min(task.settings.budgets.max_actions, ACTIONS)
    words = environment.actions or (TEXT,)
    for number, play in enumerate(task.first_training_plays[:EPISODES]):
        state, rng = play.state, generator(Purpose.ENVIRONMENT, play.seed)
        if play.error:
            continue
        for index in range(most):
            action = words[(index + number) % len(words)]
            job = StepRequest(state, (action,), rng, actions_left=most - index)
            (result,) = act(environment, [job], task.settings.limits)
            if not isinstance(result, StepResult):
                break
            if result.done:
                return bool(result.info.get(SUCCESS_UNDEFINED))
            state = result.state
    return False
