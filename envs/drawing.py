"""Pictures of grids: a sprite for each cell, drawn by whole numbers alone.

Shapes are masks that compare whole numbers, in sixteenths of a cell's side, with nothing rounded or
smoothed and no font: a picture is the same on every machine, whatever draws images there. The
smallest cell, of 8 pixels, has a pixel for two sixteenths.

A sprite is a function tile -> uint8 [tile, tile, 3], tile being the pixels of a cell's side.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ragen_jax.envs.options import whole

Colour = tuple[int, int, int]  # red, green and blue from 0 to 255
Sprite = Callable[[int], np.ndarray]

SMALLEST, LARGEST = 8, 64
TILE = 28  # pixels that the published Qwen2.5-VL shows with one token, each way


def tile_size(tile: int, observation: str | None) -> int:
    """The option `tile` of an environment that draws with observation="image" alone.

    Raises ValueError for no such size, and for another than TILE that nothing would read.
    """
    tile = whole("tile", tile, least=SMALLEST, most=LARGEST)
    if observation != "image" and tile != TILE:
        raise ValueError(
            f"tile={tile} is not read with observation={observation!r}: leave it out, or set "
            "observation='image'"
        )
    return tile


def draw_grid(rows: Sequence[Sequence[Sprite]], tile: int) -> np.ndarray:
    """uint8 [rows * tile, columns * tile, 3] of a sprite for each cell; not to be written to."""
    cells = np.array([[_drawn(sprite, tile) for sprite in row] for row in rows])
    height, width = len(rows) * tile, len(rows[0]) * tile
    picture = cells.transpose(0, 2, 1, 3, 4).reshape(height, width, 3)
    picture.flags.writeable = False  # states and observations are shared by a group
    return picture


def read_grid(picture: np.ndarray, sprites: Mapping[str, Sprite], tile: int) -> str:
    """The rows of symbols, joined by newlines, whose sprites `draw_grid` drew.

    Raises:
      ValueError: a cell that is none of the sprites, or a side that is no number of cells.
    """
    height, width, _ = picture.shape
    if height % tile or width % tile:
        raise ValueError(f"a picture of {width} x {height} pixels has no cells of {tile} pixels")
    looks = {_drawn(sprite, tile).tobytes(): symbol for symbol, sprite in sprites.items()}
    cells = picture.reshape(height // tile, tile, width // tile, tile, 3).transpose(0, 2, 1, 3, 4)
    found = [[looks.get(cell.tobytes()) for cell in row] for row in cells]
    for r, row in enumerate(found):
        if None in row:
            raise ValueError(
                f"row {r}, column {row.index(None)} of a picture is not a known sprite"
            )
    return "\n".join("".join(filter(None, row)) for row in found)


@functools.cache  # of a dozen sprites, in one size each as a rule
def _drawn(sprite: Sprite, tile: int) -> np.ndarray:
    return sprite(tile)


# ------------------------------------------------------------------------------ what sprites are of


def ground(tile: int, colour: Colour, edge: Colour) -> np.ndarray:
    """A cell of one colour, a line one pixel wide along its top and left: cells can be counted."""
    cell = np.full((tile, tile, 3), colour, np.uint8)
    cell[0] = cell[:, 0] = edge
    return cell


def bar(tile: int, top: int, bottom: int, left: int, right: int) -> np.ndarray:
    """bool [tile, tile]: the pixels from `top` to `bottom` and `left` to `right`, in sixteenths."""
    y, x = _places(tile)
    rows = (y >= top * tile) & (y < bottom * tile)
    return rows & (x >= left * tile) & (x < right * tile)


def disc(tile: int, radius: int, row: int = 8, column: int = 8) -> np.ndarray:
    """bool [tile, tile]: the pixels within `radius` of a place, all in sixteenths."""
    y, x = _places(tile)
    return (y - row * tile) ** 2 + (x - column * tile) ** 2 <= (radius * tile) ** 2


def diamond(tile: int, radius: int) -> np.ndarray:
    """bool [tile, tile]: a square on its corner around the middle, which it reaches `radius` from,
    in sixteenths."""
    y, x = _places(tile)
    return abs(y - 8 * tile) + abs(x - 8 * tile) <= radius * tile


def diagonals(tile: int, width: int) -> np.ndarray:
    """bool [tile, tile]: both diagonals, `width` sixteenths to either side, along a row."""
    y, x = _places(tile)
    return (abs(y - x) <= width * tile) | (abs(y + x - 16 * tile) <= width * tile)


def _places(tile: int) -> tuple[np.ndarray, np.ndarray]:
    """The centres of pixels, rows [tile, 1] and columns [1, tile], where the cell's side is
    16 * tile, so that n sixteenths of it are n * tile: all whole numbers."""
    along = 8 * (2 * np.arange(tile) + 1)
    return along[:, None], along[None, :]
