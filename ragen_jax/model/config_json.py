"""config.json, as transformers 4 and 5 write it <-> `qwen.ModelConfig`, by the rows of MODELS."""

from pathlib import Path
from typing import Any

from ragen_jax.model import qwen
from ragen_jax.model.families import MODELS, family_of

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_config(c: dict[str, Any], file: Path) -> qwen.ModelConfig:
    """`qwen.ModelConfig` of the contents of a config.json.

    Args:
      file: where they are from, for messages.

    Raises:
      ValueError: another architecture, a feature that qwen.py lacks, or a missing field.
    """
    family = MODELS[_family(c, file)]
    try:
        return family.read(c, file)
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error


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
