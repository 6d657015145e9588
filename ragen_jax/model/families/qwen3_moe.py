"""Qwen3 with experts: the attention of Qwen3, and in every layer a router and many small MLPs."""

import dataclasses
from pathlib import Path
from typing import Any

from ragen_jax.model.families import decoder, qwen3
from ragen_jax.model.families.types import JOIN, SPLIT, Family
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.shape import Experts, Layer

DENSE = [("layers", name, "kernel") for name in ("gate", "up", "down")]
TENSORS = {
    **{path: row for path, row in qwen3.TENSORS.items() if path not in DENSE},
    **decoder.in_layers(
        (("router", "kernel"), "mlp.gate.weight", SPLIT),
        # Two numbers in a name: the layer and the expert.
        (("experts", "gate"), "mlp.experts.{}.gate_proj.weight", SPLIT),
        (("experts", "up"), "mlp.experts.{}.up_proj.weight", SPLIT),
        (("experts", "down"), "mlp.experts.{}.down_proj.weight", JOIN),
    ),
}


def read(c: dict[str, Any], file: Path) -> ModelConfig:
    layers = c["num_hidden_layers"]
    step, dense = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
    for i in range(layers):
        decoder.refuse_unless(file, f"layer {i}: mlp_only_layers", i in dense, (False,))
        if (i + 1) % step:
            decoder.refuse_unless(file, f"layer {i}: decoder_sparse_step", step, (1,))
    config = qwen3.read(c, file)
    try:
        return dataclasses.replace(
            config,
            family="qwen3_moe",
            kinds=(Layer(mlp="experts"),) * layers,
            experts=Experts(
                c.get("num_experts") or c["num_local_experts"],  # transformers 4, 5
                c["num_experts_per_tok"],
                c["moe_intermediate_size"],
                bool(c.get("norm_topk_prob", False)),
            ),
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        raise ValueError("a model of family 'qwen3_moe' has experts")
    return qwen3.write(config) | {
        "num_experts": config.experts.count,
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
        "moe_intermediate_size": config.experts.width,
        "norm_topk_prob": config.experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


SHAPES = {
    "qwen3-30b-a3b": ModelConfig(
        vocab_size=151936,
        width=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        mlp_width=6144,  # of config.json; no layer has such an MLP
        tied=False,
        family="qwen3_moe",
        qkv_bias=False,
        qk_norm=True,
        kinds=(Layer(mlp="experts"),) * 48,
        experts=Experts(count=128, chosen=8, width=768),
        max_positions=40960,
    ),
}

FAMILY = Family("Qwen3MoeForCausalLM", read, write, TENSORS, SHAPES)
