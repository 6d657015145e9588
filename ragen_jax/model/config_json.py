"""Conversion between a config.json of transformers 4 or 5 and `qwen.ModelConfig`, using MODELS."""

from pathlib import Path
from typing import Any

from ragen_jax.model import qwen
from ragen_jax.model.families import MODELS, family_of

MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
SIZES = dict.fromkeys(
    ("num_hidden_layers", "depth", "num_experts", "num_local_experts"), MAX_LAYERS
) | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "out_hidden_size", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "num_heads", "max_position_embeddings"),
        *("moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "full_attention_interval"),
    ),
    MAX_SIZE,
)  # largest accepted values of config.json's fields
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_config(c: dict[str, Any], file: Path) -> qwen.ModelConfig:
    """Return the `qwen.ModelConfig` for the contents of a config.json.

    Args:
      file: the file that they come from, for messages.

    Raises:
      ValueError: another architecture, a feature that qwen.py lacks, or a missing field.
    """
    family = MODELS[_family(c, file)]
    for part in (c, c.get("text_config"), c.get("vision_config")):
        if isinstance(part, dict):
            _check_sizes(part, file)
    try:
        return family.read(c, file)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error


def _check_sizes(c: dict[str, Any], file: Path) -> None:
    """Raise ValueError for sizes that are not numbers or are so large that lists fill memory."""
    for name, most in SIZES.items():
        value = c.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            shown = f"{value!r:.40}"
            raise ValueError(
                f"{file}: {name} is {shown}; accepted: a whole number from 1 to {most:,}"
            )


def from_config(c: qwen.ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json, without token ids, of a `qwen.ModelConfig`.

    Args:
      dtype: dtype of the weights.

    Raises:
      ValueError: an unknown family.
    """
    family = family_of(c)
    return {
        "architectures": [family.architecture],
        "model_type": c.family,
        **family.write(c),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _family(c: dict[str, Any], file: Path) -> str:
    """Return the key of MODELS for a config.json."""
    names = c.get("architectures") or []
    if not names and c.get("model_type") in MODELS:
        return c["model_type"]
    known = {
        name: kind
        for kind, family in MODELS.items()
        for name in (family.architecture, *family.part_of)
    }
    for name in names:
        if name in known:
            return known[name]
    architecture = ", ".join(names) or f"model_type {c.get('model_type')!r}"
    raise ValueError(f"{file}: architecture {architecture}; accepted: {', '.join(known)}")
