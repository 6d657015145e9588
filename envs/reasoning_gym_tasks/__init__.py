"""The package reasoning-gym. Modules: `package` (its tasks, and the refused tasks), `env` (the
rules), `judge` (corrections of scores).

Not called reasoning_gym: in the first folder of Python's search path, it would hide the package.
"""

from ragen_jax.envs.reasoning_gym_tasks.env import Problem, ReasoningGym

__all__ = ["Problem", "ReasoningGym"]
