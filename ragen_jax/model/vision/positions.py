"""Images in rows of tokens: embeddings and positions of an image's tokens.

In a row, an image is a `<|vision_start|>`, a token for each merged square of the image, and an end.
The tokens of an image are numbers past the vocabulary, unique to that image (image_table.py). So
rows that show different images differ wherever rows are compared, and a policy never samples an
image. The table `Images` maps these numbers to embeddings; it is stored with the parameters, as
`params["images"]`.

A token has three position ids (multimodal rotary positions, arXiv 2409.12191, section 2.1). For
text, all three increase together. The tokens of an image share the first id; the second counts
their rows and the third their columns, starting where the text stopped. The text after an image
continues after the largest id.

Axes: B rows, T tokens, I tokens of images, D width; 3: time, row, column.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Array, Params

NO_TOKEN = np.iinfo(np.int32).max  # in the unused rows at the end of a table


@flax.struct.dataclass
class Images:
    """The image tokens that tokens past the vocabulary stand for, by rising number."""

    token_I: Array  # int32, NO_TOKEN after the last
    embed_ID: Array  # embeddings from `VisionTower`
    place_I2: Array  # int32, row and column within the image
    step_I: Array  # int32, position increment after it: an image's longer side at its end, else 0


def table(images: Sequence[tuple[int, int, int]], embed_ID: Array, capacity: int) -> Images:
    """Build the `Images` for some images.

    Args:
      images: (number of its first token, rows, columns of its tokens) of each image, by rising
        number.
      embed_ID: embeddings of their tokens, image after image.
      capacity: number of rows of the table, at least that of embed_ID.
    """
    token_I = np.full(capacity, NO_TOKEN, np.int32)
    place_I2 = np.zeros((capacity, 2), np.int32)
    step_I = np.zeros(capacity, np.int32)
    end = 0
    for first, rows, columns in images:
        start, end = end, end + rows * columns
        token_I[start:end] = first + np.arange(rows * columns)
        place_I2[start:end] = np.indices((rows, columns)).reshape(2, -1).T
        step_I[end - 1] = max(rows, columns)
    if isinstance(embed_ID, np.ndarray):
        embed_ID = np.pad(embed_ID, ((0, capacity - len(embed_ID)), (0, 0)))
    else:
        embed_ID = jnp.pad(embed_ID, ((0, capacity - len(embed_ID)), (0, 0)))
    return Images(token_I, embed_ID, place_I2, step_I)


def of_params(params: Params) -> Images | None:
    """Return the table stored with the parameters; None if there is none."""
    return params.get("images")


def _find(tokens: Array, images: Images) -> tuple[jax.Array, jax.Array]:
    """Return (row of the table, whether that row is the token's) for each token."""
    token_I = jnp.asarray(images.token_I)
    index = jnp.minimum(jnp.searchsorted(token_I, tokens), len(token_I) - 1)
    return index, token_I[index] == tokens


def _steps(images: Images, index: jax.Array, is_image: jax.Array) -> jax.Array:
    """Return the int32 position increment after each token; index, is_image: results of `_find`."""
    return jnp.where(is_image, jnp.asarray(images.step_I)[index], 1)


def splice(x_BTD: jax.Array, tokens_BT: Array, images: Images, vocab_size: int) -> jax.Array:
    """Return embeddings of tokens, with image embeddings inserted, in the dtype of `x_BTD`.

    A token past the vocabulary that is not in the table becomes NaN. Gradients flow to both the
    text and the image embeddings.
    """
    index_BT, is_image_BT = _find(tokens_BT, images)
    embed_ID = constrain(jnp.asarray(images.embed_ID), None, None)
    unknown = jnp.where(tokens_BT >= vocab_size, jnp.nan, 0.0)[..., None].astype(x_BTD.dtype)
    return jnp.where(
        is_image_BT[..., None], embed_ID[index_BT].astype(x_BTD.dtype), x_BTD + unknown
    )


def token_positions(
    params: Params,
    tokens_BT: Array,
    start_B: Array | None = None,
    *,
    end_BT: Array | None = None,
) -> jax.Array:
    """Return the position ids of new tokens: int32 [B, T], or [3, B, T] with an image table.

    Args:
      params: parameters, including the table of the images that the tokens show, if any.
      start_B: position of the first token of each row; None: 0.
      end_BT: `Tree.end_BT` of rows that are packed trees: a position then continues those
        of its path; None: the position before it.
    """
    B, T = tokens_BT.shape
    first_B1 = (jnp.zeros(B, jnp.int32) if start_B is None else jnp.asarray(start_B))[:, None]
    images = of_params(params)
    if images is None and end_BT is None:
        return first_B1 + jnp.arange(T)
    step_BT = jnp.ones((B, T), jnp.int32)
    if images is not None:
        index_BT, is_image_BT = _find(tokens_BT, images)
        step_BT = _steps(images, index_BT, is_image_BT)
    base_BT = first_B1 + jnp.cumsum(step_BT, axis=1, dtype=jnp.int32) - step_BT
    if end_BT is not None:
        base_BT = base_BT - jax.vmap(_steps_of_ended_branches)(step_BT, jnp.asarray(end_BT))
    if images is None:
        return base_BT
    place_BT2 = jnp.where(is_image_BT[..., None], jnp.asarray(images.place_I2)[index_BT], 0)
    return base_BT + jnp.stack([jnp.zeros_like(base_BT), *jnp.moveaxis(place_BT2, -1, 0)])


def _steps_of_ended_branches(step_T: jax.Array, end_T: jax.Array) -> jax.Array:
    """Return the sum of the steps before each position that are not on its path."""
    T = len(step_T)
    return jnp.cumsum(jnp.zeros(T + 1, jnp.int32).at[end_T].add(step_T)[:T])


def next_positions(
    params: Params, tokens_BT: Array, count_B: Array, start_B: Array | None = None
) -> jax.Array:
    """Return the position after each row's first `count_B` tokens, int32 [B].

    The other arguments are those of `token_positions`.
    """
    images = of_params(params)
    start_B = jnp.zeros_like(count_B) if start_B is None else jnp.asarray(start_B)
    if images is None:
        return start_B + count_B
    step_BT = _steps(images, *_find(tokens_BT, images))
    real_BT = jnp.arange(tokens_BT.shape[1]) < count_B[:, None]
    return start_B + jnp.where(real_BT, step_BT, 0).sum(1, dtype=jnp.int32)
