"""The micro-batches of a piece as arrays of few shapes: what the model reads, and data of its rows.

Axes: A micro-batches, R rows of a micro-batch, P shards of rows, B sequences of a micro-batch, L
positions of a sequence, E predictions of a shard, W tokens of a row, U positions of a row; in
trees, Q blocks of positions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ragen_jax.core import sharding
from ragen_jax.model.likelihood import PackedRows
from ragen_jax.model.tree_attention import Tree
from ragen_jax.update.buckets import LENGTHS, split_by_length
from ragen_jax.update.pieces import PLAIN, Grouping, Piece, Sizes, Split, TokenRows, TreeSequence
from ragen_jax.update.trees import fill_bins, pack_trees

# Fraction of the positions that trees must save: their attention gathers keys, which costs time.
WORTH_OF_TREES = 0.1


def split_rows(
    minibatches: Sequence[np.ndarray], rows: TokenRows, grouping: Grouping, *, alike: bool = False
) -> Split:
    """Split minibatches into pieces: trees if they save enough positions, or plain rows.

    Args:
      minibatches: int [R] each, R >= 1: indices of rows of the batch.
      alike: whether every minibatch must be a single piece, and all of them of the same sizes.
    """
    plain = split_by_length(minibatches, rows, grouping, max_lengths=1 if alike else LENGTHS)
    if not plain.row_positions or grouping.attention == PLAIN:
        return plain
    bins = fill_bins(minibatches, rows, grouping, alike=alike)
    most = grouping.micro_batches * grouping.shards
    single = all(len(some) <= most for cut in bins.of_length for some in cut.values())
    # Not for fewer padding alone, which depends on the lengths of a step's replies.
    few = bins.distinct <= (1 - WORTH_OF_TREES) * plain.row_positions
    fewer = bins.positions(grouping) <= (1 - WORTH_OF_TREES) * plain.positions
    if not (few and fewer) or alike and not single:
        return plain
    return pack_trees(bins, rows, grouping, plain.row_positions)


@dataclasses.dataclass(frozen=True)
class PieceArrays:
    """The micro-batches of a piece, on the host."""

    packed: PackedRows  # arrays [A, ...]
    entry_ARW: np.ndarray  # int32, index of each token's prediction in its shard, -1: not read
    row_AR: np.ndarray  # int, the row of the batch; -1: none
    count: np.int32  # number of micro-batches that hold rows

    def of_rows(self, x_BT: np.ndarray) -> np.ndarray:
        """Return an array of the batch's rows as [A, R, W]; 0 without a row."""
        A, R, W = self.entry_ARW.shape
        out = np.zeros((A, R, W), x_BT.dtype)
        real_AR, width = self.row_AR >= 0, min(W, x_BT.shape[1])
        out[real_AR, :width] = x_BT[self.row_AR[real_AR], :width]
        return out

    def with_data(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return `packed`, `entry`, and arrays [B, T] of the batch's rows as [A, R, W]."""
        rows = jax.tree.map(self.of_rows, data)
        return {"packed": self.packed, "entry": self.entry_ARW, **rows}

    def to_rows(self, found_APE: np.ndarray, out_BT: np.ndarray) -> None:
        """Write what was computed for tokens into an array of the batch's rows."""
        A, R, W = self.entry_ARW.shape
        entry = np.maximum(self.entry_ARW, 0).reshape(A, found_APE.shape[1], -1)
        x_ARW = np.take_along_axis(found_APE, entry, axis=2).reshape(A, R, W)
        x_ARW[self.entry_ARW < 0] = 0.0
        real_AR, width = self.row_AR >= 0, min(W, out_BT.shape[1])
        out_BT[self.row_AR[real_AR], :width] = x_ARW[real_AR][:, :width]


def place(arrays: PieceArrays, data: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return the micro-batches on the mesh: `packed`, `entry` and `data`.

    Args:
      data: tree of arrays [B, T] of the batch's rows, on the host. Rows that a micro-batch lacks
        are zero: the data must include a mask or weights that exclude them.
    """
    return sharding.shard_micro_batches(arrays.with_data(data), mesh)


def place_groups(
    groups: Sequence[PieceArrays], data: dict[str, Any], mesh: Mesh, *, size: int
) -> dict[str, Any]:
    """Return `place` of pieces of equal sizes as arrays [size, A, ...]; missing pieces are zero."""

    def stack(*parts):
        out = np.zeros((size, *parts[0].shape), parts[0].dtype)
        out[: len(parts)] = parts
        return out

    stacked = jax.tree.map(stack, *[one.with_data(data) for one in groups])
    return sharding.place(stacked, sharding.micro_batch_layout(mesh, axis=2))


def build_arrays(piece: Piece, rows: TokenRows, grouping: Grouping) -> PieceArrays:
    """Return the micro-batches of a piece; the fixed number of them is that of `grouping`."""
    if piece.trees is None:
        return _plain(piece, rows, grouping)
    return _trees(piece, piece.trees, rows, grouping)


def _plain(piece: Piece, rows: TokenRows, grouping: Grouping) -> PieceArrays:
    """Return micro-batches in which each row is a sequence."""
    A, R, P = grouping.micro_batches, grouping.micro_batch, grouping.shards
    N, L, E = A * R, piece.sizes.length, piece.sizes.reads
    row_N = np.full(N, -1)
    row_N[: len(piece.rows)] = piece.rows
    real_N, width = row_N >= 0, min(L + 1, rows.tokens_BT.shape[1])
    tokens_NW, read_NW = np.zeros((N, L + 1), np.int32), np.zeros((N, L + 1), bool)
    tokens_NW[real_N, :width] = rows.tokens_BT[row_N[real_N], :width]
    read_NW[real_N, :width] = rows.read_BT[row_N[real_N], :width]
    # Position k of a shard predicts the token after it.
    read_XK, token_XK = (x_NW[:, 1:].reshape(A * P, -1) for x_NW in (read_NW, tokens_NW))
    source_XE, target_XE = np.zeros((A * P, E), np.int32), np.zeros((A * P, E), np.int32)
    for source_E, target_E, read_K, token_K in zip(
        source_XE, target_XE, read_XK, token_XK, strict=True
    ):
        found = np.flatnonzero(read_K)
        source_E[: len(found)], target_E[: len(found)] = found, token_K[found]
    experts = None
    if rows.experts_BTX is not None:
        experts = np.full((N, L, rows.experts_BTX.shape[2]), -1, np.int16)
        some = min(L, width)
        experts[real_N, :some] = rows.experts_BTX[row_N[real_N], :some]
        experts = experts.reshape(A, R, L, -1)
    entry_NW = np.full((N, L + 1), -1, np.int32)
    entry_NW[:, 1:] = np.where(read_XK, np.cumsum(read_XK, axis=1) - 1, -1).reshape(N, L)
    return PieceArrays(
        PackedRows(
            tokens_NW[:, :L].reshape(A, R, L),
            source_XE.reshape(A, P, E),
            target_XE.reshape(A, P, E),
            experts_BLX=experts,
        ),
        entry_NW.reshape(A, R, L + 1),
        row_N.reshape(A, R),
        np.int32(piece.micro_batches(grouping)),
    )


def _trees(
    piece: Piece, trees: Sequence[TreeSequence], rows: TokenRows, grouping: Grouping
) -> PieceArrays:
    """Return micro-batches in which each shard has one sequence, a packed tree."""
    A, P, sizes = grouping.micro_batches, grouping.shards, piece.sizes
    X, K = A * P, grouping.tree_rows  # sequences; rows of a sequence
    L, E, W = sizes.length, sizes.reads, sizes.width + 1
    tokens_XL = np.zeros((X, L), np.int32)
    end_XL = np.tile(np.arange(1, L + 1, dtype=np.int32), (X, 1))  # padding reads itself
    source_XE, target_XE = np.zeros((X, E), np.int32), np.zeros((X, E), np.int32)
    entry_XKW, row_XK = np.full((X, K, W), -1, np.int32), np.full((X, K), -1)
    experts, width = None, min(W, rows.tokens_BT.shape[1])
    if rows.experts_BTX is not None:
        experts = np.full((X, L, rows.experts_BTX.shape[2]), -1, np.int16)
    for x, one in enumerate(tree.packed for tree in trees):
        n, e, k = len(one.row_L), len(one.source_E), len(one.bin.rows)
        tokens_XL[x, :n] = rows.tokens_BT[one.row_L, one.depth_L]
        end_XL[x, :n] = one.end_L
        if experts is not None and rows.experts_BTX is not None:
            experts[x, :n] = rows.experts_BTX[one.row_L, one.depth_L]
        source_XE[x, :e], target_XE[x, :e] = one.source_E, one.target_E
        entry_XKW[x, :k, :width] = one.entry_RT[:, :width]
        row_XK[x, :k] = one.bin.rows
    if grouping.attention == "xla":
        block, reads = rows.block, _keys(trees, X, sizes, rows.block)
    else:
        block, reads = 0, _paths(trees, X, K, sizes)
    tree = {name: x.reshape(A, P, *x.shape[1:]) for name, x in reads.items()}
    return PieceArrays(
        PackedRows(
            tokens_XL.reshape(A, P, L),
            source_XE.reshape(A, P, E),
            target_XE.reshape(A, P, E),
            Tree(end_XL.reshape(A, P, L), block=block, trunk=sizes.trunk if block else 0, **tree),
            None if experts is None else experts.reshape(A, P, L, -1),
        ),
        entry_XKW.reshape(A, P * K, W),
        row_XK.reshape(A, P * K),
        np.int32(piece.micro_batches(grouping)),
    )


def _keys(trees: Sequence[TreeSequence], X: int, sizes: Sizes, block: int) -> dict[str, np.ndarray]:
    """Return `Tree.keys_BQM` of X sequences; in empty ones, each block reads itself."""
    Q, trunk = sizes.length // block, sizes.trunk
    keys_XQM = np.full((X, Q - trunk, sizes.keys), -1, np.int32)
    for x in range(X):
        reads_QQ = trees[x].reads_QQ if x < len(trees) else np.eye(Q, dtype=bool)
        listed = reads_QQ[trunk:, trunk:]
        queries, keys = np.nonzero(listed)
        keys_XQM[x, queries, (np.cumsum(listed, axis=1) - 1)[queries, keys]] = keys + trunk
    return {"keys_BQM": keys_XQM}


def _paths(trees: Sequence[TreeSequence], X: int, K: int, sizes: Sizes) -> dict[str, np.ndarray]:
    """Return the paths of `Tree`, for X sequences of up to K rows."""
    U = sizes.width
    path_XKU, owner_XL = np.zeros((X, K, U), np.int32), np.zeros((X, sizes.length), np.int32)
    for x, one in enumerate(tree.packed for tree in trees):
        for k, (count, path_T) in enumerate(zip(one.bin.count, one.path_RT, strict=True)):
            path_XKU[x, k, :count] = path_T[:count]
            owner_XL[x, path_T[:count]] = k * U + np.arange(count)
    return {"path_BRU": path_XKU, "owner_BT": owner_XL}
