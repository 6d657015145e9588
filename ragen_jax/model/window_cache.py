"""Caches whose windowed layers hold their window only, for sampling turn by turn.

A windowed layer reads the last `ModelConfig.window` positions, so its keys and values of earlier
positions are dropped once a prompt or a turn has been read. The others stay in order: attention
sees a shorter history (`Segment.window_N` tokens), in which every distance to a new token is as in
the whole one.

Arrays of windowed layers are then shorter than those of the others. A model that runs its layers
one by one has a tuple of them, as before. A model that scans over its layers has one stack of
layers for each kind: {kind: [L of the kind, N, K, S, D]}.

In slots, windows are in the tails of rows (rollout/tails.py), the other layers in pages.

Axes: as in segments.py.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import by_shard
from ragen_jax.core.types import Array
from ragen_jax.model.segments import Segment, append
from ragen_jax.model.shape import ModelConfig

WINDOWED = "windowed"


class LayersByKind(NamedTuple):
    """Keys and values of all layers by kind, of which a scan's layer reads those at `place`."""

    k: dict[str, Any]
    v: dict[str, Any]
    place: Array | int  # index among the layers of its kind
    window_N: jax.Array | None

    def of_kind(self, kind: str, length_N: jax.Array, *rows: jax.Array) -> tuple[Any, ...]:
        """Return the layer's segment for `attend`, if it is of this kind."""

        def at(x):
            return jax.lax.dynamic_index_in_dim(x, self.place, 0, keepdims=False)

        k, v = jax.tree.map(at, (self.k[kind], self.v[kind]))
        return k, v, tokens_held(kind, length_N, self.window_N), *rows


def tokens_held(kind: str, length_N: jax.Array, window_N: jax.Array | None) -> jax.Array:
    """Return the number of tokens that layers of a kind hold in a segment."""
    return length_N if kind != WINDOWED or window_N is None else window_N


def places(config: ModelConfig) -> np.ndarray:
    """Return the index of each layer among those of its kind."""
    seen = dict.fromkeys(config.attention_kinds, 0)
    found = []
    for layer in config.kinds:
        found.append(seen[layer.attention])
        seen[layer.attention] += 1
    return np.array(found)


def _indices(config: ModelConfig, kind: str) -> list[int]:
    return [i for i, layer in enumerate(config.kinds) if layer.attention == kind]


def of_kind(config: ModelConfig, layers: Any, kind: str) -> Any:
    """Return the keys or values of the layers of a kind."""
    if isinstance(layers, dict):
        return layers[kind]
    index = _indices(config, kind)
    if isinstance(layers, tuple):
        return tuple(layers[i] for i in index)
    return jax.tree.map(lambda x: x[np.array(index)], layers)


def _join(config: ModelConfig, parts: dict[str, Any]) -> Any:
    """Return keys or values of all layers in the form that a segment has; see the module."""
    if not all(isinstance(part, tuple) for part in parts.values()):
        return parts
    layers: dict[int, Any] = {}
    for kind, part in parts.items():
        layers |= zip(_indices(config, kind), part, strict=True)
    return tuple(layers[i] for i in range(config.layers))


def with_kind(config: ModelConfig, kind: str, layers: Any) -> Any:
    """Return keys or values of all layers, in which those of other kinds have no positions.

    Args:
      layers: keys or values of the layers of this kind, the result of `of_kind`.
    """

    def without_positions(x, *first):
        return jnp.zeros((*first, *x.shape[len(first) : -2], 0, x.shape[-1]), x.dtype)

    parts = {kind: layers}
    for other in config.attention_kinds:
        count = len(_indices(config, other))
        if other == kind:
            continue
        if isinstance(layers, tuple):
            parts[other] = (jax.tree.map(without_positions, layers[0]),) * count
        else:
            parts[other] = jax.tree.map(lambda x, n=count: without_positions(x, n), layers)
    return _join(config, parts)


def keep_windows(config: ModelConfig, segment: Segment) -> Segment:
    """Return a segment whose windowed layers hold the last `config.window` tokens of each row."""
    if WINDOWED not in config.attention_kinds:
        return segment
    held_N = tokens_held(WINDOWED, segment.length_N, segment.window_N)
    parts = {
        kind: (of_kind(config, segment.k, kind), of_kind(config, segment.v, kind))
        for kind in config.attention_kinds
    }
    S = jax.tree.leaves(parts[WINDOWED])[0].shape[-2]
    if S > config.window:
        last = functools.partial(last_positions, window=config.window)
        parts[WINDOWED] = by_shard(last, parts[WINDOWED], held_N)
    k, v = (_join(config, {kind: part[i] for kind, part in parts.items()}) for i in (0, 1))
    return dataclasses.replace(segment, k=k, v=v, window_N=jnp.minimum(held_N, config.window))


def last_positions(kv: Any, held_N: jax.Array, *, window: int) -> Any:
    """Return the last `window` of each row's first `held_N` positions, or its first if fewer."""
    position_NW = jnp.maximum(held_N - window, 0)[:, None] + jnp.arange(window)
    return jax.tree.map(lambda x: _take(x, position_NW), kv)


def _take(x: jax.Array, position_NW: jax.Array) -> jax.Array:
    index = position_NW.reshape(*(1,) * (x.ndim - 4), len(position_NW), 1, -1, 1)
    return jnp.take_along_axis(x, index, axis=-2)


def append_turn(
    config: ModelConfig,
    segment: Segment,
    k: Any,
    v: Any,
    count_B: jax.Array,
    *,
    capacity: int,
) -> Segment:
    """Return `segments.append`; windowed layers get room for all of the new tokens.

    Args:
      segment: with windows only (`keep_windows`), if the model has any.
      k, v: of all layers, as the model returns them.
    """
    if segment.window_N is None:
        return append(segment, k, v, count_B, capacity=capacity)
    grown: dict[str, Segment] = {}
    for kind in config.attention_kinds:
        old_k, old_v, new_k, new_v = (
            of_kind(config, x, kind) for x in (segment.k, segment.v, k, v)
        )
        room = capacity
        if kind == WINDOWED:
            room = sum(jax.tree.leaves(x)[0].shape[-2] for x in (old_k, new_k))
        held_N = tokens_held(kind, segment.length_N, segment.window_N)
        grown[kind] = append(Segment(old_k, old_v, held_N), new_k, new_v, count_B, capacity=room)
    members = len(count_B) // len(segment.length_N)
    length_B = jnp.repeat(segment.length_N, members, total_repeat_length=len(count_B)) + count_B
    return Segment(
        k=_join(config, {kind: x.k for kind, x in grown.items()}),
        v=_join(config, {kind: x.v for kind, x in grown.items()}),
        length_N=length_B,
        window_N=grown[WINDOWED].length_N,
    )


def without_last(segment: Segment) -> Segment:
    """Return a segment without the last token of each row."""
    held_N = segment.window_N
    return dataclasses.replace(
        segment,
        length_N=segment.length_N - 1,
        window_N=None if held_N is None else held_N - 1,
    )
