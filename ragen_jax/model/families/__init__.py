"""Model families: how each family's directories are read and written. To add one, see qwen3.py.

In: the contents of a config.json, or a `qwen.ModelConfig` to write as a config.json.
Out: its `Family`: reader and writer of config.json, a name for every tensor, published shapes.
config_json.py and weights.py use these rows to read and write files; preflight uses the shapes.
The network (qwen.py) does not depend on families, only on the features that a shape lists.
"""

from ragen_jax.model.families import (
    gemma3,
    llama,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from ragen_jax.model.families.types import Family
from ragen_jax.model.qwen import ModelConfig

MODELS: dict[str, Family] = {  # keys: config.json's model_type, which is the family's name
    "qwen2": qwen2.FAMILY,
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_5_text": qwen3_5.FAMILY,
}

# Published models, for programs that need no weights.
SHAPES = {name: shape for family in MODELS.values() for name, shape in family.shapes.items()}


def family_of(config: ModelConfig) -> Family:
    """Return the row of MODELS that a shape names.

    Raises:
      ValueError: the family is unknown.
    """
    if config.family not in MODELS:
        raise ValueError(f"model family {config.family!r}; accepted: {', '.join(MODELS)}")
    return MODELS[config.family]


def name_in_memory(name: str, config: ModelConfig) -> str:
    """Return transformers' in-memory name of a tensor in a published file.

    Raises:
      ValueError: see `family_of`.
    """
    for memory, published in family_of(config).renamed.items():
        if name.startswith(published):
            return memory + name.removeprefix(published)
    return name


def known_shape(path: str) -> ModelConfig | None:
    """Return the entry of SHAPES for a hub id, with or without "-Instruct" or "-it", or None."""
    name = path.rsplit("/", 1)[-1].lower().removesuffix("-instruct").removesuffix("-it")
    return SHAPES.get(name)
