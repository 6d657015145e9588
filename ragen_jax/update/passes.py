"""Forward passes over the rows of a batch: log-probs, entropies, values before an update.

Axes: B rows, T tokens, L tokens of a row as it is cut, A micro-batches.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.model.qwen import Qwen
from ragen_jax.sharding import constrain
from ragen_jax.types import Array, Batch, Params
from ragen_jax.update.critic import token_values
from ragen_jax.update.cutting import padded_rows
from ragen_jax.update.likelihood import token_statistics
from ragen_jax.update.optimize import micro_batches
from ragen_jax.update.policy import Frozen

# `statistics` or `values`: (model, params, tokens_BT, extra) -> arrays [B, T]. Of the first `extra`
# is the temperature, of the second `policy.Frozen` or None.
Pass = Callable[[Qwen, Params, Array, Any], tuple[jax.Array, ...]]


def statistics(
    model: Qwen, params: Params, tokens_BT: Array, temperature: Array | float
) -> tuple[jax.Array, ...]:
    """(logp_BT, entropy_BT) of `likelihood.token_statistics`."""
    return token_statistics(model, params, tokens_BT, temperature=temperature)


def values(
    model: Qwen, params: Params, tokens_BT: Array, frozen: Frozen | None
) -> tuple[jax.Array]:
    """(value_BT,) of `critic.token_values`."""
    return (token_values(model, params, tokens_BT, frozen),)


@functools.partial(jax.jit, static_argnames=("function", "model"))
def read_micro_batches(
    function: Pass,
    model: Qwen,
    params: Params,
    tokens_AML: jax.Array,
    count: jax.Array,
    extra: Any,
) -> tuple[jax.Array, ...]:
    """function(model, params, tokens, extra) of the first `count` micro-batches, else 0.

    Args:
      tokens_AML: int32 [A, micro_batch, L].

    Returns:
      float32 [A, micro_batch, L] each, whole on every device.
    """
    shapes = jax.eval_shape(lambda: function(model, params, tokens_AML[0], extra))

    def read(a, outs):
        new = function(model, params, tokens_AML[a], extra)
        return tuple(x.at[a].set(y) for x, y in zip(outs, new, strict=True))

    start = tuple(jnp.zeros((len(tokens_AML), *x.shape), x.dtype) for x in shapes)
    outs = jax.lax.fori_loop(0, count, read, start)
    return tuple(constrain(x, None, None, None) for x in outs)


def over_rows(
    function: Pass,
    model: Qwen,
    params: Params,
    batch: Batch,
    rows_B: np.ndarray,
    extra: Any,
    *,
    mesh: Mesh,
    micro_batch: int,
    size: int,
) -> tuple[np.ndarray, ...]:
    """`function` of chosen rows of a batch, each read at its length of `cutting.padded_rows`.

    Args:
      batch: on the host. rows_B: indices of the rows.
      size: the most rows there can be, in whole micro-batches: one program a length for all steps.

    Returns:
      float32 [B, T] each, on the host, 0 in the other rows and behind the length of a row.
    """
    padded_B = padded_rows(batch, micro_batch=micro_batch)
    shape = batch.tokens_BT.shape
    outs: list[np.ndarray] = []
    for length in np.unique(padded_B[rows_B])[::-1].tolist() or [shape[1]]:  # of no row: zeros
        rows = rows_B[padded_B[rows_B] == length]
        tokens = {"tokens": batch.tokens_BT[:, :length]}
        arrays, count = micro_batches(tokens, rows, mesh=mesh, micro_batch=micro_batch, size=size)
        found = read_micro_batches(function, model, params, arrays["tokens"], count, extra)
        outs = outs or [np.zeros(shape, np.float32) for _ in found]
        for out_BT, x_AML in zip(outs, jax.device_get(found), strict=True):
            out_BT[rows, :length] = x_AML.reshape(size, -1)[: len(rows)]
    return tuple(outs)
