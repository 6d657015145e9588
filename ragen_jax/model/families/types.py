"""The interface of a model family, and the layout of its tensors in files."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragen_jax.model.qwen import ModelConfig

# How a tensor in the file is laid out, given the shape of one layer's parameter.
SAME = "same"  # the parameter itself
FLAT = "flat"  # all axes flattened into one
SPLIT = "split"  # matrix [outputs, D] for a kernel [D, *outputs]
JOIN = "join"  # matrix [D, inputs] for a kernel [*inputs, D]

# Path of a parameter -> (tensor name, layout). "{}" in a name is the number of the layer: such a
# parameter is stacked, and has a tensor for each entry of its first axis.
TensorNames = dict[tuple[str, ...], tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's model directories differ from those of other families."""

    architecture: str  # in config.json; its model_type is the family's name
    # Takes the contents of a config.json and its path, and returns the shape. Raises ValueError for
    # a feature that the network lacks, and KeyError for a missing field.
    read: Callable[[dict[str, Any], Path], ModelConfig]
    # Returns config.json's fields of a shape, without architecture, model_type, dtype and token
    # ids.
    write: Callable[[ModelConfig], dict[str, Any]]
    tensors: TensorNames  # all parameters of the family's models; a tied model has no head
    # Published models: the last part of the hub id, in lower case and without "-Instruct" -> the
    # shape in its config.json.
    shapes: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    # Prefixes of tensor names that some programs write -> prefixes in published files.
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Architectures of larger models whose language model is of this family, and the prefixes of its
    # tensors in their files -> prefixes in published files.
    part_of: tuple[str, ...] = ()
    part_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_prefixes: tuple[str, ...] = ()  # name prefixes of tensors that are not parameters
