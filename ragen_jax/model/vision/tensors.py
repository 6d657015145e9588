"""Read and write the vision tower's parameters as tensors of a Qwen2.5-VL checkpoint.

This works as in weights.py, with two differences: a checkpoint holds queries, keys and values as
one matrix, with a third of the rows each, and the kernel of the patch embedding as that of a
convolution, [outputs, channels, frames, height, width]. Our parameters have the layers stacked and
the heads as an axis (see tower.py). Names are those of published files.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ragen_jax.core.types import Params
from ragen_jax.model import weights
from ragen_jax.model.families.types import FLAT, JOIN, SAME, SPLIT
from ragen_jax.model.vision.config import VisionConfig
from ragen_jax.model.vision.tower import init_params
from ragen_jax.model.weights import Bounds, Part, Shape, Slice, StoredTensor, Tensors

PREFIX = "visual."


class Source(NamedTuple):
    """The location of a module's parameters in the files."""

    name: str  # name of the tensors, before `.weight` and `.bias`; "{}" is the layer's number
    third: int | None = None  # which third of the tensor's rows; None: all rows
    layout: str = SPLIT  # layout of the kernel


class Leaf(NamedTuple):
    """One parameter and where it is in the files."""

    path: tuple[str, ...]
    names: tuple[str, ...]  # names of its tensors, one per layer for a stacked leaf
    layout: str
    shape: Shape  # shape of the whole leaf
    stacked: bool
    third: int | None  # see `Source`
    tensor_shape: Shape  # shape of the whole tensor


# Path of a module -> its tensors.
MODULES: dict[tuple[str, ...], Source] = {
    ("patch",): Source("visual.patch_embed.proj"),
    ("layers", "attention_norm"): Source("visual.blocks.{}.norm1"),
    ("layers", "q"): Source("visual.blocks.{}.attn.qkv", 0),
    ("layers", "k"): Source("visual.blocks.{}.attn.qkv", 1),
    ("layers", "v"): Source("visual.blocks.{}.attn.qkv", 2),
    ("layers", "o"): Source("visual.blocks.{}.attn.proj", layout=JOIN),
    ("layers", "mlp_norm"): Source("visual.blocks.{}.norm2"),
    ("layers", "gate"): Source("visual.blocks.{}.mlp.gate_proj"),
    ("layers", "up"): Source("visual.blocks.{}.mlp.up_proj"),
    ("layers", "down"): Source("visual.blocks.{}.mlp.down_proj"),
    ("merge_norm",): Source("visual.merger.ln_q"),
    ("merge_hidden",): Source("visual.merger.mlp.0"),
    ("merge_out",): Source("visual.merger.mlp.2"),
}


@functools.cache
def plan(config: VisionConfig) -> tuple[Leaf, ...]:
    """List every parameter of a tower, in the order of MODULES."""
    abstract = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    leaves, order = [], list(MODULES)
    for path, leaf in sorted(
        flatten_dict(abstract).items(), key=lambda item: order.index(item[0][:-1])
    ):
        source, stacked = MODULES[path[:-1]], path[0] == "layers"
        layout = {"kernel": source.layout, "bias": FLAT, "scale": SAME}[path[-1]]
        name = source.name + (".bias" if path[-1] == "bias" else ".weight")
        names = tuple(name.format(i) for i in range(config.depth if stacked else 1))
        rows, *columns = weights.tensor_shape(layout, leaf.shape[1:] if stacked else leaf.shape)
        rows *= 1 if source.third is None else 3
        if path == ("patch", "kernel"):
            columns = config.in_channels, config.temporal_patch_size, *[config.patch_size] * 2
        shape = (rows, *columns)
        leaves.append(Leaf(path, names, layout, leaf.shape, stacked, source.third, shape))
    return tuple(leaves)


# ---------------------------------------------------------------- reading


def check_tensors(directory: str | Path, config: VisionConfig, tensors: Tensors) -> None:
    """Raise ValueError unless the tensors under published names match the tower's shapes."""
    want = {name: leaf.tensor_shape for leaf in plan(config) for name in leaf.names}
    there = {name for name in tensors if name.startswith(PREFIX)}
    weights.check_stored(directory, want, there - want.keys(), tensors)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """An open file in which a parameter is some rows of a tensor, with all other axes flattened."""

    file: Any
    first: int  # first row

    def get_slice(self, name: str) -> "_Cut":
        return _Cut(self.file.get_slice(name), self.first)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A tensor opened by `_Rows`, for weights.py to slice."""

    tensor: Slice
    first: int

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index
        rows = slice(rows.start + self.first, rows.stop + self.first)
        if len(self.tensor.get_shape()) == len(index):
            return self.tensor[(rows, *columns)]
        piece = self.tensor[rows]  # rows of a convolution's kernel
        return piece.reshape(len(piece), -1)[:, *columns]


def read(tensors: Tensors, config: VisionConfig, shardings: Params | None = None) -> Params:
    """Read the tower's parameters; each is read once and put on the devices that hold it.

    Args:
      tensors: tensors under published names, after `check_tensors`.
      shardings: a `Sharding` for every parameter; None: the default device.

    Returns:
      Arrays of config.dtype, in which the tower multiplies them; scales of norms are float32.

    Raises:
      ValueError: a tensor is not finite.
    """
    by_path = {} if shardings is None else flatten_dict(shardings)
    params = {}
    for leaf in plan(config):
        part = _reader(tensors, leaf, config.dtype)
        params[leaf.path] = weights.place(leaf.shape, by_path.get(leaf.path), part)
    return unflatten_dict(params)


def _reader(tensors: Tensors, leaf: Leaf, dtype: str) -> Callable[[Bounds | None], np.ndarray]:
    """Return a function that reads a parameter, or a part of it."""
    first = leaf.tensor_shape[0] // 3 * (leaf.third or 0)
    files = {name: _Rows(tensors[name], first) for name in leaf.names}

    def part(bounds):
        found = weights.read_part(files, leaf.names, leaf.layout, leaf.shape, leaf.stacked, bounds)
        return found if leaf.layout == SAME else found.astype(jnp.dtype(dtype), copy=False)

    return part


# ---------------------------------------------------------------- writing


def to_tensors(config: VisionConfig, params: Params) -> list[StoredTensor]:
    """Return the tensors of a tower's parameters.

    Raises:
      ValueError: the parameters do not fit the tower.
    """
    leaves = plan(config)
    weights.check_shapes({leaf.path: leaf.shape for leaf in leaves}, params, "the tower's")
    params, found = flatten_dict(params), {}
    for leaf in leaves:
        for i, name in enumerate(leaf.names):
            part = Part(params[leaf.path], (i,) if leaf.stacked else (), leaf.layout)
            tensor = found.get(name, StoredTensor(name, leaf.tensor_shape, ()))
            found[name] = tensor._replace(parts=(*tensor.parts, part))  # q, k and v in turn
    return list(found.values())
