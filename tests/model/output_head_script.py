"""Measure, on several devices, the gathered size of the output head and the error against one
device.

Run by tests/model/test_likelihood.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object.
"""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.core.sharding import MESH_AXES, ROWS, make_mesh, place
from ragen_jax.model import likelihood
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

V, D, T = 488, 16, 12  # V is four parts of 122, which is not a multiple of 31
COEFFICIENTS = np.arange(T, dtype=np.float32)
GATHER = re.compile(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)")


def gathered(text):
    """Return the numbers of elements that a compiled program gathers from other devices."""
    return [math.prod(map(int, dims.split(","))) for dims in GATHER.findall(text) if dims]


def apart(found, expected):
    """Return the largest difference divided by the largest value, over the arrays of both trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(x) - y).max() / np.abs(y).max()) for x, y in pairs)


def main():
    likelihood.VOCAB_CHUNK = 32
    tokens = np.random.default_rng(0).integers(0, V, (4, T)).astype(np.int32)
    found = {}
    for tied, meshes in ((False, ((1, 1, 2), (1, 1, 4), (1, 2, 2))), (True, ((1, 1, 4),))):
        config = ModelConfig(V, D, 1, 4, 4, 8, 48, tied=tied)
        model, params = Qwen(config), init_params(config, jax.random.key(0))
        name = "embed" if tied else "head"
        params[name] = 20 * params[name]  # confident, so that the KL exceeds rounding
        other = {**params, name: jnp.flip(params[name], 0)}

        @jax.jit
        def read(params, other, tokens, model=model):
            def objective(params):
                logp, entropy, kl = likelihood.token_statistics(
                    model, params, tokens, temperature=0.7, reference=other
                )
                total = ((logp + 0.3 * entropy - kl) * COEFFICIENTS).sum()
                return total, (logp, entropy, kl)

            return jax.value_and_grad(objective, has_aux=True)(params)

        expected = jax.device_get(read(params, other, tokens))
        for sizes in meshes:
            devices = jax.devices()[: math.prod(sizes)]
            mesh = make_mesh(**dict(zip(MESH_AXES, sizes, strict=True)), devices=devices)
            with jax.set_mesh(mesh):
                arguments = (
                    shard_params(params, model, mesh),
                    shard_params(other, model, mesh),
                    place(tokens, NamedSharding(mesh, PartitionSpec(ROWS))),
                )
                text = read.lower(*arguments).compile().as_text()
                error = apart(jax.device_get(read(*arguments)), expected)
            found[f"{sizes} {'tied' if tied else 'apart'}"] = {
                "error": error,
                "gathered": max([0, *gathered(text)]),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
