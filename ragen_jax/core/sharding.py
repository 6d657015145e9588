"""The device mesh and where arrays live on it: one table from logical axes to mesh axes.

Three mesh axes: `data` and `fsdp` split rows, `fsdp` also splits parameters, `tensor` splits heads,
MLP and vocabulary. A mesh for a mixture of experts may have a fourth, `expert`, which splits rows,
and the experts of a layer. Library functions take the mesh that is in use (`jax.set_mesh`);
without one they run on a single device and everything here leaves arrays as they are.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

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
    ("channels", None),  # of a convolution over queries, keys and values together
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

    The last devices of every process only sample, num_sampling in all; if it is 0, all devices do
    both.

    Raises:
      ValueError: a process would have no device left to train, or more sampling devices than
        another.
    """
    if not num_sampling:
        return devices, devices
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    processes = len(by_process)
    each, rest = divmod(num_sampling, processes)
    fewest = min(map(len, by_process.values()))
    if rest:
        raise ValueError(
            f"config.sampling_mesh.devices is {num_sampling}, but each of {processes} processes "
            f"gives the same number of devices; use a multiple of {processes}"
        )
    if each >= fewest:
        most = processes * (fewest - 1)
        of_process = f" of each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"config.sampling_mesh.devices is {num_sampling}, but at least one of {fewest} "
            f"device(s){of_process} must train; use at most {most}"
        )
    groups = by_process.values()
    training = [device for group in groups for device in group[: len(group) - each]]
    return training, [device for group in groups for device in group[-each:]]


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


def platform_of(params: Params) -> str:
    """Return the platform of the devices that hold the parameters: "cpu", "gpu" or "tpu"."""
    for leaf in jax.tree.leaves(params):
        return str(next(iter(leaf.devices())).platform)
    return jax.default_backend()  # no parameters


def has_other_devices(here: Mesh, mesh: Mesh) -> bool:
    """Return whether two meshes share no device: no program can move an array between them."""
    return not set(here.devices.flat) & set(mesh.devices.flat)


def within_processes(mesh: Mesh) -> Mesh:
    """Return a mesh over the same devices on which every process holds all parameters.

    RULES split them over the devices of a process, as far as "fsdp" does.
    """
    processes = len({device.process_index for device in mesh.devices.flat})
    return Mesh(mesh.devices.reshape(processes, -1), ("processes", "fsdp"))


def send(tree: Params, shardings: Params) -> Params:
    """Copy arrays that lie on `within_processes` of a mesh to other devices of every process.

    Programs cannot do this, because the meshes share no device. Each process copies from its own
    devices, since not every platform can copy between the devices of two processes.

    Args:
      shardings: of the results, on a mesh over devices of the same processes.
    """
    return jax.tree.map(_send, tree, shardings)


def _send(x: jax.Array, target: NamedSharding) -> jax.Array:
    source = cast(NamedSharding, x.sharding)
    mesh = cast(Mesh, source.mesh)
    own = next(row for row in mesh.devices if row[0].process_index == jax.process_index())
    local_mesh = Mesh(own, mesh.axis_names[1:])
    with jax.set_mesh(local_mesh):
        local = jax.make_array_from_single_device_arrays(
            x.shape,
            NamedSharding(local_mesh, source.spec),
            [shard.data for shard in x.addressable_shards],
        )
        pieces = [
            jax.device_put(local if _is_whole(index, x.shape) else local[index], device)
            for device, index in target.addressable_devices_indices_map(x.shape).items()
            if index is not None
        ]
    return jax.make_array_from_single_device_arrays(x.shape, target, pieces)


def _is_whole(index: tuple[slice, ...], shape: Sequence[int]) -> bool:
    return all(part.indices(size) == (0, size, 1) for part, size in zip(index, shape, strict=True))


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


def replicate(array: Array | np.generic, mesh: Mesh) -> jax.Array:
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
    return tuple(_gather(np.asarray(values)).max(0).tolist())


def _gather(x: np.ndarray) -> np.ndarray:
    """Return the arrays of all processes of the mesh in use, in order of process index.

    Only devices of the mesh take part: another thread may use the others, and processes may run
    the programs of two threads in different orders (unlike multihost_utils.process_allgather).
    """
    firsts: dict[int, jax.Device] = {}
    for device in jax.sharding.get_mesh().devices.flat:
        firsts.setdefault(device.process_index, device)
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), ("processes",))
    own = jax.device_put(x[None], firsts[jax.process_index()])
    shape = (len(firsts), *x.shape)
    sharding = NamedSharding(mesh, PartitionSpec("processes"))
    together = jax.make_array_from_single_device_arrays(shape, sharding, [own])
    with jax.set_mesh(mesh):
        return np.asarray(_replicating(mesh)(together))


@functools.cache
def _replicating(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


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
    lengths, rows = _gather(np.asarray(len(data))), _gather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
