"""Tasks of the package `verifiers`, played by its own client and harness."""

from ragen_jax.envs.verifiers_tasks.env import Verifiers

__all__ = ["Verifiers"]
