"""Names of environments for parametrized tests."""

from ragen_jax.envs import ENVS

# Environments that need an option to be built are tested with their wrappers.
OPEN = ("dataset", "gymnasium", "harness", "openenv", "reasoning_gym", "textarena", "verifiers")
OURS = [name for name in ENVS if name not in OPEN]
