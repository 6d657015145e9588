"""Forward passes over the rows of a batch: log-probs, entropies, values before an update.

Axes: B rows, T tokens.
"""

import functools
from typing import Any

import jax
import numpy as np

from ragen_jax.core.progress import begin_count
from ragen_jax.core.sharding import shard_micro_batches
from ragen_jax.core.types import Params
from ragen_jax.model.likelihood import PackedRows
from ragen_jax.model.qwen import Qwen
from ragen_jax.update.critic import packed_values
from ragen_jax.update.micro_batches import build_arrays, split_rows
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.pieces import TokenRows
from ragen_jax.update.policy import ForwardContext
from ragen_jax.update.reading import Pass, read_micro_batches, statistics

__all__ = ["Pass", "over_rows", "read_micro_batches", "statistics", "values"]


def values(
    model: Qwen, params: Params, rows: PackedRows, frozen: ForwardContext | None
) -> tuple[jax.Array]:
    """Return (values,), computed by `critic.packed_values`."""
    return (packed_values(model, params, rows, frozen),)


def over_rows(
    function: Pass,
    model: Qwen,
    params: Params,
    rows: TokenRows,
    rows_B: np.ndarray,
    extra: Any,
    layout: MinibatchLayout,
) -> tuple[np.ndarray, ...]:
    """Return `function` of the needed tokens of chosen rows of a step.

    The sizes of a row's micro-batch, and in trees the rows in it, do not depend on which rows are
    chosen. The results of two passes on a row can therefore be compared to the last digit.

    Args:
      rows_B: indices of the chosen rows.
      layout: its minibatch_rows is the maximum number of rows, fixed for a run, so that there is
        one program per size for all steps.

    Returns:
      float32 [B, T] each, on the host; 0 at other tokens.
    """
    real_B = np.flatnonzero(rows.read_BT.any(1))
    split = split_rows([real_B] if len(real_B) else [], rows, layout.grouping)
    pieces = [piece.of_rows(rows_B) for pieces in split.pieces for piece in pieces]
    pieces = [piece for piece in pieces if len(piece.rows)]
    count = begin_count(sum(len(piece.rows) for piece in pieces), "rows")
    outs: list[np.ndarray] = []
    for piece in pieces:
        arrays = build_arrays(piece, rows, layout.grouping)
        packed = shard_micro_batches(arrays.packed, layout.mesh)
        found = read_micro_batches(function, model, params, packed, arrays.count, extra)
        outs = outs or [np.zeros(rows.tokens_BT.shape, np.float32) for _ in found]
        for out_BT, x_APE in zip(outs, jax.device_get(found), strict=True):
            arrays.to_rows(x_APE, out_BT)
        count(len(piece.rows))
    if not outs:
        one = np.zeros((1, 1), np.int32)
        none = PackedRows(one, one, one)
        shapes = jax.eval_shape(functools.partial(function, model), params, none, extra)
        return tuple(np.zeros(rows.tokens_BT.shape, np.float32) for _ in shapes)
    for out_BT in outs:  # other rows are in the trees of chosen rows
        out_BT[np.setdiff1d(np.arange(len(out_BT)), rows_B)] = 0.0
    return tuple(outs)
