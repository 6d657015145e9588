"""Episodes as bytes, as they go from one process to another: text and numbers, nothing that is run.

Their arrays lie one behind the other in three arrays of an npz, all else is JSON.
"""

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.types import Episode, Turn

ARRAYS = {"prompt": np.int32, "sampled": np.int32, "logp": np.float32}  # of a turn


def to_bytes(episodes: Sequence[Episode]) -> bytes:
    """What `from_bytes` makes the episodes of; the infos of their turns hold what JSON does."""
    turns = [turn for episode in episodes for turn in episode.turns]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(turn, name) for turn in turns)])
        for name, dtype in ARRAYS.items()
    }
    told = [
        _fields(episode, "turns") | {"turns": [_told(turn) for turn in episode.turns]}
        for episode in episodes
    ]
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    np.savez(file, allow_pickle=False, text=text, **arrays)
    return file.getvalue()


def from_bytes(data: bytes) -> list[Episode]:
    """The episodes of `to_bytes`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        told = json.loads(file["text"].tobytes())
        arrays = {name: file[name] for name in ARRAYS}
    ends = dict.fromkeys(ARRAYS, 0)
    for episode in told:
        for turn in episode["turns"]:
            for name in ARRAYS:
                start, ends[name] = ends[name], ends[name] + turn[name]
                turn[name] = arrays[name][start : ends[name]].copy()
            turn |= {name: tuple(turn[name]) for name in ("reasoning", "answer", "actions")}
        episode["turns"] = tuple(Turn(**turn) for turn in episode["turns"])
    return [Episode(**episode) for episode in told]


def _told(turn: Turn) -> dict[str, Any]:
    """A turn with the lengths of its arrays in their places."""
    return _fields(turn, *ARRAYS) | {name: len(getattr(turn, name)) for name in ARRAYS}


def _fields(of: Episode | Turn, *without: str) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(of)}
    return {name: getattr(of, name) for name in names.difference(without)}
