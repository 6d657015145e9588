"""Kernels for the attention of one new token per row over a page of cached keys and values.

The plain form reads every position of a page, for as many rows as the page has; a kernel reads
only blocks in which a row has positions. It returns the three numbers of a softmax in progress, so
that `attention.attend` can add further pages (Milakov and Gimelshein, arXiv 1805.02867). The kernel
for TPUs is here, that for GPUs in page_kernel_gpu.py.

Axes: L layers, B rows, K key-value heads, Q queries of a head, S positions of the page, D head
width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import by_shard
from ragen_jax.core.types import Array
from ragen_jax.model.page_kernel_gpu import Softmax, read_on_gpu, reads_heads

BLOCK_BYTES = 1 << 20  # maximum bytes of the keys of a block, of which four are on the chip
LONGEST = 512  # maximum positions of a block
LANES = 128  # heads of other widths would be copied for the kernel
SUBLANES = 32  # a block is a multiple of this number of positions, or a whole page


def unread_heads(head_dim: int, platform: str) -> str:
    """Return which widths of heads the platform's kernel reads, or "" if this is one of them."""
    if platform == "gpu":
        return "" if reads_heads(head_dim) else "a power of two from 16 to 256"
    return f"a multiple of {LANES}" if head_dim % LANES else ""


def block_size(positions: int, position_bytes: int) -> int:
    """Return the positions of a block: the largest divisor of a page's that fits; 0: none does.

    Args:
      positions: S.
      position_bytes: bytes of the keys of a position of a row, of all heads.
    """
    most = min(LONGEST, BLOCK_BYTES // position_bytes)
    if positions <= most:
        return positions
    blocks = range(most - most % SUBLANES, 0, -SUBLANES)
    return next((block for block in blocks if positions % block == 0), 0)


def read_page(
    q_BKQD: jax.Array,
    k_LBKSD: jax.Array,
    v_LBKSD: jax.Array,
    layer: Array | int,
    length_B: jax.Array,
    *,
    kernel: Callable[..., Softmax] | None = None,
) -> Softmax:
    """Return (maximum [B, K, Q, 1], denominator [B, K, Q, 1], sum of values [B, K, Q, D]).

    Rows without positions have the maximum -1e30 and zeros. On a mesh, each device reads its rows.

    Args:
      k_LBKSD, v_LBKSD: of all layers, because a layer's slice would be copied for a kernel.
      layer: index of the layer to read.
      length_B: int32; positions from here on are ignored.
      kernel: `read_on_tpu` or `read_on_gpu`; None: that of the platform which the program is
        compiled for.
    """
    read = kernel or _read_local
    layer_B = jnp.full(length_B.shape, layer, jnp.int32)
    return by_shard(read, q_BKQD, k_LBKSD, v_LBKSD, layer_B, length_B)


def _read_local(*args: jax.Array) -> Softmax:
    found: Softmax = jax.lax.platform_dependent(*args, tpu=read_on_tpu, cuda=read_on_gpu)
    return found


def read_on_tpu(
    q_BKQD: jax.Array,
    k_LBKSD: jax.Array,
    v_LBKSD: jax.Array,
    layer_B: Array,
    length_B: Array,
    *,
    interpret: bool = False,
) -> Softmax:
    """Return `read_page` of one device's rows.

    Args:
      layer_B: int32, the layer that each row reads.
      interpret: run the kernel's program without a TPU, for tests.
    """
    # Imported here because importing Pallas for TPU takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (B, K, Q, D), S = q_BKQD.shape, k_LBKSD.shape[3]
    block = block_size(S, K * D * k_LBKSD.dtype.itemsize)

    def kernel(layer_ref, length_ref, q_ref, k_ref, v_ref, top_ref, total_ref, out_ref):
        row, index = pl.program_id(0), pl.program_id(1)

        @pl.when(index == 0)
        def _():
            top_ref[...] = jnp.full(top_ref.shape, -1e30, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
            out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

        @pl.when(index * block < length_ref[row])
        def _():
            position = index * block + jax.lax.broadcasted_iota(jnp.int32, (Q, block), 1)
            real = position < length_ref[row]
            for head in range(K):
                v = v_ref[0, 0, head]
                contract = (((1,), (1,)), ((), ()))
                scores = jax.lax.dot_general(
                    *(q_ref[0, head], k_ref[0, 0, head], contract),
                    preferred_element_type=jnp.float32,
                )
                scores = jnp.where(real, scores * D**-0.5, -1e30)
                before = top_ref[0, head]
                top = jnp.maximum(before, scores.max(-1, keepdims=True))
                kept, weight = jnp.exp(before - top), jnp.exp(scores - top)
                mixed = jnp.dot(weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
                top_ref[0, head] = top
                total_ref[0, head] = total_ref[0, head] * kept + weight.sum(-1, keepdims=True)
                out_ref[0, head] = out_ref[0, head] * kept + mixed

    def of_row(row, index, layer_ref, length_ref):
        return row, 0, 0, 0

    def of_block(row, index, layer_ref, length_ref):
        # Blocks after a row's last repeat it: a block that does not change is not read again.
        last = jnp.maximum((length_ref[row] + block - 1) // block - 1, 0)
        return layer_ref[row], row, 0, jnp.minimum(index, last), 0

    def row_shape(last):
        return jax.ShapeDtypeStruct((B, K, Q, last), jnp.float32)

    found: Softmax = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, S // block),
            in_specs=[
                pl.BlockSpec((1, K, Q, D), of_row),
                pl.BlockSpec((1, 1, K, block, D), of_block),
                pl.BlockSpec((1, 1, K, block, D), of_block),
            ],
            out_specs=[pl.BlockSpec((1, K, Q, last), of_row) for last in (1, 1, D)],
        ),
        out_shape=[row_shape(last) for last in (1, 1, D)],
        interpret=interpret,
    )(layer_B, length_B, q_BKQD, k_LBKSD, v_LBKSD)
    return found
