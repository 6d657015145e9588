"""Load a Qwen2.5-VL from a directory, and arrange rows of tokens with images."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from safetensors.numpy import save_file

from ragen_jax.model import hf, qwen, weights
from ragen_jax.model.vision import image_table as image_table
from ragen_jax.model.vision import images, positions
from ragen_jax.model.vision import tensors as vision_tensors
from ragen_jax.model.vision import tower as vision


class VisionModel(NamedTuple):
    """Language model, vision tower, image settings and special ids."""

    model: qwen.Qwen
    params: dict
    tower: vision.VisionTower
    tower_params: dict
    image_config: images.ImageConfig
    vision_start: int
    vision_end: int
    image_pad: int


def load(directory):
    """Load the `VisionModel` of a directory."""
    model, params = hf.load_weights(directory)
    tower, tokens = hf.load_tower(directory), model.config.image_tokens
    return VisionModel(
        *(model, params),
        *(tower.model, tower.params, tower.images),
        *(tokens.start, tokens.end, tokens.pad),
    )


def read_tower(folder, tensors, config):
    """Return a tower's parameters from tensors (NumPy, published names), through a file in
    `folder`."""
    save_file(tensors, folder / weights.WEIGHTS)
    with weights.open_tensors(folder) as found:
        vision_tensors.check_tensors(folder, config, found)
        return vision_tensors.read(found, config)


def shown(seeing, picture_HW3):
    """Return the tokens of a picture, including the start and end tokens."""
    _, h, w = images.image_grid(*picture_HW3.shape[:2], seeing.image_config)
    pads = [seeing.image_pad] * (h * w // seeing.image_config.merge_size**2)
    return [seeing.vision_start, *pads, seeing.vision_end]


@functools.partial(jax.jit, static_argnums=(0, 3))
def embed(tower, tower_params, pixels_NPC, grid):
    return tower.apply({"params": tower_params}, pixels_NPC, grid)


class Rows(NamedTuple):
    """Rows of tokens, ready for the language model and in transformers' form."""

    tokens_BT: np.ndarray  # image ids past the vocabulary
    length_B: np.ndarray
    positions_3BT: np.ndarray
    images: positions.Images
    pixels: list  # (patches, grid) of all pictures in order
    ids_BT: np.ndarray  # image tokens are image_pad


def album_of(seeing):
    """Return an empty image table of the model."""
    tower = vision.Tower(seeing.tower, seeing.tower_params, seeing.image_config)
    return image_table.ImageTable(tower, seeing.model.config.vocab_size)


def arrange(seeing, rows, width, book=None):
    """Return `Rows` of (tokens, pictures) pairs, right-padded to `width` tokens with zeros.

    book: the image table to add to; None: a new table.
    """
    book = book or album_of(seeing)
    book.register(picture for _, pictures in rows for picture in pictures)
    ids_BT = np.zeros((len(rows), width), np.int32)
    for row, (tokens, _) in zip(ids_BT, rows, strict=True):
        row[: len(tokens)] = tokens
    numbers = [
        first + np.arange(count)
        for _, pictures in rows
        for first, count in map(book.span, pictures)
    ]
    tokens_BT = ids_BT.copy()
    if numbers:
        tokens_BT[ids_BT == seeing.image_pad] = np.concatenate(numbers)
    table = book.table(tokens_BT)
    at = positions.token_positions({"images": table}, tokens_BT)
    return Rows(
        tokens_BT,
        np.array([len(tokens) for tokens, _ in rows], np.int32),
        np.asarray(at),
        table,
        [images.preprocess(x, seeing.image_config) for _, pictures in rows for x in pictures],
        ids_BT,
    )


def seen_by(params, table):
    """Return the parameters with a table of images, or unchanged if `table` is None."""
    return params if table is None else params | {"images": table}


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BT, at=None, segments=()):
    """Return (log-probs [B, T, V] of the next token, keys and values)."""
    hidden, kv = model.apply({"params": params}, tokens_BT, at, segments, keep_kv=True)
    return jax.nn.log_softmax(qwen.logits(params, hidden)), kv


def picked(logp_BTV, tokens_BT):
    """Return [B, T]: entry t is the log-prob of token t, as transformers numbers it; entry 0 is
    0."""
    of_next = np.take_along_axis(np.asarray(logp_BTV)[:, :-1], tokens_BT[:, 1:, None], -1)[..., 0]
    return np.pad(of_next, ((0, 0), (1, 0)))


def torch_logps(theirs, rows, image_pad):
    """Return log-probs [B, T, V] of `Rows`, computed by transformers' model."""
    import torch

    ids = torch.tensor(rows.ids_BT).long()
    mask = torch.arange(ids.shape[1]) < torch.tensor(rows.length_B)[:, None]
    pixels, grids = zip(*rows.pixels, strict=True)
    with torch.no_grad():
        found = theirs(
            ids,
            pixel_values=torch.tensor(np.concatenate(pixels)),
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(ids == image_pad).int(),
            attention_mask=mask.long(),
        )
    return found.logits.log_softmax(-1).numpy()
