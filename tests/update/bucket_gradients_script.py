"""Compare gradients on four devices with gradients of rows that are not split by length.

Run by tests/update/test_buckets.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object.
"""

import json

import jax
import pytest
from random_rows import V
from test_buckets import gradients_apart

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params


def main():
    config = ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False)
    policy = Qwen(config), init_params(config, jax.random.key(0))
    found = {}
    for sizes in ((2, 2, 1), (1, 2, 2)):
        mesh = make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
        for who in ("policy", "critic", "adapter"):
            found[f"{who} {sizes}"] = gradients_apart(policy, mesh, pytest.MonkeyPatch(), who)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
