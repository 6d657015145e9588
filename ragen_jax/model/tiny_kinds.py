"""Kinds of layers of the tiny agent, so that every kind can be trained without a download."""

from typing import Any

from ragen_jax.model.families import gemma3, qwen3_5
from ragen_jax.model.shape import DeltaHeads, Experts, Layer

DENSE, WINDOWED, EXPERTS, HYBRID = "dense", "windowed", "experts", "hybrid"
KINDS = (DENSE, WINDOWED, EXPERTS, HYBRID)
TINY_WINDOW = 32  # positions; a first prompt of Sokoban has about 60
TINY_EXPERTS, TINY_CHOSEN = 8, 2


def kind_fields(
    kind: str, layers: int, mlp_width: int, heads: int, head_dim: int
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for a kind.

    dense: a Qwen2.5. windowed: a Gemma 3, whose odd layers read the last TINY_WINDOW positions.
    experts: a Qwen3 mixture, of which a token's experts have `mlp_width` hidden units together.
    hybrid: a Qwen3.5 whose even layers have linear attention, with `heads` heads of `head_dim`.

    Raises:
      ValueError: a hybrid of one layer.
    """
    if kind == WINDOWED:
        return {
            "kinds": tuple(Layer("full" if i % 2 else "windowed") for i in range(layers)),
            "window": TINY_WINDOW,
            "family": "gemma3_text",
            "qkv_bias": False,
            "qk_norm": True,
            **gemma3.FEATURES,
        }
    if kind == HYBRID:
        if layers < 2:
            raise ValueError(
                f"config.warmstart.layers is {layers}; a tiny agent of kind 'hybrid' has at least 2"
            )
        return {
            "kinds": tuple(Layer("full" if i % 2 else "linear") for i in range(layers)),
            "delta": DeltaHeads(heads, heads, head_dim, head_dim),
            "family": "qwen3_5_text",
            **qwen3_5.FEATURES,
        }
    if kind == EXPERTS:
        return {
            "kinds": (Layer(mlp="experts"),) * layers,
            "experts": Experts(TINY_EXPERTS, TINY_CHOSEN, max(mlp_width // TINY_CHOSEN, 1)),
            "family": "qwen3_moe",
            "qkv_bias": False,
            "qk_norm": True,
        }
    return {}
