"""The layout of a model's parameters on a mesh, for training and for sampling."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ragen_jax.core.sharding import boxed_shardings, has_other_devices
from ragen_jax.core.types import Params
from ragen_jax.model.qwen import Qwen


def param_shardings(model: "Qwen", mesh: Mesh) -> Params:
    """A NamedSharding for every parameter of `model`, by RULES."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return boxed_shardings(shapes["params"], mesh)


def shard_params(params: Params, model: "Qwen", mesh: Mesh) -> Params:
    """The parameters, placed on the mesh by RULES."""
    return jax.device_put(params, param_shardings(model, mesh))


def sampling_params(params: Params, model: "Qwen", mesh: Mesh) -> Params:
    """The parameters as what does not train them reads them: in the model's dtype, on `mesh`.

    The model casts every matrix to its dtype when it multiplies, so a copy in that dtype gives the
    same numbers for half the memory traffic. Without anything to change it is `params` itself.

    Args:
      params: on the training mesh.
      mesh: the mesh of sampling, over the same devices in the same order or over other ones.
    """
    here = getattr(jax.tree.leaves(params)[0].sharding, "mesh", mesh)
    kinds = jax.tree_util.tree_map_with_path(functools.partial(_kind, model), params)
    as_read = all(jax.tree.leaves(jax.tree.map(lambda x, kind: x.dtype == kind, params, kinds)))
    if as_read and here == mesh:
        return params
    if not has_other_devices(here, mesh):
        return resharding(model, mesh)(params)
    sent = params if as_read else resharding(model, here)(params)
    return jax.device_put(sent, param_shardings(model, mesh))


def _kind(model: "Qwen", path: Any, x: jax.Array) -> jnp.dtype:
    """The dtype that a parameter is read in."""
    norm = any("norm" in key.key for key in path)  # its scale is multiplied in float32
    return x.dtype if norm else jnp.dtype(model.config.dtype)


@functools.cache
def resharding(model: "Qwen", mesh: Mesh) -> Callable[[Params], Params]:
    def cast(path, x):
        return x.astype(_kind(model, path, x))

    return jax.jit(
        functools.partial(jax.tree_util.tree_map_with_path, cast),
        out_shardings=param_shardings(model, mesh),
    )
