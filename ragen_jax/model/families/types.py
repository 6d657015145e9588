"""The contract of a model family, and how its tensors lie in files."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ragen_jax.model.qwen import ModelConfig

# How a tensor in the file is laid out, given the shape of one layer's parameter.
SAME = "same"  # the parameter itself
FLAT = "flat"  # all axes in one
SPLIT = "split"  # matrix [outputs, D] for a kernel [D, *outputs]
JOIN = "join"  # matrix [D, inputs] for a kernel [*inputs, D]

# Path of a parameter -> (tensor name, layout). "{}" in a name is the number of the layer: such a
# parameter is stacked, and has a tensor for each entry of its first axis.
TensorNames = dict[tuple[str, ...], tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets the directories of a family's models apart from those of others."""

    architecture: str  # in config.json; its model_type is the family's name
    # The contents of a config.json, and where they are from, as a shape. Raises ValueError of what
    # the network lacks, and KeyError of a field that is missing.
    read: Callable[[dict[str, Any], Path], ModelConfig]
    # The fields that say it again, but for architecture, model_type, dtype and token ids.
    write: Callable[[ModelConfig], dict[str, Any]]
    tensors: TensorNames  # of every parameter that its models have; a tied one has no head
    # Published models: the last part of the hub id, in small letters and without "-Instruct" ->
    # shape, as the config.json has it.
    shapes: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    # Beginnings of tensor names as some writers have them -> as published files have them.
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside: tuple[str, ...] = ()  # beginnings of names of tensors that are no parameter's
