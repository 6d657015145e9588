"""What a model that sees keeps on the devices beside the language model, and what sees for it.

The tower sees each picture once, when the environment shows it; its embeddings are kept for the
prompts and rows in which the picture stands.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from ragen_jax import sharding
from ragen_jax.model import images, vision
from ragen_jax.model.images import Grid
from ragen_jax.model.positions import Images
from ragen_jax.model.vision_config import VisionConfig
from ragen_jax.preflight.program import Program, on_chip, program
from ragen_jax.preflight.roofline import TowerWork
from ragen_jax.preflight.shapes import Run, cache_struct, laid_out, struct
from ragen_jax.rollout.album import AT_A_TIME
from ragen_jax.run.sizes import of_environments
from ragen_jax.types import Params

TILE = 28  # pixels along a side of a cell where env.options does not say: one token


def with_tower(run: Run, plan: Sequence[Program]) -> list[Program]:
    """The programs, with what sees for the model beside each, and those that see.

    Not planned: that prompts and rows look up embeddings, their second and third positions, and the
    way back to adapters of the tower (model.lora.tower).
    """
    if run.model.config.vision is None:
        return [*plan]
    config = dataclasses.replace(run.model.config.vision, dtype=run.config.model.dtype)
    grids = picture_grids(run)
    params = tower_struct(config, run)
    merged = config.spatial_merge_size**2
    tables = {
        name: table_struct(run, name, tokens=grid[1] * grid[2] // merged)
        for name, grid in grids.items()
    }
    plan = [dataclasses.replace(one, held=(one.held, params, tables)) for one in plan]
    return [*plan, *_tower_programs(run, vision.VisionTower(config), params, grids, tables)]


def picture_grids(run: Run) -> dict[str, Grid]:
    """Environment -> the patches of one of its pictures, of those that show pictures.

    These have `size` cells, of `tile` pixels along a side.
    """
    path = Path(run.config.model.path).expanduser()
    settings = images.read_config(path) if path.is_dir() else images.ImageConfig()
    found = {}
    for name, config in of_environments(run.config).items():
        options = config.env.options
        if options.get("observation") == "image":
            height, width = (cells * options.get("tile", TILE) for cells in options.size)
            found[name] = images.image_grid(height, width, settings)
    return found


def tower_struct(config: VisionConfig, run: Run) -> Params:
    """The tower's parameters as hf.load_tower holds them, where sampling runs it."""
    shapes = flatten_dict(
        jax.eval_shape(lambda key: vision.init_params(config, key), jax.random.key(0))
    )
    held = {
        path: x if path[-1] == "scale" else jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.dtype))
        for path, x in shapes.items()
    }
    return laid_out(unflatten_dict(held), vision.param_shardings(config, run.sampling_mesh))


def table_struct(run: Run, name: str, *, tokens: int) -> Images:
    """What all pictures of a step show, on every chip; tokens: of a picture, one a turn."""
    c, mesh = of_environments(run.config)[name], run.sampling_mesh
    count = c.rollout.groups * c.rollout.group_size * c.env.max_turns * tokens
    dtype = jnp.dtype(run.config.model.dtype)
    return Images(
        token_I=struct(mesh, (count,), jnp.int32),
        embed_ID=struct(mesh, (count, run.model.config.width), dtype),
        place_I2=struct(mesh, (count, 2), jnp.int32),
        step_I=struct(mesh, (count,), jnp.int32),
    )


def _tower_programs(
    run: Run,
    tower: vision.VisionTower,
    params: Params,
    grids: dict[str, Grid],
    tables: dict[str, Images],
) -> Iterator[Program]:
    """The program that sees some of a step's pictures, one a turn, beside the last turn's cache."""
    several = len(of_environments(run.config)) > 1
    mesh = run.sampling_mesh
    shards = sharding.data_shards(mesh)
    for name, grid in grids.items():
        c = of_environments(run.config)[name]
        rows = -(-c.rollout.groups * c.rollout.group_size // shards) * shards
        pixels = (AT_A_TIME, grid[1] * grid[2], tower.config.patch_numbers)
        yield program(
            f"tower:{name}" if several else "tower",
            mesh,
            vision.see,
            tower,
            params,
            struct(mesh, pixels, jnp.float32, "rows"),
            grid,
            held=(
                run.held,
                run.policy,
                cache_struct(run.model, run.policy, mesh, rows, run.at[name].prompt),
                tables,
            ),
            cost=TowerWork(tower.config, mesh.shape["tensor"]).see(on_chip(AT_A_TIME, mesh), grid),
            calls=-(-rows // AT_A_TIME) * c.env.max_turns,
            helps=("rollout.groups", *run.helps),
        )
