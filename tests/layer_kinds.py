"""Fields of `ModelConfig` for small models with layers of each kind."""

from ragen_jax.model.families import gemma3, qwen3_5
from ragen_jax.model.shape import DeltaHeads, Experts, Layer


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


def hybrid(layers, every=4):
    """Return the fields of a Qwen3.5 model: linear attention, with a full layer after some.

    In narrow heads, a query and a key may be almost orthogonal. The norm of the result then
    magnifies rounding, unless its epsilon is large.
    """
    return {
        "kinds": tuple(Layer("linear" if (i + 1) % every else "full") for i in range(layers)),
        "delta": DeltaHeads(key_heads=2, value_heads=4, key_dim=16, value_dim=5, taps=3),
        "rotary_dim": 4,
        "norm_eps": 1e-2,
        "family": "qwen3_5_text",
        **qwen3_5.FEATURES,
    }
