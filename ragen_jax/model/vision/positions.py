"""Images in rows of tokens: what the tokens of an image show, and at which positions they stand.

In a row an image is one `<|vision_start|>`, a token for each merged square of the image, and an
end. The tokens of an image are numbers past the vocabulary, every image's its own
(image_table.py): rows that show other images are other rows, wherever rows are compared, and
what a policy samples is never an image. What these numbers stand for is a table, `Images`,
which goes with the parameters, as `params["images"]`.

A token has three position ids (multimodal rotary positions, arXiv 2409.12191, section 2.1): for
text all three count on; the tokens of an image share the first, the second counts their rows and
the third their columns, from where the text stopped; text goes on behind the largest.

Axes: B rows, T tokens, I tokens of images, D width; 3: time, row, column.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Array, Params

NO_TOKEN = np.iinfo(np.int32).max  # behind the last row of a table that has room for more


@flax.struct.dataclass
class Images:
    """What tokens past the vocabulary stand for, by rising number."""

    token_I: Array  # int32, NO_TOKEN behind the last
    embed_ID: Array  # of `VisionTower`
    place_I2: Array  # int32, row and column within the image
    step_I: Array  # int32, how far positions go on behind it: 0, at an image's end its longer side


def table(shown: Sequence[tuple[int, int, int]], embed_ID: Array, room: int) -> Images:
    """The `Images` of some images.

    Args:
      shown: the number of its first token, and rows and columns of its tokens, of each image, by
        rising number.
      embed_ID: what their tokens show, image after image.
      room: rows of the table, at least those of embed_ID.
    """
    token_I = np.full(room, NO_TOKEN, np.int32)
    place_I2 = np.zeros((room, 2), np.int32)
    step_I = np.zeros(room, np.int32)
    end = 0
    for first, rows, columns in shown:
        start, end = end, end + rows * columns
        token_I[start:end] = first + np.arange(rows * columns)
        place_I2[start:end] = np.indices((rows, columns)).reshape(2, -1).T
        step_I[end - 1] = max(rows, columns)
    if isinstance(embed_ID, np.ndarray):
        embed_ID = np.pad(embed_ID, ((0, room - len(embed_ID)), (0, 0)))
    else:
        embed_ID = jnp.pad(embed_ID, ((0, room - len(embed_ID)), (0, 0)))
    return Images(token_I, embed_ID, place_I2, step_I)


def of_params(params: Params) -> Images | None:
    """The table among the parameters; None: nothing is shown."""
    return params.get("images")


def _find(tokens: Array, images: Images) -> tuple[jax.Array, jax.Array]:
    """(row of the table, whether it is the token's), of each token."""
    token_I = jnp.asarray(images.token_I)
    index = jnp.minimum(jnp.searchsorted(token_I, tokens), len(token_I) - 1)
    return index, token_I[index] == tokens


def _steps(images: Images, index: jax.Array, shown: jax.Array) -> jax.Array:
    """int32: how far positions go on behind each token; index, shown: of `_find`."""
    return jnp.where(shown, jnp.asarray(images.step_I)[index], 1)


def splice(x_BTD: jax.Array, tokens_BT: Array, images: Images, vocab_size: int) -> jax.Array:
    """The embeddings of tokens, those of images in their places, in the dtype of `x_BTD`.

    A token past the vocabulary that the table has not is NaN. Gradients flow to both.
    """
    index_BT, shown_BT = _find(tokens_BT, images)
    embed_ID = constrain(jnp.asarray(images.embed_ID), None, None)
    unknown = jnp.where(tokens_BT >= vocab_size, jnp.nan, 0.0)[..., None].astype(x_BTD.dtype)
    return jnp.where(shown_BT[..., None], embed_ID[index_BT].astype(x_BTD.dtype), x_BTD + unknown)


def token_positions(params: Params, tokens_BT: Array, start_B: Array | None = None) -> jax.Array:
    """The position ids of new tokens: int32 [B, T], or [3, B, T] where a table is there.

    Args:
      params: with the table of the images that the tokens show.
      start_B: the position of the first token of each row; None: 0.
    """
    B, T = tokens_BT.shape
    first_B1 = (jnp.zeros(B, jnp.int32) if start_B is None else jnp.asarray(start_B))[:, None]
    images = of_params(params)
    if images is None:
        return first_B1 + jnp.arange(T)
    index_BT, shown_BT = _find(tokens_BT, images)
    step_BT = _steps(images, index_BT, shown_BT)
    base_BT = first_B1 + jnp.cumsum(step_BT, axis=1, dtype=jnp.int32) - step_BT
    place_BT2 = jnp.where(shown_BT[..., None], jnp.asarray(images.place_I2)[index_BT], 0)
    return base_BT + jnp.stack([jnp.zeros_like(base_BT), *jnp.moveaxis(place_BT2, -1, 0)])


def position_behind(
    params: Params, tokens_BT: Array, count_B: Array, start_B: Array | None = None
) -> jax.Array:
    """int32 [B]: the position behind each row's first `count_B` tokens.

    Args: as in `token_positions`.
    """
    images = of_params(params)
    start_B = jnp.zeros_like(count_B) if start_B is None else jnp.asarray(start_B)
    if images is None:
        return start_B + count_B
    step_BT = _steps(images, *_find(tokens_BT, images))
    real_BT = jnp.arange(tokens_BT.shape[1]) < count_B[:, None]
    return start_B + jnp.where(real_BT, step_BT, 0).sum(1, dtype=jnp.int32)
