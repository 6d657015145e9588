"""Pack rows that share their beginnings into sequences of few lengths: prefix trees.

The rows of a minibatch, in depth-first order of their tree (model/prefix_tree.py), fill sequences
with the positions of a micro-batch of plain rows, and the rest a shorter one of few lengths. So a
run needs few programs, whatever its rows share. A trunk is computed once per sequence.

Axes: R rows of a minibatch.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from ragen_jax.model.prefix_tree import Bin, PackedBin, bin_end, build_tree, key_blocks, pack
from ragen_jax.update.pieces import (
    Grouping,
    Piece,
    Sizes,
    Split,
    TokenRows,
    TreeSequence,
    padded_reads,
    rows_of,
)

Item = TypeVar("Item")

# Lengths of sequences, in eighths of the positions of a micro-batch of plain rows: the longest is
# the first of LONGEST that holds every minibatch, or all of them, and the others are parts of it. A
# further part of a quarter would fill 1 % more of the positions, for a third more programs.
LONGEST = (1, 2, 4, 8)
PARTS = (1.0, 0.75, 0.5)
SLACK = 1.02  # predictions per position of a sequence that is filled, over the mean


@dataclasses.dataclass(frozen=True)
class Bins:
    """The sequences of minibatches, by their padded lengths."""

    of_length: list[dict[int, list[Bin]]]  # of each minibatch, the longest first
    reads: dict[int, int]  # number of predictions that sequences of each length have room for

    @property
    def distinct(self) -> int:
        """Positions without padding."""
        return sum(one.positions for cut in self.of_length for bins in cut.values() for one in bins)

    def positions(self, grouping: Grouping) -> int:
        """Return the computed positions, including padding and empty sequences."""
        shards = grouping.shards
        return sum(
            -(-len(bins) // shards) * shards * length
            for cut in self.of_length
            for length, bins in cut.items()
        )


def fill_bins(
    minibatches: Sequence[np.ndarray],
    rows: TokenRows,
    grouping: Grouping,
    *,
    alike: bool = False,
    parts: Sequence[float] = PARTS,
) -> Bins:
    """Fill sequences of few lengths with the rows of minibatches.

    Args:
      minibatches: int [R] each, R >= 1: indices of rows of the batch.
      alike: whether all sequences have the same length.
      parts: lengths of sequences over the longest, which is the first.
    """
    trees = [build_tree(rows.tokens_BT, rows.count_B, chosen) for chosen in minibatches]
    plain = grouping.shard_rows * rows.width
    # A shard's part of the largest minibatch, or the longest row.
    needed = max(rows.width, *(tree.positions / grouping.shards for tree in trees))
    eighths = range(1, 9) if alike else LONGEST
    longest = next((eighth for eighth in eighths if plain * eighth >= 8 * needed), 8)
    lengths = [
        math.ceil(plain * longest * part / (8 * rows.block)) * rows.block
        for part in (parts[:1] if alike else parts)
    ]
    of_row_B, before_BT = rows.read_BT.sum(1), np.cumsum(rows.read_BT, axis=1)
    added = [  # predictions that each row adds, if the rows before it need what it shares with them
        of_row_B[tree.rows] - before_BT[tree.rows, np.maximum(tree.shared - 1, 0)] for tree in trees
    ]
    share = sum(int(one.sum()) for one in added) / max(sum(tree.positions for tree in trees), 1)
    share = 1.0 if alike else max(SLACK * share, of_row_B.max() / lengths[0])
    reads = {
        length: padded_reads(math.ceil(min(share, 1.0) * length), length) for length in lengths
    }
    of_length = []
    for tree, new in zip(trees, added, strict=True):
        bins = _fill(tree, new, of_row_B[tree.rows], reads, grouping)
        of_length.append(_by_length([(one, n, one) for one, n in bins], reads))
    return Bins(of_length, reads)


def _fill(
    tree: Bin, new: np.ndarray, alone: np.ndarray, reads: dict[int, int], grouping: Grouping
) -> Iterator[tuple[Bin, int]]:
    """Yield the sequences of a tree, one for each shard at a time, and their predictions.

    Args:
      new: predictions that each row adds to those of the rows before it. alone: all of its own.
      reads: the maximum number of predictions of each length.
    """
    start, rows = 0, len(tree.rows)
    while start < rows:
        left = tree.part(start, rows).positions / grouping.shards
        length = min([x for x in reads if x >= left], default=max(reads))
        for _ in range(grouping.shards):
            if start < rows:
                predictions = np.concatenate([alone[start : start + 1], new[start + 1 :]])
                stop = start + bin_end(
                    tree.part(start, rows),
                    predictions,
                    max_rows=grouping.tree_rows,
                    max_positions=length,
                    max_reads=reads[length],
                )
                yield tree.part(start, stop), int(predictions[: stop - start].sum())
                start = stop


def _by_length(
    bins: Sequence[tuple[Bin, int, Item]], reads: dict[int, int]
) -> dict[int, list[Item]]:
    """Return the items of bins by the shortest length that holds them, the longest length first.

    Args:
      bins: (bin, its predictions, item). A bin with too many predictions gets the longest length.
    """
    found = {length: [] for length in reads}
    for one, predictions, item in bins:
        fits = [n for n in reads if one.positions <= n and predictions <= reads[n]]
        found[min(fits, default=max(reads))].append(item)
    return {length: items for length, items in found.items() if items}


def pack_trees(bins: Bins, rows: TokenRows, grouping: Grouping, row_positions: int) -> Split:
    """Return the pieces of filled sequences.

    Args:
      row_positions: positions of all rows, for `Split`.
    """
    cuts = []
    for cut in bins.of_length:
        packed = [pack(one, rows.tokens_BT, rows.read_BT) for some in cut.values() for one in some]
        cuts.append(_by_length([(one.bin, len(one.source_E), one) for one in packed], bins.reads))
    # Rows may need tokens that the rows they share them with do not need. Then there are more
    # predictions than counted, and the longest sequences get room for them.
    longest, reads = max(bins.reads), bins.reads
    most = max((len(one.source_E) for cut in cuts for one in cut.get(longest, [])), default=0)
    reads = reads | {longest: max(reads[longest], padded_reads(most, longest))}
    trees = [
        {length: [_sequence(one, rows, length) for one in some] for length, some in cut.items()}
        for cut in cuts
    ]
    everything = [(n, tree) for cut in trees for n, some in cut.items() for tree in some]
    # Equally many per position for all lengths, and usually for all steps, so that few programs are
    # needed. On average, a block reads half of the blocks of a row, and some of other rows.
    pairs = max(int(tree.reads_QQ.sum()) * longest / n for n, tree in everything)
    usual = longest // rows.block * (rows.width / rows.block / 2 + 2)
    most = pairs / usual
    pairs = usual * next((x for x in (0.25, 0.5, 1.0) if most <= x), math.ceil(2 * most) / 2)
    pieces = []
    for cut in trees:
        pieces.append([])
        for length, some in cut.items():
            part = math.ceil(pairs * length / longest)
            sizes = Sizes(length, reads[length], rows.width, part)
            most = grouping.micro_batches * grouping.shards  # sequences of a piece
            for start in range(0, len(some), most):
                here = tuple(some[start : start + most])
                pieces[-1].append(Piece(rows_of(x.packed.bin for x in here), sizes, here))
    positions = sum(piece.positions(grouping) for cut in pieces for piece in cut)
    distinct = sum(tree.packed.bin.positions for _, tree in everything)
    return Split(pieces, positions, distinct, row_positions)


def _sequence(packed: PackedBin, rows: TokenRows, length: int) -> TreeSequence:
    blocks = key_blocks(packed, blocks=length // rows.block, block=rows.block)
    return TreeSequence(packed, blocks)
