"""Model families: how the directories of each are read and written. To add one, see qwen3.py.

In: the contents of a config.json, or a `qwen.ModelConfig` that is to become one again.
Out: its `Family`: reader and writer of config.json, a name for every tensor, published shapes.
config_json.py and weights.py read and write files by these rows, preflight plans by the shapes.
The network itself (qwen.py) knows no family, only what a shape says that it has.
"""

from ragen_jax.model.families import llama, qwen2, qwen2_5_vl, qwen3
from ragen_jax.model.families.types import Family
from ragen_jax.model.qwen import ModelConfig

MODELS: dict[str, Family] = {  # by config.json's model_type, which is the family's name
    "qwen2": qwen2.FAMILY,
    "llama": llama.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen2_5_vl": qwen2_5_vl.FAMILY,
}

# Published models, for programs that need no weights.
SHAPES = {name: shape for family in MODELS.values() for name, shape in family.shapes.items()}


def family_of(config: ModelConfig) -> Family:
    """The row of MODELS that a shape names.

    Raises:
      ValueError: it names none.
    """
    if config.family not in MODELS:
        raise ValueError(f"model family {config.family!r}; accepted: {', '.join(MODELS)}")
    return MODELS[config.family]


def name_in_memory(name: str, config: ModelConfig) -> str:
    """The name that transformers has in memory for a tensor of a published file.

    Raises:
      ValueError: as `family_of`.
    """
    for memory, published in family_of(config).renamed.items():
        if name.startswith(published):
            return memory + name.removeprefix(published)
    return name


def known_shape(path: str) -> ModelConfig | None:
    """The entry of SHAPES that a hub id names, with or without "-Instruct"; None: there is none."""
    return SHAPES.get(path.rsplit("/", 1)[-1].lower().removesuffix("-instruct"))
