"""Numbers derived from a config: groups, rows and tokens of a step, and its schedules."""

from ml_collections import ConfigDict

from ragen_jax.algorithm.algorithms import ALGORITHMS
from ragen_jax.rollout import chat


def per_task_configs(config: ConfigDict) -> dict[str, ConfigDict]:
    """Return {name: the run's config with only the named environment}, config.env first.

    A config with one environment is returned unchanged, as the only entry.
    """
    alone = {config.env.name: config}
    if config.also:
        parts = {config.env.name: ConfigDict(dict(groups=config.rollout.groups, env=config.env))}
        for name, part in (parts | dict(config.also)).items():
            alone[name] = config.copy_and_resolve_references()
            with alone[name].unlocked():
                alone[name].env = part.env
                alone[name].also = ConfigDict()
            alone[name].rollout.groups = part.groups
    return alone


def per_task_groups(config: ConfigDict) -> tuple[int, ...]:
    """Return the number of groups per step of each environment."""
    return tuple(c.rollout.groups for c in per_task_configs(config).values())


def step_groups(config: ConfigDict) -> int:
    """Return the number of groups per step over all environments."""
    return sum(per_task_groups(config))


def is_due(every: int, step: int) -> bool:
    """Return whether an action with an interval in steps (0: never) is due in this step."""
    return every > 0 and step % every == 0


def turns_shown(env: ConfigDict) -> int:
    """Return the maximum number of turns in a prompt, for the section `env` of an environment."""
    return chat.CONTEXTS[env.context](env.max_turns, env.window)


def row_tokens(config: ConfigDict) -> int:
    """Return the maximum number of sampled tokens in a row: Dr.GRPO's constant length."""
    shown = max(turns_shown(c.env) for c in per_task_configs(config).values())
    return shown * config.rollout.max_new_tokens


def step_rows(config: ConfigDict) -> int:
    """Return the maximum number of rows of a step.

    Turns of an episode that do not fit in its first row need further rows.
    """

    def rows(c):
        # At the limit of the context any turn may have to start another row.
        together = 1 if c.env.max_context else turns_shown(c.env)
        return c.rollout.groups * c.rollout.group_size * (c.env.max_turns - together + 1)

    return sum(map(rows, per_task_configs(config).values()))


def minibatch_rows(config: ConfigDict) -> int:
    """Return the maximum number of rows of a minibatch."""
    return -(-step_rows(config) // config.optimizer.minibatches)


def has_critic(config: ConfigDict) -> bool:
    """Return whether the config's algorithm uses a critic."""
    return ALGORITHMS[config.algorithm.name].critic
