"""The episodes of a step that the update learns from, by the filter of a config.

Axes: E environments, G groups (prompts), K episodes per group.
"""

import jax
import jax.numpy as jnp

from ragen_jax.algorithm.advantage import comparable_members, has_variance, reward_unit
from ragen_jax.algorithm.filter import (
    METRICS,
    PAIRS,
    ZERO_SCORE,
    group_scores,
    round_scores,
    select_by_environment,
    select_members,
)
from ragen_jax.configs.base import Filter
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Array


@stored(static_argnames=("settings", "groups_E", "value_E"))
def select_episodes(
    settings: Filter,
    groups_E: tuple[int, ...],
    return_GK: Array,
    length_GK: Array,
    entropy_GK: Array | None,
    *,
    value_E: tuple[float, ...],
    sound_GK: Array | None = None,
    task_return_GK: Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Score the groups and select episodes, separately for each environment.

    With settings.eps 0, the tolerance of the linear threshold is a fraction of the total score,
    and an environment whose task rewards vary in no group is rejected, however much penalties
    vary. With settings.eps above 0, the tolerance is absolute, and rejects such a step if its
    total score is small (the paper's code). The strategy `pairs` selects only groups with
    variance.

    Args:
      groups_E: number of groups of each environment.
      return_GK, length_GK, entropy_GK, sound_GK: as in `group_scores`.
      value_E: the value for each environment; replaces settings.value.
      task_return_GK: the returns without penalties; None: there were no penalties.

    Returns:
      (score_G, keep_GK bool, zero_G bool): keep_GK contains only sound members of groups with a
      score; zero_G says which scores count as 0.
    """
    s = settings
    environment_G = jnp.repeat(
        jnp.arange(len(groups_E)), jnp.array(groups_E), total_repeat_length=sum(groups_E)
    )
    score_G = group_scores(
        return_GK, s.metric, entropy_GK=entropy_GK, length_GK=length_GK, sound_GK=sound_GK
    )
    reward_G = reward_unit(return_GK, environment_G=environment_G, sound_GK=sound_GK)
    unit_G = reward_G ** METRICS[s.metric].power
    starts_E = [sum(groups_E[:e]) for e in range(len(groups_E))]
    ranked_G = score_G if s.eps else round_scores(score_G, unit_G)
    if s.strategy == PAIRS:
        varied_G = has_variance(return_GK, environment_G=environment_G, sound_GK=sound_GK)
        ranked_G = jnp.where(varied_G, ranked_G, jnp.nan)
    keep_G = select_by_environment(
        ranked_G,
        groups_E,
        strategy=s.strategy,
        value=value_E,
        unit_E=unit_G[jnp.array(starts_E)],
        mode=s.mode,
        keep=s.keep,
        include_zero=s.include_zero,
        eps=s.eps or None,
    )
    if task_return_GK is not None and not s.eps and (s.strategy, s.mode) == ("top_p", "linear"):
        varied_G = has_variance(task_return_GK, environment_G=environment_G, sound_GK=sound_GK)
        varied_E = jax.ops.segment_sum(varied_G * 1, environment_G, len(groups_E)) > 0
        rejected_E = ~varied_E & (jnp.array(value_E) < 1)
        keep_G &= ~rejected_E[environment_G]
    keep_GK = keep_G[:, None] & eligible_members(s, return_GK, sound_GK)
    return score_G, keep_GK, jnp.abs(score_G) <= ZERO_SCORE * unit_G


def eligible_members(
    settings: Filter, return_GK: Array, sound_GK: Array | None = None
) -> jax.Array:
    """Return the members that an update reads if their group is kept, bool [G, K].

    These are the sound members of groups in which a comparison is possible (`comparable_members`);
    if the settings ask for it, only the best and the worst of them.
    """
    member_GK = jnp.ones(jnp.shape(return_GK), bool)
    if sound_GK is not None:
        member_GK = comparable_members(sound_GK)
    if settings.top_members + settings.bottom_members:
        member_GK &= select_members(
            return_GK,
            top=settings.top_members,
            bottom=settings.bottom_members,
            sound_GK=sound_GK,
        )
    return member_GK
