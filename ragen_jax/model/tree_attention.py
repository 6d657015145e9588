"""Attention over rows that are packed into one sequence as a prefix tree (prefix_tree.py).

Axes: B packed sequences, T positions, Q blocks of positions, M blocks that one reads, R rows and U
positions of a row, H heads, K key-value heads, D head width.
"""

from collections.abc import Callable

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
    # For the plain form: the blocks of keys that each block of queries reads any of; -1: none.
    keys_BQM: Array | None = None
    # For kernels: the packed position of each position of each row, and one of these R * U
    # positions for each packed position; int32.
    path_BRU: Array | None = None
    owner_BT: Array | None = None
    # int32, the number of positions before each on its path; set by models with windows.
    depth_BT: Array | None = None
    block: int = flax.struct.field(pytree_node=False, default=0)  # positions; 0 for kernels


def attend_tree(
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
        score = score_keys(q_BKCXD.reshape(-1, groups * block, D), read(k_BKQYD, index_BN))
        score = jnp.where(reads, score, MASKED)
        weight = jnp.exp(score - jax.lax.stop_gradient(score).max(-1, keepdims=True))
        out = mix_values(weight, read(v_BKQYD, index_BN)) / weight.sum(-1, keepdims=True)
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
