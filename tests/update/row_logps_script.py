"""Compare log-probs of ragged rows on eight devices with those of padded rows.

Run by tests/update/test_row_logps.py in a separate process, because the number of devices is fixed
when JAX starts. Prints the largest difference.
"""

import jax
import numpy as np
from shared_rows import random_tree
from test_row_logps import T, V, expected

from ragen_jax import row_logps
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params


def main():
    model = Qwen(ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False))
    params = init_params(model.config, jax.random.key(0))
    rows = random_tree(np.random.default_rng(0), 50, T, V)
    wanted, found = expected((model, params), rows), []
    for data, fsdp, tensor in ((8, 1, 1), (2, 2, 2)):
        mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
        with jax.set_mesh(mesh):
            found.append(row_logps(model, shard_params(params, model, mesh), rows))
    pairs = [pair for logps in found for pair in zip(logps, wanted, strict=True)]
    print(max(float(np.abs(a - b).max()) for a, b in pairs))


if __name__ == "__main__":
    main()
