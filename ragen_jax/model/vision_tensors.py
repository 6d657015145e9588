"""The vision tower's parameters as tensors of a checkpoint of Qwen2.5-VL, for both directions.

A checkpoint holds matrices as [outputs, inputs], the kernel of the patch embedding as that of a
convolution, [outputs, channels, frames, height, width], queries, keys and values as one matrix,
and one tensor a layer; our parameters hold [inputs, outputs] with the heads as an axis and the
layers stacked (see vision.py). Published files begin names with `visual.`; what transformers 5
calls `model.visual.` is the same.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ragen_jax.model.vision import VisionConfig, init_params
from ragen_jax.types import Params


class Source(NamedTuple):
    """Where a module's parameters are in the files."""

    name: str  # of the tensors, before `.weight` and `.bias`; "{}" is the layer's number
    third: int | None = None  # which third of the tensor's rows; None: all of them


class Leaf(NamedTuple):
    """One parameter and where it is in the files."""

    path: tuple[str, ...]
    names: tuple[str, ...]  # of its tensors, one a layer for a stacked leaf
    third: int | None  # of `Source`
    shape: tuple[int, ...]  # of the parameter, of one layer where it is stacked
    tensor_shape: tuple[int, ...]  # of the whole tensor


# Path of a module -> its tensors. Kernels are transposed weights, scales weights, biases biases.
MODULES: dict[tuple[str, ...], Source] = {
    ("patch",): Source("visual.patch_embed.proj"),
    ("merge_norm",): Source("visual.merger.ln_q"),
    ("merge_hidden",): Source("visual.merger.mlp.0"),
    ("merge_out",): Source("visual.merger.mlp.2"),
    ("layers", "attention_norm"): Source("visual.blocks.{}.norm1"),
    ("layers", "q"): Source("visual.blocks.{}.attn.qkv", 0),
    ("layers", "k"): Source("visual.blocks.{}.attn.qkv", 1),
    ("layers", "v"): Source("visual.blocks.{}.attn.qkv", 2),
    ("layers", "o"): Source("visual.blocks.{}.attn.proj"),
    ("layers", "mlp_norm"): Source("visual.blocks.{}.norm2"),
    ("layers", "gate"): Source("visual.blocks.{}.mlp.gate_proj"),
    ("layers", "up"): Source("visual.blocks.{}.mlp.up_proj"),
    ("layers", "down"): Source("visual.blocks.{}.mlp.down_proj"),
}


@functools.cache
def plan(config: VisionConfig) -> tuple[Leaf, ...]:
    """Every parameter of a tower."""
    abstract = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    leaves = []
    for path, leaf in flatten_dict(abstract).items():
        source, stacked = MODULES[path[:-1]], path[0] == "layers"
        name = source.name + (".bias" if path[-1] == "bias" else ".weight")
        names = tuple(name.format(i) for i in range(config.depth if stacked else 1))
        shape = leaf.shape[1:] if stacked else leaf.shape
        rows, *columns = _tensor_shape(path, shape, config)
        rows *= 1 if source.third is None else 3
        leaves.append(Leaf(path, names, source.third, shape, (rows, *columns)))
    return tuple(leaves)


def _tensor_shape(
    path: tuple[str, ...], shape: tuple[int, ...], config: VisionConfig
) -> tuple[int, ...]:
    """In the file, of one layer's parameter."""
    if path[-1] != "kernel":
        return (math.prod(shape),)
    if path[0] == "patch":
        c = config
        return shape[1], c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size
    inputs = 2 if path[-2] == "o" else 1  # axes of the kernel; the others are outputs
    return math.prod(shape[inputs:]), math.prod(shape[:inputs])


def to_params(tensors: Mapping[str, np.ndarray], config: VisionConfig) -> Params:
    """The tower's parameters, float32 NumPy arrays.

    Args:
      tensors: name -> array of any float dtype; those that do not begin with `visual.` are left.

    Raises:
      ValueError: a tensor is missing, not one of the tower's, or of another shape.
    """
    leaves = plan(config)
    want = {name for leaf in leaves for name in leaf.names}
    have = {name for name in tensors if name.startswith("visual.")}
    for problem, names in (("missing", want - have), ("unexpected", have - want)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"vision tower: {len(names)} {problem} tensors: {some}")
    return unflatten_dict({leaf.path: _read(tensors, leaf) for leaf in leaves})


def _read(tensors: Mapping[str, np.ndarray], leaf: Leaf) -> np.ndarray:
    layers = []
    for name in leaf.names:
        tensor = tensors[name]
        if tensor.shape != leaf.tensor_shape:
            raise ValueError(
                f"tensor {name} has shape {tensor.shape}, "
                f"vision_config asks for {leaf.tensor_shape}"
            )
        if leaf.third is not None:
            tensor = np.split(tensor, 3)[leaf.third]
        if leaf.path[-1] == "kernel":
            tensor = tensor.reshape(len(tensor), -1).T
        layers.append(tensor.reshape(leaf.shape).astype(np.float32))
    return np.stack(layers) if leaf.path[0] == "layers" else layers[0]


def to_tensors(params: Params, config: VisionConfig) -> dict[str, np.ndarray]:
    """The inverse of `to_params`, in the parameters' dtype."""
    flat, parts = flatten_dict(params), {}  # tensor name -> its thirds, or all of it
    for leaf in plan(config):
        value = np.asarray(flat[leaf.path])
        layers = value if leaf.path[0] == "layers" else value[None]
        rows = leaf.tensor_shape[0] // (1 if leaf.third is None else 3)
        for name, layer in zip(leaf.names, layers, strict=True):
            if leaf.path[-1] == "kernel":
                layer = layer.reshape(-1, rows).T
            part = layer.reshape(rows, *leaf.tensor_shape[1:])
            parts.setdefault(name, {})[leaf.third] = part
    return {name: np.concatenate([x[i] for i in sorted(x)]) for name, x in parts.items()}
