"""One program of a run, and helpers shared by the modules that plan programs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.stages import Lowered

from ragen_jax.core import sharding
from ragen_jax.model.shape import ModelConfig
from ragen_jax.programs.roofline import Cost, Work
from ragen_jax.programs.shapes import RunShapes


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run, ready to be compiled."""

    name: str
    lower: Callable[[], Lowered]
    arguments: Any  # tree of `Struct`s
    resident: Any  # tree of `Struct`s that are in memory during a call but are not arguments
    cost: Cost  # one call on one chip
    calls: float  # average number per step
    helps: tuple[str, ...]  # config fields that reduce its memory
    tokens: int = 0  # tokens that a call samples on a chip
    diagnosis: bool = False  # whether it belongs to the diagnosis of a step


def program(
    name: str,
    mesh: Mesh,
    function: Any,
    *args: Any,
    keywords: dict[str, Any] | None = None,
    **rest: Any,
) -> Program:
    """Return a `Program` that calls a jitted function (of any declared type) on the mesh."""

    def lower():
        with jax.set_mesh(mesh):
            return function.lower(*args, **(keywords or {}))

    arrays = [x for x in jax.tree.leaves((args, keywords)) if getattr(x, "sharding", None)]
    return Program(name=name, lower=lower, arguments=arrays, **rest)


def on_chip(count: int, mesh: Mesh) -> int:
    """Return the number of rows on one chip; rows that do not split evenly are replicated."""
    shards = sharding.data_shards(mesh)
    return count if count % shards else count // shards


def work_on(config: ModelConfig, mesh: Mesh) -> Work:
    """Return the `Work` of a model on a chip of a mesh."""
    return Work(config, mesh.shape["tensor"], mesh.shape.get(sharding.EXPERT, 1))


def split(run: RunShapes) -> int:
    """Return the number of chips that a parameter is split over, experts' along all axes."""
    axes = run.mesh.shape["fsdp"], run.mesh.shape["tensor"], run.mesh.shape.get(sharding.EXPERT, 1)
    return math.prod(axes)


def training_helps(run: RunShapes) -> tuple[str, ...]:
    """Return the config fields that reduce the memory of training."""
    helps = ["optimizer.micro_batch"]
    helps += [] if run.config.model.remat else ["model.remat"]
    helps += ["algorithm.kl_coef"] if run.reference else []
    helps += ["algorithm.name"] if run.state.critic else []
    return (*helps, *run.helps)
