"""Pictures of the cells of a room: a sprite for each symbol of its text (`board`).

Each thing has its own colour as well as its own shape: a vision tower may see a few pixels at a
time.
"""

import numpy as np

from ragen_jax.envs.drawing import Sprite, bar, diagonals, disc, draw_grid, ground
from ragen_jax.envs.sokoban import board
from ragen_jax.envs.sokoban.board import State

SAND, SAND_EDGE = (232, 218, 186), (206, 190, 154)
BRICK, MORTAR = (88, 92, 104), (44, 46, 56)
RED = (212, 32, 48)
WOOD, WOOD_DARK = (158, 98, 38), (92, 52, 16)
GREEN, GREEN_DARK = (52, 168, 76), (14, 92, 40)
BLUE, WHITE = (36, 88, 208), (255, 255, 255)


def wall(tile: int) -> np.ndarray:
    """Grey bricks in two layers."""
    cell = ground(tile, BRICK, MORTAR)
    cell[bar(tile, 7, 9, 0, 16)] = MORTAR
    cell[bar(tile, 0, 8, 7, 9) | bar(tile, 8, 16, 2, 4) | bar(tile, 8, 16, 12, 14)] = MORTAR
    return cell


def floor(tile: int) -> np.ndarray:
    """Plain sand."""
    return ground(tile, SAND, SAND_EDGE)


def target(tile: int) -> np.ndarray:
    """A red ring around a red dot, on sand."""
    cell = floor(tile)
    cell[disc(tile, 7) & ~disc(tile, 5)] = RED
    cell[disc(tile, 2)] = RED
    return cell


def box(tile: int) -> np.ndarray:
    """A brown crate with a dark frame and cross."""
    return _crate(tile, WOOD, WOOD_DARK)


def box_on_target(tile: int) -> np.ndarray:
    """The same crate in green."""
    return _crate(tile, GREEN, GREEN_DARK)


def player(tile: int) -> np.ndarray:
    """A blue disc with a white middle, on sand."""
    return _disc(tile, floor(tile))


def player_on_target(tile: int) -> np.ndarray:
    """The same disc on a red ground."""
    return _disc(tile, ground(tile, RED, SAND_EDGE))


def _crate(tile: int, light: tuple[int, int, int], dark: tuple[int, int, int]) -> np.ndarray:
    cell = floor(tile)
    whole, inside = bar(tile, 2, 15, 2, 15), bar(tile, 4, 13, 4, 13)
    cell[whole] = dark
    cell[inside & ~diagonals(tile, 1)] = light
    return cell


def _disc(tile: int, cell: np.ndarray) -> np.ndarray:
    cell[disc(tile, 6)] = BLUE
    cell[disc(tile, 2)] = WHITE
    return cell


SPRITES: dict[str, Sprite] = {
    board.WALL: wall,
    board.FLOOR: floor,
    board.TARGET: target,
    board.BOX_ON_TARGET: box_on_target,
    board.BOX: box,
    board.PLAYER: player,
    board.PLAYER_ON_TARGET: player_on_target,
}


def draw(state: State, tile: int) -> np.ndarray:
    """Return uint8 [rows * tile, columns * tile, 3]: the room from above."""
    rows = board.grid_text(state).split("\n")
    return draw_grid([[SPRITES[symbol] for symbol in row] for row in rows], tile)
