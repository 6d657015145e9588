"""Sokoban: `board` (state and text), `rooms` (generator, splits), `solver`, `env` (the rules)."""

from envs.sokoban.env import Sokoban
from envs.sokoban.rooms import split_of
from envs.sokoban.solver import solve

__all__ = ["Sokoban", "solve", "split_of"]
