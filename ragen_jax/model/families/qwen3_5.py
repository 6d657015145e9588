"""Qwen3.5, dense, text: linear attention in three of four layers, full attention with a gate.

The published models also have a vision tower and layers for speculative decoding, in files of
another architecture: the language model is read from them, the rest is not supported. A saved model
has the text model's architecture.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import JOIN, SAME, SPLIT, Family
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.shape import DeltaHeads, Layer

# Defaults of transformers for missing fields.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
ROTARY_PART = 0.25  # of a head
ATTENTION = {"full_attention": "full", "linear_attention": "linear"}
FEATURES: dict[str, Any] = {  # of every model of the family
    "qkv_bias": False,
    "qk_norm": True,
    "norm_plus_one": True,
    "output_gate": True,
}

LARGE = decoder.in_layers(  # the matrices of linear attention that adapters are made for
    (("delta_qkv", "kernel"), "linear_attn.in_proj_qkv.weight", SPLIT),
    (("delta_z", "kernel"), "linear_attn.in_proj_z.weight", SPLIT),
    (("delta_o", "kernel"), "linear_attn.out_proj.weight", JOIN),
)
TENSORS = (
    decoder.TENSORS
    | LARGE
    | decoder.in_layers(
        (("q_norm", "scale"), "self_attn.q_norm.weight", SAME),
        (("k_norm", "scale"), "self_attn.k_norm.weight", SAME),
        (("delta_a", "kernel"), "linear_attn.in_proj_a.weight", SPLIT),
        (("delta_b", "kernel"), "linear_attn.in_proj_b.weight", SPLIT),
        (("delta_conv",), "linear_attn.conv1d.weight", SAME),
        (("delta_log_decay",), "linear_attn.A_log", SAME),
        (("delta_decay_bias",), "linear_attn.dt_bias", SAME),
        (("delta_norm", "scale"), "linear_attn.norm.weight", SAME),
    )
)


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    text = DEFAULTS | (c.get("text_config") or c)
    decoder.refuse_attention_bias(text, file)
    layers, every = text["num_hidden_layers"], text["full_attention_interval"]
    kinds = text.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
    ]
    for i, kind in enumerate(kinds):
        decoder.refuse_unless(file, f"layer {i}: layer_types", kind, tuple(ATTENTION))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}  # transformers 5, 4
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Without images, the three positions of mrope are equal.
    decoder.refuse_unless(file, "rope_type", kind, ("default", "mrope"))
    part = float(
        rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or ROTARY_PART
    )
    theta = {"rope_theta": rope.get("rope_theta") or text.get("rope_theta") or 1e4}
    tied = c.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    plain = {
        "layer_types": (),
        "rope_scaling": None,
        "rope_parameters": theta,
        "partial_rotary_factor": None,
        "tie_word_embeddings": tied,
        "quantization_config": c.get("quantization_config"),
    }
    config = decoder.read(text | plain, file, family="qwen3_5_text")
    try:
        return dataclasses.replace(
            config,
            kinds=tuple(Layer(ATTENTION[kind]) for kind in kinds),
            delta=DeltaHeads(
                key_heads=text["linear_num_key_heads"],
                value_heads=text["linear_num_value_heads"],
                key_dim=text["linear_key_head_dim"],
                value_dim=text["linear_value_head_dim"],
                taps=text["linear_conv_kernel_dim"],
            ),
            rotary_dim=int(config.head_dim * part),
            **FEATURES,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write(config: ModelConfig) -> dict[str, Any]:
    differ = [name for name, value in FEATURES.items() if getattr(config, name) != value]
    if differ or config.delta is None:
        raise ValueError(
            "a model of family 'qwen3_5_text' has linear-attention layers and the features "
            f"{FEATURES}"
        )
    fields = decoder.write(config)
    del fields["rope_theta"], fields["rope_scaling"]
    part = (config.rotary_dim or config.head_dim) / config.head_dim
    names = {kind: name for name, kind in ATTENTION.items()}
    return fields | {
        "attention_bias": False,
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": part},
        "layer_types": [names[layer.attention] for layer in config.kinds],
        "linear_num_key_heads": config.delta.key_heads,
        "linear_num_value_heads": config.delta.value_heads,
        "linear_key_head_dim": config.delta.key_dim,
        "linear_value_head_dim": config.delta.value_dim,
        "linear_conv_kernel_dim": config.delta.taps,
    }


def _shape(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    *,
    value_heads: int,
    tied: bool = True,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=248320,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        mlp_width=mlp_width,
        rope_theta=1e7,
        tied=tied,
        family="qwen3_5_text",
        kinds=tuple(Layer("linear" if (i + 1) % 4 else "full") for i in range(layers)),
        delta=DeltaHeads(16, value_heads, 128, 128),
        rotary_dim=64,
        max_positions=262144,
        **FEATURES,
    )


SHAPES = {
    "qwen3.5-0.8b": _shape(1024, 24, 8, 2, 3584, value_heads=16),
    "qwen3.5-2b": _shape(2048, 24, 8, 2, 6144, value_heads=16),
    "qwen3.5-4b": _shape(2560, 32, 16, 4, 9216, value_heads=32),
    "qwen3.5-9b": _shape(4096, 32, 16, 4, 12288, value_heads=32, tied=False),
    "qwen3.5-27b": _shape(5120, 64, 24, 4, 17408, value_heads=48, tied=False),
}

FAMILY = Family(
    "Qwen3_5ForCausalLM",
    read,
    write,
    TENSORS,
    SHAPES,
    part_of=("Qwen3_5ForConditionalGeneration",),
    part_names={"model.language_model.": "model."},
    other_prefixes=("model.visual.", "mtp."),
)
