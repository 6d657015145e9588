"""Run a tower and a language model with images on a mesh and without a mesh.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 NPROC=32 \
        python tests/model/vision_on_mesh_script.py MODEL_DIR DATA,FSDP,TENSOR

Run by test_seeing.py in a separate process, because the number of devices is fixed when JAX starts.
Prints one JSON object: the number of devices, the fraction of the tower's parameters that are
split, and the largest differences of the image embeddings and of the log-probs.
"""

import json
import sys

import jax
import numpy as np
from vision_model import arrange, embed, forward, load, seen_by, shown

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import hf
from ragen_jax.model.layout import shard_params


def main(directory, sizes):
    data, fsdp, tensor = map(int, sizes.split(","))
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    s = load(directory)
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (4, 40, 24, 3), dtype=np.uint8)
    rows = [([*range(2, 4 + b), *shown(s, x), 7, 8], [x]) for b, x in enumerate(pictures)]
    rows = arrange(s, rows, 32)
    pixels_NPC, grid = np.stack([x for x, _ in rows.pixels]), rows.pixels[0][1]

    def see(params, tower_params):
        embed_NPD = embed(s.tower, tower_params, pixels_NPC, grid)
        found = np.zeros_like(rows.images.embed_ID)
        found[: embed_NPD.shape[0] * embed_NPD.shape[1]] = np.concatenate(embed_NPD)
        seen = seen_by(params, rows.images.replace(embed_ID=found))
        logp, _ = forward(s.model, seen, rows.tokens_BT)
        return jax.block_until_ready(embed_NPD), jax.block_until_ready(logp)

    want = see(s.params, s.tower_params)
    tower_params = hf.load_tower(directory, mesh=mesh).params
    with jax.set_mesh(mesh):
        got = see(shard_params(s.params, s.model, mesh), tower_params)
    apart = [float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True)]
    leaves = jax.tree.leaves(tower_params)
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "split": sum(not x.is_fully_replicated for x in leaves) / len(leaves),
                "embeddings": apart[0],
                "log-probs": apart[1],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
