"""What the rows of a cache in slots keep of their end only.

Linear-attention layers keep a state, and windowed layers their window. Neither grows with the row,
so that neither is in pages: a tail has all of it, for all rows of the cache. A row can go on only
after its last token, or from nothing, because a tail does not know how it was before.

Where a model has windowed layers and others, the pages have the others only. A model whose layers
are all windowed keeps all positions in pages.

Axes: as in chunks.py, and W positions of a window.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import by_shard, constrain
from ragen_jax.core.types import Array, Params
from ragen_jax.model.delta_rule import States
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.segments import Layers, Segment, append
from ragen_jax.model.shape import ModelConfig
from ragen_jax.model.window_cache import WINDOWED, last_positions, of_kind, with_kind
from ragen_jax.rollout.sample import one_or_none, read_tokens

Kept = TypeVar("Kept")


@flax.struct.dataclass
class Tail:
    """The end of some rows; axis -4 of each array are the rows."""

    # Keys and values of the last W positions in windowed layers; None: they are in pages.
    window: tuple[Layers, Layers] | None
    state: States | None  # after the last token; None: the model has no linear-attention layers


def has_tail(config: ModelConfig) -> bool:
    """Return whether any layer keeps the end of a row only."""
    return config.has_state or _has_windows(config)


def _has_windows(config: ModelConfig) -> bool:
    return WINDOWED in config.attention_kinds and len(config.attention_kinds) > 1


def can_continue(config: ModelConfig, cached: int, start: int) -> bool:
    """Return whether a row with `cached` tokens can go on after its first `start` tokens.

    A window that has lost nothing yet is as good as a page.
    """
    if start in (0, cached) or not has_tail(config):
        return True
    return not config.has_state and cached <= config.window


def split(config: ModelConfig, kept: Sequence[Any]) -> tuple[tuple[Layers, Layers], Tail | None]:
    """Return what the model keeps of new tokens as (what belongs into pages, into a tail).

    The tail's windows have all of the new tokens.

    Args:
      kept: (keys, values) and, in a model that has one, the state.
    """
    k, v, *states = kept
    if not has_tail(config):
        return (k, v), None
    state = one_or_none(states)
    if not _has_windows(config):
        return (k, v), Tail(None, state)
    windowed, (k, v) = (
        tuple(of_kind(config, x, kind) for x in (k, v)) for kind in (WINDOWED, _other(config))
    )
    return (k, v), Tail(windowed, state)


def _other(config: ModelConfig) -> str:
    """Return the kind of the layers that are not windowed."""
    (other,) = (kind for kind in config.attention_kinds if kind != WINDOWED)
    return other


def keep_tokens(
    model: Qwen, params: Params, *, rows: int, positions: int
) -> tuple[tuple[Layers, Layers], Tail | None]:
    """Return `split` of `positions` new tokens of `rows` rows; for `jax.eval_shape`."""
    plain = Qwen(dataclasses.replace(model.config, attention="xla"))
    tokens = jnp.zeros((rows, positions), jnp.int32)
    return split(model.config, read_tokens(plain, params, tokens)[1])


@functools.partial(jax.jit, static_argnames=("model", "rows"))
def empty_tail(model: Qwen, params: Params, *, rows: int) -> Tail:
    """Return the tail of `rows` rows without tokens, of a model that has one."""
    positions = max(model.config.window, 1)
    keep = functools.partial(keep_tokens, model, rows=rows, positions=positions)
    _, shapes = jax.eval_shape(keep, params)
    return lay_out_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def lay_out_rows(kept: Kept) -> Kept:
    """Shard the rows and heads of a page or a tail over the mesh in use."""

    def lay_out(x):
        return constrain(x, *(None,) * (x.ndim - 4), "rows", "kv_heads", None, None)

    laid_out: Kept = jax.tree.map(lay_out, kept)
    return laid_out


def add_tail(
    config: ModelConfig,
    pages: tuple[Segment, ...],
    tail: Tail | None,
    start_R: Array,
    rows_R: jax.Array | None = None,
) -> tuple[Segment, ...]:
    """Return the memory of rows whose tokens are in pages and a tail.

    Args:
      pages: the segments of the pages; (): all rows start from nothing.
      start_R: number of tokens of each row.
      rows_R: as in `chunks.read`; None: all rows.
    """
    if tail is None or not pages:
        return pages
    if tail.window is not None:
        nothing_R = jnp.zeros_like(start_R)
        other = functools.partial(with_kind, config, _other(config))
        pages = tuple(
            dataclasses.replace(page, k=other(page.k), v=other(page.v), window_N=nothing_R)
            for page in pages
        )
        k, v = (with_kind(config, WINDOWED, x) for x in tail.window)
        held_R = jnp.minimum(start_R, config.window)
        pages = *pages, Segment(k, v, nothing_R, rows_B=rows_R, window_N=held_R)
    state = tail.state
    if state is not None:
        if rows_R is not None:
            state = by_shard(_take_rows, state, rows_R)
        some_R = (start_R > 0)[:, None, None, None]
        known: Any = jax.tree.map(lambda x: jnp.where(some_R, x, jnp.zeros_like(x)), state)
        state = known
    return *pages[:-1], dataclasses.replace(pages[-1], state=state)


def _take_rows(state: States, rows_R: jax.Array) -> States:
    return jax.tree.map(lambda x: jnp.take(x, rows_R, axis=-4), state)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("tail",))
def fold_tail(
    config: ModelConfig,
    tail: Tail,
    new: Tail,
    start_R: jax.Array,
    count_R: jax.Array,
    reader_B: jax.Array,
) -> Tail:
    """Return the tail after new tokens.

    Args:
      new: the third result of `chunks.read`, or the last of `chunks.decode_chunk`.
      start_R, count_R, reader_B: as in `chunks.fold`.
    """

    def fold_rows(tail, new, start_R, count_R, reader_B):
        here_B = reader_B < start_R.shape[0]
        taken: Any = jax.tree.map(lambda x: jnp.take(x, reader_B, axis=-4, mode="clip"), new)
        start_B, count_B = (jnp.take(x, reader_B, mode="clip") for x in (start_R, count_R))
        count_B = jnp.where(here_B, count_B, 0)
        window, state = tail.window, tail.state
        folded_state: Any = state
        if window is not None:
            W = config.window
            held_B = jnp.where(here_B, jnp.minimum(start_B, W), W)
            T = jax.tree.leaves(taken.window)[0].shape[-2]
            k, v = window
            grown = append(Segment(k, v, held_B), *taken.window, count_B, capacity=W + T)
            window = last_positions((grown.k, grown.v), grown.length_N, window=W)
        if state is not None:
            read_B = (count_B > 0)[:, None, None, None]
            folded_state = jax.tree.map(
                lambda old, x: jnp.where(read_B, x, old), state, taken.state
            )
        return Tail(window, folded_state)

    folded: Tail = by_shard(fold_rows, tail, new, start_R, count_R, reader_B)
    return lay_out_rows(folded)
