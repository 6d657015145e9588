"""Qwen2.5 as a Flax module: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Axes: B rows, T tokens, D width, H heads, K key-value heads, F MLP width, V vocabulary, L layers.
Parameters of the L layers are stacked on a leading axis; the layers run as one scan.
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from ragen_jax.model.attention import attend

# Models of so few layers run them one after the other instead of as a scan: a scan's backward
# pass first copies every saved activation into an array stacked over layers, which on CPU costs
# the tiny agent as much as the layers themselves.
UNROLLED_LAYERS = 4


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


def rotary_angles(positions_BT, head_dim, theta):
    """Cosine and sine [B, T, 1, head_dim / 2] of the rotary embedding (RoFormer), float32."""
    frequency = theta ** (-jnp.arange(0, head_dim // 2, dtype=jnp.float32) / (head_dim // 2))
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHD, angles):
    """Rotary position embedding, halves convention (RoFormer, arXiv 2104.09864), in float32."""
    cos, sin = angles
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
    """x @ kernel [+ bias], over the last `contract` axes of x; `axes` name the kernel's axes.

    The product is taken on matrices: XLA's CPU backend is four times slower at the backward
    pass of the same product with a batch axis.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x):
        inner, outer = self.shape[: self.contract], self.shape[self.contract :]
        fan_in = math.prod(inner)
        init = nn.initializers.normal(fan_in**-0.5)
        kernel = self.param("kernel", nn.with_logical_partitioning(init, self.axes), self.shape)
        y = x.reshape(-1, fan_in) @ kernel.astype(x.dtype).reshape(fan_in, -1)
        y = y.reshape(*x.shape[: -self.contract], *outer)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[self.contract :])
            y = y + self.param("bias", zeros, outer).astype(x.dtype)
        return y


class Block(nn.Module):
    """One layer. Its carry is x; it also returns the new tokens' keys and values."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, angles, segment_lengths, keep_kv, segment_kvs):
        c = self.config
        D, H, K, hd, F = c.width, c.heads, c.kv_heads, c.head_dim, c.mlp_width

        def project(name, heads, axis):
            axes = ("embed", axis, "head")
            return Linear((D, heads, hd), axes, bias=c.qkv_bias, name=name)(h)

        h = RMSNorm(c.norm_eps, name="attention_norm")(x)
        q = rotate(project("q", H, "heads"), angles)
        k = rotate(project("k", K, "kv_heads"), angles)
        v = project("v", K, "kv_heads")
        segments = [
            (sk, sv, length) for (sk, sv), length in zip(segment_kvs, segment_lengths, strict=True)
        ]
        a = attend(q, k, v, segments)
        x = x + Linear((H, hd, D), ("heads", "head", "embed"), contract=2, name="o")(a)

        h = RMSNorm(c.norm_eps, name="mlp_norm")(x)
        gate = Linear((D, F), ("embed", "mlp"), name="gate")(h)
        up = Linear((D, F), ("embed", "mlp"), name="up")(h)
        x = x + Linear((F, D), ("mlp", "embed"), name="down")(nn.silu(gate) * up)
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
          (hidden_BTD after the final norm, (k, v) in the form of `attention.Segment` or None).
        """
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        embed = self.param("embed", init, (c.vocab_size, c.width))
        if not c.tied:
            self.param("head", init, (c.vocab_size, c.width))  # read by `head`
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        angles = rotary_angles(positions_BT, c.head_dim, c.rope_theta)
        x = embed[tokens_BT].astype(c.dtype)
        lengths = tuple(segment.length_N for segment in segments)
        kvs = tuple((segment.k, segment.v) for segment in segments)
        block = nn.remat(Block, prevent_cse=False, static_argnums=(4,)) if c.remat else Block
        if c.layers <= UNROLLED_LAYERS and not self.is_initializing():
            stacked = self.variables["params"]["layers"]
            found = []
            for layer in range(c.layers):
                own = jax.tree.map(lambda a, layer=layer: a[layer], stacked)
                memory = tuple((k[layer], v[layer]) for k, v in kvs)
                x, kv = block(c, parent=None).apply(
                    {"params": own}, x, angles, lengths, keep_kv, memory
                )
                found.append(kv)
            kv = tuple(zip(*found, strict=True)) if keep_kv else None
        else:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),
                length=c.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, kv = layers(c, name="layers")(x, angles, lengths, keep_kv, kvs)
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
