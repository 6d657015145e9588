"""2048. Modules: `board` (state, text, slides), `boards` (generator, splits), `player` (a scripted
player), `env` (the rules)."""

from ragen_jax.envs.game_2048.boards import split_of
from ragen_jax.envs.game_2048.env import Game2048

__all__ = ["Game2048", "split_of"]
