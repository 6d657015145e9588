"""What a step hands from stage to stage, and when its diagnostics are due."""

import dataclasses

import numpy as np

from ragen_jax.algorithm.rewards import (
    broken_episodes,
)
from ragen_jax.core.types import Episode
from ragen_jax.diagnostics.stopping import Fired


@dataclasses.dataclass(frozen=True)
class Played:
    """What was played for a step."""

    selected: list[Episode]  # that the step learns from, of all environments
    episodes_E: list[list[Episode]]  # of each environment all of them, groups numbered from 0
    returns_E: list[np.ndarray]  # and their return_GK, undiscounted, penalties included
    # What there is to say of environments that broke.
    fired: list[Fired] = dataclasses.field(default_factory=list)

    @property
    def sound_E(self) -> list[np.ndarray]:
        """bool [G, K] of each environment: the episodes of episodes_E that did not break."""
        return [~broken_episodes(episodes) for episodes in self.episodes_E]
