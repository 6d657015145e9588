"""The kernel of page_kernel.py for GPUs: attention of one new token per row over a page.

Each program of the kernel reads a part of the positions of a row and a key-value head, because few
rows would otherwise leave most of a GPU idle; the parts are merged afterwards (Dao et al.,
Flash-Decoding, 2023). JAX's own kernel, `pallas.ops.gpu.decode_attention`, takes one layer, which
XLA would first copy out of the cache, and rounds each part to the dtype of the queries.

Axes: those of page_kernel.py, and N parts.
"""

import jax
import jax.numpy as jnp

from ragen_jax.core.types import Array

BLOCK = 64  # positions of a step of a program; a power of two, for Triton
LEAST_QUERIES = 16  # rows of the smallest matrix product of tensor cores
PROGRAMS = 512  # programs that fill a GPU: it has about 130 processors, and each runs several
NONE = -1e30  # the maximum of no positions

Softmax = tuple[jax.Array, jax.Array, jax.Array]  # maximum, denominator, sum of values; float32


def reads_heads(head_dim: int) -> bool:
    """Return whether the kernel reads heads of this width: Triton's arrays are powers of two."""
    return 16 <= head_dim <= 256 and head_dim & (head_dim - 1) == 0


def read_on_gpu(
    q_BKQD: jax.Array,
    k_LBKSD: jax.Array,
    v_LBKSD: jax.Array,
    layer_B: Array,
    length_B: Array,
    *,
    interpret: bool = False,
) -> Softmax:
    """Return `page_kernel.read_page` of one device's rows.

    Args:
      layer_B: int32, the layer that each row reads.
      interpret: run the kernel's program without a GPU, for tests.
    """
    # Imported here because importing Pallas takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, K, Q, D), S = q_BKQD.shape, k_LBKSD.shape[3]
    blocks = -(-S // BLOCK)
    steps = -(-blocks // min(blocks, max(1, PROGRAMS // (B * K))))  # blocks of a part
    N = -(-blocks // steps)
    padded = max(LEAST_QUERIES, 1 << (Q - 1).bit_length())
    q_BKQD = jnp.pad(q_BKQD, ((0, 0), (0, 0), (0, padded - Q), (0, 0)))

    def kernel(q_ref, k_ref, v_ref, layer_ref, length_ref, top_ref, total_ref, out_ref):
        row, head, part = (pl.program_id(axis) for axis in range(3))
        layer, length = layer_ref[row], length_ref[row]
        q = q_ref[...]

        def add(index, carry):
            top, total, out = carry
            position = index * BLOCK + jnp.arange(BLOCK)
            here = layer, row, head, pl.ds(index * BLOCK, BLOCK), slice(None)
            inside = jnp.broadcast_to((position < S)[:, None], (BLOCK, D))  # the page may end here
            k = triton.load(k_ref.at[here], mask=inside, other=0.0)
            v = triton.load(v_ref.at[here], mask=inside, other=0.0)
            scores = jnp.where((position < length)[None], triton.dot(q, k.T) * D**-0.5, NONE)
            higher = jnp.maximum(top, scores.max(-1))
            kept, weight = jnp.exp(top - higher), jnp.exp(scores - higher[:, None])
            out = out * kept[:, None] + triton.dot(weight.astype(v.dtype), v)
            return higher, total * kept + weight.sum(-1), out

        nothing = jnp.full(padded, NONE), jnp.zeros(padded), jnp.zeros((padded, D))
        nothing = jax.tree.map(lambda x: x.astype(jnp.float32), nothing)
        last = jnp.minimum((part + 1) * steps, pl.cdiv(length, BLOCK))
        top_ref[...], total_ref[...], out_ref[...] = jax.lax.fori_loop(
            part * steps, last, add, nothing
        )

    whole = pl.BlockSpec(memory_space=pl.ANY)
    parts: Softmax = pl.pallas_call(
        kernel,
        grid=(B, K, N),
        in_specs=[
            pl.BlockSpec((None, None, padded, D), lambda row, head, part: (row, head, 0, 0)),
            *[whole] * 4,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, padded), lambda *at: (*at, 0)),
            pl.BlockSpec((None, None, None, padded), lambda *at: (*at, 0)),
            pl.BlockSpec((None, None, None, padded, D), lambda *at: (*at, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, N, padded, *last), jnp.float32) for last in ((), (), (D,))
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="read_page",
    )(q_BKQD, k_LBKSD, v_LBKSD, layer_B, length_B)
    top_BKNQ, total_BKNQ, out_BKNQD = (x[:, :, :, :Q] for x in parts)
    top = top_BKNQ.max(2, keepdims=True)
    kept = jnp.exp(top_BKNQ - top)
    total_BKQ, out_BKQD = (total_BKNQ * kept).sum(2), (out_BKNQD * kept[..., None]).sum(2)
    return top[:, :, 0, :, None], total_BKQ[..., None], out_BKQD
