"""One program of a run, and what the places that plan programs have in common."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from ragen_jax.core import sharding
from ragen_jax.programs.roofline import Cost
from ragen_jax.programs.shapes import RunShapes, Struct


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run, ready to be compiled."""

    name: str
    lower: Callable[[], Lowered]
    arguments: Any  # tree of `Struct`s
    held: Any  # tree of those in memory that are not its arguments
    cost: Cost  # of a call, on a chip
    calls: float  # of a step, on average
    helps: tuple[str, ...]  # config fields that make it smaller


def program(
    name: str,
    mesh: Mesh,
    function: Any,
    *args: Any,
    keywords: dict[str, Any] | None = None,
    **rest: Any,
) -> Program:
    """A `Program` that calls a jitted function (of any declared type) with the mesh in use."""

    def lower():
        with jax.set_mesh(mesh):
            return function.lower(*args, **(keywords or {}))

    arrays = [x for x in jax.tree.leaves(args) if getattr(x, "sharding", None)]
    return Program(name=name, lower=lower, arguments=arrays, **rest)


def on_chip(count: int, mesh: Mesh) -> int:
    """Rows of a chip; rows that do not split evenly are on all of them."""
    shards = sharding.data_shards(mesh)
    return count if count % shards else count // shards


def split(run: RunShapes) -> int:
    """Chips that a parameter is split over."""
    return run.mesh.shape["fsdp"] * run.mesh.shape["tensor"]


def micro_batches(run: RunShapes, A: int, **types: str) -> dict[str, Struct]:
    """{name: [A, micro_batch, T] of a dtype}."""
    shape = (A, run.config.optimizer.micro_batch, run.row)
    layout = sharding.micro_batch_layout(run.mesh)
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=layout)
        for name, dtype in types.items()
    }


def training_helps(run: RunShapes) -> tuple[str, ...]:
    """Config fields that make what training holds smaller."""
    helps = ["optimizer.micro_batch"]
    helps += [] if run.config.model.remat else ["model.remat"]
    helps += ["algorithm.kl_coef"] if run.reference else []
    helps += ["algorithm.name"] if run.state.critic else []
    return (*helps, *run.helps)
