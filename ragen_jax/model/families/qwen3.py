"""Qwen3, dense: no bias, an RMSNorm on each head of queries and keys, an independent head width."""

from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import SAME, Family
from ragen_jax.model.qwen import ModelConfig

TENSORS = decoder.TENSORS | decoder.in_layers(
    (("q_norm", "scale"), "self_attn.q_norm.weight", SAME),
    (("k_norm", "scale"), "self_attn.k_norm.weight", SAME),
)


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    decoder.refuse_attention_bias(c, file)
    # The head width does not follow from the model's width. Files that leave it out mean the
    # default of transformers.
    return decoder.read({"head_dim": 128} | c, file, family="qwen3", qk_norm=True)


def write(config: ModelConfig) -> dict[str, Any]:
    return decoder.write(config) | {"attention_bias": False, "use_sliding_window": False}


def _shape(width: int, layers: int, heads: int, mlp_width: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        mlp_width=mlp_width,
        tied=True,
        family="qwen3",
        qkv_bias=False,
        qk_norm=True,
        max_positions=40960,
    )


SHAPES = {
    "qwen3-0.6b": _shape(1024, 28, 16, 3072),
    "qwen3-1.7b": _shape(2048, 28, 16, 6144),
    "qwen3-4b": _shape(2560, 36, 32, 9728),
}

FAMILY = Family("Qwen3ForCausalLM", read, write, TENSORS, SHAPES)
