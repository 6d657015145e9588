"""Forward passes over the rows of a batch: log-probs, entropies, values before an update.

Axes: B rows, T tokens, A micro-batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.sharding import constrain
from ragen_jax.update.critic import token_values
from ragen_jax.update.likelihood import token_statistics
from ragen_jax.update.optimize import micro_batches


def statistics(model, params, tokens_BT, temperature):
    """(logp_BT, entropy_BT) of `likelihood.token_statistics`."""
    return token_statistics(model, params, tokens_BT, temperature=temperature)


def values(model, params, tokens_BT, frozen):
    """(value_BT,) of `critic.token_values`."""
    return (token_values(model, params, tokens_BT, frozen),)


@functools.partial(jax.jit, static_argnames=("function", "model"))
def read_micro_batches(function, model, params, tokens_AMT, count, extra):
    """function(model, params, tokens, extra) of the first `count` micro-batches, else 0.

    Args:
      function: `statistics` or `values`. tokens_AMT: int32 [A, micro_batch, T].

    Returns:
      tuple of float32 [A, micro_batch, T], whole on every device.
    """
    shapes = jax.eval_shape(lambda: function(model, params, tokens_AMT[0], extra))

    def one(a, found):
        new = function(model, params, tokens_AMT[a], extra)
        return tuple(x.at[a].set(y) for x, y in zip(found, new, strict=True))

    start = tuple(jnp.zeros((len(tokens_AMT), *x.shape), x.dtype) for x in shapes)
    found = jax.lax.fori_loop(0, count, one, start)
    return tuple(constrain(x, None, None, None) for x in found)


def over_rows(function, model, params, batch, rows_B, extra, *, mesh, micro_batch, size):
    """`function` of chosen rows of a batch.

    Args:
      function: `statistics` (extra: temperature) or `values` (extra: `policy.Frozen` or None).
      batch: `Batch` on the host. rows_B: indices of the rows.
      size: the most rows there can be, in whole micro-batches: one program for all steps.

    Returns:
      tuple of float32 [B, T] on the host, 0 in the other rows.
    """
    tokens = {"tokens": batch.tokens_BT}
    arrays, count = micro_batches(tokens, rows_B, mesh=mesh, micro_batch=micro_batch, size=size)
    found = read_micro_batches(function, model, params, arrays["tokens"], count, extra)
    outs = []
    for x_AMT in jax.device_get(found):
        out_BT = np.zeros(batch.tokens_BT.shape, np.float32)
        out_BT[rows_B] = x_AMT.reshape(size, -1)[: len(rows_B)]
        outs.append(out_BT)
    return tuple(outs)
