"""Compare a model with linear-attention layers on meshes of eight devices with one device.

Run by tests/model/test_delta_rule.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object: the largest differences of log-probs of a pass and of
sampled tokens, and of gradients relative to the largest.

    python hybrid_on_mesh_script.py LAYERS
"""

import json
import sys

import jax
import numpy as np
from layer_kinds import hybrid

from ragen_jax.core.sharding import make_mesh, place_rows, read_rows
from ragen_jax.model.layout import shard_params
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.rollout import sample

MESHES = ((8, 1, 1), (2, 4, 1), (2, 2, 2))  # data, fsdp, tensor
ROWS, TOKENS = 16, 11


def main():
    found, layers = {}, int(sys.argv[1])
    config = ModelConfig(40, 32, layers, 4, 2, 8, 48, **hybrid(layers))
    model, params = Qwen(config), init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, 40, (ROWS, TOKENS)).astype(np.int32)
    weight_BT = rng.normal(size=(ROWS, TOKENS)).astype(np.float32)
    length_B = rng.integers(2, TOKENS + 1, ROWS).astype(np.int32)

    def run(params, tokens_BT, weight_BT, length_B):
        def total(params):
            logp_BT = token_logps(model, params, tokens_BT)
            return (logp_BT * weight_BT).sum(), logp_BT

        gradient, logp_BT = jax.jit(jax.grad(total, has_aux=True))(params)
        segment, logits = sample.prefill(model, params, tokens_BT, length_B)
        seeds = range(len(read_rows(place_rows(np.arange(ROWS)))))
        keys = sample.episode_keys(jax.random.key(5), seeds, [0] * ROWS, 0)
        budget = place_rows(np.full(ROWS, 5, np.int32))
        settings = sample.DecodeSettings(max_tokens=5, stop_ids=(7,))
        one = np.float32(1.0)
        replies = sample.decode(
            model, params, segment, logits, keys, budget, one, settings=settings
        )
        longer, _ = sample.extend(
            *(model, params, segment, replies.reply),
            place_rows(np.arange(ROWS, dtype=np.int32) % (ROWS // shards())),
            *(tokens_BT[:, :3], place_rows(np.full(ROWS, 3, np.int32))),
            capacity=32,
        )
        states = jax.tree.leaves(longer.state)
        return jax.device_get((gradient, logp_BT, replies.tokens_BT, replies.logp_BT, states))

    want = run(params, tokens_BT, weight_BT, length_B)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(want[0]))
    for sizes in MESHES:
        mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
        with jax.set_mesh(mesh):
            placed = shard_params(params, model, mesh)
            rows = map(place_rows, (tokens_BT, weight_BT, length_B))
            other = run(placed, *rows)
        assert np.array_equal(want[2], other[2])
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), want, other)
        found[str(sizes)] = {
            "gradient": max(jax.tree.leaves(apart[0])) / largest,
            "logp": max(apart[1], apart[3]),
            "state": max(apart[4]),
        }
    print(json.dumps(found))


def shards():
    """Return the number of shards of rows of the mesh in use."""
    mesh = jax.sharding.get_mesh()
    return 1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"]


if __name__ == "__main__":
    main()
