"""Forward passes over micro-batches: the program, and the old log-probs of the minibatches.

Axes: B rows, T tokens, L tokens of a row at its padded length, A micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Array, Params
from ragen_jax.model.likelihood import token_statistics
from ragen_jax.model.qwen import Qwen
from ragen_jax.update.optimize import MinibatchPlan, micro_batches

# (model, params, tokens_BT, extra) -> arrays [B, T]: `statistics`, whose `extra` is the
# temperature, or `passes.values`, whose `extra` is a `policy.ForwardContext` or None.
Pass = Callable[[Qwen, Params, Array, Any], tuple[jax.Array, ...]]


def statistics(
    model: Qwen, params: Params, tokens_BT: Array, temperature: Array | float
) -> tuple[jax.Array, ...]:
    """Return (logp_BT, entropy_BT), computed by `likelihood.token_statistics`."""
    return token_statistics(model, params, tokens_BT, temperature=temperature)


@functools.partial(jax.jit, static_argnames=("function", "model"))
def read_micro_batches(
    function: Pass,
    model: Qwen,
    params: Params,
    tokens_AML: jax.Array,
    count: jax.Array,
    extra: Any,
) -> tuple[jax.Array, ...]:
    """Return function(model, params, tokens, extra) of the first `count` micro-batches.

    Args:
      tokens_AML: int32 [A, micro_batch, L].

    Returns:
      float32 [A, micro_batch, L] each, replicated on every device; 0 in the other micro-batches.
    """
    shapes = jax.eval_shape(lambda: function(model, params, tokens_AML[0], extra))

    def read(a, outs):
        new = function(model, params, tokens_AML[a], extra)
        return tuple(x.at[a].set(y) for x, y in zip(outs, new, strict=True))

    start = tuple(jnp.zeros((len(tokens_AML), *x.shape), x.dtype) for x in shapes)
    outs = jax.lax.fori_loop(0, count, read, start)
    return tuple(constrain(x, None, None, None) for x in outs)


def minibatch_logps(
    plan: MinibatchPlan, model: Qwen, params: Params, *, temperature: float
) -> MinibatchPlan:
    """Return the minibatches with the log-probs of `params` in place of the sampler's.

    Rows are read at the same length and in the same micro-batches as in the update, so that both
    forward passes round alike. The first minibatch keeps the sampler's log-probs: its parameters
    are still unchanged, and `policy.PolicyLoss` then sets its ratios to 1.

    Args:
      params: the parameters before the update, as the model reads them.
    """
    layout = plan.layout
    logp_BT = plan.arrays["logp"].copy()
    for piece in (piece for pieces in plan.cuts[1:] for piece in pieces):
        tokens = {"tokens": plan.arrays["tokens"][:, : piece.length]}
        arrays, count = micro_batches(
            tokens, piece.rows, mesh=layout.mesh, micro_batch=layout.micro_batch, size=layout.size
        )
        found, _ = read_micro_batches(
            statistics, model, params, arrays["tokens"], count, np.float32(temperature)
        )
        read_BT = jax.device_get(found).reshape(layout.size, -1)[: len(piece.rows)]
        logp_BT[piece.rows, : piece.length] = read_BT
    return dataclasses.replace(plan, arrays={**plan.arrays, "logp": logp_BT})
