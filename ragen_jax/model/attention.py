"""Grouped-query attention over read-only memory and over the new tokens.

Every program of the project computes a form of the same sum: new tokens attend causally to each
other and to zero or more preceding `Segment`s of keys and values computed earlier.

    training, prefill   no segment
    extend              one segment: the row's own history
    decode              two: the prompt (shared by a group's rows on the first turn) and the
                        tokens sampled so far in this turn
    slots               the pages of a cache that grows by whole pages and, while decoding, the
                        tokens sampled since the rows were last read
    cross-scoring       one: a prompt shared by every reasoning scored under it
    packed rows         no segment; a `Tree` says which of the earlier positions a token reads

Segments are never written inside a layer, so a decode loop carries only the small buffer of
the turn's tokens; the long prompt stays loop-invariant and is neither copied nor repeated.

Axes: B rows, N segment rows (B = N * m, row b reads segment row b // m), T new tokens,
S segment positions, H heads, K key-value heads, D head width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import by_shard
from ragen_jax.model.kernels import KERNELS
from ragen_jax.model.page_kernel import read_page
from ragen_jax.model.products import MASKED, mix_values, score_keys
from ragen_jax.model.segments import KV, PageOfLayers
from ragen_jax.model.tree_attention import Tree, attend_rows, attend_tree

# Memory positions scored at a time where a row has several new tokens and the memory is long. The
# scores of all positions, [B, H, T, S], would be larger than everything else.
BLOCK = 256
WHOLE = 1024  # a memory of at most this number of positions is scored at once


def attend(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    segments: Sequence[tuple[Any, ...]],
    *,
    kernel: str = "xla",
    tree: Tree | None = None,
    window: jax.Array | int | None = None,
) -> jax.Array:
    """Return softmax attention of new tokens over `segments` and, causally, over each other.

    Args:
      q_BTHD: queries, rotated.
      k_BTKD, v_BTKD: keys (rotated) and values of the same new tokens.
      segments: (k_NKSD, v_NKSD, length_N) of one layer each; N divides B. Keys and values are
        arrays or `Quantised`. A fourth entry, rows_B of `Segment`, is allowed only with several new
        tokens.
      kernel: "xla" (the plain form below), or one of `kernels.KERNELS`, used if there are no
        segments. For "splash" the queries are already scaled (kernels.SCALED_QUERIES).
      tree: which earlier positions each position reads; None: all. Not with segments. Its plain
        form accepts the positions in blocks, [B * Q, block, H, D].
      window: number of positions that a token reads, itself included; None: all. An array is
        allowed for the plain form.

    Returns:
      [B, T, H, D] in the dtype of `v_BTKD`. Right-padded rows need no mask: padding comes after
      every real token, so causality already hides it. With several new tokens, a memory longer
      than `WHOLE` positions, or one read through rows_B, is read in blocks, with a running maximum
      and denominator (Milakov and Gimelshein, arXiv 1805.02867).
    """
    if tree is not None:
        if kernel != "xla":
            attend_one = functools.partial(KERNELS[kernel], window=window)
            return attend_rows(attend_one, q_BTHD, k_BTKD, v_BTKD, tree)
        return attend_tree(q_BTHD, k_BTKD, v_BTKD, tree, window)
    if not segments and kernel != "xla":
        return KERNELS[kernel](q_BTHD, k_BTKD, v_BTKD, window=window)
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    # A single key head gets no axis: XLA's CPU backend does not fuse across an axis of length
    # one, which made this four times slower.
    heads = (K,) if K > 1 else ()

    def by_head(x_NKSD):
        return jax.tree.map(lambda x: x.reshape(x.shape[0], *heads, *x.shape[2:]), x_NKSD)

    Q = H // K * T  # queries of one row that share a key head, head-major
    q = q_BTHD.reshape(B, T, K, H // K, D)
    q = q.transpose(0, 2, 3, 1, 4).reshape(B, *heads, Q, D)

    pages = [s for s in segments if isinstance(s[0], PageOfLayers)]
    # Of windowed and other layers, either may have no positions in a segment (rollout/tails.py).
    segments = [s for s in segments if not isinstance(s[0], PageOfLayers) and s[0].shape[2]]
    reads = jnp.tril(jnp.ones((T, T), bool))
    firsts = [None] * len(segments)  # first position of each segment that a query reads; None: 0
    if window is not None:
        at_T = jnp.arange(T)
        reads = reads & (at_T[:, None] - at_T < window)
        for i in range(len(segments)):
            # Positions from the start of this segment to the first new token.
            before_B = jnp.zeros(B, jnp.int32)
            for _, _, length_N, *_ in segments[i:]:
                before_B += jnp.repeat(length_N, B // len(length_N), total_repeat_length=B)
            first_BT = before_B[:, None] + at_T - window + 1
            first_BQ = jnp.tile(first_BT, (1, H // K))
            firsts[i] = first_BQ.reshape(B, *(1 for _ in heads), Q, 1)
    causal = jnp.tile(reads, (H // K, 1))  # [Q, T]
    own_scores = score_keys(q, by_head(k_BTKD.swapaxes(1, 2)))

    def by_row(out):
        out = out.astype(v_BTKD.dtype).reshape(B, K, H // K, T, D)
        return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)

    scores = [jnp.where(causal, own_scores, MASKED)]
    if T > 1 and (
        sum(segment[0].shape[2] for segment in segments) > WHOLE
        or any(len(segment) == 4 for segment in segments)
    ):
        top = jax.lax.stop_gradient(scores[0].max(-1, keepdims=True))
        weight = jnp.exp(scores[0] - top)
        out = mix_values(weight, by_head(v_BTKD.swapaxes(1, 2)))
        carry = top, weight.sum(-1, keepdims=True), out
        for segment, first in zip(segments, firsts, strict=True):
            carry = _attend_in_blocks(q, by_head, carry, first, *segment)
        _, total, out = carry
        return by_row(out / total)
    # Scores stay laid out by segment row, [N, K, m * Q, S]; only per-query values are moved.
    for (k_NKSD, _, length_N), first in zip(segments, firsts, strict=True):
        N, S = length_N.shape[0], k_NKSD.shape[2]
        real = (jnp.arange(S) < length_N[:, None]).reshape(N, *(1 for _ in heads), 1, S)
        if first is not None:
            real = real & (jnp.arange(S) >= _gather(first, N))
        scores.append(jnp.where(real, score_keys(_gather(q, N), by_head(k_NKSD)), MASKED))

    # One softmax over all keys: the pieces share a maximum and a denominator, so they are never
    # concatenated.
    tops = [_scatter(score.max(-1, keepdims=True), B) for score in scores]
    read = [
        jax.tree.map(by_head, tuple(read_page(q.reshape(B, K, Q, D), *page, length_B)))
        for page, length_B in pages
    ]
    tops += [top for top, _, _ in read]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))  # [B, K, Q, 1]
    weights = [jnp.exp(score - _gather(top, score.shape[0])) for score in scores]
    total = sum(_scatter(weight.sum(-1, keepdims=True), B) for weight in weights)

    out = mix_values(weights[0], by_head(v_BTKD.swapaxes(1, 2)))
    for weight, (_, v_NKSD, _) in zip(weights[1:], segments, strict=True):
        out = out + _scatter(mix_values(weight, by_head(v_NKSD), v_BTKD.dtype), B)
    for top_of_page, total_of_page, out_of_page in read:
        kept = jnp.exp(top_of_page - top)
        total, out = total + kept * total_of_page, out + kept * out_of_page
    return by_row(out / total)


def _attend_in_blocks(
    q: jax.Array,
    by_head: Callable[[Any], Any],
    carry: tuple[jax.Array, jax.Array, jax.Array],
    first: jax.Array | None,
    k_NKSD: KV,
    v_NKSD: KV,
    length_N: jax.Array,
    rows_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add a segment to (maximum, denominator, sum of values), `BLOCK` positions at a time.

    This is a loop because, without it, the scheduler would compute all scores first.

    Args:
      q: [B, .., Q, D].
      carry: (maximum, denominator, sum of values) without the segment.
      first: [B, .., Q, 1], the first position that a query reads; None: 0.
      rows_B: see `Segment`.
    """
    B, S = q.shape[0], k_NKSD.shape[2]
    block = min(BLOCK, S)

    def read(x, start):
        x = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, block, axis=2), x)
        return by_head(x if rows_B is None else by_shard(_take, x, rows_B))

    def body(carry, index):
        top, total, out = carry
        start = jnp.minimum(index * block, S - block)  # the last block reaches back
        position = start + jnp.arange(block)
        real = (position >= index * block) & (position < length_N[:, None])
        real = real.reshape(len(length_N), *(1 for _ in q.shape[1:-1]), block)
        if first is not None:
            real = real & (position >= _gather(first, len(length_N)))
        score = jnp.where(real, score_keys(_gather(q, len(length_N)), read(k_NKSD, start)), MASKED)
        higher = jnp.maximum(top, _scatter(score.max(-1, keepdims=True), B))
        higher = jax.lax.stop_gradient(higher)
        kept = jnp.exp(top - higher)
        weight = jnp.exp(score - _gather(higher, len(length_N)))
        total = total * kept + _scatter(weight.sum(-1, keepdims=True), B)
        out = out * kept + _scatter(mix_values(weight, read(v_NKSD, start), q.dtype), B)
        return (higher, total, out), None

    if S == block:
        return body(carry, 0)[0]
    carry, _ = jax.lax.scan(body, carry, jnp.arange(-(-S // block)))
    return carry


def _take(x: Any, rows_B: jax.Array) -> Any:
    return jax.tree.map(lambda x: jnp.take(x, rows_B, axis=0), x)


def _gather(x: jax.Array, N: int) -> jax.Array:
    """Join the queries of all rows that share a segment row: [B, .., Q, E] -> [N, .., m * Q, E]."""
    B, *heads, Q, E = x.shape
    if N == B:
        return x
    x = jnp.moveaxis(x.reshape(N, B // N, *heads, Q, E), 1, -3)
    return x.reshape(N, *heads, B // N * Q, E)


def _scatter(x: jax.Array, B: int) -> jax.Array:
    """Invert `_gather`."""
    N, *heads, Q, E = x.shape
    if N == B:
        return x
    m = B // N
    return jnp.moveaxis(x.reshape(N, *heads, m, Q // m, E), -3, 1).reshape(B, *heads, Q // m, E)
