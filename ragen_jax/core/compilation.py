"""Compile a program without running it."""

from typing import Any

import jax

from ragen_jax.core.stored_programs import Jitted


def compiled(function: Jitted, *args: Any, **keywords: Any) -> Any:
    """Compile a jitted function for these arrays or shapes; return the shapes of its outputs."""
    lowered = function.lower(*args, **keywords)
    shardings = lowered.compile().output_shardings
    if jax.sharding.get_mesh().empty:  # the outputs may be placed anywhere
        shardings = jax.tree.map(lambda _: None, lowered.out_info)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        shardings,
    )


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return an array's shape and dtype, and its sharding if committed (`jax.Array.committed`)."""
    sharding = x.sharding if getattr(x, "committed", False) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
