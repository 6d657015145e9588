"""DeepCoder. Modules: `grade` (tests a program), `sandbox` (choice of sandbox), `process` (limits),
`filter` and `inside` (confinement), `tasks` (generator), `file_problems` (files), `problems`
(from both, and splits), `expressions` (the tiny agent's language), `env` (the rules)."""

from ragen_jax.envs.deepcoder.env import DeepCoder
from ragen_jax.envs.deepcoder.grade import Grade, grade
from ragen_jax.envs.deepcoder.process import SandboxFault

__all__ = ["DeepCoder", "Grade", "SandboxFault", "grade"]
