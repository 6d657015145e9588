"""Where the images of a row stand: rotary position ids and which embedding belongs to which token.

In a row of tokens an image is one `<|vision_start|>`, an `<|image_pad|>` for each of its tokens,
and an end. A token has three position ids (multimodal rotary positions, arXiv 2409.12191, section
2.1): for text all three count on; the tokens of an image share the first, the second counts their
rows and the third their columns, from where the text stopped; text goes on behind the largest.

What the policy sampled is text whatever its id, as it was when it was sampled: a policy that says
`<|image_pad|>` shows nothing and moves no image.

Axes: B rows, T tokens, I image embeddings of a row, D width; 3: time, row, column.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.model.images import Grid
from ragen_jax.sharding import constrain
from ragen_jax.types import Array


@flax.struct.dataclass
class Images:
    """The images of rows of tokens, as `Qwen` takes them."""

    embed_BID: Array  # of `VisionTower`, a row's one behind the other, padded with anything
    index_BT: Array  # int32: which of the row's embeddings stands at the token; -1: its own


def image_index(tokens_BT: Array, image_pad: int, sampled_BT: Array | None = None) -> jax.Array:
    """`Images.index_BT`: image tokens take the row's embeddings in order. Traceable.

    Args:
      tokens_BT: int32. image_pad: the id of image tokens.
      sampled_BT: 1 where the policy sampled the token: these are text. None: nowhere.
    """
    image_BT = jnp.asarray(tokens_BT) == image_pad
    if sampled_BT is not None:
        image_BT &= jnp.asarray(sampled_BT) == 0
    return jnp.where(image_BT, jnp.cumsum(image_BT, 1, dtype=jnp.int32) - 1, -1)


def splice(x_BTD: jax.Array, images: Images) -> jax.Array:
    """The embeddings of tokens, those of images in their places, in the dtype of `x_BTD`.

    An index beyond the row's embeddings gives NaN. Gradients flow to both.
    """
    index_BT1 = jnp.asarray(images.index_BT)[..., None]
    embed_BID = constrain(jnp.asarray(images.embed_BID), "rows", None, None)
    embed_BTD = jnp.take_along_axis(embed_BID, jnp.maximum(index_BT1, 0), 1)
    return jnp.where(index_BT1 < 0, x_BTD, embed_BTD.astype(x_BTD.dtype))


def row_positions(
    tokens_T: np.ndarray,
    grids: Sequence[Grid],
    *,
    merge: int,
    vision_start: int,
    image_pad: int,
    sampled_T: np.ndarray | None = None,
    start: int = 0,
) -> np.ndarray:
    """The position ids of one row, or of what one turn adds to it.

    Args:
      tokens_T: int, without padding.
      grids: (1, h, w) in patches of each image, in order.
      merge: patches along a side of what one token shows (spatial_merge_size).
      vision_start, image_pad: the ids of these tokens.
      sampled_T: 1 where the policy sampled the token: these are text. None: nowhere.
      start: the position of the first token: 0, or what earlier turns ended with, plus 1, which
        is `positions.max() + 1` of them all.

    Returns:
      int32 [3, T].

    Raises:
      ValueError: images and their tokens do not fit each other.
    """
    tokens_T = np.asarray(tokens_T)
    image_T = tokens_T == image_pad
    if sampled_T is not None:
        image_T &= np.asarray(sampled_T) == 0
    edge = np.flatnonzero(np.diff(image_T, prepend=False, append=False))
    spans = edge.reshape(-1, 2).tolist()  # start and end of each image
    if len(spans) != len(grids):
        raise ValueError(
            f"{len(spans)} runs of image token {image_pad} in a row of {len(tokens_T)} tokens, but "
            f"{len(grids)} image grids; give one grid for each, in order"
        )
    position_3T = np.ones((3, len(tokens_T)), np.int32)
    position_3T = np.cumsum(position_3T, 1, dtype=np.int32) + (start - 1)
    for (begin, end), (t, h, w) in zip(spans, grids, strict=True):
        rows, columns = h // merge, w // merge
        if t != 1 or h % merge or w % merge or end - begin != rows * columns:
            raise ValueError(
                f"an image of grid {(t, h, w)} takes 1 x {h} x {w} / {merge}^2 tokens; tokens "
                f"{begin} to {end} of the row are {end - begin} of id {image_pad}"
            )
        if begin == 0 or tokens_T[begin - 1] != vision_start:
            before = tokens_T[begin - 1] if begin else "nothing"
            raise ValueError(
                f"the image at token {begin} of the row stands behind {before}, expected "
                f"<|vision_start|>, {vision_start}"
            )
        first = position_3T[0, begin]
        place_2P = np.indices((rows, columns), np.int32).reshape(2, -1)
        position_3T[:, begin:end] = first
        position_3T[1:, begin:end] += place_2P
        # Text behind it goes on where the longer side ended.
        position_3T[:, end:] += max(rows, columns) - (end - begin)
    return position_3T
