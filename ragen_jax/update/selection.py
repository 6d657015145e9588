"""The episodes of a step that the update learns from, by the filter of a config.

Axes: E environments, G groups (prompts), K episodes per group.
"""

import functools

import jax
import jax.numpy as jnp

from ragen_jax.algorithm.advantage import comparable_members
from ragen_jax.algorithm.filter import group_scores, select_by_environment, select_members
from ragen_jax.configs.base import Filter
from ragen_jax.core.types import Array


@functools.partial(jax.jit, static_argnames=("settings", "groups_E", "value_E"))
def select_episodes(
    settings: Filter,
    groups_E: tuple[int, ...],
    return_GK: Array,
    length_GK: Array,
    entropy_GK: Array | None,
    *,
    value_E: tuple[float, ...],
    sound_GK: Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Score the groups and select episodes, separately for each environment.

    Args:
      groups_E: number of groups of each environment.
      return_GK, length_GK, entropy_GK, sound_GK: as in `group_scores`.
      value_E: the value for each environment; replaces settings.value.

    Returns:
      (score_G, keep_GK bool); keep_GK contains only sound members of groups with a score.
    """
    s = settings
    score_G = group_scores(
        return_GK, s.metric, entropy_GK=entropy_GK, length_GK=length_GK, sound_GK=sound_GK
    )
    keep_G = select_by_environment(
        score_G,
        groups_E,
        strategy=s.strategy,
        value=value_E,
        mode=s.mode,
        keep=s.keep,
        include_zero=s.include_zero,
        eps=s.eps,
    )
    return score_G, keep_G[:, None] & eligible_members(s, return_GK, sound_GK)


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
