"""Kinds of layers of the tiny agent, so that every kind can be trained without a download."""

from typing import Any

from ragen_jax.model.families import gemma3
from ragen_jax.model.shape import Experts, Layer

DENSE, WINDOWED, EXPERTS = "dense", "windowed", "experts"
KINDS = (DENSE, WINDOWED, EXPERTS)
TINY_WINDOW = 32  # positions; a first prompt of Sokoban has about 60
TINY_EXPERTS, TINY_CHOSEN = 8, 2


def kind_fields(kind: str, layers: int, mlp_width: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for a kind.

    dense: a Qwen2.5. windowed: a Gemma 3, whose odd layers read the last TINY_WINDOW positions.
    experts: a Qwen3 mixture, of which a token's experts have `mlp_width` hidden units together.
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
    if kind == EXPERTS:
        return {
            "kinds": (Layer(mlp="experts"),) * layers,
            "experts": Experts(TINY_EXPERTS, TINY_CHOSEN, max(mlp_width // TINY_CHOSEN, 1)),
            "family": "qwen3_moe",
            "qkv_bias": False,
            "qk_norm": True,
        }
    return {}
