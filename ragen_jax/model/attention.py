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
S segment positions, H heads, K key-value heads, D head width, L layers; in a tree, Q blocks of
positions, M blocks that one reads, R rows and U positions of a row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ragen_jax.core.sharding import by_shard
from ragen_jax.core.types import Array
from ragen_jax.model.delta_rule import States
from ragen_jax.model.kernels import KERNELS
from ragen_jax.model.page_kernel import block_size, read_page
from ragen_jax.model.quantised import Quantised

KV = jax.Array | Quantised  # keys or values


class PageOfLayers(NamedTuple):
    """Keys and values of all layers, of which `page_kernel.read_page` reads one."""

    k_LNKSD: jax.Array
    v_LNKSD: jax.Array
    layer: Array | int


# Keys or values of all layers: one stacked array, or one array per layer (see Segment). Where
# windowed layers hold their window only, also a stack for each kind (window_cache.py).
Layers = KV | tuple[KV, ...]

MASKED = -1e30  # finite, so that a row whose segment is empty has no NaN
# Memory positions scored at a time where a row has several new tokens and the memory is long. The
# scores of all positions, [B, H, T, S], would be larger than everything else.
BLOCK = 256
WHOLE = 1024  # a memory of at most this number of positions is scored at once
TREE_SCORES = 1 << 20  # scores of a larger tree that are computed at a time
WHOLE_TREE = 1 << 22  # a tree of at most this number of scores is scored at once
LEAST_PAGE = 128  # minimum positions of a segment that a kernel reads
LEAST_PREFIX = 64  # minimum length of a common prefix of prompts that is read in a separate call


@flax.struct.dataclass
class Segment:
    """Keys and values of earlier tokens, already rotated, for all layers.

    k and v have the form that the model produces: [L, N, K, S, D] if it scans over layers, a tuple
    of L arrays [N, K, S, D] if it runs them one by one (slicing a stack copies it: on CPU a third
    of a decode step). Code that handles them counts axes from the end and maps over the tree.
    This order of axes keeps each head's positions contiguous: on CPU decode attention is ten
    times faster than with [N, S, K, D].
    """

    k: Layers
    v: Layers
    length_N: jax.Array  # [N] int32, positions s < length are real
    # [B] int32: the segment row that each row of new tokens reads; length_N then has B entries.
    # None: row b reads row b // m.
    rows_B: jax.Array | None = None
    # [N] int32: the position of the next token, where images make it less than the number of
    # tokens (positions.py); None: it is `length_N`.
    next_position_N: jax.Array | None = None
    # int16 [N, T, X]: in the result of a program, the experts of the tokens that it read, layer
    # after layer (rollout/routes.py). None in the input of a program, and unless they are kept.
    experts_NTX: jax.Array | None = None
    # int32 [N], the number of tokens in windowed layers, which hold no more than their window
    # (window_cache.py); None: all.
    window_N: jax.Array | None = None
    # The states after the tokens of each row, in a model with linear-attention layers: k and v are
    # then those of its other layers. Of several segments, the last has the state.
    state: States | None = None

    @property
    def next_N(self) -> jax.Array:
        """Return the position of the token after the last, int32 [N]."""
        return self.length_N if self.next_position_N is None else self.next_position_N


def as_segment(
    kept: Sequence[Any], length_N: jax.Array, next_position_N: jax.Array | None = None
) -> Segment:
    """Return the memory of tokens, given their (keys, values) or (keys, values, state)."""
    k, v, *state = kept
    more = {"state": state[0]} if state else {}
    return Segment(k, v, length_N, next_position_N=next_position_N, **more)


def is_page(segment: Segment, rows: int) -> bool:
    """Return whether page_kernel.py reads a segment for a new token in each of `rows` rows.

    The first turn's prompt, which a group shares, and short segments are read by the plain form.
    """
    k = segment.k[0] if isinstance(segment.k, tuple) else segment.k
    own = k.shape[-4] == rows and segment.rows_B is None
    if not own or isinstance(k, Quantised) or k.shape[-2] < LEAST_PAGE:
        return False
    return block_size(k.shape[-2], k.shape[-3] * k.shape[-1] * k.dtype.itemsize) > 0


@flax.struct.dataclass
class Tree:
    """The prefix tree of rows that are packed into one sequence (prefix_tree.py).

    A position reads itself and the positions on its path from the root. In depth-first order these
    are the positions k <= q with q < end[k]. The plain form of attention reads blocks of keys; the
    kernels read whole rows.
    """

    end_BT: Array  # int32, the position after the last that reads this one
    # For the plain form: the blocks of keys that each block of queries reads any of; -1: none.
    keys_BQM: Array | None = None
    # For kernels: the packed position of each position of each row, and one of these R * U
    # positions for each packed position; int32.
    path_BRU: Array | None = None
    owner_BT: Array | None = None
    # int32, the number of positions before each on its path; set by models with windows.
    depth_BT: Array | None = None
    block: int = flax.struct.field(pytree_node=False, default=0)  # positions; 0 for kernels


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
            attend_rows = functools.partial(KERNELS[kernel], window=window)
            return _attend_rows(attend_rows, q_BTHD, k_BTKD, v_BTKD, tree)
        return _attend_tree(q_BTHD, k_BTKD, v_BTKD, tree, window)
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
    own_scores = _scores(q, by_head(k_BTKD.swapaxes(1, 2)))

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
        out = _mix(weight, by_head(v_BTKD.swapaxes(1, 2)))
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
        scores.append(jnp.where(real, _scores(_gather(q, N), by_head(k_NKSD)), MASKED))

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

    out = _mix(weights[0], by_head(v_BTKD.swapaxes(1, 2)))
    for weight, (_, v_NKSD, _) in zip(weights[1:], segments, strict=True):
        out = out + _scatter(_mix(weight, by_head(v_NKSD), v_BTKD.dtype), B)
    for top_of_page, total_of_page, out_of_page in read:
        kept = jnp.exp(top_of_page - top)
        total, out = total + kept * total_of_page, out + kept * out_of_page
    return by_row(out / total)


def _attend_tree(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    tree: Tree,
    window: jax.Array | int | None,
) -> jax.Array:
    """Return attention over the paths of a tree, in the shape of the queries.

    Each block of queries reads the blocks of keys of its list. In larger trees, a few blocks of
    queries are computed at a time, whose scores stay in the cache; the backward pass computes the
    scores again.

    Args:
      q_BTHD, k_BTKD, v_BTKD: [.., heads, D] with any axes in front that hold the B * T positions.
    """
    assert tree.keys_BQM is not None
    (B, Q, M), block = tree.keys_BQM.shape, tree.block
    (H, D), K = q_BTHD.shape[-2:], k_BTKD.shape[-2]
    groups = H // K
    scores = H * M * block**2  # of a block of queries
    # Blocks of queries at a time.
    step = Q if B * Q * scores <= WHOLE_TREE else min(Q, max(1, TREE_SCORES // scores))
    steps = -(-Q // step)

    def by_head(x, groups):
        """Return [B, K, Q, groups * block, D]."""
        x = x.reshape(B, Q, block, K, groups, D).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(B, K, Q, groups * block, D)

    def split(x, axis):
        """Return `steps` slices of blocks of queries; those past the last are zero."""
        missing = [(0, steps * step - Q if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, missing)
        x = x.reshape(*x.shape[:axis], steps, step, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    q_BKQXD, k_BKQYD, v_BKQYD = by_head(q_BTHD, groups), by_head(k_BTKD, 1), by_head(v_BTKD, 1)
    end_BQY = tree.end_BT.reshape(B, Q, block)
    depth_BQX = None
    if window is not None:
        assert tree.depth_BT is not None
        depth_BQX = tree.depth_BT.reshape(B, Q, block)

    def read(x, index_BN):
        """Return the blocks of keys of each block of queries, [B * K * step, M * block, D]."""
        x = _take_blocks(x.reshape(B * K, *x.shape[2:]), jnp.repeat(index_BN, K, axis=0))
        return x.reshape(B * K * step, M * block, D)

    def attend_step(_, step_inputs):
        q_BKCXD, keys_BCM, first, *depth_of_q = step_inputs
        index_BN = jnp.maximum(keys_BCM, 0).reshape(B, step * M)
        at_q = (first + jnp.arange(step * block)).reshape(step, block, 1)
        at_k = (index_BN[..., None] * block + jnp.arange(block)).reshape(B, step, 1, M * block)
        end = take_along_rows(end_BQY, index_BN).reshape(at_k.shape)
        real = jnp.repeat(keys_BCM >= 0, block, axis=2)[:, :, None]
        reads = real & (at_k <= at_q) & (at_q < end)  # [B, C, block, M * block]
        for depth_BCX in depth_of_q:
            assert depth_BQX is not None
            depth = take_along_rows(depth_BQX, index_BN).reshape(at_k.shape)
            reads = reads & (depth_BCX[..., None] - depth < window)
        reads = jnp.broadcast_to(
            reads[:, None, :, None], (B, K, step, groups, *reads.shape[2:])
        ).reshape(B * K * step, groups * block, M * block)
        score = _scores(q_BKCXD.reshape(-1, groups * block, D), read(k_BKQYD, index_BN))
        score = jnp.where(reads, score, MASKED)
        weight = jnp.exp(score - jax.lax.stop_gradient(score).max(-1, keepdims=True))
        out = _mix(weight, read(v_BKQYD, index_BN)) / weight.sum(-1, keepdims=True)
        return None, out.astype(v_BTKD.dtype).reshape(q_BKCXD.shape)

    first = jnp.arange(steps) * step * block
    inputs = split(q_BKQXD, 2), split(tree.keys_BQM, 1), first
    if depth_BQX is not None:
        inputs = *inputs, split(depth_BQX, 1)
    if steps == 1:
        out = attend_step(None, jax.tree.map(lambda x: x[0], inputs))[1][None]
    else:
        _, out = jax.lax.scan(jax.checkpoint(attend_step, prevent_cse=False), None, inputs)
    out = jnp.moveaxis(out, 0, 2).reshape(B, K, steps * step, groups, block, D)[:, :, :Q]
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(q_BTHD.shape)


@jax.custom_vjp
def _take_blocks(x: jax.Array, index_BN: jax.Array) -> jax.Array:
    """Return `take_along_rows`; the backward pass is a product, as XLA adds rows one by one."""
    return take_along_rows(x, index_BN)


def _take_blocks_forward(x: jax.Array, index_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take_along_rows(x, index_BN), jax.nn.one_hot(index_BN, x.shape[1], dtype=jnp.float32)


def _take_blocks_backward(taken_BNQ: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    sums = jnp.einsum(
        "bnq,bn...->bq...",
        taken_BNQ,
        g.astype(jnp.float32),  # XLA's CPU backend lacks this product in bfloat16
        precision=jax.lax.Precision.HIGHEST,
    )
    return sums.astype(g.dtype), None


_take_blocks.defvjp(_take_blocks_forward, _take_blocks_backward)


def _attend_rows(
    kernel: Callable[..., jax.Array],
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    tree: Tree,
) -> jax.Array:
    """Return attention over the paths of a tree by a kernel for whole rows.

    The rows are unpacked for attention alone: it repeats shared positions, which costs little next
    to the matrix products that do not.
    """
    assert tree.path_BRU is not None and tree.owner_BT is not None
    B, R, U = tree.path_BRU.shape
    path_BX = tree.path_BRU.reshape(B, R * U)

    def unpack(x_BTE):
        x = take_along_rows(x_BTE, path_BX)
        return x.reshape(B * R, U, *x_BTE.shape[2:])

    out = kernel(unpack(q_BTHD), unpack(k_BTKD), unpack(v_BTKD))
    return take_along_rows(out.reshape(B, R * U, *out.shape[2:]), tree.owner_BT)


def take_along_rows(x: Array, index_BN: Array) -> jax.Array:
    """Return entries of each row: x [B, T, ...], index int32 [B, N] -> [B, N, ...]."""
    return jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds"))(x, index_BN)


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
        score = jnp.where(real, _scores(_gather(q, len(length_N)), read(k_NKSD, start)), MASKED)
        higher = jnp.maximum(top, _scatter(score.max(-1, keepdims=True), B))
        higher = jax.lax.stop_gradient(higher)
        kept = jnp.exp(top - higher)
        weight = jnp.exp(score - _gather(higher, len(length_N)))
        total = total * kept + _scatter(weight.sum(-1, keepdims=True), B)
        out = out * kept + _scatter(_mix(weight, read(v_NKSD, start), q.dtype), B)
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


def _scores(q: jax.Array, k: KV) -> jax.Array:
    if isinstance(k, Quantised):
        return _scores(q, k.codes.astype(q.dtype)) * jnp.swapaxes(k.scale, -1, -2)
    # Scaled in float32: queries scaled in bfloat16 would be rounded a second time.
    scores = jnp.einsum("n...qd,n...sd->n...qs", q, k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5


def _mix(weight: jax.Array, v: KV, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the weighted sums of values; dtype: that of the product with int8 codes."""
    if isinstance(v, Quantised):
        weight, v = weight * jnp.swapaxes(v.scale, -1, -2), v.codes.astype(dtype)
    weight = weight.astype(v.dtype)
    return jnp.einsum("n...qs,n...sd->n...qd", weight, v, preferred_element_type=jnp.float32)


def append(segment: Segment, k: Layers, v: Layers, count_B: jax.Array, *, capacity: int) -> Segment:
    """Return a longer history, with each row's first `count_B` new tokens after its last position.

    Rows keep their own lengths and write at their own positions (no left padding), so turn t + 1
    continues turn t independently of other rows. A segment shared by a group is repeated here for
    the group's members, once per turn.

    Args:
      segment: N rows; N divides B.
      k, v: keys and values of the new tokens, [.., B, K, T, D] like the segment's.
      count_B: [B] int32, how many of the T new tokens are real.
      capacity: S of the result; may be larger or smaller than the segment's. The caller must make
        sure that every row fits (a write past the end would be dropped).

    Returns:
      `Segment` with B rows.
    """
    B, N = count_B.shape[0], segment.length_N.shape[0]
    T = jax.tree.leaves(k)[0].shape[-2]
    length_B = jnp.repeat(segment.length_N, B // N, total_repeat_length=B)
    # Padding tokens get positions past the end, where a scatter drops them.
    position_BT = length_B[:, None] + jnp.arange(T)
    position_BT = jnp.where(jnp.arange(T) < count_B[:, None], position_BT, capacity)

    def grow(old, new):
        # The rows that made the old cache longer than this may have finished.
        room = jnp.repeat(old[..., :capacity, :], B // N, axis=-4, total_repeat_length=B)
        missing = capacity - room.shape[-2]
        room = jnp.pad(room, [(0, 0)] * (room.ndim - 2) + [(0, missing), (0, 0)])
        return write(room, new, position_BT)

    return Segment(
        k=jax.tree.map(grow, segment.k, k),
        v=jax.tree.map(grow, segment.v, v),
        length_N=length_B + count_B,
    )


def prepend(prefix: Segment, k: Layers, v: Layers) -> tuple[Layers, Layers]:
    """Return keys and values [.., B, K, T, D] after those of a prefix of one row, without padding.

    The prefix is repeated for each row, so that attention reads a single segment: on CPU, a second
    segment costs more than reading the whole rows.
    """

    def join(first, rest):
        first = jnp.broadcast_to(first, (*rest.shape[:-2], first.shape[-2], rest.shape[-1]))
        return jnp.concatenate([first, rest], axis=-2)

    return jax.tree.map(join, (prefix.k, prefix.v), (k, v))


def write(cache: jax.Array, new: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Return a cache's keys or values with new entries written into each row.

    Args:
      cache: [.., B, K, S, D].
      new: [.., B, K, T, D].
      position_BT: int32; entries at positions of S or more are dropped.
    """
    rows_B1 = jnp.arange(position_BT.shape[0])[:, None]
    new = jnp.moveaxis(new, (-4, -2), (0, 1)).astype(cache.dtype)  # [B, T, .., K, D]
    return cache.at[..., rows_B1, :, position_BT, :].set(new, mode="drop")
