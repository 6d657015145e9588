"""Compare gradients of trees with gradients of plain rows on eight devices.

Run by tests/update/test_trees.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object.

    python tree_gradients_script.py few | others
"""

import json
import sys

import jax
from layer_kinds import mixture, windowed
from test_trees import V, largest_difference

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

MESHES = ((8, 1, 1), (2, 4, 1), (2, 2, 2))
MODELS = {  # kind of layers -> (number of layers, fields of the model's config, meshes)
    "full": (2, {"tied": False}, MESHES),
    "windowed": (5, windowed(5), MESHES[-1:]),
    "experts": (2, mixture(2), ((2, 2, 2), (1, 2, 2, 2))),
}


FEW = {  # cases of every CI run
    *(("full", who, (2, 2, 2)) for who in ("policy", "critic", "adapter")),
    *(("full", "policy", sizes) for sizes in MESHES),
    ("windowed", "policy", (2, 2, 2)),
    ("experts", "policy", (1, 2, 2, 2)),
}


def main():
    found, few = {}, sys.argv[1] == "few"
    for kind, (layers, fields, meshes) in MODELS.items():
        model = Qwen(ModelConfig(V, 32, layers, 4, 2, 8, 48, **fields))
        params = init_params(model.config, jax.random.key(0))
        for sizes in meshes:
            axes = dict(zip(("data", "fsdp", "tensor", "expert"), sizes, strict=False))
            mesh = make_mesh(**axes)
            with jax.set_mesh(mesh):
                placed = shard_params(params, model, mesh)
            for who in ("policy", "critic", "adapter"):
                if ((kind, who, sizes) in FEW) != few:
                    continue
                apart = largest_difference(model, placed, mesh, who, micro_batch=8)
                found[f"{kind} {who} {sizes}"] = apart
    print(json.dumps(found))


if __name__ == "__main__":
    main()
