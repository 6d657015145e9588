"""Compiling a program without running it."""

from typing import Any

import jax
from jax.stages import Wrapped


def compiled(function: Wrapped, *args: Any, **keywords: Any) -> Any:
    """Compiles a jitted function for these arrays or their shapes -> shapes of what it returns."""
    lowered = function.lower(*args, **keywords)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array, and where it lies if it is JAX's."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
