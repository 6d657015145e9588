"""A small Qwen2.5-VL in a directory as transformers writes it, and rows of tokens with images.

The language model's tensors are those of a Qwen2 under other names, and are opened as one.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from ragen_jax.model import hf, images, positions, qwen, vision, vision_tensors
from ragen_jax.rollout import album

NOT_OF_QWEN2 = ("model_type", "rope_parameters", "layer_types", "sliding_window")


class Seeing(NamedTuple):
    """A model that sees: the language model, the tower, the pictures' settings, special ids."""

    model: qwen.Qwen
    params: dict
    tower: vision.VisionTower
    tower_params: dict
    image_config: images.ImageConfig
    vision_start: int
    vision_end: int
    image_pad: int


def load(directory, scratch):
    """`Seeing` of a directory; scratch: a folder for the language model alone."""
    directory, scratch = Path(directory), Path(scratch)
    fields = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    text, rope = fields["text_config"], fields["text_config"]["rope_parameters"]
    scratch.mkdir(exist_ok=True)
    save_file(
        {name: x for name, x in tensors.items() if not name.startswith("visual.")},
        scratch / "model.safetensors",
    )
    qwen2 = {name: value for name, value in text.items() if name not in NOT_OF_QWEN2}
    qwen2 |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    qwen2["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    qwen2["tie_word_embeddings"] = fields["tie_word_embeddings"]
    (scratch / "config.json").write_text(json.dumps(qwen2))
    model, params = hf.load_weights(scratch)
    config = dataclasses.replace(model.config, mrope_section=tuple(rope["mrope_section"]))
    names = {field.name for field in dataclasses.fields(vision.VisionConfig)}
    given = {name: value for name, value in fields["vision_config"].items() if name in names}
    given["fullatt_block_indexes"] = tuple(given["fullatt_block_indexes"])
    vision_config = vision.VisionConfig(**given)
    return Seeing(
        qwen.Qwen(config),
        params,
        vision.VisionTower(vision_config),
        vision_tensors.to_params(tensors, vision_config),
        images.read_config(directory),
        fields["vision_start_token_id"],
        fields["vision_end_token_id"],
        fields["image_token_id"],
    )


def shown(seeing, picture_HW3):
    """The tokens of a picture, its ends included."""
    _, h, w = images.image_grid(*picture_HW3.shape[:2], seeing.image_config)
    pads = [seeing.image_pad] * (h * w // seeing.image_config.merge_size**2)
    return [seeing.vision_start, *pads, seeing.vision_end]


@functools.partial(jax.jit, static_argnums=(0, 3))
def embed(tower, tower_params, pixels_NPC, grid):
    return tower.apply({"params": tower_params}, pixels_NPC, grid)


class Rows(NamedTuple):
    """Rows of tokens, ready for the language model, and as transformers has them."""

    tokens_BT: np.ndarray  # images as their numbers
    length_B: np.ndarray
    positions_3BT: np.ndarray
    images: positions.Images
    pixels: list  # of all pictures in order: (patches, grid)
    ids_BT: np.ndarray  # images as image_pad


def album_of(seeing):
    """An empty album of the model."""
    tower = vision.Tower(seeing.tower, seeing.tower_params, seeing.image_config)
    return album.Album(tower, seeing.model.config.vocab_size)


def arrange(seeing, rows, width, book=None):
    """`Rows` of (tokens, pictures) pairs, right-padded to `width` tokens with zeros.

    book: an album that goes on; None: a new one.
    """
    book = book or album_of(seeing)
    book.meet(picture for _, pictures in rows for picture in pictures)
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
    """The parameters with a table of images; None: without."""
    return params if table is None else params | {"images": table}


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BT, at=None, segments=()):
    """(log-probs [B, T, V] of the next token, keys and values)."""
    hidden, kv = model.apply({"params": params}, tokens_BT, at, segments, keep_kv=True)
    return jax.nn.log_softmax(qwen.logits(params, hidden)), kv


def picked(logp_BTV, tokens_BT):
    """[B, T]: entry t is the log-prob of token t, as transformers numbers it; entry 0 is 0."""
    of_next = np.take_along_axis(np.asarray(logp_BTV)[:, :-1], tokens_BT[:, 1:, None], -1)[..., 0]
    return np.pad(of_next, ((0, 0), (1, 0)))
