"""config.json, as transformers 4 and 5 write it <-> `qwen.ModelConfig`, by the rows of MODELS."""

from pathlib import Path
from typing import Any

from ragen_jax.model import qwen
from ragen_jax.model.families import MODELS, family_of

MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
SIZES = dict.fromkeys(("num_hidden_layers", "depth"), MAX_LAYERS) | dict.fromkeys(
    (
        *("vocab_size", "hidden_size", "intermediate_size", "out_hidden_size", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "num_heads", "max_position_embeddings"),
    ),
    MAX_SIZE,
)  # of fields of config.json: the most that is accepted
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_config(c: dict[str, Any], file: Path) -> qwen.ModelConfig:
    """`qwen.ModelConfig` of the contents of a config.json.

    Args:
      file: where they are from, for messages.

    Raises:
      ValueError: another architecture, a feature that qwen.py lacks, or a missing field.
    """
    family = MODELS[_family(c, file)]
    for part in (c, c.get("text_config"), c.get("vision_config")):
        if isinstance(part, dict):
            _check_sizes(part, file)
    try:
        return family.read(c, file)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error


def _check_sizes(c: dict[str, Any], file: Path) -> None:
    """Raises ValueError for sizes that are no numbers, or of which lists would fill the memory."""
    for name, most in SIZES.items():
        value = c.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            shown = f"{value!r:.40}"
            raise ValueError(
                f"{file}: {name} is {shown}; accepted: a whole number from 1 to {most:,}"
            )


def from_config(c: qwen.ModelConfig, dtype: str) -> dict[str, Any]:
    """A config.json, but for token ids, of a `qwen.ModelConfig`; dtype: of the weights.

    Raises:
      ValueError: a family that there is not.
    """
    family = family_of(c)
    return {
        "architectures": [family.architecture],
        "model_type": c.family,
        **family.write(c),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _family(c: dict[str, Any], file: Path) -> str:
    """The key of MODELS that a config.json is of."""
    names = c.get("architectures") or []
    if not names and c.get("model_type") in MODELS:
        return c["model_type"]
    known = {family.architecture: kind for kind, family in MODELS.items()}
    for name in names:
        if name in known:
            return known[name]
    architecture = ", ".join(names) or f"model_type {c.get('model_type')!r}"
    raise ValueError(f"{file}: architecture {architecture}; accepted: {', '.join(known)}")
