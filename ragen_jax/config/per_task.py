"""Numbers derived from a config: groups, rows and tokens of a step, and its schedules."""

import dataclasses

from ragen_jax.algorithm.algorithms import ALGORITHMS
from ragen_jax.configs.base import INITIAL, Algorithm, Config, Env, Task
from ragen_jax.rollout import chat


def per_task_configs(config: Config) -> dict[str, Config]:
    """Return {name: the run's config with only the named environment}, config.env first.

    A config with one environment is returned unchanged, as the only entry.
    """
    if not config.also:
        return {config.env.name: config}
    tasks = {config.env.name: Task(config.rollout.groups, config.env), **config.also}
    return {
        name: dataclasses.replace(
            config,
            env=task.env,
            also={},
            rollout=dataclasses.replace(config.rollout, groups=task.groups),
        )
        for name, task in tasks.items()
    }


def per_task_groups(config: Config) -> tuple[int, ...]:
    """Return the number of groups per step of each environment."""
    return tuple(c.rollout.groups for c in per_task_configs(config).values())


def step_groups(config: Config) -> int:
    """Return the number of groups per step over all environments."""
    return sum(per_task_groups(config))


def is_due(every: int, step: int) -> bool:
    """Return whether an action with an interval in steps (0: never) is due in this step."""
    return every > 0 and step % every == 0


def turns_per_prompt(env: Env) -> int:
    """Return the maximum number of turns in a prompt, for the section `env` of an environment."""
    return chat.CONTEXTS[env.context](env.max_turns, env.window)


def row_tokens(config: Config) -> int:
    """Return the maximum number of sampled tokens in a row: Dr.GRPO's constant length."""
    prompt_turns = max(turns_per_prompt(c.env) for c in per_task_configs(config).values())
    return prompt_turns * config.rollout.max_new_tokens


def step_rows(config: Config) -> int:
    """Return the maximum number of rows of a step.

    Turns of an episode that do not fit in its first row need further rows.
    """

    def rows(c):
        # At the limit of the context any turn may have to start another row.
        row_turns = 1 if c.env.max_context else turns_per_prompt(c.env)
        return c.rollout.groups * c.rollout.group_size * (c.env.max_turns - row_turns + 1)

    return sum(map(rows, per_task_configs(config).values()))


def minibatch_rows(config: Config) -> int:
    """Return the maximum number of rows of a minibatch."""
    return -(-step_rows(config) // config.optimizer.minibatches)


def teacher_path(algorithm: Algorithm) -> str | None:
    """Return the model that the KL is measured to; None: the initial policy, or there is no KL."""
    named = algorithm.kl_coef and algorithm.kl_reference != INITIAL
    return algorithm.kl_reference if named else None


def has_critic(algorithm: Algorithm) -> bool:
    """Return whether the algorithm uses a critic."""
    return ALGORITHMS[algorithm.name].critic
