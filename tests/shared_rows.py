"""Rows that share their beginnings, and rows as a forward pass reads them."""

from unittest import mock

import jax
import numpy as np

from ragen_jax.core.types import Batch
from ragen_jax.update import micro_batches
from ragen_jax.update.pieces import Grouping, TokenRows

ALWAYS, NEVER = -np.inf, 1.0  # values of micro_batches.WORTH_OF_TREES


def trees(when):
    """Return a context in which rows are packed as trees ALWAYS or NEVER."""
    return mock.patch.object(micro_batches, "WORTH_OF_TREES", when)


def random_tree(rng, rows, T, V):
    """Return rows of 2 to T tokens, each of which begins with a part of an earlier one.

    Some rows are equal, and some are beginnings of others.
    """
    found = [rng.integers(0, V, rng.integers(2, T + 1))]
    while len(found) < rows:
        before = found[rng.integers(len(found))]
        cut = rng.integers(0, len(before) + 1)
        row = np.concatenate([before[:cut], rng.integers(0, V, rng.integers(0, T - cut + 1))])
        found.append(row if len(row) > 1 else rng.integers(0, V, 3))
    return [row.astype(np.int32) for row in found]


def batch_of(rows, rng, T, V, *, sampled=0.6):
    """Return a `Batch` of rows in which each token but the first is sampled with a probability.

    Its log-probs are random, so that some ratios are clipped.
    """
    B, shape = len(rows), (len(rows), T)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
        mask[b, 1 : len(row)] = rng.random(len(row) - 1) < sampled
    logp = np.where(mask, -np.log(V) + 0.2 * rng.normal(size=shape), 0.0)
    return Batch(
        tokens_BT=tokens,
        mask_BT=mask,
        logp_BT=logp.astype(np.float32),
        turn_BT=np.where(mask > 0, 0, -1).astype(np.int32),
        turn_end_BT=np.zeros(shape, bool),
        span_BT=np.zeros(shape, np.int8),
        reward_BT=np.zeros(shape, np.float32),
        episode_B=np.arange(B, dtype=np.int32),
        group_B=np.zeros(B, np.int32),
        weight_B=np.ones(B, np.float32),
    )


def one_micro_batch(tokens_BT, read_BT=None, *, attention="xla"):
    """Return (`PackedRows`, entry_RT) of all rows in a micro-batch, with every token needed."""
    B = len(tokens_BT)
    read_BT = np.ones(tokens_BT.shape, bool) if read_BT is None else read_BT.astype(bool)
    read_BT = read_BT & (np.arange(tokens_BT.shape[1]) > 0)
    rows, grouping = TokenRows(tokens_BT, read_BT), Grouping(B, 1, B, attention)
    split = micro_batches.split_rows([np.arange(B)], rows, grouping, alike=True)
    ((piece,),) = split.pieces
    built = micro_batches.build_arrays(piece, rows, grouping)
    assert built.count == 1
    packed, entry = jax.tree.map(lambda x: x[0], (built.packed, built.entry_ARW))
    order = built.row_AR[0]
    return packed, np.stack([entry[list(order).index(b)] for b in range(B)])
