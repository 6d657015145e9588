"""Fields of `ModelConfig` for small models with layers of each kind."""

from ragen_jax.model.families import gemma3
from ragen_jax.model.shape import Experts, Layer


def windowed(layers, window=5):
    """Return the fields of a Gemma 3 model: windowed layers, with a full one after each two."""
    return {
        "kinds": tuple(Layer("full" if i % 3 == 2 else "windowed") for i in range(layers)),
        "window": window,
        "window_rope_theta": 100.0,
        "score_dim": 12,
        "qkv_bias": False,
        "qk_norm": True,
        "family": "gemma3_text",
        **gemma3.FEATURES,
    }


def mixture(layers, count=4, chosen=2):
    """Return the fields of a Qwen3 model with experts."""
    return {
        "kinds": (Layer(mlp="experts"),) * layers,
        "experts": Experts(count, chosen, width=12),
        "tied": False,
        "qkv_bias": False,
        "qk_norm": True,
        "family": "qwen3_moe",
    }
