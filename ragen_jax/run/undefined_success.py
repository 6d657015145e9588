"""Checks before a run whether its environments define success.

Most environments do. An engine such as Gymnasium may not: its episodes then end without a verdict
(core.types.SUCCESS_UNDEFINED), and settings that read success have no effect.
"""

from collections.abc import Sequence

from ragen_jax.configs.base import Config
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.rollout.env_calls import StepRequest, StepResult, act
from ragen_jax.rollout.task import Task
from ragen_jax.storage.console import console

EPISODES = 4  # maximum number of episodes to play until one of them ends
ACTIONS = 200  # maximum number of actions per episode
TEXT = "0"  # the action if an environment has no list of actions


def check_success(config: Config, tasks: Sequence["Task"]) -> None:
    """Refuse settings that read success if an environment is known not to define it.

    For `stopping.success`, which is on by default, only a warning is printed: the rule never fires.

    Raises:
      ValueError: names the field, its value and the environment.
    """
    rule = config.stopping.success.action
    readers = [name for name in ("zvp_coef", "virtual_rewards") if getattr(config.algorithm, name)]
    if not readers and (rule == "off" or not config.eval.every):
        return
    for task in tasks:
        if not lacks_success(task):
            continue
        for name in readers:
            raise ValueError(
                f"config.algorithm.{name} is {getattr(config.algorithm, name):g}, but environment "
                f"{task.name!r} does not define success; accepted: 0, or set "
                "env.options.success_reward=NUMBER"
            )
        console(
            f"warning: config.stopping.success.action is {rule!r}, but environment "
            f"{task.name!r} does not define success, so that rule never fires"
        )


def lacks_success(task: "Task") -> bool:
    """Return whether a scripted episode on one of the first training problems ends without verdict.

    Return False if no episode ends within its actions, because success is then not known.
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
