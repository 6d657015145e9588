"""Llama 3, and SmolLM2, which has its shape: no bias anywhere, stretched rotary frequencies."""

from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import Family
from ragen_jax.model.rotary import RopeScaling
from ragen_jax.model.shape import ModelConfig


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    decoder.refuse_attention_bias(c, file)
    return decoder.read(c, file, family="llama")


def write(config: ModelConfig) -> dict[str, Any]:
    return decoder.write(config) | {"attention_bias": False}


def _shape(
    width: int, layers: int, heads: int, mlp_width: int, *, factor: float, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vocab_size=128256,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=width // heads,
        mlp_width=mlp_width,
        rope_theta=5e5,
        rope_scaling=RopeScaling("llama3", factor),
        norm_eps=1e-5,
        tied=tied,
        family="llama",
        qkv_bias=False,
        max_positions=131072,
    )


def _smollm2(
    width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, theta: float = 1e5
) -> ModelConfig:
    return ModelConfig(
        vocab_size=49152,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        mlp_width=mlp_width,
        rope_theta=theta,
        norm_eps=1e-5,
        tied=True,
        family="llama",
        qkv_bias=False,
        max_positions=8192,
    )


SHAPES = {  # the instruction-tuned models
    "llama-3.2-1b": _shape(2048, 16, 32, 8192, factor=32.0, tied=True),
    "llama-3.2-3b": _shape(3072, 28, 24, 8192, factor=32.0, tied=True),
    "llama-3.1-8b": _shape(4096, 32, 32, 14336, factor=8.0, tied=False),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, theta=1.3e5),
}

FAMILY = Family("LlamaForCausalLM", read, write, decoder.TENSORS, SHAPES)
