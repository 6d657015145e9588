"""The device mesh and where arrays live on it: one table from logical axes to mesh axes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter (model/qwen.py) -> mesh axis it is split over.
RULES = (
    ("layers", None),
    ("embed", "fsdp"),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head", None),
    ("mlp", "tensor"),
    ("norm", None),
)


def make_mesh(*, data, fsdp, tensor):
    """A mesh over all devices.

    Args:
      data, fsdp, tensor: devices along each axis; one may be -1, which takes all that remain.

    Raises:
      ValueError: sizes that are not positive, two -1, or a product other than the device count.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    shown = ", ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    devices = jax.device_count()
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"{shown}: sizes must be at least 1, and one of them may be -1 (the rest)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and devices % fixed == 0:
        sizes[free[0]] = devices // fixed
    elif fixed != devices or free:
        raise ValueError(f"{shown} does not fit {devices} device(s)")
    return Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), MESH_AXES)


def param_shardings(model, mesh):
    """A NamedSharding for every parameter of `model`, by RULES."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    specs = nn.get_partition_spec(shapes)
    return nn.logical_to_mesh_sharding(specs, mesh, RULES)["params"]


def shard_params(params, model, mesh):
    """The parameters, placed on the mesh by RULES."""
    return jax.device_put(params, param_shardings(model, mesh))


def shard_micro_batches(arrays, mesh):
    """[A, micro_batch, ...] arrays with each micro-batch's rows over the data and fsdp axes."""
    return jax.device_put(arrays, NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"))))


def replicate(array, mesh):
    """A copy of the array on every device."""
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


def data_shards(mesh):
    """Into how many parts a batch of rows is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]
