"""Parameters in safetensors files, in the layout of Hugging Face's models.

The table of the model's family (families/) names every tensor, for reading and for writing. A file
holds a matrix as [outputs, inputs] with the heads flattened and one tensor per layer; our
parameters are [inputs, outputs] with the heads as an axis and the layers stacked (see qwen.py).
Files are read and converted a few megabytes at a time. Each process reads only the parts that its
devices hold.

Axes: L layers, D width, H heads.
"""

import contextlib
import functools
import json
import math
import mmap
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragen_jax.core.progress import begin_count
from ragen_jax.core.types import Array, Params
from ragen_jax.model import qwen
from ragen_jax.model.families import family_of
from ragen_jax.model.families.types import FLAT, JOIN, SPLIT
from ragen_jax.storage import limits
from ragen_jax.storage.atomic_io import atomic_write, with_retries
from ragen_jax.storage.checksums import is_below

Tensors = Mapping[str, Any]  # tensor name -> the open file that holds it: get_slice(name)
Slice = Any  # a tensor in a file, to be cut: safetensors has no type for it
Shape = tuple[int, ...]
Bounds = Sequence[tuple[int, int]]  # a part of a parameter: (start, stop) of every axis

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05}-of-{:05}.safetensors"
DISK_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
SAVE_DTYPES = ("float32", "bfloat16", "float16")
MAX_HEADER_BYTES = 16 << 20  # largest accepted header of a safetensors file
PIECE_BYTES = 4 << 20  # size of a read; transposing larger pieces would miss the CPU's cache

IGNORED = "rotary_emb.inv_freq"  # constants in old Llama files, which are ignored


class Renamed(NamedTuple):
    """An open file that holds a tensor under another name."""

    file: safe_open
    name: str

    def get_slice(self, _: str) -> Slice:
        return self.file.get_slice(self.name)


class Part(NamedTuple):
    """The source of a tensor, or of some of its rows."""

    x: Array
    index: tuple[int, ...]  # layer (and expert) of `x` to write; (): all of it
    layout: str


class StoredTensor(NamedTuple):
    """A tensor to write."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]  # consecutive parts with equal numbers of rows


class Leaf(NamedTuple):
    """One parameter and where it is in the files."""

    path: tuple[str, ...]
    names: tuple[str, ...]  # names of its tensors, one per layer, or layer and expert, if stacked
    layout: str
    shape: Shape  # shape of the whole leaf
    stacked: int  # number of leading axes that run over the names

    @property
    def tensor_shape(self) -> Shape:
        return tensor_shape(self.layout, self.shape[self.stacked :])


@functools.cache
def plan(config: qwen.ModelConfig) -> tuple[Leaf, ...]:
    """List every parameter of a model.

    Raises:
      ValueError: an unknown family, or parameters that the family does not have.
    """
    tensors = family_of(config).tensors
    abstract = flatten_dict(nn.unbox(qwen.boxed_shapes(config)))
    differ = abstract.keys() ^ (tensors.keys() - ({("head",)} if config.tied else set()))
    if differ:
        names = ", ".join("/".join(path) for path in sorted(differ))
        raise ValueError(
            f"models of family {config.family!r} have parameters that their ModelConfig does "
            f"not: {names} (see its qkv_bias and qk_norm)"
        )
    leaves = []
    for path, leaf in abstract.items():
        name, layout = tensors[path]
        stacked = name.count("{}")
        of_layers = config.layers_with(path[1]) if stacked else ()
        indices = np.ndindex(leaf.shape[:stacked])
        names = tuple(name.format(*_numbers(of_layers, index)) for index in indices)
        leaves.append(Leaf(path, names, layout, leaf.shape, stacked))
    return tuple(leaves)


def _numbers(of_layers: Shape, index: Shape) -> Shape:
    """Return the numbers in the name of a tensor at an index of a stack of these layers."""
    return (of_layers[index[0]], *index[1:]) if index else ()


def _groups(layout: str, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each axis of a tensor in the file, the axes of a layer's parameter in it."""
    axes = tuple(range(ndim))
    if layout == SPLIT:
        return axes[1:], axes[:1]
    if layout == JOIN:
        return axes[-1:], axes[:-1]
    return (axes,) if layout == FLAT else tuple((axis,) for axis in axes)


def tensor_shape(layout: str, shape: Shape) -> Shape:
    """Return the shape in the file of a parameter (of one layer) of shape `shape`."""
    groups = _groups(layout, len(shape))
    return tuple(math.prod(shape[axis] for axis in group) for group in groups)


# ---------------------------------------------------------------- reading


@contextlib.contextmanager
def open_tensors(directory: str | Path) -> Generator[dict[str, safe_open]]:
    """Yield {tensor name: open safetensors file that holds it}.

    Raises:
      ValueError: there are no weights, or a weight file is missing, truncated or damaged.
    """
    directory = Path(directory)
    single, index = directory / WEIGHTS, directory / INDEX
    if single.exists():
        files = [single]
    elif index.exists():
        try:
            names = set(limits.read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} is not an index of weights: {error!r}") from error
        outside = [name for name in names if not is_below(name)]
        if outside:
            raise ValueError(
                f"{index} names {outside[0]!r}, which is outside its folder; the weights of a "
                "model must be in the model's directory"
            )
        files = sorted(directory / name for name in names)
    else:
        raise ValueError(f"{directory} has neither {WEIGHTS} nor {INDEX}")
    with contextlib.ExitStack() as stack:
        tensors = {}
        for file in files:
            try:
                check_header(file)
                opened = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read {file}: {error}") from error
            tensors |= dict.fromkeys(opened.keys(), opened)
        yield tensors


def check_header(file: Path) -> None:
    """Refuse a safetensors file with a header so large that reading it would take gigabytes.

    Raises:
      ValueError: the header is too large.
      OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
    if size > MAX_HEADER_BYTES and size <= file.stat().st_size:
        raise ValueError(
            f"{file} has a header of {size:,} bytes; accepted: {MAX_HEADER_BYTES:,}, which "
            "is enough for 100,000 tensors"
        )


def by_published_names(tensors: Tensors, config: qwen.ModelConfig) -> Tensors:
    """Return the tensors under the names in published files of the model's family.

    Raises:
      ValueError: two tensors get the same name.
    """
    found = {}
    family = family_of(config)
    for name, file in tensors.items():
        published, opened = name, file
        for beginning, instead in {**family.renamed, **family.part_names}.items():
            if name.startswith(beginning):
                published, opened = instead + name.removeprefix(beginning), Renamed(file, name)
        if published in found:
            raise ValueError(f"tensor {published} is stored under two names; keep one of them")
        found[published] = opened
    return found


def check_tensors(directory: str | Path, config: qwen.ModelConfig, tensors: Tensors) -> None:
    """Raise ValueError unless the files hold exactly the model's tensors, in its shapes.

    Tensors of the family that are not parameters (`Family.other_prefixes`) are not checked here.
    """
    want = {name: leaf.tensor_shape for leaf in plan(config) for name in leaf.names}
    family = family_of(config)
    # Some trainers write the head although it is tied; that is accepted if the values are equal.
    embed, head = (family.tensors[(name,)][0] for name in ("embed", "head"))
    extra = {name for name in tensors.keys() - want.keys() if not name.endswith(IGNORED)}
    extra = {name for name in extra if not name.startswith(family.other_prefixes)}
    if config.tied and head in extra and embed in tensors:
        if not _same(*(tensors[name].get_slice(name) for name in (embed, head))):
            raise ValueError(f"{directory}: {head} differs from {embed}, to which it is tied")
        extra.remove(head)
    check_stored(directory, want, extra, tensors)


def check_stored(
    directory: str | Path, want: Mapping[str, Shape], extra: Collection[str], tensors: Tensors
) -> None:
    """Raise ValueError if tensors are missing, unexpected, or of a wrong shape or dtype.

    Args:
      want: name -> shape.
      extra: names of unexpected tensors.
    """
    for problem, names in (("missing", want.keys() - tensors.keys()), ("unexpected", extra)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{directory}: {len(names)} {problem} tensors: {some}")
    for name, shape in want.items():
        tensor = tensors[name].get_slice(name)
        stored_shape = tuple(tensor.get_shape())
        if stored_shape != shape:
            raise ValueError(
                f"{directory}: tensor {name} has shape {stored_shape}; config.json needs {shape}"
            )
        if tensor.get_dtype() not in DISK_DTYPES.values():
            raise ValueError(
                f"{directory}: tensor {name} is {tensor.get_dtype()}; "
                f"accepted: {', '.join(DISK_DTYPES.values())}"
            )


def _same(a: Slice, b: Slice) -> bool:
    """Return whether two matrices in files hold the same numbers."""
    rows, *others = a.get_shape()
    if [rows, *others] != list(b.get_shape()):
        return False
    step = max(1, PIECE_BYTES // (4 * math.prod(others)))
    return all(
        np.array_equal(a[i : min(i + step, rows)], b[i : min(i + step, rows)], equal_nan=True)
        for i in range(0, rows, step)
    )


def read(tensors: Tensors, config: qwen.ModelConfig, shardings: Params | None = None) -> Params:
    """Read the parameters; each part is read once and put on the devices that hold it.

    Args:
      tensors: tensors from `open_tensors`, after `check_tensors`.
      shardings: a `Sharding` for every parameter; None: the default device.

    Returns:
      float32 arrays. While reading, the host additionally holds at most one device's part of one
      parameter.

    Raises:
      ValueError: a tensor is not finite.
    """
    by_path = {} if shardings is None else flatten_dict(shardings)
    params = {}
    # Largest first: the host memory for a part is then smallest at the end, when the arrays are
    # largest.
    leaves = sorted(plan(config), key=lambda leaf: -math.prod(leaf.shape))
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves]) // 10**6
    count = begin_count(int(ends[-1]), "million parameters")
    for leaf, more in zip(leaves, np.diff(ends, prepend=0).tolist(), strict=True):
        part = functools.partial(read_part, tensors, *leaf[1:])
        params[leaf.path] = place(leaf.shape, by_path.get(leaf.path), part)
        count(more)
    return unflatten_dict(params)


def place(
    shape: Shape, sharding: Sharding | None, part: Callable[[Bounds | None], np.ndarray]
) -> jax.Array:
    """Build an array on the devices of a sharding (None: the default device) from its parts.

    Args:
      part: function that returns the part in given bounds (None: all) as a new array. On CPU the
        device's array may alias this memory, so nothing else may keep it. (XLA knows that it does
        not own the memory: a computation that donates the array writes to a copy.)
    """
    if sharding is None:
        return jax.block_until_ready(jax.device_put(part(None)))
    holders = {}  # {part: the devices that need it}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        # ty: ignore[invalid-argument-type] JAX says that index may be None, but never makes it so
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        host = part(bounds)
        pieces += jax.block_until_ready([jax.device_put(host, device) for device in devices])
        del host  # free it before the next part is made
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def read_part(
    tensors: Tensors,
    names: Sequence[str],
    layout: str,
    shape: Shape,
    stacked: int,
    bounds: Bounds | None = None,
) -> np.ndarray:
    """Read a parameter, or its part `bounds`, as a new float32 array.

    Args:
      tensors: tensors from `open_tensors`.
      names, layout, shape, stacked: see `Leaf`.

    Raises:
      ValueError: the values read contain NaN or infinity, or float32 cannot hold them.
    """
    bounds = bounds or tuple((0, n) for n in shape)
    part = _empty([stop - start for start, stop in bounds])
    layers = part.reshape(-1, *part.shape[stacked:])
    parts = tuple(slice(*ends) for ends in bounds[:stacked])
    names = np.array(names).reshape(shape[:stacked])[parts].reshape(-1).tolist()
    shape, bounds = shape[stacked:], bounds[stacked:]
    for into, name in zip(layers, names, strict=True):
        _read_tensor(tensors[name].get_slice(name), name, layout, shape, bounds, into)
    return part


def _empty(shape: Sequence[int]) -> np.ndarray:
    """Return a new float32 array; a large one returns its memory to the kernel when it is freed.

    It is mapped separately, because malloc may be configured to keep freed memory (core/memory.py).
    The array starts 16 bytes after the start of a page: JAX's CPU backend then copies it into XLA's
    memory instead of aliasing it. Aliasing would save a copy here but cost a copy of all
    parameters at the first update.
    """
    size = math.prod(shape)
    if 4 * size < PIECE_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(shape, np.float32)
    pages = mmap.mmap(-1, 4 * size + 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.float32, offset=16).reshape(shape)


def _read_tensor(
    tensor: Slice, name: str, layout: str, shape: Shape, bounds: Bounds, into: np.ndarray
) -> None:
    """Fill `into`, the part `bounds` of one layer's parameter of shape `shape`, from the file.

    Where several axes of the parameter share an axis in the file, the file is sliced along the
    first of them; slices along the others, if a sharding splits them, are taken in memory. Each
    process checks the values it reads and raises on a fault; processes do not wait for each other.
    """
    groups = _groups(layout, len(shape))
    firsts = [group[0] for group in groups]
    inner = [math.prod(shape[axis] for axis in group[1:]) for group in groups]
    columns = [
        slice(bounds[axis][0] * n, bounds[axis][1] * n)
        for axis, n in zip(firsts[1:], inner[1:], strict=True)
    ]
    order = [axis for group in groups for axis in group]
    sizes = [bounds[a][1] - bounds[a][0] if a in firsts else shape[a] for a in order]
    cut = tuple(slice(None) if a in firsts else slice(*bounds[a]) for a in order)
    into = into.transpose(order)
    start, stop = bounds[firsts[0]]
    step = max(1, PIECE_BYTES // (4 * math.prod(sizes[1:])))
    for i in range(start, stop, step):
        j = min(i + step, stop)
        piece = tensor[(slice(i * inner[0], j * inner[0]), *columns)]
        with np.errstate(over="ignore"):  # float64 values may overflow
            piece = piece.astype(np.float32, copy=False)
        if not np.isfinite(piece).all():  # checked while the piece is in the cache
            raise ValueError(
                f"tensor {name} holds NaN, infinity or values outside float32: the file is "
                "damaged, or its training diverged"
            )
        into[i - start : j - start] = piece.reshape(j - i, *sizes[1:])[cut]


# ---------------------------------------------------------------- writing


def to_tensors(config: qwen.ModelConfig, params: Params) -> list[StoredTensor]:
    """Return the tensors of a model's parameters: the embedding, the layers, norm and head.

    Raises:
      ValueError: the parameters do not fit the model.
    """
    leaves = plan(config)
    check_shapes({leaf.path: leaf.shape for leaf in leaves}, params, "the model's")
    params, order = flatten_dict(params), []
    for leaf in leaves:
        indices = np.ndindex(leaf.shape[: leaf.stacked])
        for index, name in zip(indices, leaf.names, strict=True):
            part = Part(params[leaf.path], index, leaf.layout)
            at = -1 if leaf.path == ("embed",) else config.layers
            if index:
                at = config.layers_with(leaf.path[1])[index[0]]
            order.append((at, StoredTensor(name, leaf.tensor_shape, (part,))))
    return [tensor for _, tensor in sorted(order, key=lambda entry: entry[0])]


def write(
    directory: Path,
    tensors: Sequence[StoredTensor],
    *,
    dtype: str,
    max_shard_bytes: int,
    writer: bool,
) -> None:
    """Write tensors into a single file, or into several files and their index.

    Args:
      tensors: result of `to_tensors`, in the order in which they are written. If their parameters
        are spread over several processes, every process must call this.
      dtype: a member of SAVE_DTYPES.
      max_shard_bytes: largest size of a file; a single tensor may be larger.
      writer: whether this process writes.

    Raises:
      ValueError: float16 cannot hold a tensor's values.
    """
    shards = _shards(tensors, jnp.dtype(dtype).itemsize, max_shard_bytes)
    count = begin_count(len(tensors), "tensors")
    for file, entries in shards.items():
        made = {}
        for tensor in entries:
            parts = [on_host(x[i] if i else x) for x, i, _ in tensor.parts]
            if writer:
                made[tensor.name] = _joined(tensor, parts, dtype)
            count(1)
        if writer:
            write_tensors(directory / file, made)
    if writer and len(shards) > 1:
        names = {tensor.name: file for file in shards for tensor in shards[file]}
        size = sum(math.prod(tensor.shape) for tensor in tensors) * jnp.dtype(dtype).itemsize
        index = {"metadata": {"total_size": size}, "weight_map": names}
        atomic_write(directory / INDEX, json.dumps(index, indent=2) + "\n")


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file with its folder's read and write permissions.

    Raises:
      DiskRefused: the disk refuses the write.
    """

    def write() -> None:
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors writes private files

    with_retries(write, path)


def _joined(tensor: StoredTensor, parts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Return a tensor in the file's layout."""
    rows = (tensor.shape[0] // len(parts), *tensor.shape[1:])
    made = [
        to_tensor(x, tensor.name, part.layout, rows, dtype)
        for x, part in zip(parts, tensor.parts, strict=True)
    ]
    return made[0] if len(made) == 1 else np.concatenate(made)


def _shards(
    tensors: Sequence[StoredTensor], itemsize: int, max_bytes: int
) -> dict[str, list[StoredTensor]]:
    """Return {file name: its tensors}, in the given order."""
    shards, used = [[]], 0
    for tensor in tensors:
        size = itemsize * math.prod(tensor.shape)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {SHARD.format(i + 1, len(shards)): shard for i, shard in enumerate(shards)}


def is_writer(params: Any) -> bool:
    """Return whether this process writes a tree's arrays: it holds them all or is process 0."""
    whole = all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(params))
    return whole or jax.process_index() == 0


def check_shapes(shapes: Mapping[tuple[str, ...], Shape], params: Params, whose: str) -> None:
    """Raise ValueError unless `params` has the parameters of `shapes`; `whose` is for messages."""
    params = flatten_dict(params)
    differ = params.keys() ^ shapes.keys()
    if differ:
        names = ", ".join("/".join(path) for path in sorted(differ))
        raise ValueError(f"parameters missing or not {whose}: {names}")
    for path, shape in shapes.items():
        if params[path].shape != shape:
            raise ValueError(
                f"parameter {'/'.join(path)} has shape {params[path].shape}, {whose} is {shape}"
            )


def on_host(x: Array) -> np.ndarray:
    """Copy an array to the host from any devices, including those of other processes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def to_tensor(x: np.ndarray, name: str, layout: str, shape: Shape, dtype: str) -> np.ndarray:
    """Return a parameter (of one layer) in the file's layout."""
    order = [axis for group in _groups(layout, x.ndim) for axis in group]
    with np.errstate(over="ignore"):
        flat = x.transpose(order).reshape(shape)
        tensor = np.ascontiguousarray(flat.astype(dtype, copy=False))
    if dtype == "float16" and np.isinf(tensor).any() and not np.isinf(x).any():
        raise ValueError(
            f"{name} has values above float16's maximum ({np.abs(x).max():.3g}); save in bfloat16"
        )
    return tensor
