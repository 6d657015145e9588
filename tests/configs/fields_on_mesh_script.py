"""Print the fractions of rows and parameters on each of eight virtual devices, for some configs.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python tests/configs/fields_on_mesh_script.py FIELDS

FIELDS is JSON: a list of {field: value}. Prints a JSON list with the fractions for each config. Run
by tests/configs/test_fields_start.py in a separate process, because the number of devices is fixed
when JAX starts.
"""

import json
import math
import sys

import jax
import numpy as np
from field_entries import configured
from layer_kinds import mixture

from ragen_jax.config.build_model import build_meshes
from ragen_jax.core.sharding import place_rows, shard_micro_batches
from ragen_jax.model.layout import sampling_params, shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

SHAPE = ModelConfig(
    vocab_size=64,
    width=32,
    layers=1,
    heads=8,
    kv_heads=8,
    head_dim=4,
    mlp_width=64,
    **mixture(1, count=8),
)
PARAMS = jax.device_get(init_params(SHAPE, jax.random.key(0)))


def share(array):
    """The fraction of an array that one device holds."""
    return math.prod(array.sharding.shard_shape(array.shape)) / array.size


def held(config):
    mesh, sampling_mesh = build_meshes(config)
    model = Qwen(SHAPE)
    params = shard_params(PARAMS, model, mesh)
    policy = sampling_params(params, model, sampling_mesh)
    rows = shard_micro_batches(np.zeros((1, config.optimizer.micro_batch, 4)), mesh)
    with jax.set_mesh(sampling_mesh):
        played = place_rows(np.zeros((16, 4)))
    return {
        "rows": share(rows),
        "heads": share(params["layers"]["q"]["kernel"]),
        "experts": share(params["layers"]["experts"]["gate"]),
        "played rows": share(played),
        "played heads": share(policy["layers"]["q"]["kernel"]),
        "played experts": share(policy["layers"]["experts"]["gate"]),
    }


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    print(json.dumps([held(configured(fields)) for fields in json.loads(sys.argv[1])]))
