"""The device mesh and where arrays live on it: one table from logical axes to mesh axes.

Three mesh axes: `data` and `fsdp` split rows, `fsdp` also splits parameters, `tensor` splits heads,
MLP and vocabulary. A mesh for a mixture of experts may have a fourth, `expert`, which splits rows,
and the experts of a layer. Library functions take the mesh that is in use (`jax.set_mesh`);
without one they run on a single device and everything here leaves arrays as they are.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ragen_jax.core.progress import count_barrier
from ragen_jax.core.types import Array, Params

MESH_AXES = ("data", "fsdp", "tensor")
EXPERT = "expert"  # the axis of a mesh that has more than one device along it
ROWS = ("data", EXPERT, "fsdp")

# Logical axis of a parameter or activation (model/qwen.py) -> mesh axes it is split over.
RULES = (
    ("rows", ROWS),
    ("data_rows", ("data", EXPERT)),
    ("layers", None),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head", None),
    ("mlp", "tensor"),
    ("experts", EXPERT),
    ("router", None),
    ("norm", None),
    ("patch", None),
)


def make_mesh(
    *,
    data: int,
    fsdp: int,
    tensor: int,
    expert: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh over all devices.

    Args:
      data, fsdp, tensor, expert: devices along each axis; one may be -1 and then takes all the
        rest. A mesh with expert=1 has no such axis.
      devices: the devices (default: all of this run).

    Raises:
      ValueError: sizes that are not positive, two -1, or a product other than the device count.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {"data": data, **({EXPERT: expert} if expert != 1 else {})}
    sizes |= {"fsdp": fsdp, "tensor": tensor}
    shown = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"{shown}: sizes must be at least 1; one may be -1 (the remaining devices)"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    elif fixed != len(devices) or free:
        raise ValueError(f"{shown} does not fit {len(devices)} device(s)")
    if sizes.get(EXPERT) == 1:
        del sizes[EXPERT]
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def split_devices(
    devices: Sequence[jax.Device], num_sampling: int
) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """Return (devices that train, devices that sample).

    The last num_sampling devices only sample; if it is 0, all devices do both.

    Raises:
      ValueError: no device would be left to train.
    """
    if num_sampling >= len(devices):
        raise ValueError(
            f"config.sampling_mesh.devices is {num_sampling}, but at least one of "
            f"{len(devices)} device(s) must train; use at most {len(devices) - 1}"
        )
    return devices[: len(devices) - num_sampling], devices[-num_sampling:]


def spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """Return an array's PartitionSpec by RULES; axes that do not divide evenly are not split."""
    rules = dict(RULES)

    def mesh_axes(axis, size):
        names = rules[axis] if axis else None
        names = present(names, mesh)
        return names if size % math.prod(mesh.shape[name] for name in names) == 0 else None

    return PartitionSpec(*(mesh_axes(axis, size) for axis, size in zip(axes, shape, strict=True)))


def present(names: str | Sequence[str] | None, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return those of some axes that the mesh has."""
    names = (names,) if isinstance(names, str) else names or ()
    return tuple(name for name in names if name in mesh.shape)


def row_spec(mesh: Mesh | AbstractMesh, before: int = 0) -> PartitionSpec:
    """Return the PartitionSpec of arrays whose rows are split, after `before` axes that are not."""
    return PartitionSpec(*[None] * before, present(ROWS, mesh))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay x out by the logical names of its axes (None: not split) on the mesh in use, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def vocabulary_shards(V: int) -> int:
    """Return the number of parts of a vocabulary of V tokens on the mesh in use; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or not spec(("vocab",), (V,), mesh)[0] else mesh.shape["tensor"]


def by_shard(function: Callable[..., Any], *args: Any) -> Any:
    """Call function(*args) on each shard of the mesh in use, with only that shard's rows.

    Otherwise XLA would copy a whole cache to every device to gather or scatter its rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*args)

    def layout(x):
        axes = ("rows", "kv_heads", None, None) if x.ndim >= 4 else ("rows",)
        return spec((None,) * (x.ndim - len(axes)) + axes, x.shape, mesh)

    specs, out_specs = jax.tree.map(layout, (args, jax.eval_shape(function, *args)))
    return jax.shard_map(function, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)


# ------------------------------------------------------------------------------ parameters


def boxed_shardings(boxed: Params, mesh: Mesh) -> Params:
    """Return a NamedSharding by RULES for every parameter that names its axes."""
    return jax.tree.map(
        lambda x: NamedSharding(mesh, spec(x.names, x.value.shape, mesh)),
        boxed,
        is_leaf=lambda x: isinstance(x, nn.Partitioned),
    )


def has_other_devices(here: Mesh, mesh: Mesh) -> bool:
    """Return whether two meshes share no device: no program can move an array between them."""
    return not set(here.devices.flat) & set(mesh.devices.flat)


MEMORIES = {"device": "device", "host": "pinned_host"}  # name: memory kind of JAX


def in_memory(params: Params, name: str) -> Params:
    """Move device arrays to one of MEMORIES and keep their layout."""
    kind = MEMORIES[name]
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params)


def rests_on_host(params: Params) -> bool:
    """Return whether arrays are in the host's pinned memory."""
    return jax.tree.leaves(params)[0].sharding.memory_kind == MEMORIES["host"]


# ------------------------------------------------------------------------------ rows


def data_shards(mesh: Mesh) -> int:
    """Return the number of parts that a batch of rows is split into."""
    return math.prod(mesh.shape[name] for name in present(ROWS, mesh))


def row_shards() -> tuple[int, list[int]]:
    """Return (number of row shards on the mesh in use, indices of this process's shards)."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return 1, [0]
    shards = mesh.devices.reshape(data_shards(mesh), -1)
    here = jax.process_index()
    return len(shards), [
        i for i, row in enumerate(shards) if any(device.process_index == here for device in row)
    ]


def shards_are_shared() -> bool:
    """Return whether any row shard on the mesh in use spans several processes."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return False
    shards = mesh.devices.reshape(data_shards(mesh), -1)
    return any(len({device.process_index for device in row}) > 1 for row in shards)


def place_rows(array: np.ndarray) -> Array:
    """Place this process's rows (in the order of its shards) in an array over all devices."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return array
    count, mine = row_shards()
    size = len(array) // len(mine)  # rows per shard
    sharding = NamedSharding(mesh, row_spec(mesh))

    def piece(index):
        start = index[0].start or 0
        local = mine.index(start // size) * size if count > 1 else 0
        return array[local : local + size]

    return jax.make_array_from_callback((size * count, *array.shape[1:]), sharding, piece)


def read_rows(array: jax.Array) -> np.ndarray:
    """Return this process's rows of a row-sharded array, in the order of its shards."""
    if jax.sharding.get_mesh().empty:
        return np.asarray(array)
    count_barrier()
    pieces = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)])


def shard_micro_batches(arrays: Any, mesh: Mesh) -> Any:
    """Place a tree of [A, micro_batch, ...] arrays on the mesh."""
    return place(arrays, micro_batch_layout(mesh))


def micro_batch_layout(mesh: Mesh, axis: int = 1) -> NamedSharding:
    """Return the sharding of [A, micro_batch, ...]: micro-batch rows over the axes of rows.

    Args:
      axis: of the rows.
    """
    return NamedSharding(mesh, row_spec(mesh, axis))


def replicate(array: Array, mesh: Mesh) -> jax.Array:
    """Copy the array to every device."""
    return place(array, NamedSharding(mesh, PartitionSpec()))


def place(tree: Any, sharding: Sharding) -> Any:
    """Place a tree of NumPy arrays, which every process holds, on the devices."""

    def put(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, tree)


# ------------------------------------------------------------------------------ processes


def process_count() -> int:
    """Return the number of processes of the mesh in use; 1 without one."""
    mesh = jax.sharding.get_mesh()
    return 1 if mesh.empty else len({device.process_index for device in mesh.devices.flat})


def max_over_processes(*values: int) -> tuple[int, ...]:
    """Return the maximum of each number over all processes."""
    if process_count() == 1:
        return values
    count_barrier()
    return tuple(multihost_utils.process_allgather(np.asarray(values)).max(0).tolist())


def from_main_process(number: int) -> int:
    """Return the main process's number in all processes."""
    if jax.process_count() == 1:
        return number
    count_barrier()
    return int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def is_main_process() -> bool:
    """Return whether this process writes the run's files and its console."""
    return jax.process_index() == 0


@contextlib.contextmanager
def main_process_first(name: str) -> Generator[None]:
    """Run the body in the main process first, so that the other processes find its files."""
    if not is_main_process():
        multihost_utils.sync_global_devices(name)
    yield
    if is_main_process() and jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of all processes, in order of process index."""
    if process_count() == 1:
        return [data]
    (longest,) = max_over_processes(len(data))
    padded = np.zeros(longest, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray(len(data)))
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
