"""Qwen2 and Qwen2.5: a bias on queries, keys and values."""

from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import FLAT, Family
from ragen_jax.model.qwen import ModelConfig

TENSORS = decoder.TENSORS | decoder.in_layers(
    (("q", "bias"), "self_attn.q_proj.bias", FLAT),
    (("k", "bias"), "self_attn.k_proj.bias", FLAT),
    (("v", "bias"), "self_attn.v_proj.bias", FLAT),
)


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    return decoder.read(c, file, family="qwen2", qkv_bias=True)


def write(config: ModelConfig) -> dict[str, Any]:
    return decoder.write(config) | {"use_sliding_window": False}


def _shape(
    width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, *, tied: bool = False
) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936 if tied else 152064,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width // heads,
        mlp_width=mlp_width,
        tied=tied,
    )


SHAPES = {  # the instruction-tuned models
    "qwen2.5-0.5b": _shape(896, 24, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _shape(1536, 28, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _shape(2048, 36, 16, 2, 11008, tied=True),
    "qwen2.5-7b": _shape(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _shape(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _shape(5120, 64, 40, 8, 27648),
    "qwen2.5-72b": _shape(8192, 80, 64, 8, 29568),
}

FAMILY = Family("Qwen2ForCausalLM", read, write, TENSORS, SHAPES)
