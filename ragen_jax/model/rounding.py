"""Rounding of parameters to fewer bits, as in a sampler with quantized weights."""

import functools

import jax
import jax.numpy as jnp

from ragen_jax.core.tables import look_up
from ragen_jax.core.types import Params

EXACT = "exact"
TINY = 1e-30  # scale of a vector of zeros


def _bfloat16(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _float8(x: jax.Array) -> jax.Array:
    scale = _scale(x, float(jnp.finfo(jnp.float8_e4m3fn).max))
    return (x / scale).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def _int8(x: jax.Array) -> jax.Array:
    scale = _scale(x, 127.0)
    return jnp.round(x / scale) * scale


def _scale(x: jax.Array, largest: float) -> jax.Array:
    """Return the scale that maps the largest entry of each vector (last axis) to `largest`."""
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / largest, TINY)


PRECISIONS = {EXACT: None, "bfloat16": _bfloat16, "float8": _float8, "int8": _int8}


@functools.partial(jax.jit, static_argnames="precision")
def round_params(params: Params, precision: str) -> Params:
    """Return the parameters with every matrix rounded to a precision, in its own dtype.

    bfloat16 keeps 8 bits of mantissa; float8 is e4m3 and int8 symmetric, both with a scale for each
    vector along the last axis. Vectors, such as the scales of norms, are not rounded.

    Args:
      precision: a key of PRECISIONS.
    Raises:
      ValueError: unknown precision.
    """
    rounded = look_up(PRECISIONS, "precision", precision)
    if rounded is None:
        return params

    def round_one(path, x):
        is_norm = any("norm" in key.key for key in path)
        return x if is_norm or x.ndim < 2 else rounded(x)

    return jax.tree_util.tree_map_with_path(round_one, params)
