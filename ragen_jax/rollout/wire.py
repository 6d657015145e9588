"""Serialize episodes to send them to other processes: text and numbers, no code.

The arrays of all turns are concatenated by kind, in an npz file. The pixels of images are
concatenated in the same way; an image that several turns show is stored once. The rest is JSON.
"""

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.core.types import Episode, Turn

ARRAYS = {"prompt": np.int32, "sampled": np.int32, "logp": np.float32}  # arrays of a turn
TUPLES = ("reasoning", "answer", "actions", "messages", "tools")  # fields of a turn


def to_bytes(episodes: Sequence[Episode]) -> bytes:
    """Serialize episodes for `from_bytes`; the infos of their turns must be valid JSON."""
    turns = [turn for episode in episodes for turn in episode.turns]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(turn, name) for turn in turns)])
        for name, dtype in ARRAYS.items()
    }
    kept = [turn.experts for turn in turns if turn.experts is not None]
    arrays["experts"] = np.concatenate(kept) if kept else np.zeros((0, 0), np.int16)
    # (shape, pixels) of an image -> its number; members of a group share many images.
    images: dict[tuple[tuple[int, ...], bytes], int] = {}
    records = [
        _fields(episode, "turns")
        | {"turns": [_turn_fields(turn, images) for turn in episode.turns]}
        for episode in episodes
    ]
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(records).encode(), np.uint8)
    arrays["sizes"] = np.array([shape[:2] for shape, _ in images], np.int32).reshape(-1, 2)
    arrays["pixels"] = np.frombuffer(b"".join(pixels for _, pixels in images), np.uint8)
    np.savez(file, allow_pickle=False, text=text, **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> list[Episode]:
    """Return the episodes that `to_bytes` serialized."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        records = json.loads(file["text"].tobytes())
        arrays = {name: file[name] for name in (*ARRAYS, "experts")}
        sizes, pixels = file["sizes"], file["pixels"]
    images, end = [], 0
    for height, width in sizes.tolist():
        start, end = end, end + 3 * height * width
        images.append(pixels[start:end].reshape(height, width, 3))
    ends = dict.fromkeys(arrays, 0)
    for episode in records:
        for turn in episode["turns"]:
            for name in arrays:
                if turn[name] is None:
                    continue
                start, ends[name] = ends[name], ends[name] + turn[name]
                turn[name] = arrays[name][start : ends[name]].copy()
            turn |= {name: tuple(turn[name]) for name in TUPLES}
            turn["spans"] = tuple(map(tuple, turn["spans"]))
            turn["images"] = tuple(images[number] for number in turn["images"])
        episode["turns"] = tuple(Turn(**turn) for turn in episode["turns"])
    return [Episode(**episode) for episode in records]


def _turn_fields(turn: Turn, images: dict[tuple[tuple[int, ...], bytes], int]) -> dict[str, Any]:
    """Return a turn's fields, with lengths in place of arrays and numbers in place of images.

    New images are added to `images`.
    """
    numbers = [images.setdefault((x.shape, x.tobytes()), len(images)) for x in turn.images]
    lengths = {name: len(getattr(turn, name)) for name in ARRAYS}
    experts = None if turn.experts is None else len(turn.experts)
    others = lengths | {"images": numbers, "experts": experts}
    return _fields(turn, *others) | others


def _fields(of: Episode | Turn, *without: str) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(of)}
    return {name: getattr(of, name) for name in names.difference(without)}
