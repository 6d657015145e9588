"""Gemma 3, text: windowed layers between full ones, four norms a layer, GELU, scaled embeddings.

The published 4B model also has a vision tower, in files of another architecture: its language model
is read from them, the tower is not supported. A saved model has the text model's architecture.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import SAME, Family
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.rotary import RopeScaling
from ragen_jax.model.shape import Layer

# Defaults of transformers for missing fields, which the published files leave out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
THETA, WINDOW_THETA = 1e6, 1e4
ATTENTION = {"full_attention": "full", "sliding_attention": "windowed"}

TENSORS = decoder.TENSORS | decoder.in_layers(
    (("attention_post_norm", "scale"), "post_attention_layernorm.weight", SAME),
    (("mlp_norm", "scale"), "pre_feedforward_layernorm.weight", SAME),
    (("mlp_post_norm", "scale"), "post_feedforward_layernorm.weight", SAME),
    (("q_norm", "scale"), "self_attn.q_norm.weight", SAME),
    (("k_norm", "scale"), "self_attn.k_norm.weight", SAME),
)


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    text = DEFAULTS | (c.get("text_config") or c)
    decoder.refuse_attention_bias(text, file)
    full, windowed = _rotary(text)
    layers = text["num_hidden_layers"]
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % text["sliding_window_pattern"] == 0 else "sliding_attention"
        for i in range(layers)
    ]
    for name, value, known in (
        ("hidden_activation", text["hidden_activation"], "gelu_pytorch_tanh"),
        ("attn_logit_softcapping", text.get("attn_logit_softcapping"), None),
        ("final_logit_softcapping", text.get("final_logit_softcapping"), None),
        ("use_bidirectional_attention", text.get("use_bidirectional_attention") or False, False),
        ("rope_type of sliding_attention", windowed.get("rope_type", "default"), "default"),
    ):
        decoder.refuse_unless(file, name, value, (known,))
    for i, kind in enumerate(kinds):
        decoder.refuse_unless(file, f"layer {i}: layer_types", kind, tuple(ATTENTION))
    shared = {"hidden_act": "silu", "layer_types": (), "rope_scaling": None}
    config = decoder.read(
        text | shared | {"rope_parameters": full}, file, family="gemma3_text", qk_norm=True
    )
    width = text["query_pre_attn_scalar"]
    try:
        return dataclasses.replace(
            config,
            kinds=tuple(Layer(ATTENTION[kind]) for kind in kinds),
            window=text["sliding_window"],
            window_rope_theta=float(windowed["rope_theta"]),
            score_dim=0 if width == config.head_dim else width,
            **FEATURES,
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


FEATURES: dict[str, Any] = {  # of every model of the family
    "activation": "gelu",
    "post_norms": True,
    "norm_plus_one": True,
    "scaled_embed": True,
}


def _rotary(text: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary fields of full and windowed layers, as transformers 4 or 5 writes them."""
    both = text.get("rope_parameters") or {}  # transformers 5
    full = {"rope_theta": text.get("rope_theta", THETA)} | (both.get("full_attention") or {})
    windowed = {"rope_theta": text.get("rope_local_base_freq", WINDOW_THETA)}
    return full | (text.get("rope_scaling") or {}), windowed | (both.get("sliding_attention") or {})


def write(config: ModelConfig) -> dict[str, Any]:
    differ = [name for name, value in FEATURES.items() if getattr(config, name) != value]
    if differ or not config.kinds:
        raise ValueError(
            f"a model of family 'gemma3_text' has kinds of layers and the features {FEATURES}"
        )
    fields = decoder.write(config)
    full = fields["rope_parameters"]
    windowed = {"rope_type": "default", "rope_theta": config.window_rope_theta}
    del fields["hidden_act"]
    names = {kind: name for name, kind in ATTENTION.items()}
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config.score_dim or config.head_dim,
        "sliding_window": config.window,
        "layer_types": [names[layer.attention] for layer in config.kinds],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": config.window_rope_theta,  # transformers 4
        "rope_parameters": {"full_attention": full, "sliding_attention": windowed},
    }


def _shape(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    *,
    window: int,
    vocab_size: int = 262144,
    max_positions: int = 32768,
    scaling: RopeScaling | None = None,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        mlp_width=mlp_width,
        rope_theta=THETA,
        rope_scaling=scaling,
        tied=True,
        family="gemma3_text",
        qkv_bias=False,
        qk_norm=True,
        kinds=tuple(Layer("windowed" if (i + 1) % 6 else "full") for i in range(layers)),
        window=window,
        window_rope_theta=WINDOW_THETA,
        max_positions=max_positions,
        **FEATURES,
    )


SHAPES = {  # the instruction-tuned models
    "gemma-3-270m": _shape(640, 18, 4, 1, 2048, window=512),
    "gemma-3-1b": _shape(1152, 26, 4, 1, 6912, window=512),
    "gemma-3-4b": _shape(
        *(2560, 34, 8, 4, 10240),
        window=1024,
        vocab_size=262208,
        max_positions=131072,
        scaling=RopeScaling("linear", 8.0),
    ),
}

FAMILY = Family(
    "Gemma3ForCausalLM",
    read,
    write,
    TENSORS,
    SHAPES,
    part_of=("Gemma3ForConditionalGeneration",),
    # Names in published files of the larger model, and in memory since transformers 4.52.
    part_names={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    other_prefixes=(
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    ),
)
