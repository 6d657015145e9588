"""Data that a step passes between its stages, and the settings of its diagnostics."""

import dataclasses

import numpy as np

from ragen_jax.algorithm.rewards import (
    broken_episodes,
)
from ragen_jax.core.types import Episode
from ragen_jax.diagnostics.stopping import Fired


@dataclasses.dataclass(frozen=True)
class Played:
    """The episodes that were played for a step."""

    selected: list[Episode]  # episodes of all environments that the step learns from
    episodes_E: list[list[Episode]]  # all episodes of each environment, groups numbered from 0
    returns_E: list[np.ndarray]  # their return_GK, undiscounted, penalties included
    # Messages about episodes that broke.
    fired: list[Fired] = dataclasses.field(default_factory=list)

    @property
    def sound_E(self) -> list[np.ndarray]:
        """bool [G, K] of each environment: whether the episode did not break."""
        return [~broken_episodes(episodes) for episodes in self.episodes_E]
