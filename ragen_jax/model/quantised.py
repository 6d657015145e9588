"""Keys and values in int8, with a scale for each token and head.

The sampler's model with `ModelConfig.cache_dtype` int8 rounds keys and values where it computes
them, so that a token reads the same numbers whether they come from the cache or from the call that
computed them. How a row is divided into calls therefore changes results by float rounding only. In
deep models this rounding moves some numbers to other codes, whose effect grows from layer to layer.

Axes: K heads, S positions, D head width.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

LARGEST = 127  # codes are symmetric: -128 is not used


@flax.struct.dataclass
class Quantised:
    """Keys or values, as `codes * scale`."""

    codes: jax.Array  # int8 [.., K, S, D]
    scale: jax.Array  # float32 [.., K, S, 1], at least 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the keys or values."""
        return self.codes.shape


def quantise(x: jax.Array) -> Quantised:
    """Round each vector of the last axis to multiples of its largest absolute value / 127."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / LARGEST
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    return Quantised(codes.astype(jnp.int8), scale)


def dequantise(x: Quantised, dtype: DTypeLike) -> jax.Array:
    """Return the numbers that the codes stand for."""
    return (x.codes.astype(jnp.float32) * x.scale).astype(dtype)
