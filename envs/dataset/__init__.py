"""Prompts of one's own with a function that pays: `rows` (file or Hub, splits), `functions` (what a
module of one's own returns), `tools` (functions that a reply calls), `env` (the rules)."""

from ragen_jax.envs.dataset.env import Dataset

__all__ = ["Dataset"]
