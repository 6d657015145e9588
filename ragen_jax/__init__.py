"""ragen_jax: multi-turn RL for LLM agents that watches whether they think about their input."""

from pathlib import Path

__version__ = "0.1.0"

# Environments and configs are at the top of the source tree, where they are looked for first, and
# are imported as ragen_jax.envs and ragen_jax.configs wherever they are. An installed package holds
# them (setup.py); in a clone, installed or not, they are found beside it.
if not Path(__file__).with_name("envs").exists():
    __path__.append(str(Path(__file__).parents[1]))
