"""The network's shape, from a GGUF file's keys."""

import dataclasses
from typing import Any

import numpy as np

from ragen_jax.model import config_json
from ragen_jax.model.gguf.reader import GGUF
from ragen_jax.model.gguf.tensors import EMBEDDING, HEAD, ROPE_DIVISORS, dequantize
from ragen_jax.model.rotary import RopeScaling, rotary_frequencies
from ragen_jax.model.shape import ModelConfig

# general.architecture -> architecture in a config.json
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TOLERANCE = 1e-4  # relative; the divisors are stored in float32

# Keys of an architecture that `read_shape` reads, or that do not change the network.
_READ = {
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.freq_base"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
# Keys of features that the network lacks, unless they have one of these values.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "expert_count": (0, None),
    "expert_used_count": (0, None),
    "attention.sliding_window": (0, None),
    "attention.causal": (True, None),
    "attention.scale": (None,),
    "attention.clamp_kqv": (0.0, None),
    "attention.max_alibi_bias": (0.0, None),
    "logit_scale": (None,),
    "embedding_scale": (None,),
    "residual_scale": (None,),
    "use_parallel_residual": (False, None),
    "pooling_type": (0, None),
    "rope.scaling.attn_factor": (1.0, None),
}


def read_shape(file: GGUF) -> ModelConfig:
    """Return the shape that the file's keys describe.

    Raises:
      ValueError: another architecture, a missing key, or a feature that qwen.py lacks.
    """
    if file.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {file.architecture!r:.40}; accepted for GGUF files: "
            f"{', '.join(ARCHITECTURES)}"
        )
    for key, accepted in _ABSENT.items():
        if file.get(key) not in accepted:
            raise ValueError(
                f"{file.path}: {file.architecture}.{key} is {file.get(key)!r:.40}, which is not "
                "supported"
            )
    if EMBEDDING not in file.tensors or len(file.tensors[EMBEDDING].shape) != 2:
        raise ValueError(f"{file.path} lacks the matrix {EMBEDDING}")
    heads, width = file.whole_number("attention.head_count"), file.whole_number("embedding_length")
    head_dim = file.whole_number("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.whole_number(key, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {file.architecture}.{key} is {file.get(key)}; accepted: the width "
                f"of a head, {head_dim}"
            )
    if head_dim % 2:
        raise ValueError(
            f"{file.path}: heads have width {head_dim}; rotary positions need an even width"
        )
    fields = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "vocab_size": int(file.tensors[EMBEDDING].shape[1]),
        "hidden_size": width,
        "intermediate_size": file.whole_number("feed_forward_length"),
        "num_hidden_layers": file.whole_number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole_number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("rope.freq_base", 1e4),
        "rope_scaling": _rope_scaling(file),
        "tie_word_embeddings": HEAD not in file.tensors,
        "max_position_embeddings": file.whole_number("context_length"),
    }
    config = config_json.to_config(fields, file.path)
    if ROPE_DIVISORS in file.tensors:
        scaling = _scaling_of_divisors(file, config)
        return dataclasses.replace(config, rope_scaling=scaling)
    return config


def unread_keys(file: GGUF) -> list[str]:
    """Return the architecture's keys that `read_shape` does not know."""
    prefix = f"{file.architecture}."
    keys = (key.removeprefix(prefix) for key in file.fields if key.startswith(prefix))
    return sorted(set(keys) - _READ - set(_ABSENT))


def _rope_scaling(file: GGUF) -> dict[str, Any] | None:
    """Return config.json's rope_scaling.

    Raises:
      ValueError: it is of a type that is not supported.
    """
    kind = file.get("rope.scaling.type", "linear")
    factor = file.number("rope.scaling.factor", file.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{file.path}: {file.architecture}.rope.scaling.type is {kind!r:.40}; accepted: none, "
            "linear"
        )
    return None if kind == "none" or factor == 1 else {"rope_type": kind, "factor": factor}


def _scaling_of_divisors(file: GGUF, config: ModelConfig) -> RopeScaling | None:
    """Return the scaling of Llama 3.1 whose divisors of the frequencies the file holds.

    Raises:
      ValueError: they are those of another scaling.
    """
    divisors = dequantize(file, ROPE_DIVISORS).reshape(-1)
    plain = np.asarray(rotary_frequencies(config.head_dim, config.rope_theta, None))
    if config.rope_scaling is None and divisors.shape == plain.shape and divisors.min() >= 1:
        scaling = RopeScaling("llama3", float(divisors.max()))
        scaled = rotary_frequencies(config.head_dim, config.rope_theta, scaling)
        if np.allclose(plain / scaled, divisors, rtol=ROPE_TOLERANCE, atol=0):
            return scaling if scaling.factor > 1 else None
    raise ValueError(
        f"{file.path}: the divisors in {ROPE_DIVISORS} are not those of Llama 3.1's rotary "
        "scaling, the only scaling by divisors that is supported"
    )
