"""Qwen2.5 as a Flax module: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Axes: B rows, T tokens, D width, H heads, K key-value heads, F MLP width, V vocabulary, L layers.
Parameters of the L layers are stacked on a leading axis and the layers run as one scan.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from ragen_jax.model.attention import attend


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a model, in the terms of a Hugging Face config.json (see model/hf.py)."""

    vocab_size: int
    width: int  # hidden_size
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int  # intermediate_size
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied: bool = True  # the output head is the embedding
    qkv_bias: bool = True
    max_positions: int = 32768
    dtype: str = "float32"  # of activations and matrix products; parameters keep their own
    remat: bool = False  # recompute each layer's activations in the backward pass


def rotate(x_BTHD, positions_BT, theta):
    """Rotary position embedding, halves convention (RoFormer, arXiv 2104.09864), in float32."""
    D = x_BTHD.shape[-1]
    frequency = theta ** (-jnp.arange(0, D // 2, dtype=jnp.float32) / (D // 2))
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHD.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", init, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype)


class Linear(nn.Module):
    """einsum(x, kernel) [+ bias]; `axes` name the kernel's axes for sharding.py."""

    equation: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int
    bias_axes: int = 0  # the bias has the kernel's last `bias_axes` axes; 0: no bias

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(self.fan_in**-0.5)
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), self.shape)
        y = jnp.einsum(self.equation, x, kernel.astype(x.dtype))
        if self.bias_axes:
            zeros = nn.with_logical_partitioning(
                nn.initializers.zeros, self.axes[-self.bias_axes :]
            )
            bias = self.param("bias", zeros, self.shape[-self.bias_axes :])
            y = y + bias.astype(x.dtype)
        return y


class Block(nn.Module):
    """One layer. Its carry is x; it also returns the new tokens' keys and values."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions_BT, segment_lengths, keep_kv, segment_kvs):
        c = self.config
        D, H, K, hd, F = c.width, c.heads, c.kv_heads, c.head_dim, c.mlp_width
        bias = 2 if c.qkv_bias else 0

        def project(name, heads, axis):
            return Linear(
                "btd,dhe->bthe", (D, heads, hd), ("embed", axis, "head"), D, bias, name=name
            )

        h = RMSNorm(c.norm_eps, name="attention_norm")(x)
        q = rotate(project("q", H, "heads")(h), positions_BT, c.rope_theta)
        k = rotate(project("k", K, "kv_heads")(h), positions_BT, c.rope_theta)
        v = project("v", K, "kv_heads")(h)
        segments = [
            (sk, sv, length) for (sk, sv), length in zip(segment_kvs, segment_lengths, strict=True)
        ]
        a = attend(q, k, v, segments)
        o_axes = ("heads", "head", "embed")
        x = x + Linear("bthe,hed->btd", (H, hd, D), o_axes, H * hd, name="o")(a)

        h = RMSNorm(c.norm_eps, name="mlp_norm")(x)
        gate = Linear("btd,df->btf", (D, F), ("embed", "mlp"), D, name="gate")(h)
        up = Linear("btd,df->btf", (D, F), ("embed", "mlp"), D, name="up")(h)
        down = Linear("btf,fd->btd", (F, D), ("mlp", "embed"), F, name="down")
        x = x + down(nn.silu(gate) * up)
        kv = (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) if keep_kv else None  # [B, K, T, hd]
        return x, kv


class Qwen(nn.Module):
    """tokens -> final hidden states (and, on request, keys and values for later reuse)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT, positions_BT=None, segments=(), *, keep_kv=False):
        """Runs the layers over new tokens.

        Args:
          tokens_BT: int32 [B, T], right-padded with any id.
          positions_BT: int32 [B, T]; default 0..T-1.
          segments: tuple of `attention.Segment`, the memory the new tokens may read.
          keep_kv: also return the new tokens' keys and values.

        Returns:
          (hidden_BTD after the final norm, (k, v) each [L, B, K, T, head_dim] or None).
        """
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        embed = self.param("embed", init, (c.vocab_size, c.width))
        if not c.tied:
            self.param("head", init, (c.vocab_size, c.width))  # read by `head`
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x = embed[tokens_BT].astype(c.dtype)
        block = nn.remat(Block, prevent_cse=False, static_argnums=(4,)) if c.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        lengths = tuple(segment.length_N for segment in segments)
        kvs = tuple((segment.k, segment.v) for segment in segments)
        x, kv = layers(c, name="layers")(x, positions_BT, lengths, keep_kv, kvs)
        return RMSNorm(c.norm_eps, name="final_norm")(x), kv


def head(params):
    """The output matrix [V, D]: the embedding itself where the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params, hidden):
    """float32 logits [..., V] of hidden states [..., D]."""
    w = head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, w, preferred_element_type=jnp.float32)


def init_params(config, key):
    """Fresh parameters of a model, on the default device: a plain nested dict of float32."""
    variables = Qwen(config).init(key, jnp.zeros((1, 1), jnp.int32))
    return nn.unbox(variables)["params"]
