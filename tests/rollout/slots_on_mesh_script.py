"""Play in slots and turn by turn on meshes of virtual devices, and on one device, and compare.

Run by tests/rollout/test_slots.py in a separate process, because the number of devices is fixed
when JAX starts. Prints the kinds of layers and the meshes whose episodes were the same.
"""

import math

import jax
from episode_equality import assert_same_episode
from test_slots import HYBRID, MIXTURE, WINDOWED, play_seeds, played_by

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import shard_params

MESHES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2))


def play(model, params, task, **served):
    return play_seeds(model, params, task, range(6), group_size=7, **served)


def main():
    compare("full", MESHES)
    compare("windowed", MESHES[-1:], **dict(WINDOWED))
    compare("hybrid", MESHES[-1:], **dict(HYBRID))
    compare("experts", (*MESHES[-1:], (2, 1, 2, 2)), **dict(MIXTURE))


def compare(kind, meshes, **options):
    model, params, task = played_by("frozen_lake", "full", **options)
    record = {"replay_experts": model.config.experts is not None}
    theirs = play(model, params, task, **record)
    for sizes in meshes:
        axes = dict(zip(("data", "fsdp", "tensor", "expert"), sizes, strict=False))
        mesh = make_mesh(**axes, devices=jax.devices()[: math.prod(sizes)])
        with jax.set_mesh(mesh):
            placed = shard_params(params, model, mesh)
            served = [{"slots": 20, "chunk": 5}, *([{}] if options else [])]
            ours = [play(model, placed, task, **record, **how) for how in served]
        for a, b in ((a, b) for one in ours for a, b in zip(one, theirs, strict=True)):
            assert_same_episode(model, params, task.key, a, b)
            for turn, other in zip(a.turns, b.turns, strict=False):
                if turn.experts is not None and turn.sampled.tolist() == other.sampled.tolist():
                    assert (turn.experts == other.experts).all()
        print(f"{kind}:{','.join(map(str, sizes))}", flush=True)


if __name__ == "__main__":
    main()
