"""Forward passes over micro-batches: the program, and the old log-probs of the minibatches.

Axes: A micro-batches, P shards of rows, E predictions of a shard.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import constrain, shard_micro_batches
from ragen_jax.core.types import Array, Params
from ragen_jax.model.likelihood import PackedRows, packed_statistics
from ragen_jax.model.qwen import Qwen
from ragen_jax.update.micro_batches import build_arrays
from ragen_jax.update.optimize import MinibatchPlan

# (model, params, packed rows, extra) -> arrays [P, E]: `statistics`, whose `extra` is the
# temperature, or `passes.values`, whose `extra` is a `policy.ForwardContext` or None.
Pass = Callable[[Qwen, Params, PackedRows, Any], tuple[jax.Array, ...]]


def statistics(
    model: Qwen, params: Params, rows: PackedRows, temperature: Array | float
) -> tuple[jax.Array, ...]:
    """Return (log-probs, entropies), computed by `likelihood.packed_statistics`."""
    return packed_statistics(model, params, rows, temperature=temperature)


@functools.partial(jax.jit, static_argnames=("function", "model"))
def read_micro_batches(
    function: Pass,
    model: Qwen,
    params: Params,
    packed: PackedRows,
    count: jax.Array,
    extra: Any,
) -> tuple[jax.Array, ...]:
    """Return function(model, params, rows, extra) of the first `count` micro-batches.

    Args:
      packed: arrays [A, ...].

    Returns:
      float32 [A, P, E] each, replicated on every device; 0 in the other micro-batches.
    """

    def at(a):
        rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, a, 0, False), packed)
        return function(model, params, rows, extra)

    shapes = jax.eval_shape(at, 0)

    def read(a, outs):
        return tuple(x.at[a].set(y) for x, y in zip(outs, at(a), strict=True))

    start = tuple(jnp.zeros((len(packed.tokens_BL), *x.shape), x.dtype) for x in shapes)
    outs = jax.lax.fori_loop(0, count, read, start)
    return tuple(constrain(x, None, None, None) for x in outs)


def minibatch_logps(
    plan: MinibatchPlan, model: Qwen, params: Params, *, temperature: float
) -> MinibatchPlan:
    """Return the minibatches with the log-probs of `params` in place of the sampler's.

    Rows are read in the same micro-batches as in the update, so that both forward passes round
    alike. The first minibatch keeps the sampler's log-probs: its parameters are still unchanged,
    and `policy.PolicyLoss` then sets its ratios to 1.

    Args:
      params: the parameters before the update, as the model reads them.
    """
    logp_BT = plan.arrays["logp"].copy()
    for piece in (piece for pieces in plan.split.pieces[1:] for piece in pieces):
        arrays = build_arrays(piece, plan.rows, plan.layout.grouping)
        packed = shard_micro_batches(arrays.packed, plan.layout.mesh)
        found, _ = read_micro_batches(
            statistics, model, params, packed, arrays.count, np.float32(temperature)
        )
        arrays.to_rows(jax.device_get(found), logp_BT)
    return dataclasses.replace(plan, arrays={**plan.arrays, "logp": logp_BT})
