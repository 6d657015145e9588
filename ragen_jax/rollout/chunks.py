"""Sample in chunks of a few tokens, with a cache whose rows are reused.

    read           new tokens of some rows -> their keys and values
    decode_chunk   last token of every row -> up to C further tokens, keys and values of its input
    fold           keys and values -> the cache, after the tokens that its rows hold

sample.py decodes until the last row of a batch has stopped. Here the host sees the rows after every
chunk and gives new work to a row that has stopped. Between two calls, a row consists of the tokens
in the cache and one more token that has not been read yet. The next chunk reads that token and
draws its successor. A prompt is therefore read without its last token, and no logits are kept
between two calls.

A cache is a list of pages, each with all rows: the first page has the first positions of every row,
the second page the next positions. The cache grows by appending a page, so that there is never a
second copy of it. What layers keep of the end of a row only is in a tail (tails.py).

Axes: B rows of the cache, R rows that a call reads, E new tokens, C tokens of a chunk,
V vocabulary. On a mesh, rows are sharded as in sample.py, and row indices count within a shard.
"""

import functools
from collections.abc import Iterator, Sequence

import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import by_shard, constrain
from ragen_jax.core.types import Array, Params
from ragen_jax.model.qwen import Qwen, separate_layers
from ragen_jax.model.qwen import logits as output_logits
from ragen_jax.model.segments import Layers, Segment, write
from ragen_jax.model.vision.positions import token_positions
from ragen_jax.rollout.drawing import draw_tokens
from ragen_jax.rollout.routes import no_experts, put_experts
from ragen_jax.rollout.sample import (
    DecodeSettings,
    empty_reply,
    one_or_none,
    put,
    read_tokens,
    unless,
)
from ragen_jax.rollout.tails import Kept, Tail, add_tail, keep_tokens, lay_out_rows, split

Page = tuple[Layers, Layers]  # keys and values of the layers that pages hold, as in `Segment`


@flax.struct.dataclass
class DecodeBatch:
    """The replies that a chunk continues, one in each row of the cache."""

    token_B: Array  # int32, last token of the row
    length_B: Array  # int32, number of tokens before it
    drawn_B: Array  # int32, number of tokens in the reply so far
    budget_B: Array  # int32, number of tokens the reply may still get; 0: no reply is running
    keys_B: jax.Array  # the result of `episode_keys`
    # int32, with images: `ImageTable.shift` of the tokens before the last; None: without images
    shift_B: Array | None = None
    stop_B: Array | None = None  # int32, state of the stop strings (stops.py); None: there are none


@functools.partial(jax.jit, static_argnames=("model", "rows", "positions"))
def empty_page(model: Qwen, params: Params, *, rows: int, positions: int) -> Page:
    """Return a page of zeros with room for `positions` tokens in each of `rows` rows."""
    keep = functools.partial(keep_tokens, model, rows=rows, positions=positions)
    page, _ = jax.eval_shape(keep, params)
    return lay_out_rows(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), page))


@jax.jit
def keep_rows(page: Kept, rows_B: jax.Array) -> Kept:
    """Return the given rows of a page or a tail.

    Args:
      rows_B: int32 indices; each shard's entries index the rows of that shard.
    """

    def take(page, rows_B):
        return jax.tree.map(lambda x: jnp.take(x, rows_B, axis=-4), page)

    return lay_out_rows(by_shard(take, page, rows_B))


@functools.partial(jax.jit, static_argnames=("model",))
def read(
    model: Qwen,
    params: Params,
    pages: Sequence[Page],
    rows_R: jax.Array,
    start_R: jax.Array,
    tokens_RE: jax.Array,
    shift_R: jax.Array | None = None,
    *,
    tail: Tail | None = None,
    count_R: jax.Array | None = None,
) -> tuple[Page, jax.Array | None, Tail | None]:
    """Read new tokens that follow the cached tokens of some rows.

    Args:
      pages: [] if all rows start from nothing.
      rows_R: int32, indices of the cache rows that the new tokens follow.
      start_R: int32, number of cached tokens of each row to keep; later ones are ignored.
      tokens_RE: int32, right-padded.
      shift_R: int32, with images: position of the first new token minus start_R
        (`ImageTable.shift`).
      tail: the cache's, in a model that has one.
      count_R: int32, number of real tokens of each row, in a model that has a tail.

    Returns:
      (keys and values of the new tokens, their `Segment.experts_NTX`, their tail for `fold_tail`).
    """
    position_R = start_R if shift_R is None else start_R + shift_R
    position_RE = token_positions(params, tokens_RE, position_R)
    memory = add_tail(model.config, _memory(pages, start_R, rows_R), tail, start_R, rows_R)
    _, kept, experts = read_tokens(model, params, tokens_RE, position_RE, memory, count_B=count_R)
    page, new_tail = split(model.config, kept)
    return lay_out_rows(page), _by_row(experts), lay_out_rows(new_tail)


@functools.partial(jax.jit, donate_argnames=("page",))
def fold(
    page: Page,
    new: Page,
    first: jax.Array,
    start_R: jax.Array,
    count_R: jax.Array,
    reader_B: jax.Array,
) -> Page:
    """Write new keys and values into a page, as far as their positions are in it.

    This is a separate program because it writes into the page: a program that also reads pages
    would make XLA copy them.

    Args:
      new: the result of `read`, or of `decode_chunk` (R = B).
      first: int32, number of positions in the earlier pages.
      start_R: as in `read`, or length_B of a `DecodeBatch`.
      count_R: int32, number of real tokens; 0 on padding rows.
      reader_B: int32, index of the R rows that each row of the cache takes its tokens from; R: the
        row is unchanged. Several rows may take the tokens of one reader that started from nothing.
    """

    def fold_rows(page, k, v, start_R, count_R, reader_B):
        k, v = jax.tree.map(lambda x: jnp.take(x, reader_B, axis=-4, mode="clip"), (k, v))
        start_B, count_B = (jnp.take(x, reader_B, mode="clip") for x in (start_R, count_R))
        count_B = jnp.where(reader_B < start_R.shape[0], count_B, 0)
        return _fold(page, k, v, start_B, count_B)

    return lay_out_rows(by_shard(fold_rows, page, *new, start_R - first, count_R, reader_B))


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def decode_chunk(
    model: Qwen,
    params: Params,
    pages: Sequence[Page],
    batch: DecodeBatch,
    temperature: jax.Array,
    tail: Tail | None = None,
    *,
    settings: DecodeSettings,
) -> tuple[Page, jax.Array, jax.Array, jax.Array, jax.Array | None, Tail | None]:
    """Sample up to `settings.max_tokens` tokens of each row's reply.

    Args:
      pages: the pages with the first max(batch.length_B) positions.
      temperature: traced scalar > 0.
      tail: the cache's, in a model that has one.

    Returns:
      (keys and values of the tokens read, to be folded in after length_B; tokens_BC, logp_BC,
      count_B, as in `Sampled`; `Segment.experts_NTX` of the tokens read; their tail for
      `fold_tail`). The tokens read are `token_B` and all but the last of the `count_B` sampled
      tokens.
    """
    length_B, keys_B = batch.length_B, batch.keys_B
    B, V, C = length_B.shape[0], model.config.vocab_size, settings.max_tokens
    memory = add_tail(model.config, _memory(pages, length_B), tail, length_B)
    position_B = length_B if batch.shift_B is None else length_B + batch.shift_B
    params = separate_layers(model.config, params)

    def body(carry):
        index, token_B, done_B, *read, tokens_BC, logp_BC, count_B, state_B = carry
        reply_k, reply_v, states, kept = read
        length_N = jnp.full((B,), index, jnp.int32)
        reply = Segment(k=reply_k, v=reply_v, length_N=length_N, state=states)
        position_B1 = (position_B + index)[:, None]
        new = read_tokens(model, params, token_B[:, None], position_B1, (*memory, reply))
        hidden, (k, v, *new_states), experts = new
        # A reply that has ended does not change its state.
        states = jax.tree.map(functools.partial(unless, done_B), states, one_or_none(new_states))
        read = put(reply_k, k, index), put(reply_v, v, index), states
        read = *read, put_experts(kept, experts, index)
        logits_BV = output_logits(params, hidden[:, 0]) / temperature
        scaled_BV = settings.filter_logits(logits_BV)
        drawn, logp_B = draw_tokens(scaled_BV, keys_B, batch.drawn_B + index)
        token_B = jnp.where(done_B, 0, drawn).astype(jnp.int32)
        logp_B = jnp.where(done_B, 0.0, logp_B)
        count_B = count_B + ~done_B
        state_B, stops_B = settings.follow(state_B, token_B, V)
        done_B = done_B | stops_B | (index + 1 >= batch.budget_B)
        tokens_BC = jax.lax.dynamic_update_slice_in_dim(tokens_BC, token_B[:, None], index, axis=1)
        logp_BC = jax.lax.dynamic_update_slice_in_dim(logp_BC, logp_B[:, None], index, axis=1)
        return index + 1, token_B, done_B, *read, tokens_BC, logp_BC, count_B, state_B

    carry = (
        jnp.int32(0),
        batch.token_B,
        batch.budget_B <= 0,
        empty_reply(memory[0].k, B, C),
        empty_reply(memory[0].v, B, C),
        memory[-1].state,
        no_experts(model, B, C),
        jnp.zeros((B, C), jnp.int32),
        jnp.zeros((B, C), jnp.float32),
        jnp.zeros(B, jnp.int32),
        jnp.zeros(B, jnp.int32) if batch.stop_B is None else batch.stop_B,
    )
    carry = jax.lax.while_loop(lambda c: (c[0] < C) & ~c[2].all(), body, carry)
    *_, reply_k, reply_v, states, kept, tokens_BC, logp_BC, count_B, _ = carry
    page, new_tail = split(model.config, (reply_k, reply_v, *([] if states is None else [states])))
    return (
        lay_out_rows(page),
        constrain(tokens_BC, "rows", None),
        constrain(logp_BC, "rows", None),
        constrain(count_B, "rows"),
        _by_row(kept),
        lay_out_rows(new_tail),
    )


def _by_row(experts_NTX: jax.Array | None) -> jax.Array | None:
    return None if experts_NTX is None else constrain(experts_NTX, "rows", None, None)


def _places(pages: Sequence[Page]) -> Iterator[tuple[int, int, Page]]:
    """Yield (first position, number of positions, page) of each page."""
    first = 0
    for page in pages:
        size = jax.tree.leaves(page)[0].shape[-2]
        yield first, size, page
        first += size


def _memory(
    pages: Sequence[Page], length: Array, rows: jax.Array | None = None
) -> tuple[Segment, ...]:
    """Return the first `length` positions of the pages' rows: all rows, or those of `rows`."""
    return tuple(
        Segment(k=k, v=v, length_N=jnp.clip(length - first, 0, size), rows_B=rows)
        for first, size, (k, v) in _places(pages)
    )


def _fold(page: Page, k: Layers, v: Layers, start_B: jax.Array, count_B: jax.Array) -> Page:
    """Write each row's first `count_B` new tokens into a page, from position `start_B` on.

    `start_B` may be before or after the page; tokens outside the page are left out.
    """
    size, T = (jax.tree.leaves(x)[0].shape[-2] for x in (page, k))
    position_BT = start_B[:, None] + jnp.arange(T)
    here = (jnp.arange(T) < count_B[:, None]) & (position_BT >= 0)
    position_BT = jnp.where(here, position_BT, size)  # positions past the end are not written
    return jax.tree.map(lambda old, new: write(old, new, position_BT), page, (k, v))
