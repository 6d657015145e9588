"""Countdown: `arithmetic` (reads answers), `solver`, `problems` (generator, file, splits),
`env` (the rules)."""

from envs.countdown.arithmetic import evaluate
from envs.countdown.env import Countdown
from envs.countdown.problems import Problem, load_problems, split_of

__all__ = ["Countdown", "Problem", "evaluate", "load_problems", "split_of"]
