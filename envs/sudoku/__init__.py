"""Sudoku. Modules: `grid` (state, units and text), `solver` (singles), `problems` (generator,
splits), `reading` (answers and reasoning), `env` (the rules)."""

from ragen_jax.envs.sudoku.env import Sudoku
from ragen_jax.envs.sudoku.problems import split_of

__all__ = ["Sudoku", "split_of"]
