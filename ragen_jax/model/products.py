"""The two products of attention: scores, and weighted sums of values; keys and values may be int8.

Axes: n rows or pages, q queries, s keys, d head width.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ragen_jax.model.quantised import Quantised
from ragen_jax.model.segments import KV

MASKED = -1e30  # finite, so that a row whose segment is empty has no NaN


def score_keys(q: jax.Array, k: KV) -> jax.Array:
    """Return q . k / sqrt(d), float32 [n, .., q, s], of queries [n, .., q, d] and keys."""
    if isinstance(k, Quantised):
        return score_keys(q, k.codes.astype(q.dtype)) * jnp.swapaxes(k.scale, -1, -2)
    # Scaled in float32: queries scaled in bfloat16 would be rounded a second time.
    scores = jnp.einsum("n...qd,n...sd->n...qs", q, k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5


def mix_values(weight: jax.Array, v: KV, dtype: DTypeLike | None = None) -> jax.Array:
    """Return weighted sums of values, float32 [n, .., q, d].

    Args:
      weight: float32 [n, .., q, s].
      dtype: dtype of the product with int8 codes.
    """
    if isinstance(v, Quantised):
        weight, v = weight * jnp.swapaxes(v.scale, -1, -2), v.codes.astype(dtype)
    weight = weight.astype(v.dtype)
    return jnp.einsum("n...qs,n...sd->n...qd", weight, v, preferred_element_type=jnp.float32)
