"""config.json of Qwen2 and Llama, as transformers 4 and 5 write it <-> `qwen.ModelConfig`."""

from pathlib import Path
from typing import Any

from ragen_jax.model import qwen

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Field of `qwen.RopeScaling` -> its name in config.json, for each rope_type.
ROPE = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    },
}


def to_config(c: dict[str, Any], file: Path) -> qwen.ModelConfig:
    """`qwen.ModelConfig` of the contents of a config.json.

    Args:
      file: where they are from, for messages.

    Raises:
      ValueError: another architecture, a feature that qwen.py lacks, or a missing field.
    """
    family = _family(c, file)
    for name, why in qwen.MODELS[family].refused.items():
        if c.get(name):
            raise ValueError(f"{file}: {name} true {why}, which is not supported; accepted: false")
    layer_types = c.get("layer_types") or ()
    windowed = c.get("use_sliding_window") and c.get("sliding_window") is not None
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # transformers 4, 5
    try:
        if not layer_types and windowed and c.get("max_window_layers", 28) < c["num_hidden_layers"]:
            layer_types = ("sliding_attention",)
        for name, value, known in (
            ("hidden_act", c.get("hidden_act", "silu"), ("silu",)),
            *(("layer_types", kind, ("full_attention",)) for kind in layer_types),
            ("mlp_bias", c.get("mlp_bias") or False, (False,)),
            ("quantization_config", c.get("quantization_config"), (None,)),
            ("rope_type", rope.get("rope_type") or rope.get("type") or "default", tuple(ROPE)),
            ("partial_rotary_factor", _partial(c, rope), (1.0,)),
        ):
            if value not in known:
                accepted = ", ".join(map(repr, known))
                raise ValueError(f"{file}: {name} {value!r} is not supported; accepted: {accepted}")

        # Defaults are those of transformers, for fields that older files leave out.
        heads = c["num_attention_heads"]
        kv_heads = c.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"{file}: {heads} attention heads cannot share {kv_heads} key heads")
        return qwen.ModelConfig(
            vocab_size=c["vocab_size"],
            width=c["hidden_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            mlp_width=c["intermediate_size"],
            rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 1e4),
            rope_scaling=_rope_scaling(rope, file),
            norm_eps=float(c.get("rms_norm_eps", 1e-6)),
            tied=bool(c.get("tie_word_embeddings", False)),
            family=family,
            max_positions=c.get("max_position_embeddings", 32768),
        )
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error


def from_config(c: qwen.ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json, but for token ids, of a `qwen.ModelConfig`; dtype: of the weights."""
    family = qwen.MODELS[c.family]
    rope: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        kind = c.rope_scaling.kind
        names = ROPE[kind]
        rope = {"rope_type": kind} | {n: getattr(c.rope_scaling, f) for f, n in names.items()}
    return {
        "architectures": [family.architecture],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        # transformers 4 reads these two, 5 rope_parameters.
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **family.features_off,
    }


def _family(c: dict[str, Any], file: Path) -> str:
    """The key of `qwen.MODELS` that a config.json is of."""
    names = c.get("architectures") or []
    if not names and c.get("model_type") in qwen.MODELS:
        return c["model_type"]
    known = {family.architecture: kind for kind, family in qwen.MODELS.items()}
    for name in names:
        if name in known:
            return known[name]
    architecture = ", ".join(names) or f"model_type {c.get('model_type')!r}"
    raise ValueError(f"{file}: architecture {architecture}; accepted: {', '.join(known)}")


def _partial(c: dict[str, Any], rope: dict[str, Any]) -> float:
    return float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1)


def _rope_scaling(rope: dict[str, Any], file: Path) -> qwen.RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    missing = [name for name in ROPE[kind].values() if rope.get(name) is None]
    if missing:
        raise ValueError(f"{file}: rope_type {kind!r} needs {', '.join(missing)}")
    try:
        return qwen.RopeScaling(kind, **{field: rope[name] for field, name in ROPE[kind].items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
