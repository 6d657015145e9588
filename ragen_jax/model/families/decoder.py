"""Code shared by all families: a decoder's config.json and the names of its tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax.model import qwen, rotary
from ragen_jax.model.families.types import JOIN, SAME, SPLIT, TensorNames

# Field of `rotary.RopeScaling` -> its name in config.json, for each rope_type.
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


def in_layers(*rows: tuple[tuple[str, ...], str, str]) -> TensorNames:
    """Return the tensor names of every layer, from (path, tensor name, layout) within a layer."""
    return {("layers", *path): (f"model.layers.{{}}.{name}", layout) for path, name, layout in rows}


TENSORS: TensorNames = {
    ("embed",): ("model.embed_tokens.weight", SAME),
    ("head",): ("lm_head.weight", SAME),
    ("final_norm", "scale"): ("model.norm.weight", SAME),
    **in_layers(
        (("attention_norm", "scale"), "input_layernorm.weight", SAME),
        (("q", "kernel"), "self_attn.q_proj.weight", SPLIT),
        (("k", "kernel"), "self_attn.k_proj.weight", SPLIT),
        (("v", "kernel"), "self_attn.v_proj.weight", SPLIT),
        (("o", "kernel"), "self_attn.o_proj.weight", JOIN),
        (("mlp_norm", "scale"), "post_attention_layernorm.weight", SAME),
        (("gate", "kernel"), "mlp.gate_proj.weight", SPLIT),
        (("up", "kernel"), "mlp.up_proj.weight", SPLIT),
        (("down", "kernel"), "mlp.down_proj.weight", JOIN),
    ),
}


def read(
    c: dict[str, Any], file: Path, *, family: str, qkv_bias: bool = False, qk_norm: bool = False
) -> qwen.ModelConfig:
    """Return the shape that a decoder's fields describe, as transformers 4 or 5 writes them.

    Args:
      c: the fields.
      file: the file that they come from, for messages.
      family, qkv_bias, qk_norm: fields of `qwen.ModelConfig` that config.json does not have.

    Raises:
      ValueError: a feature that qwen.py lacks. KeyError: a missing field.
    """
    layer_types = c.get("layer_types") or ()
    windowed = c.get("use_sliding_window") and c.get("sliding_window") is not None
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}  # transformers 4, 5
    first_windowed = c.get("max_window_layers", 28)
    if not layer_types and windowed and first_windowed < c["num_hidden_layers"]:
        layer_types = ["full_attention"] * first_windowed + ["sliding_attention"]
    for name, value, known in (
        ("hidden_act", c.get("hidden_act", "silu"), ("silu",)),
        *(
            (f"layer {i}: layer_types", kind, ("full_attention",))
            for i, kind in enumerate(layer_types)
        ),
        ("mlp_bias", c.get("mlp_bias") or False, (False,)),
        ("quantization_config", c.get("quantization_config"), (None,)),
        ("rope_type", rope.get("rope_type") or rope.get("type") or "default", tuple(ROPE)),
        ("partial_rotary_factor", _partial(c, rope), (1.0,)),
    ):
        refuse_unless(file, name, value, known)

    # Fields that older files leave out get the defaults of transformers.
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
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        max_positions=c.get("max_position_embeddings", 32768),
    )


def refuse_unless(file: Path, name: str, value: Any, known: Sequence[Any]) -> None:
    """Raise ValueError if a field of config.json has a value other than the known ones."""
    if value not in known:
        accepted = ", ".join(map(repr, known))
        raise ValueError(f"{file}: {name} {value!r} is not supported; accepted: {accepted}")


def refuse_attention_bias(c: dict[str, Any], file: Path) -> None:
    """Raise ValueError if the field attention_bias is true."""
    if c.get("attention_bias"):
        raise ValueError(
            f"{file}: attention_bias true also puts a bias on o_proj, which is not supported; "
            "accepted: false"
        )


def write(c: qwen.ModelConfig) -> dict[str, Any]:
    """Return the fields from which `read` makes the shape, for transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if c.rope_scaling is not None:
        kind = c.rope_scaling.kind
        names = ROPE[kind]
        rope = {"rope_type": kind} | {n: getattr(c.rope_scaling, f) for f, n in names.items()}
    return {
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
        # transformers 4 reads these two fields; transformers 5 reads rope_parameters.
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "use_cache": True,
    }


def _partial(c: dict[str, Any], rope: dict[str, Any]) -> float:
    return float(rope.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1)


def _rope_scaling(rope: dict[str, Any], file: Path) -> rotary.RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    missing = [name for name in ROPE[kind].values() if rope.get(name) is None]
    if missing:
        raise ValueError(f"{file}: rope_type {kind!r} needs {', '.join(missing)}")
    try:
        return rotary.RopeScaling(kind, **{field: rope[name] for field, name in ROPE[kind].items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
