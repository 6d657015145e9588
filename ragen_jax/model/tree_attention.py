"""Attention over rows that are packed into one sequence as a prefix tree (prefix_tree.py).

Axes: B packed sequences, T positions, Q blocks of positions, C of them that are computed at a time,
M blocks that one reads, X queries and Y keys of a block for each key-value head, P positions of the
trunk, N keys, R rows and U positions of a row, H heads, K key-value heads, D head width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.types import Array
from ragen_jax.model.products import MASKED, mix_values, score_keys

TREE_SCORES = 1 << 20  # scores of a larger tree that are computed at a time
WHOLE_TREE = 1 << 22  # a tree of at most this number of scores is scored at once


@flax.struct.dataclass
class Tree:
    """The prefix tree of rows that are packed into one sequence (prefix_tree.py).

    A position reads itself and the positions on its path from the root. In depth-first order these
    are the positions k <= q with q < end[k]. The plain form of attention reads blocks of keys; the
    kernels read whole rows.
    """

    end_BT: Array  # int32, the position after the last that reads this one
    # For the plain form: the blocks of keys after the trunk that each block of queries after it
    # reads any of; -1: none.
    keys_BQM: Array | None = None
    # For kernels: the packed position of each position of each row, and one of these R * U
    # positions for each packed position; int32.
    path_BRU: Array | None = None
    owner_BT: Array | None = None
    # int32, the number of positions before each on its path; set by models with windows.
    depth_BT: Array | None = None
    block: int = flax.struct.field(pytree_node=False, default=0)  # positions; 0 for kernels
    # For the plain form: the number of first blocks of keys, with which all queries are multiplied.
    trunk: int = flax.struct.field(pytree_node=False, default=0)


class Partial(NamedTuple):
    """Attention to a part of the keys; the sums over keys are float32."""

    values_BKQXD: jax.Array  # sum of exp(score - most) * value
    total_BKQX: jax.Array  # sum of exp(score - most)
    most_BKQX: jax.Array  # largest score


def attend_tree(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    tree: Tree,
    window: jax.Array | int | None,
) -> jax.Array:
    """Return attention over the paths of a tree, in the shape of the queries.

    All queries are multiplied with the trunk, and each block of queries after it with the blocks of
    keys of its list: XLA's CPU backend uses several cores for a large product, and only one for
    many small products.

    Args:
      q_BTHD, k_BTKD, v_BTKD: [.., heads, D] with any axes in front that hold the B * T positions.
    """
    assert tree.keys_BQM is not None
    (B, T), block, trunk = tree.end_BT.shape, tree.block, tree.trunk
    (H, D), K = q_BTHD.shape[-2:], k_BTKD.shape[-2]
    Q, groups = T // block, H // K

    def by_head(x, groups):
        """Return [B, K, Q, groups * block, D]."""
        x = x.reshape(B, Q, block, K, groups, D).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(B, K, Q, groups * block, D)

    q_BKQXD, k_BKQYD, v_BKQYD = by_head(q_BTHD, groups), by_head(k_BTKD, 1), by_head(v_BTKD, 1)
    listed = tree.keys_BQM.size // B
    whole = B * H * block**2 * (Q * trunk + listed) <= WHOLE_TREE
    found = _attend_lists(q_BKQXD[:, :, trunk:], k_BKQYD, v_BKQYD, tree, window, whole)
    if trunk:
        first = [(0, 0), (0, 0), (trunk, 0), (0, 0)]
        lists = Partial(
            jnp.pad(found.values_BKQXD, [*first, (0, 0)]),
            jnp.pad(found.total_BKQX, first),
            jnp.pad(found.most_BKQX, first, constant_values=MASKED),
        )
        found = _add(lists, _attend_trunk(q_BKQXD, k_BKQYD, v_BKQYD, tree, window, whole))
    out = found.values_BKQXD / found.total_BKQX[..., None]
    out = out.astype(v_BTKD.dtype).reshape(B, K, Q, groups, block, D)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(q_BTHD.shape)


def _add(a: Partial, b: Partial) -> Partial:
    """Return the attention to the keys of both."""
    most_BKQX = jnp.maximum(a.most_BKQX, b.most_BKQX)
    of_a, of_b = jnp.exp(a.most_BKQX - most_BKQX), jnp.exp(b.most_BKQX - most_BKQX)
    values_BKQXD = a.values_BKQXD * of_a[..., None] + b.values_BKQXD * of_b[..., None]
    return Partial(values_BKQXD, a.total_BKQX * of_a + b.total_BKQX * of_b, most_BKQX)


def _attend_lists(
    q_BKQXD: jax.Array,
    k_BKQYD: jax.Array,
    v_BKQYD: jax.Array,
    tree: Tree,
    window: jax.Array | int | None,
    whole: bool,
) -> Partial:
    """Return the attention of blocks of queries after the trunk to the keys of their lists."""
    assert tree.keys_BQM is not None
    (B, K, _, X, D), M, block = q_BKQXD.shape, tree.keys_BQM.shape[2], tree.block

    def attend(q_BKCXD, keys_BCM, *rows_of_q):
        C = keys_BCM.shape[1]
        index_BN = jnp.maximum(keys_BCM, 0).reshape(B, C * M)

        def read(x_BKQYD):
            """Return the blocks of keys of each block of queries, [B * K * C, M * block, D]."""
            x = x_BKQYD.reshape(B * K, *x_BKQYD.shape[2:])
            return _take_blocks(x, jnp.repeat(index_BN, K, axis=0)).reshape(-1, M * block, D)

        of_keys = [
            take_along_rows(x.reshape(B, -1, block), index_BN).reshape(B, C, 1, M * block)
            for x in _rows(tree, window)
        ]
        reads = _is_read(rows_of_q, of_keys, window)
        reads &= jnp.repeat(keys_BCM >= 0, block, axis=2)[:, :, None]
        score = score_keys(q_BKCXD.reshape(-1, X, D), read(k_BKQYD))
        return _weigh(score, reads, read(v_BKQYD), q_BKCXD.shape)

    inputs = [(q_BKQXD, 2), (jnp.asarray(tree.keys_BQM), 1)]
    inputs += [(x.reshape(B, -1, block)[:, tree.trunk :], 1) for x in _rows(tree, window)]
    return _by_chunks(attend, inputs, X // block * K * M * block**2, whole)


def _attend_trunk(
    q_BKQXD: jax.Array,
    k_BKQYD: jax.Array,
    v_BKQYD: jax.Array,
    tree: Tree,
    window: jax.Array | int | None,
    whole: bool,
) -> Partial:
    """Return the attention of all queries to the keys of the trunk."""
    B, K, _, X, D = q_BKQXD.shape
    P, block = tree.trunk * tree.block, tree.block
    k_trunk, v_trunk = (x.reshape(B * K, -1, D)[:, :P] for x in (k_BKQYD, v_BKQYD))
    of_keys = [x[:, None, None, :P] for x in _rows(tree, window)]

    def attend(q_BKCXD, *rows_of_q):
        score = score_keys(q_BKCXD.reshape(B * K, -1, D), k_trunk)
        return _weigh(score, _is_read(rows_of_q, of_keys, window), v_trunk, q_BKCXD.shape)

    inputs = [(q_BKQXD, 2), *((x.reshape(B, -1, block), 1) for x in _rows(tree, window))]
    return _by_chunks(attend, inputs, K * X * P, whole)


def _rows(tree: Tree, window: jax.Array | int | None) -> list[jax.Array]:
    """Return the position, the end and, with a window, the depth of each position, [B, T]."""
    end_BT = jnp.asarray(tree.end_BT)
    rows = [jnp.broadcast_to(jnp.arange(end_BT.shape[1]), end_BT.shape), end_BT]
    if window is not None:
        assert tree.depth_BT is not None
        rows.append(jnp.asarray(tree.depth_BT))
    return rows


def _is_read(
    of_q: Sequence[jax.Array], of_keys: Sequence[jax.Array], window: jax.Array | int | None
) -> jax.Array:
    """Return which keys each query reads, bool [B, C, block, N].

    Args:
      of_q: `_rows` of the queries, [B, C, block].
      of_keys: `_rows` of the keys, [B, C or 1, 1, N].
    """
    at_q, _, *depth_q = (x[..., None] for x in of_q)
    at_k, end_k, *depth_k = of_keys
    reads = (at_k <= at_q) & (at_q < end_k)
    for q, k in zip(depth_q, depth_k, strict=True):
        assert window is not None
        reads &= q - k < window
    return reads


def _weigh(
    score: jax.Array, reads: jax.Array, values: jax.Array, shape: tuple[int, ...]
) -> Partial:
    """Return attention given its scores.

    Args:
      score: [n, .., N], for values [n, N, D].
      reads: bool [B, C, block, N].
      shape: (B, K, C, groups * block, D).
    """
    (B, K, C, X, _), (block, N) = shape, reads.shape[2:]
    reads = jnp.broadcast_to(reads[:, None, :, None], (B, K, C, X // block, block, N))
    score = jnp.where(reads.reshape(B, K, C, X, N), score.reshape(B, K, C, X, N), MASKED)
    most = jax.lax.stop_gradient(score).max(-1)
    weight = jnp.exp(score - most[..., None])
    found = mix_values(weight.reshape(len(values), -1, N), values)
    return Partial(found.reshape(shape), weight.sum(-1), most)


def _by_chunks(
    attend: Callable[..., Partial],
    inputs: Sequence[tuple[jax.Array, int]],
    scores: int,
    whole: bool,
) -> Partial:
    """Return `attend` of all blocks of queries.

    If they are not computed at once, a few are computed at a time, whose scores stay in the cache;
    the backward pass computes the scores again.

    Args:
      inputs: (array, its axis of blocks of queries).
      scores: scores per block of queries.
      whole: whether all are computed at once.
    """
    array, axis = inputs[0]
    Q = array.shape[axis]
    if whole:
        return attend(*(x for x, _ in inputs))
    step = min(Q, max(1, TREE_SCORES // scores))
    steps = -(-Q // step)

    def split(x, axis):
        """Return `steps` slices of blocks of queries; those past the last are zero."""
        missing = [(0, steps * step - Q if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, missing)
        x = x.reshape(*x.shape[:axis], steps, step, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def join(x):
        """Return [B, K, Q, ..] of slices [steps, B, K, step, ..]."""
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], steps * step, *x.shape[4:])[:, :, :Q]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend_step(_, chunk):
        return None, attend(*chunk)

    _, found = jax.lax.scan(attend_step, None, tuple(split(x, axis) for x, axis in inputs))
    return jax.tree.map(join, found)


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


def attend_rows(
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
