"""Library kernels for causal self-attention that never hold the [T, T] scores in memory.

They are used for passes over whole rows (training, scoring, prefill). `attention.attend` handles
attention over a cache; each kernel is tested against its plain form.

Axes: B rows, T tokens, H heads, K key-value heads, D head width.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ragen_jax.core.sharding import spec

SPLASH_BLOCK = 128  # T is padded to a multiple of this; also the kernel's number of lanes


def best_kernel(platform: str, dtype: str, head_dim: int) -> str:
    """Return "splash" on TPU, "cudnn" on GPU, and "xla" elsewhere or if these do not apply.

    Args:
      platform: "cpu", "gpu" or "tpu".
      dtype: name of the activations' dtype.
      head_dim: D.
    """
    if platform == "tpu" and head_dim % 64 == 0:
        return "splash"
    if platform == "gpu" and dtype in ("bfloat16", "float16") and head_dim <= 128:
        return "cudnn"
    return "xla"


def cudnn(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, *, window: int | None = None
) -> jax.Array:
    """Return cuDNN's fused attention, [B, T, H, D]; window: see `attention.attend`."""
    return jax.nn.dot_product_attention(
        *(q_BTHD, k_BTKD, v_BTKD),
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def splash(
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return splash attention (Pallas, TPU) for queries scaled by D ** -0.5, [B, T, H, D].

    The compiler cannot partition a kernel, so on the current mesh it is mapped over rows and
    heads. Padding at the end needs no mask: causality hides it from every real token.

    Args:
      window: see `attention.attend`.
      interpret: run the kernel's program without a TPU, for tests.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    padding = -T % SPLASH_BLOCK

    def to_heads(x, *groups):
        x = jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        return jnp.moveaxis(x.reshape(B, T + padding, K, *groups, D), 1, -2)

    q = to_heads(q_BTHD, H // K)  # [B, K, H / K, T, D]
    k, v = to_heads(k_BTKD), to_heads(v_BTKD)  # [B, K, T, D]
    attend = functools.partial(_attend_local, window=window, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        rows, heads, groups = spec(("rows", "kv_heads", "heads"), (B, K, H // K), mesh)
        # With too few key-value heads for the tensor axis, their queries are split instead.
        queries = PartitionSpec(rows, heads, None if heads else groups)
        keys = PartitionSpec(rows, heads)
        attend = jax.shard_map(
            attend, in_specs=(queries, keys, keys), out_specs=queries, check_vma=False
        )
    out = jnp.moveaxis(attend(q, k, v), -2, 1)  # [B, T, K, H / K, D]
    return out[:, :T].reshape(B, T, H, D)


def _attend_local(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None, interpret: bool
) -> jax.Array:
    # Imported here because importing Pallas for TPU takes a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    groups, T = q.shape[2:4]
    reads = masks.CausalMask((T, T))
    if window is not None:
        reads = masks.LocalMask((T, T), (window - 1, 0), 0)
    mask = masks.MultiHeadMask([reads] * groups)
    attend = kernel.make_splash_mqa_single_device(mask, interpret=interpret)
    return jax.vmap(jax.vmap(attend))(q, k, v)


KERNELS: dict[str, Callable[..., jax.Array]] = {"cudnn": cudnn, "splash": splash}
# Kernels that do not scale the scores. The caller scales the queries when it rotates them, in
# float32, before rounding to their dtype; scaling afterwards would round them twice.
SCALED_QUERIES = ("splash",)
