"""Pictures of grids: a sprite for each cell, drawn with integers only.

Shapes are masks from comparisons of integers, in sixteenths of a cell's side, without rounding,
smoothing or fonts, so a picture is the same on every machine. In the smallest cell, 8 pixels wide,
a pixel covers two sixteenths.

A sprite is a function tile -> uint8 [tile, tile, 3], where tile is the side of a cell in pixels.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ragen_jax.envs.options import whole

Colour = tuple[int, int, int]  # red, green and blue from 0 to 255
Sprite = Callable[[int], np.ndarray]

MIN_TILE, MAX_TILE = 8, 64
TILE = 28  # height and width, in pixels, of an image token of the published Qwen2.5-VL


def tile_size(tile: int, observation: str | None) -> int:
    """Return the option `tile` of an environment that draws only with observation="image".

    Raises ValueError for a size out of range, and for a size other than TILE that would be unused.
    """
    tile = whole("tile", tile, least=MIN_TILE, most=MAX_TILE)
    if observation != "image" and tile != TILE:
        raise ValueError(
            f"tile={tile} is not read with observation={observation!r}: leave it out, or set "
            "observation='image'"
        )
    return tile


def draw_grid(rows: Sequence[Sequence[Sprite]], tile: int) -> np.ndarray:
    """Return read-only uint8 [rows * tile, columns * tile, 3] with a sprite in each cell."""
    cells = np.array([[_draw(sprite, tile) for sprite in row] for row in rows])
    height, width = len(rows) * tile, len(rows[0]) * tile
    picture = cells.transpose(0, 2, 1, 3, 4).reshape(height, width, 3)
    picture.flags.writeable = False  # states and observations are shared by a group
    return picture


def read_grid(picture: np.ndarray, sprites: Mapping[str, Sprite], tile: int) -> str:
    """Return the rows of symbols, joined by newlines, whose sprites `draw_grid` drew.

    Raises:
      ValueError: a cell is none of the sprites, or a side is not a multiple of `tile`.
    """
    height, width, _ = picture.shape
    if height % tile or width % tile:
        raise ValueError(f"a picture of {width} x {height} pixels has no cells of {tile} pixels")
    symbols_by_pixels = {
        _draw(sprite, tile).tobytes(): symbol for symbol, sprite in sprites.items()
    }
    cells = picture.reshape(height // tile, tile, width // tile, tile, 3).transpose(0, 2, 1, 3, 4)
    found = [[symbols_by_pixels.get(cell.tobytes()) for cell in row] for row in cells]
    for r, row in enumerate(found):
        if None in row:
            raise ValueError(
                f"row {r}, column {row.index(None)} of a picture is not a known sprite"
            )
    return "\n".join("".join(filter(None, row)) for row in found)


@functools.cache  # about a dozen sprites, usually in one size each
def _draw(sprite: Sprite, tile: int) -> np.ndarray:
    return sprite(tile)


# ------------------------------------------------------------------------- shapes of sprites


def ground(tile: int, colour: Colour, edge: Colour) -> np.ndarray:
    """Return a cell of one colour with a line, one pixel wide, along its top and left edges.

    The lines make cells countable.
    """
    cell = np.full((tile, tile, 3), colour, np.uint8)
    cell[0] = cell[:, 0] = edge
    return cell


def bar(tile: int, top: int, bottom: int, left: int, right: int) -> np.ndarray:
    """Return a bool [tile, tile] mask of a rectangle whose bounds are in sixteenths."""
    y, x = _pixel_centres(tile)
    rows = (y >= top * tile) & (y < bottom * tile)
    return rows & (x >= left * tile) & (x < right * tile)


def disc(tile: int, radius: int, row: int = 8, column: int = 8) -> np.ndarray:
    """Return a bool [tile, tile] mask of a disc; radius and centre are in sixteenths."""
    y, x = _pixel_centres(tile)
    return (y - row * tile) ** 2 + (x - column * tile) ** 2 <= (radius * tile) ** 2


def diamond(tile: int, radius: int) -> np.ndarray:
    """Return a bool [tile, tile] mask of a square that stands on its corner in the middle.

    radius: distance from the centre to a corner, in sixteenths
    """
    y, x = _pixel_centres(tile)
    return abs(y - 8 * tile) + abs(x - 8 * tile) <= radius * tile


def diagonals(tile: int, width: int) -> np.ndarray:
    """Return a bool [tile, tile] mask of both diagonals.

    width: half the width of a diagonal, measured along a row, in sixteenths
    """
    y, x = _pixel_centres(tile)
    return (abs(y - x) <= width * tile) | (abs(y + x - 16 * tile) <= width * tile)


def _pixel_centres(tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres of pixels, rows [tile, 1] and columns [1, tile].

    The cell's side is 16 * tile, so n sixteenths of it are n * tile: all values are integers.
    """
    centre = 8 * (2 * np.arange(tile) + 1)
    return centre[:, None], centre[None, :]
