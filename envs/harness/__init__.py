"""Agents that run in a harness of their own and ask for replies over the OpenAI API."""

from ragen_jax.envs.harness.env import Harness

__all__ = ["Harness"]
