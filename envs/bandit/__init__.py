"""Bandit. Modules: `names`, `problems` (arms, generator, splits), `reading` (answers and
reasoning), `env` (the rules)."""

from ragen_jax.envs.bandit.env import Bandit
from ragen_jax.envs.bandit.problems import Arm, State, split_of

__all__ = ["Arm", "Bandit", "State", "split_of"]
