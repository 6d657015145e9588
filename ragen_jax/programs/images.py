"""What a model that sees keeps on the devices beside the language model, and what sees for it.

The tower sees each picture once, when the environment shows it; its embeddings are kept for the
prompts and rows in which the picture stands. With adapters that are trained (model.lora.tower) it
sees them again in every minibatch, and the minibatch's gradient goes back through it.
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
from ragen_jax.model.vision.image_table import AT_A_TIME, SIGHTS, tower_gradient
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
    """The programs, with what sees for the model beside each, and those that see."""
    if run.model.config.vision is None:
        return [*plan]
    # With adapters the tower is on the mesh of training, too.
    meshes = {run.sampling_mesh, run.mesh} if run.tower_trains else {run.sampling_mesh}
    towers = {mesh: tower_struct(run, mesh) for mesh in meshes}
    tables = [*run.images.values()]
    latest = tables[:1] * (SIGHTS + 1 if run.tower_trains else 1)  # that an image table remembers

    def with_towers(one: Program) -> Program:
        reads = any(x is table.embed_ID for x in one.arguments for table in tables)
        return dataclasses.replace(one, held=(one.held, latest[reads:], [*towers.values()]))

    return [*map(with_towers, plan), *_tower_programs(run, towers, latest)]


def tower_struct(run: RunShapes, mesh: Mesh) -> Params:
    """The tower's parameters on a mesh as hf.load_tower holds them, without adapters."""
    config = _tower(run).config
    shapes = flatten_dict(
        jax.eval_shape(lambda key: vision.init_params(config, key), jax.random.key(0))
    )
    held = {
        path: x if path[-1] == "scale" else jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.dtype))
        for path, x in shapes.items()
    }
    return laid_out(unflatten_dict(held), vision.param_shardings(config, mesh))


def _tower(run: RunShapes) -> vision.VisionTower:
    config = run.model.config.vision
    assert config is not None
    return vision.VisionTower(dataclasses.replace(config, dtype=run.config.model.dtype))


def _tower_programs(
    run: RunShapes, towers: dict[Mesh, Params], latest: Sequence[Images]
) -> Iterator[Program]:
    """The programs that see some of a step's pictures beside the last turn's cache and, where
    adapters of the tower are trained, in an update, and that go back through it."""
    several = len(per_task_configs(run.config)) > 1
    mesh = run.sampling_mesh
    shards = sharding.data_shards(mesh)
    for name, grid in picture_grids(run.config).items():
        c = per_task_configs(run.config)[name]
        suffix = f":{name}" if several else ""
        rows = -(-c.rollout.groups * c.rollout.group_size // shards) * shards
        cache = cache_struct(run.model, run.policy, mesh, rows, run.at[name].prompt)
        yield _see(
            run,
            f"tower{suffix}",
            grid,
            towers,
            mesh,
            held=(run.held, run.policy, cache, latest),
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
    held: Any,
    calls: float,
    helps: tuple[str, ...],
) -> Program:
    """The `Program` that sees AT_A_TIME pictures, with adapters where they are trained."""
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
        held=(held, [params for other, params in towers.items() if other != mesh]),
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
    """`ImageTable.table` and `ImageTable.gradient` in the updates of a step of `count` pictures."""
    tower, mesh, minibatches = _tower(run), run.mesh, run.config.optimizer.minibatches
    held = (
        (run.state, run.frozen and run.frozen.params, run.policy if run.copied else None),
        run.learning,  # of its form is the gradient
        latest,
    )
    helps = ("model.lora.tower", *run.helps)
    yield _see(
        run,
        f"tower_update{suffix}",
        grid,
        towers,
        mesh,
        held=held,
        calls=-(-count // AT_A_TIME) * minibatches,  # each with other adapters
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
        held=(held, [params for other, params in towers.items() if other != mesh]),
        cost=TowerWork(tower.config, mesh.shape["tensor"]).back(on_chip(AT_A_TIME, mesh), grid),
        calls=-(-count // minibatches // AT_A_TIME) * minibatches,
        helps=helps,
    )


def _patches(tower: vision.VisionTower, grid: Grid, mesh: Mesh) -> Struct:
    shape = (AT_A_TIME, grid[1] * grid[2], tower.config.patch_numbers)
    return struct(mesh, shape, jnp.float32, "rows")
