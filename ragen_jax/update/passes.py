"""Forward passes over the rows of a batch: log-probs, entropies, values before an update.

Axes: B rows, T tokens, A micro-batches, L tokens of a row at its padded length.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.core.types import Array, Batch, Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.update.buckets import padded_rows
from ragen_jax.update.critic import token_values
from ragen_jax.update.optimize import micro_batches
from ragen_jax.update.policy import ForwardContext
from ragen_jax.update.reading import Pass, read_micro_batches, statistics

__all__ = ["Pass", "over_rows", "read_micro_batches", "statistics", "values"]


def values(
    model: Qwen, params: Params, tokens_BT: Array, frozen: ForwardContext | None
) -> tuple[jax.Array]:
    """Return (value_BT,), computed by `critic.token_values`."""
    return (token_values(model, params, tokens_BT, frozen),)


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
    """Return `function` of the chosen rows of a batch, each at its `buckets.padded_rows` length.

    Args:
      batch: on the host. rows_B: indices of the rows.
      size: maximum number of rows, a multiple of micro_batch; fixed for a run, so that there is
        one program per length for all steps.

    Returns:
      float32 [B, T] each, on the host; 0 in the other rows and after the padded length of a row.
    """
    padded_B = padded_rows(batch, micro_batch=micro_batch)
    shape = batch.tokens_BT.shape
    outs: list[np.ndarray] = []
    for length in np.unique(padded_B[rows_B])[::-1].tolist() or [shape[1]]:  # no rows: zeros
        rows = rows_B[padded_B[rows_B] == length]
        tokens = {"tokens": batch.tokens_BT[:, :length]}
        arrays, count = micro_batches(tokens, rows, mesh=mesh, micro_batch=micro_batch, size=size)
        found = read_micro_batches(function, model, params, arrays["tokens"], count, extra)
        outs = outs or [np.zeros(shape, np.float32) for _ in found]
        for out_BT, x_AML in zip(outs, jax.device_get(found), strict=True):
            out_BT[rows, :length] = x_AML.reshape(size, -1)[: len(rows)]
    return tuple(outs)
