"""Compiling a program without running it."""

from typing import Any

import jax
from jax.stages import Wrapped


def compiled(function: Wrapped, *args: Any, **keywords: Any) -> Any:
    """Compiles a jitted function for these arrays or their shapes -> shapes of what it returns."""
    lowered = function.lower(*args, **keywords)
    shardings = lowered.compile().output_shardings
    if jax.sharding.get_mesh().empty:  # what it returns may lie anywhere
        shardings = jax.tree.map(lambda _: None, lowered.out_info)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        shardings,
    )


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and where it lies if that is settled (`jax.Array.committed`)."""
    sharding = x.sharding if getattr(x, "committed", False) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
