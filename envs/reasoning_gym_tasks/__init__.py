"""The package reasoning-gym: `package` (its tasks, and which are refused), `env` (the rules).

Not called reasoning_gym: in a folder that Python imports from first, that would hide the package.
"""

from ragen_jax.envs.reasoning_gym_tasks.env import Problem, ReasoningGym

__all__ = ["Problem", "ReasoningGym"]
