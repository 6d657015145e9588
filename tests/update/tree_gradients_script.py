"""Compare gradients of trees with gradients of plain rows on eight devices.

Run by tests/update/test_trees.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object.
"""

import json

import jax
from test_trees import V, largest_difference

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params


def main():
    model = Qwen(ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False))
    params, found = init_params(model.config, jax.random.key(0)), {}
    for sizes in ((8, 1, 1), (2, 4, 1), (2, 2, 2)):
        mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
        with jax.set_mesh(mesh):
            placed = shard_params(params, model, mesh)
        for who in ("policy", "critic", "adapter"):
            found[f"{who} {sizes}"] = largest_difference(model, placed, mesh, who, micro_batch=8)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
