"""The 2x2x2 cube. Modules: `cube` (state, text, turns), `distances` (the table from which problems
and plans are drawn), `env` (the environment)."""

from ragen_jax.envs.rubik.cube import split_of
from ragen_jax.envs.rubik.env import Rubik

__all__ = ["Rubik", "split_of"]
