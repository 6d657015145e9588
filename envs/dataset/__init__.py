"""A user's prompts with a reward function. Modules: `rows` (file or Hub, splits), `functions`
(return values of the user's functions), `tools` (functions that a response may call), `env` (the
rules)."""

from ragen_jax.envs.dataset.env import Dataset

__all__ = ["Dataset"]
