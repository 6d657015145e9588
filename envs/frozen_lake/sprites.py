"""Pictures of the cells of a lake: a sprite for each symbol of its text (`lake`).

Each thing has its own colour as well as its own shape: a vision tower may see a few pixels at a
time.
"""

import numpy as np

from ragen_jax.envs.drawing import Sprite, bar, diagonals, diamond, disc, draw_grid, ground
from ragen_jax.envs.frozen_lake import lake
from ragen_jax.envs.frozen_lake.lake import State

ICE, ICE_EDGE = (206, 232, 248), (158, 196, 224)
WATER, RIM = (12, 34, 84), (64, 116, 178)
GOLD, GOLD_DARK = (248, 190, 8), (150, 96, 0)
COAT, FACE = (206, 28, 60), (255, 226, 196)


def ice(tile: int) -> np.ndarray:
    """Plain pale blue."""
    return ground(tile, ICE, ICE_EDGE)


def hole(tile: int) -> np.ndarray:
    """Dark water with a blue rim."""
    cell = ice(tile)
    cell[disc(tile, 7)] = RIM
    cell[disc(tile, 6)] = WATER
    return cell


def goal(tile: int) -> np.ndarray:
    """A golden diamond."""
    cell = ice(tile)
    cell[diamond(tile, 8)] = GOLD_DARK
    cell[diamond(tile, 6)] = GOLD
    return cell


def player(tile: int) -> np.ndarray:
    """Someone in a red coat, on the ice."""
    return _figure(tile, ice(tile))


def player_in_hole(tile: int) -> np.ndarray:
    """A red cross in dark water that fills the cell."""
    cell = ground(tile, WATER, ICE_EDGE)
    cell[diagonals(tile, 2) & bar(tile, 3, 14, 3, 14)] = COAT
    return cell


def player_on_goal(tile: int) -> np.ndarray:
    """Someone in a red coat, on gold that fills the cell."""
    return _figure(tile, ground(tile, GOLD, ICE_EDGE))


def _figure(tile: int, cell: np.ndarray) -> np.ndarray:
    cell[bar(tile, 7, 15, 4, 13)] = COAT
    cell[disc(tile, 3, row=5)] = FACE
    return cell


SPRITES: dict[str, Sprite] = {
    lake.PLAYER: player,
    lake.FROZEN: ice,
    lake.HOLE: hole,
    lake.GOAL: goal,
    lake.PLAYER_IN_HOLE: player_in_hole,
    lake.PLAYER_ON_GOAL: player_on_goal,
}


def draw(state: State, tile: int) -> np.ndarray:
    """Return uint8 [rows * tile, columns * tile, 3]: the lake from above."""
    rows = lake.grid_text(state).split("\n")
    return draw_grid([[SPRITES[symbol] for symbol in row] for row in rows], tile)
