"""Compare a mixture of experts on meshes of eight devices with one device.

Run by tests/model/test_experts.py in a separate process, because the number of devices is fixed
when JAX starts. Prints one JSON object: the largest differences of log-probs, and of gradients
relative to the largest.
"""

import dataclasses
import json

import jax
import numpy as np
from layer_kinds import mixture

from ragen_jax.core.sharding import make_mesh, place_rows
from ragen_jax.model import experts, lora
from ragen_jax.model.layout import shard_params
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

# data, fsdp, tensor, expert
MESHES = ((8, 1, 1, 1), (4, 1, 1, 2), (1, 2, 1, 4), (1, 1, 1, 8), (1, 2, 2, 2))
ROWS, TOKENS = 16, 11


def main():
    config = ModelConfig(40, 32, 2, 4, 2, 8, 48, **mixture(2, count=8, chosen=3))
    params, rng = init_params(config, jax.random.key(0)), np.random.default_rng(0)
    # By a feature that all tokens have, expert 2 gets every token, and expert 5 none.
    params["embed"] = params["embed"].at[:, 0].set(1.0)
    router = params["layers"]["router"]
    router["kernel"] = router["kernel"].at[:, 0, 2].set(9.0).at[:, 0, 5].set(-9.0)
    tokens_BT = rng.integers(0, 40, (ROWS, TOKENS)).astype(np.int32)
    weight_BT = rng.normal(size=(ROWS, TOKENS)).astype(np.float32)

    adapters = lora.init_adapters(config, jax.random.key(1), rank=2, targets=lora.TARGETS)
    adapters = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), adapters
    )

    def run(params, adapters, form, tokens_BT, weight_BT):
        model = Qwen(dataclasses.replace(config, expert_form=form))

        def total(trained):
            logp_BT = token_logps(model, lora.attach(*trained, scale=0.5), tokens_BT)
            return (logp_BT * weight_BT).sum(), logp_BT

        gradient, logp_BT = jax.jit(jax.grad(total, has_aux=True))((params, adapters))
        return jax.device_get((gradient, logp_BT))

    *_, routing = Qwen(config).apply({"params": params}, tokens_BT, keep_routing=True)
    count_LX = np.stack([np.bincount(x.ravel(), minlength=8) for x in np.asarray(routing.index)])
    assert (count_LX[:, 2] == ROWS * TOKENS).all() and (count_LX[:, 5] == 0).all()
    gradient, logp_BT = run(params, adapters, "wide", tokens_BT, weight_BT)
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(gradient))
    found = {}
    experts.BLOCK, experts.SAVING = 8, 0  # let few tokens run in blocks, too
    for form in experts.FORMS:
        for sizes in MESHES:
            names = ("data", "fsdp", "tensor", "expert")
            mesh = make_mesh(**dict(zip(names, sizes, strict=True)))
            with jax.set_mesh(mesh):
                placed = shard_params(params, Qwen(config), mesh)
                of_mesh = lora.place_adapters(adapters, Qwen(config), mesh)
                rows = map(place_rows, (tokens_BT, weight_BT))
                other, other_BT = run(placed, of_mesh, form, *rows)
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), gradient, other)
            kernel = placed["layers"]["experts"]["gate"]
            found[f"{form} {sizes}"] = {
                "logp": float(np.abs(logp_BT - other_BT).max()),
                "gradient": max(jax.tree.leaves(apart)) / largest,
                "experts": kernel.addressable_shards[0].data.shape[1],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
