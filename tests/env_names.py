"""Names of environments for parametrized tests."""

from ragen_jax.envs import ENVS

# Those that need an option to be built are tested where they are wrapped.
OPEN = ("dataset", "gymnasium", "reasoning_gym", "textarena")
OURS = [name for name in ENVS if name not in OPEN]
