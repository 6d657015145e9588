"""FrozenLake. Modules: `lake` (state and text), `maps` (generator, splits), `rules` (Gymnasium's
transition table), `solver`, `sprites` (pictures of cells), `env` (the environment)."""

from ragen_jax.envs.frozen_lake.env import FrozenLake
from ragen_jax.envs.frozen_lake.maps import split_of

__all__ = ["FrozenLake", "split_of"]
