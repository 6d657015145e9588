"""The 2x2x2 cube: `cube` (state, text, turns), `distances` (the table that problems and plans come
from), `env` (the environment)."""

from ragen_jax.envs.rubik.cube import split_of
from ragen_jax.envs.rubik.env import Rubik

__all__ = ["Rubik", "split_of"]
