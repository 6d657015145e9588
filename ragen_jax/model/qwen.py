"""Qwen2.5, Qwen3 and Llama-3 as a Flax module: RMSNorm, rotary positions, grouped queries, SwiGLU.

Axes: B rows, T tokens, D width, H heads, K key-value heads, F MLP width, V vocabulary, L layers.
Parameters of the L layers are stacked on a leading axis; the layers run as one scan.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Params
from ragen_jax.model.attention import Layers, Segment, Tree, attend
from ragen_jax.model.kernels import SCALED_QUERIES
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.model.vision.positions import splice, token_positions

# Models with at most this number of layers run them one after the other instead of as a scan: a
# scan's backward pass first copies every saved activation into an array stacked over layers, which
# on CPU costs the tiny agent as much as the layers do.
UNROLLED_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the lengths of pre-training.

    linear: every frequency is divided by `factor`. llama3: a frequency that turns fewer than
    `low_freq_factor` times within the original length is divided, a frequency that turns more
    than `high_freq_factor` times is kept, and in between the two are mixed linearly.
    """

    kind: str  # linear | llama3
    factor: float
    low_freq_factor: float = 1.0  # used by llama3 only, like the next two fields
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rotary scaling {self.kind!r}; accepted: linear, llama3")
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(f"{self}: needs factor > 0 and low_freq_factor < high_freq_factor")


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
    rope_scaling: RopeScaling | None = None
    # Numbers of frequencies that turn with time, row and column (vision/positions.py); (): each
    # token has one position.
    mrope_section: tuple[int, ...] = ()
    vision: VisionConfig | None = None  # the vision tower; None: a text-only model
    image_tokens: ImageTokens | None = None  # set if the model has a tower
    norm_eps: float = 1e-6
    tied: bool = True  # the output head is the embedding
    family: str = "qwen2"  # a key of families.MODELS: the format of its config.json
    qkv_bias: bool = True  # whether queries, keys and values have a bias
    qk_norm: bool = False  # whether each head of queries and keys has an RMSNorm
    max_positions: int = 32768
    dtype: str = "float32"  # dtype of activations and matrix products; not of the parameters
    attention: str = "xla"  # "xla", or a key of kernels.KERNELS, used if no cache is read
    remat: bool = False  # recompute each layer's activations in the backward pass

    def __post_init__(self) -> None:
        section = self.mrope_section
        if section and (len(section) != 3 or sum(section) * 2 != self.head_dim):
            raise ValueError(
                f"mrope_section {section}: expected 3 numbers of frequencies that sum to "
                f"head_dim / 2 = {self.head_dim // 2}; see rope_scaling in config.json"
            )
        if (self.vision is None) != (self.image_tokens is None):
            raise ValueError("a model must have both vision and image_tokens, or neither")
        if self.vision is not None and self.vision.out_hidden_size != self.width:
            raise ValueError(
                f"vision_config: out_hidden_size {self.vision.out_hidden_size} must equal the "
                f"language model's hidden_size, {self.width}"
            )
        ids = self.image_tokens
        if ids is not None and max(ids.start, ids.pad, ids.end) >= self.vocab_size:
            raise ValueError(
                f"vision_start_token_id {ids.start}, image_token_id {ids.pad} and "
                f"vision_end_token_id {ids.end} must be below vocab_size {self.vocab_size}"
            )


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Return the float32 frequencies [head_dim / 2] of the rotary embedding, in radians a position.

    Args:
      head_dim, theta, scaling: see `ModelConfig`.
    """
    frequency = theta ** (-jnp.arange(0, head_dim // 2, dtype=jnp.float32) / (head_dim // 2))
    if scaling is not None:
        kept = 0.0
        if scaling.kind == "llama3":
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            turns = scaling.original_max_positions * frequency / (2 * math.pi)
            kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency


def rotary_angles(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    section: Sequence[int] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine [B, T, 1, head_dim / 2] of the rotary embedding (RoFormer), float32.

    Args:
      positions: int32 [B, T], or [3, B, T]: the first section[0] frequencies turn with the first
        position, the next section[1] with the second, the others with the third (arXiv 2409.12191).
      head_dim, theta, scaling, section: see `ModelConfig`.
    """
    frequency = rotary_frequencies(head_dim, theta, scaling)
    if positions.ndim == 3:
        position = jnp.moveaxis(positions[np.repeat(np.arange(3), section)], 0, -1)[..., None, :]
    else:
        position = positions[..., None, None]
    angle = position.astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHD: jax.Array, angles: Sequence[jax.Array]) -> jax.Array:
    """Apply the rotary embedding, halves convention (RoFormer, arXiv 2104.09864), in float32."""
    cos, sin = angles
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHD.dtype)


def _with_axes(init: nn.initializers.Initializer, axes: tuple[str, ...]) -> Callable[..., Any]:
    """Return an initialiser that names its parameter's axes, for sharding.

    Typed as Any because it returns a boxed array, which `Module.param` unboxes.
    """
    return nn.with_logical_partitioning(init, axes)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = _with_axes(nn.initializers.ones, ("norm",))
        scale: jax.Array = self.param("scale", init, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel [+ bias], over the last `contract` axes of x; `axes` name the kernel's axes.

    The product is computed on matrices: with a batch axis, XLA's CPU backend is four times slower
    in the backward pass.

    If lora.attach has put lora_a [inputs, r] and lora_b [r, *outputs] next to the kernel,
    (x @ lora_a) @ lora_b is added.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner, outer = self.shape[: self.contract], self.shape[self.contract :]
        fan_in = math.prod(inner)
        init = nn.initializers.normal(fan_in**-0.5)
        kernel: jax.Array = self.param("kernel", _with_axes(init, self.axes), self.shape)
        rows, x = x.shape[: -self.contract], x.reshape(-1, fan_in)
        y = x @ kernel.astype(x.dtype).reshape(fan_in, -1)
        if self.has_variable("params", "lora_a"):
            a = self.get_variable("params", "lora_a").astype(x.dtype)
            b = self.get_variable("params", "lora_b").astype(x.dtype)
            y = y + (x @ a) @ b.reshape(b.shape[0], -1)
        y = y.reshape(*rows, *outer)
        if self.bias:
            zeros = _with_axes(nn.initializers.zeros, self.axes[self.contract :])
            bias: jax.Array = self.param("bias", zeros, outer)
            y = y + bias.astype(x.dtype)
        return y


class Block(nn.Module):
    """A transformer layer. Its carry is x; it also returns the new tokens' keys and values."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        segment_rows: tuple[tuple[jax.Array, ...], ...],
        keep_kv: bool,
        tree: Tree | None,
        segment_kvs: tuple[tuple[jax.Array, jax.Array], ...],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        D, H, K, hd, F = c.width, c.heads, c.kv_heads, c.head_dim, c.mlp_width

        def project(name, heads, axis):
            axes = ("embed", axis, "head")
            y = Linear((D, heads, hd), axes, bias=c.qkv_bias, name=name)(h)
            y = constrain(y, "rows", None, axis, None)
            normed = c.qk_norm and name in ("q", "k")
            return RMSNorm(c.norm_eps, name=f"{name}_norm")(y) if normed else y

        h = RMSNorm(c.norm_eps, name="attention_norm")(x)
        scaled = c.attention in SCALED_QUERIES and not segment_kvs
        scale = hd**-0.5 if scaled else 1.0
        q = rotate(project("q", H, "heads"), [scale * x for x in angles])
        k = rotate(project("k", K, "kv_heads"), angles)
        v = project("v", K, "kv_heads")
        segments = [(*kv, *lengths) for kv, lengths in zip(segment_kvs, segment_rows, strict=True)]
        a = attend(q, k, v, segments, kernel=c.attention, tree=tree)
        x = x + Linear((H, hd, D), ("heads", "head", "embed"), contract=2, name="o")(a)
        x = constrain(x, "rows", None, None)

        h = RMSNorm(c.norm_eps, name="mlp_norm")(x)
        gate = Linear((D, F), ("embed", "mlp"), name="gate")(h)
        up = Linear((D, F), ("embed", "mlp"), name="up")(h)
        x = x + Linear((F, D), ("mlp", "embed"), name="down")(nn.silu(gate) * up)
        x = constrain(x, "rows", None, None)
        kv = (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) if keep_kv else None  # [B, K, T, hd]
        return x, kv


class Qwen(nn.Module):
    """tokens -> final hidden states (and, on request, keys and values for later reuse)."""

    config: ModelConfig

    if TYPE_CHECKING:  # Linen gives a module the hash of its fields, which checkers do not see

        def __hash__(self) -> int: ...

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        positions: jax.Array | None = None,
        segments: Sequence[Segment] = (),
        *,
        tree: Tree | None = None,
        keep_kv: bool = False,
    ) -> tuple[jax.Array, tuple[Layers, Layers] | None]:
        """Run the layers over new tokens.

        The embeddings of tokens past the vocabulary are read from the table `images`
        (vision/positions.py), which is stored next to the module's parameters like the adapters of
        lora.attach.

        Args:
          tokens_BT: int32 [B, T], right-padded with any id.
          positions: int32 [B, T], or [3, B, T] with a mrope_section; default: those of
            `token_positions`, from 0, in a tree along each path.
          segments: the memory that the new tokens may read.
          tree: the prefix tree of the rows that are packed into each row of tokens, without
            segments. None: a row of tokens is one sequence.
          keep_kv: whether to return the new tokens' keys and values.

        Returns:
          (hidden_BTD after the final norm, (k, v) in the form of `attention.Segment` or None).

        Raises:
          ValueError: three positions per token for a model with one.
        """
        c = self.config
        init = _with_axes(nn.initializers.normal(0.02), ("vocab", "embed"))
        embed: jax.Array = self.param("embed", init, (c.vocab_size, c.width))
        if not c.tied:
            self.param("head", init, (c.vocab_size, c.width))  # read by `head`
        images = self.get_variable("params", "images")
        if positions is None:
            end_BT = None if tree is None else tree.end_BT
            positions = token_positions({"images": images}, tokens_BT, end_BT=end_BT)
        if positions.ndim == 3 and not c.mrope_section:
            raise ValueError(
                f"positions have shape {positions.shape}, but the model has no mrope_section: "
                f"expected {tokens_BT.shape}"
            )
        angles = rotary_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling, c.mrope_section)
        # Look embeddings up on the devices that hold the table's columns, then move them to the
        # rows' devices: XLA would otherwise copy the result to all devices.
        text_BT = tokens_BT if images is None else jnp.minimum(tokens_BT, c.vocab_size - 1)
        x = embed[constrain(text_BT, "data_rows", None)].astype(c.dtype)
        x = constrain(constrain(x, "data_rows", None, "embed"), "rows", None, None)
        if images is not None:
            x = splice(x, tokens_BT, images, c.vocab_size)
        if tree is not None and tree.block:
            # With one long row, XLA's CPU backend is a fifth slower.
            x, cos, sin = (y.reshape(-1, tree.block, *y.shape[2:]) for y in (x, *angles))
            angles = cos, sin
        rows = tuple(
            (segment.length_N,) if segment.rows_B is None else (segment.length_N, segment.rows_B)
            for segment in segments
        )
        kvs = tuple((segment.k, segment.v) for segment in segments)
        block = nn.remat(Block, prevent_cse=False, static_argnums=(4,)) if c.remat else Block
        if c.layers <= UNROLLED_LAYERS and not self.is_initializing():
            stacked = self.variables["params"]["layers"]
            layer_kvs = []
            for layer in range(c.layers):
                layer_params = jax.tree.map(lambda a, layer=layer: a[layer], stacked)
                memory = tuple((k[layer], v[layer]) for k, v in kvs)
                x, kv = block(c, parent=None).apply(
                    {"params": layer_params}, x, angles, rows, keep_kv, tree, memory
                )
                layer_kvs.append(kv)
            kv = None
            if keep_kv:
                k, v = zip(*layer_kvs, strict=True)
                kv = k, v
        else:
            layers: Any = nn.scan(  # Any: nn.scan is typed as Block but takes stacked memory
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0),
                length=c.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, kv = layers(c, name="layers")(x, angles, rows, keep_kv, tree, kvs)
        x = RMSNorm(c.norm_eps, name="final_norm")(x)
        return x.reshape(*tokens_BT.shape, c.width), kv


def head(params: Params) -> jax.Array:
    """Return the output matrix [V, D]: the embedding if the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [..., V] of hidden states [..., D]."""
    w = head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, w, preferred_element_type=jnp.float32)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Return new parameters of a model on the default device: a plain nested dict of float32."""
    variables = Qwen(config).init(key, jnp.zeros((1, 1), jnp.int32))
    return nn.unbox(variables)["params"]
