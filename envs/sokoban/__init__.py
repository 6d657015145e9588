"""Sokoban. Modules: `board` (state and text), `rooms` (generator, splits), `solver`, `sprites`
(pictures of cells), `env` (the rules)."""

from ragen_jax.envs.sokoban.env import Sokoban
from ragen_jax.envs.sokoban.rooms import split_of
from ragen_jax.envs.sokoban.solver import solve

__all__ = ["Sokoban", "solve", "split_of"]
