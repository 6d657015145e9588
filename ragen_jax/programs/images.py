"""The memory and the programs of a vision tower.

The tower encodes each image once, when the environment shows it; the embeddings are kept for the
prompts and rows that show the image. If the tower's adapters are trained (model.lora.tower), it
encodes the images again in every minibatch, and the minibatch's gradient is propagated through it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from ragen_jax.config.per_task import per_task_configs
from ragen_jax.core import sharding
from ragen_jax.core.types import Params
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.image_table import AT_A_TIME, MAX_CACHES, tower_gradient
from ragen_jax.model.vision.images import Grid
from ragen_jax.model.vision.positions import Images
from ragen_jax.programs.program import Program, on_chip, program
from ragen_jax.programs.roofline import TowerWork
from ragen_jax.programs.shapes import (
    RunShapes,
    Struct,
    adapters,
    cache_struct,
    host,
    laid_out,
    picture_grids,
    pictures,
    struct,
)


def with_tower(run: RunShapes, plan: Sequence[Program]) -> list[Program]:
    """Return the programs with the tower's memory added to each, then the tower's programs."""
    if run.model.config.vision is None:
        return [*plan]
    # With adapters the tower is on both meshes.
    meshes = {run.sampling_mesh, run.mesh} if run.tower_trains else {run.sampling_mesh}
    towers = {mesh: tower_struct(run, mesh) for mesh in meshes}
    tables = [*run.images.values()]
    cached = MAX_CACHES + 1 if run.tower_trains else 1  # tables that ImageTable caches
    latest = tables[:1] * cached

    def with_towers(one: Program) -> Program:
        reads = any(x is table.embed_ID for x in one.arguments for table in tables)
        return dataclasses.replace(one, resident=(one.resident, latest[reads:], [*towers.values()]))

    return [*map(with_towers, plan), *_tower_programs(run, towers, latest)]


def tower_struct(run: RunShapes, mesh: Mesh) -> Params:
    """Return the tower's parameters on a mesh as hf.load_tower places them, without adapters."""
    config = _tower(run).config
    shapes = flatten_dict(
        jax.eval_shape(lambda key: vision.init_params(config, key), jax.random.key(0))
    )
    resident = {
        path: x if path[-1] == "scale" else jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.dtype))
        for path, x in shapes.items()
    }
    return laid_out(unflatten_dict(resident), vision.param_shardings(config, mesh))


def _tower(run: RunShapes) -> vision.VisionTower:
    config = run.model.config.vision
    assert config is not None
    return vision.VisionTower(dataclasses.replace(config, dtype=run.config.model.dtype))


def _tower_programs(
    run: RunShapes, towers: dict[Mesh, Params], latest: Sequence[Images]
) -> Iterator[Program]:
    """Yield the programs that encode images during rollouts.

    The last turn's cache is in memory during these calls. If the tower's adapters are trained, also
    yield the programs of updates: encoding and gradient.
    """
    several = len(per_task_configs(run.config)) > 1
    mesh = run.sampling_mesh
    shards = sharding.data_shards(mesh)
    for name, grid in picture_grids(run.config).items():
        c = per_task_configs(run.config)[name]
        suffix = f":{name}" if several else ""
        rows = -(-c.rollout.groups * c.rollout.group_size // shards) * shards
        cache = cache_struct(run.sampler, run.policy, mesh, rows, run.at[name].prompt)
        yield _see(
            run,
            f"tower{suffix}",
            grid,
            towers,
            mesh,
            resident=(run.resident, run.policy, cache, latest),
            calls=-(-rows // AT_A_TIME) * c.env.max_turns,
            helps=("rollout.groups", *run.helps),
        )
        if run.tower_trains:
            yield from _training_tower(run, suffix, grid, towers, latest, pictures(c))


def _see(
    run: RunShapes,
    name: str,
    grid: Grid,
    towers: dict[Mesh, Params],
    mesh: Mesh,
    *,
    resident: Any,
    calls: float,
    helps: tuple[str, ...],
) -> Program:
    """Return the `Program` that encodes AT_A_TIME images, with the adapters if they are trained."""
    tower, params = _tower(run), towers[mesh]
    if run.tower_trains:
        pairs = adapters(run.config, run.model, mesh)["tower"]["layers"]
        layers = {target: x | pairs.get(target, {}) for target, x in params["layers"].items()}
        params = params | {"layers": layers}
    return program(
        name,
        mesh,
        vision.see,
        tower,
        params,
        _patches(tower, grid, mesh),
        grid,
        resident=(resident, [params for other, params in towers.items() if other != mesh]),
        cost=TowerWork(tower.config, mesh.shape["tensor"]).see(on_chip(AT_A_TIME, mesh), grid),
        calls=calls,
        helps=helps,
    )


def _training_tower(
    run: RunShapes,
    suffix: str,
    grid: Grid,
    towers: dict[Mesh, Params],
    latest: Sequence[Images],
    count: int,
) -> Iterator[Program]:
    """Yield the programs of `ImageTable.table` and `ImageTable.gradient` in a step's updates.

    Args:
      count: images of the step.
    """
    tower, mesh, minibatches = _tower(run), run.mesh, run.config.optimizer.minibatches
    resident = (
        (run.state, run.frozen and run.frozen.params, run.policy if run.copied else None),
        run.learning,  # the gradient has its shapes
        latest,
    )
    helps = ("model.lora.tower", *run.helps)
    yield _see(
        run,
        f"tower_update{suffix}",
        grid,
        towers,
        mesh,
        resident=resident,
        calls=-(-count // AT_A_TIME) * minibatches,  # each minibatch has new adapters
        helps=helps,
    )
    tokens = grid[1] * grid[2] // tower.config.spatial_merge_size**2
    yield program(
        f"tower_gradient{suffix}",
        mesh,
        tower_gradient,
        tower,
        towers[mesh],
        run.state.params["tower"],
        host((), jnp.float32),
        _patches(tower, grid, mesh),
        grid,
        host((AT_A_TIME, tokens, run.model.config.width), jnp.float32),
        resident=(resident, [params for other, params in towers.items() if other != mesh]),
        cost=TowerWork(tower.config, mesh.shape["tensor"]).back(on_chip(AT_A_TIME, mesh), grid),
        calls=-(-count // minibatches // AT_A_TIME) * minibatches,
        helps=helps,
    )


def _patches(tower: vision.VisionTower, grid: Grid, mesh: Mesh) -> Struct:
    shape = (AT_A_TIME, grid[1] * grid[2], tower.config.patch_numbers)
    return struct(mesh, shape, jnp.float32, "rows")
