"""Qwen2.5-VL: a Qwen2.5 language model with three positions per token, and a vision tower.

config.json has the language model's fields either at the top level (as published; every version of
transformers reads them) or in a `text_config` (as written by transformers 4.52 and later). The
parameters here are the language model's only; vision/tensors.py names the tower's tensors. Video
is not supported: config.json's video fields are kept for programs that open the model later.
"""

import dataclasses
from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder, qwen2
from ragen_jax.model.families.types import Family
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.model.vision.tower import ROPE_THETA

# Defaults of transformers for missing fields. In nested objects, its version 4 leaves out every
# field that has its default value.
TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 4096,
}
SECTION = (16, 24, 24)
VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "window_size": 112,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "tokens_per_second": 4,
}
TOKENS = {  # field of config.json -> (field of `ImageTokens`, default)
    "vision_start_token_id": ("start", 151652),
    "image_token_id": ("pad", 151655),
    "vision_end_token_id": ("end", 151653),
    "video_token_id": ("video", 151656),
}


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    text = TEXT | (c.get("text_config") or c)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ValueError(
            f"{file}: rope_type {kind!r} is not supported; accepted: 'default', 'mrope'"
        )
    fields = text | {
        "rope_scaling": None,
        "rope_parameters": {**rope, "rope_type": "default"},
        "tie_word_embeddings": c.get("tie_word_embeddings") or text.get("tie_word_embeddings"),
        "quantization_config": c.get("quantization_config"),
    }
    config = decoder.read(fields, file, family="qwen2_5_vl", qkv_bias=True)
    ids = {
        field: default if c.get(name) is None else c[name]
        for name, (field, default) in TOKENS.items()
    }
    try:
        _check_heads(config)
        return dataclasses.replace(
            config,
            mrope_section=tuple(rope.get("mrope_section") or SECTION),
            vision=_vision(c["vision_config"]),
            image_tokens=ImageTokens(**ids),
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _vision(given: Any) -> VisionConfig:
    """Return the tower that a `vision_config` describes.

    Raises:
      ValueError: a feature that vision/tower.py lacks, or a value that is not an integer.
    """
    if not isinstance(given, dict):
        raise ValueError(f"vision_config {given!r} must be an object")
    fields = VISION | given
    rope = fields.get("rope_parameters") or {}
    for name, value, known in (
        ("hidden_act", fields.get("hidden_act", "silu"), "silu"),
        ("in_channels", fields["in_channels"], 3),  # images.py reads three colours
        ("rope_theta", rope.get("rope_theta", ROPE_THETA), ROPE_THETA),
    ):
        if value != known:
            raise ValueError(
                f"vision_config: {name} {value!r} is not supported; accepted: {known!r}"
            )
    found = {name: fields[name] for name in VISION}
    whole_image = found.pop("fullatt_block_indexes")
    if not isinstance(whole_image, list | tuple):
        raise ValueError(f"vision_config: fullatt_block_indexes {whole_image!r} must be a list")
    for name, value in [*found.items(), *(("fullatt_block_indexes", x) for x in whole_image)]:
        if not isinstance(value, int):
            raise ValueError(f"vision_config: {name} {value!r} must be a whole number")
    return VisionConfig(**found, fullatt_block_indexes=tuple(whole_image))


def _check_heads(config: ModelConfig) -> None:
    """Raise ValueError if heads * head_dim is not the width: config.json has no field for it."""
    if config.heads * config.head_dim != config.width:
        raise ValueError(
            f"head_dim {config.head_dim} of {config.heads} attention heads must be hidden_size / "
            f"num_attention_heads = {config.width / config.heads:g}"
        )


def write(config: ModelConfig) -> dict[str, Any]:
    if config.vision is None or not config.mrope_section or config.rope_scaling is not None:
        raise ValueError(
            "a model of family 'qwen2_5_vl' has vision, image_tokens and mrope_section, and no "
            "rope_scaling"
        )
    _check_heads(config)
    vision = {name: getattr(config.vision, name) for name in VISION}
    vision["fullatt_block_indexes"] = list(vision["fullatt_block_indexes"])
    fields = decoder.write(config)
    # transformers 4 and 5 read rope_theta and rope_scaling, and compute a head's width.
    del fields["rope_parameters"], fields["head_dim"]
    return fields | {
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.mrope_section)},
        "use_sliding_window": False,
        "vision_config": vision | {"hidden_act": "silu"},
        **{name: getattr(config.image_tokens, field) for name, (field, _) in TOKENS.items()},
    }


def _shape(text: ModelConfig) -> ModelConfig:
    """Return the published model's shape: the language model's, with the tower of all sizes."""
    return dataclasses.replace(
        text,
        mrope_section=SECTION,
        vision=VisionConfig(
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            out_hidden_size=text.width,
            fullatt_block_indexes=(7, 15, 23, 31),
            tokens_per_second=2,
        ),
        image_tokens=ImageTokens(start=151652, pad=151655, end=151653, video=151656),
        family="qwen2_5_vl",
        max_positions=128000,
    )


SHAPES = {  # the instruction-tuned models; their language models have the shapes of Qwen2.5
    "qwen2.5-vl-3b": _shape(qwen2.SHAPES["qwen2.5-3b"]),
    "qwen2.5-vl-7b": _shape(qwen2.SHAPES["qwen2.5-7b"]),
}

FAMILY = Family(
    "Qwen2_5_VLForConditionalGeneration",
    read,
    write,
    qwen2.TENSORS,
    SHAPES,
    # Names in memory since transformers 4.52, and in files written from its state_dict.
    renamed={"model.language_model.": "model.", "model.visual.": "visual."},
    other_prefixes=("visual.",),
)
