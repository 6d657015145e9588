"""Countdown. Modules: `arithmetic` (evaluates answers), `solver`, `problems` (generator, file,
splits), `env` (the rules)."""

from ragen_jax.envs.countdown.arithmetic import evaluate
from ragen_jax.envs.countdown.env import Countdown
from ragen_jax.envs.countdown.problems import Problem, load_problems, split_of

__all__ = ["Countdown", "Problem", "evaluate", "load_problems", "split_of"]
