"""The shape of a model: its sizes, features and kinds of layers.

A layer is described by its kind, not by the model's family: caches, packed rows and every pass over
the layers ask for the kind alone.
"""

import dataclasses

from ragen_jax.model.rotary import RopeScaling
from ragen_jax.model.vision.config import ImageTokens, VisionConfig

# full: a token reads all tokens before it. windowed: the last `ModelConfig.window` of them.
# linear: it reads a state of fixed size that they left, `ModelConfig.delta`.
ATTENTION_KINDS = ("full", "windowed", "linear")
# dense: one MLP. experts: `ModelConfig.experts`.
MLP_KINDS = ("dense", "experts")
# The parameters that linear-attention layers lack; theirs begin with "delta_".
SOFTMAX_PARAMETERS = ("q", "k", "v", "o", "q_norm", "k_norm")


@dataclasses.dataclass(frozen=True)
class Layer:
    """The kind of a layer."""

    attention: str = "full"  # one of ATTENTION_KINDS
    mlp: str = "dense"  # one of MLP_KINDS

    def __post_init__(self) -> None:
        for field, known in (("attention", ATTENTION_KINDS), ("mlp", MLP_KINDS)):
            value = getattr(self, field)
            if value not in known:
                raise ValueError(f"{field} {value!r} of a layer; accepted: {', '.join(known)}")


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer; see model/experts.py."""

    count: int
    chosen: int  # experts of a token
    width: int  # hidden units of an expert
    normalized: bool = True  # whether the weights of a token's experts sum to 1

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"{self.chosen} experts of a token, of {self.count} experts")


@dataclasses.dataclass(frozen=True)
class DeltaHeads:
    """The heads of linear-attention layers; see model/delta_rule.py."""

    key_heads: int
    value_heads: int  # a multiple of key_heads, each of which serves as many
    key_dim: int
    value_dim: int
    taps: int = 4  # positions that the convolution reads, the token's included

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads of linear attention cannot share "
                f"{self.key_heads} key heads"
            )
        if self.taps < 2:
            raise ValueError(f"a convolution of {self.taps} positions; accepted: at least 2")

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


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
    kinds: tuple[Layer, ...] = ()  # the kind of each layer; (): all layers are Layer()
    window: int = 0  # positions that a token of a windowed layer reads, itself included
    experts: Experts | None = None  # of layers whose mlp is "experts"
    expert_form: str = "wide"  # a key of experts.FORMS
    window_rope_theta: float = 1e4  # rope_theta of windowed layers, whose rotary is not scaled
    delta: DeltaHeads | None = None  # of layers whose attention is "linear"
    rotary_dim: int = 0  # first numbers of a head that turn with the position; 0: all
    output_gate: bool = False  # whether full attention's result is multiplied by a gate
    # The next five are features of Gemma 3.
    score_dim: int = 0  # scores are divided by the root of this; 0: head_dim
    activation: str = "silu"  # of the MLP's gate; a key of modules.ACTIVATIONS
    post_norms: bool = False  # whether attention's and the MLP's results have an RMSNorm
    norm_plus_one: bool = False  # whether norms multiply by 1 + scale
    scaled_embed: bool = False  # whether embeddings of tokens are multiplied by sqrt(width)
    max_positions: int = 32768
    dtype: str = "float32"  # dtype of activations and matrix products; not of the parameters
    attention: str = "xla"  # "xla", or a key of kernels.KERNELS, used if no cache is read
    remat: bool = False  # recompute each layer's activations in the backward pass
    # "model": keys and values have `dtype`; "int8": they are rounded (quantised.py), for sampling
    cache_dtype: str = "model"
    cache_kernel: str = "xla"  # "xla", or "pages": page_kernel.py for a new token per row
    keep_experts: bool = False  # whether sampling returns the experts of the tokens that it reads

    def __post_init__(self) -> None:
        section = self.mrope_section
        if section and (len(section) != 3 or sum(section) * 2 != self.head_dim):
            raise ValueError(
                f"mrope_section {section}: expected 3 numbers of frequencies that sum to "
                f"head_dim / 2 = {self.head_dim // 2}; see rope_scaling in config.json"
            )
        if self.kinds and len(self.kinds) != self.layers:
            raise ValueError(f"{len(self.kinds)} kinds of layers for {self.layers} layers")
        mlps = [layer.mlp for layer in self.kinds or (Layer(),)]
        for i, mlp in enumerate(mlps):
            if mlp != mlps[0]:
                raise ValueError(
                    f"layer {i}: mlp {mlp!r}, but layer 0 has {mlps[0]!r}; layers of a model must "
                    "have the same kind of MLP"
                )
        if (self.experts is None) == (mlps[0] == "experts"):
            raise ValueError(f"experts {self.experts} of a model whose layers have mlp {mlps[0]!r}")
        if self.window < 1 and "windowed" in self.attention_kinds:
            raise ValueError(f"window {self.window}: windowed layers need at least 1")
        if (self.delta is None) == self.has_state:
            raise ValueError(
                f"delta {self.delta} of a model whose layers have attention "
                f"{', '.join(self.attention_kinds)}"
            )
        if self.has_state and len(self.attention_kinds) == 1:
            raise ValueError("a model needs at least one layer whose attention is not linear")
        if self.has_state and ("windowed" in self.attention_kinds or self.experts is not None):
            raise ValueError(
                "a model with linear-attention layers can have neither windowed layers nor experts"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim}: accepted: even numbers up to head_dim = "
                f"{self.head_dim}"
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

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """The kinds of attention that layers of the model have, without repetition."""
        return tuple(dict.fromkeys(layer.attention for layer in self.kinds or (Layer(),)))

    @property
    def has_state(self) -> bool:
        """Whether any layer is a linear-attention layer."""
        return "linear" in self.attention_kinds

    @property
    def row_form(self) -> str:
        """How passes over many rows read them: as trees by a form of attention, or "plain".

        A state cannot branch, so models that have one read each row as a sequence.
        """
        return "plain" if self.has_state else self.attention

    def layers_with(self, parameter: str) -> tuple[int, ...]:
        """Return the layers that have a parameter, given its first name within a layer."""
        if not self.has_state:
            return tuple(range(self.layers))
        kinds = set(self.attention_kinds)
        if parameter.startswith("delta_"):
            kinds = {"linear"}
        elif parameter in SOFTMAX_PARAMETERS:
            kinds.remove("linear")
        return tuple(i for i, layer in enumerate(self.kinds) if layer.attention in kinds)
