"""The layout of a model's parameters on a mesh, for training and for sampling."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ragen_jax.core.sharding import boxed_shardings, has_other_devices, send, within_processes
from ragen_jax.core.types import Params
from ragen_jax.model.qwen import Qwen, boxed_shapes


def param_shardings(model: "Qwen", mesh: Mesh) -> Params:
    """Return a NamedSharding for every parameter of `model`, from RULES."""
    return boxed_shardings(boxed_shapes(model.config), mesh)


def shard_params(params: Params, model: "Qwen", mesh: Mesh) -> Params:
    """Place the parameters on the mesh according to RULES."""
    return jax.device_put(params, param_shardings(model, mesh))


def sampling_params(params: Params, model: "Qwen", mesh: Mesh) -> Params:
    """Return the parameters for sampling and scoring: in the model's dtype, on `mesh`.

    The model casts every matrix to its dtype when it multiplies, so a copy in that dtype gives the
    same numbers for half the memory traffic. If nothing has to change, `params` is returned.

    Args:
      params: parameters on the training mesh.
      mesh: the sampling mesh, over the same devices in the same order or over other devices.
    """
    here = getattr(jax.tree.leaves(params)[0].sharding, "mesh", mesh)
    kinds = jax.tree_util.tree_map_with_path(functools.partial(_kind, model), params)
    as_read = all(jax.tree.leaves(jax.tree.map(lambda x, kind: x.dtype == kind, params, kinds)))
    if as_read and here == mesh:
        return params
    if not has_other_devices(here, mesh):
        return resharding(model, mesh)(params)
    shardings = param_shardings(model, mesh)
    if jax.process_count() > 1:
        within = within_processes(here)
        with jax.set_mesh(within):
            staged = resharding(model, within)(params)
        return send(staged, shardings)
    sent = params if as_read else resharding(model, here)(params)
    return jax.device_put(sent, shardings)


def _kind(model: "Qwen", path: Any, x: jax.Array) -> jnp.dtype:
    """Return the dtype in which a parameter is read."""
    # Scales of norms are multiplied, and decays of linear attention computed, in float32.
    exact = any("norm" in key.key or "decay" in key.key for key in path)
    return x.dtype if exact else jnp.dtype(model.config.dtype)


@functools.cache
def resharding(model: "Qwen", mesh: Mesh) -> Callable[[Params], Params]:
    def cast(path, x):
        return x.astype(_kind(model, path, x))

    return jax.jit(
        functools.partial(jax.tree_util.tree_map_with_path, cast),
        out_shardings=param_shardings(model, mesh),
    )
