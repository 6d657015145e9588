"""Pack rows that share their beginnings into sequences of few lengths: prefix trees.

The rows of a minibatch, in depth-first order of their tree (model/prefix_tree.py), are cut into
sequences that have at most the positions of a micro-batch of plain rows, so that the fewest
positions are computed. They have few lengths, so that a run needs few programs, whatever its rows
share. A trunk is computed once per sequence.

Axes: R rows of a minibatch.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from ragen_jax.model.prefix_tree import Bin, PackedBin, build_tree, cut_tree, key_blocks, pack
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
# the first of LONGEST that holds every minibatch, or all of them, and the others are parts of it.
# Sequences of a half would fill hardly more of the positions, for half as many programs again.
LONGEST = (1, 2, 3, 4, 6, 8)
PARTS = (1.0, 0.75)
TRUNK = 0.65  # blocks of the trunk, if there is any, over those of a row
TRUNK_COST = 0.5  # time per block of the trunk, over that per block of a list
WORTH_OF_TRUNK = 0.9  # the most time that attention with a trunk takes, over that without
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
        return sum(_computed(cut, grouping.shards) for cut in self.of_length)


def _computed(cut: dict[int, list[Bin]], shards: int) -> int:
    return sum(-(-len(bins) // shards) * shards * length for length, bins in cut.items())


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
    shards, plain = grouping.shards, grouping.shard_rows * rows.width
    # A shard's part of the largest minibatch, or the longest row.
    needed = max(rows.width, *(tree.positions / shards for tree in trees))
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
        alone, most = of_row_B[tree.rows], tree.count.max(initial=0)
        menus = [reads]
        if len(reads) > 1 and shards > 1:
            # Shards wait for each other: where there are few sequences, one length is better.
            fits = (n for n in lengths if n >= most and reads[n] >= alone.max(initial=0))
            menus += [{n: reads[n]} for n in fits]
        cuts = [cut_tree(tree, alone, new, menu, max_rows=grouping.tree_rows) for menu in menus]
        of_length.append(
            min((_by_length(cut, lengths) for cut in cuts), key=lambda x: _computed(x, shards))
        )
    return Bins(of_length, reads)


def _by_length(items: Sequence[tuple[int, Item]], lengths: Sequence[int]) -> dict[int, list[Item]]:
    """Return the items (length, item) of each of the lengths that has any, the longest first."""
    found = {length: [item for n, item in items if n == length] for length in lengths}
    return {length: some for length, some in found.items() if some}


def pack_trees(bins: Bins, rows: TokenRows, grouping: Grouping, row_positions: int) -> Split:
    """Return the pieces of filled sequences.

    Args:
      row_positions: positions of all rows, for `Split`.
    """
    longest, reads = max(bins.reads), bins.reads
    cuts = []
    for cut in bins.of_length:
        packed = [
            (length, pack(one, rows.tokens_BT, rows.read_BT))
            for length, some in cut.items()
            for one in some
        ]
        # Rows may need tokens that the rows they share them with do not need. Then there are more
        # predictions than counted, and the longest sequences get room for them.
        fits = [(n if len(one.source_E) <= reads[n] else longest, one) for n, one in packed]
        cuts.append(_by_length(fits, list(reads)))
    most = max((len(one.source_E) for cut in cuts for one in cut.get(longest, [])), default=0)
    reads = reads | {longest: max(reads[longest], padded_reads(most, longest))}
    trees = [
        {length: [_sequence(one, rows, length) for one in some] for length, some in cut.items()}
        for cut in cuts
    ]
    everything = [(n, tree) for cut in trees for n, some in cut.items() for tree in some]
    trunk, keys = _key_counts([tree.reads_QQ for _, tree in everything], rows.width // rows.block)
    of_piece = grouping.micro_batches * grouping.shards  # sequences of a piece
    pieces = []
    for cut in trees:
        pieces.append([])
        for length, some in cut.items():
            sizes = Sizes(length, reads[length], rows.width, keys, trunk)
            for start in range(0, len(some), of_piece):
                here = tuple(some[start : start + of_piece])
                pieces[-1].append(Piece(rows_of(x.packed.bin for x in here), sizes, here))
    positions = sum(piece.positions(grouping) for cut in pieces for piece in cut)
    distinct = sum(tree.packed.bin.positions for _, tree in everything)
    return Split(pieces, positions, distinct, row_positions)


def _key_counts(reads: Sequence[np.ndarray], row_blocks: int) -> tuple[int, int]:
    """Return (blocks of the trunk, blocks of keys after it that a block of queries reads).

    They are the same for all lengths and, usually, for all steps, so that few programs are needed.

    Args:
      reads: `TreeSequence.reads_QQ` of each sequence.
      row_blocks: blocks of a single row.
    """
    unit = max(2, row_blocks // 2)

    def keys_after(trunk):
        needed = max(int(reads_QQ[:, trunk:].sum(1).max(initial=0)) for reads_QQ in reads)
        # Those of a single row; each branch may add one, and a trunk has one branch.
        keys = row_blocks - trunk + (1 if trunk else 2 + row_blocks // 8)
        return keys + max(0, math.ceil((needed - keys) / unit)) * unit

    trunk = round(TRUNK * row_blocks)
    keys, without = keys_after(trunk), keys_after(0)
    fits = all(trunk < len(reads_QQ) for reads_QQ in reads)
    if fits and TRUNK_COST * trunk + keys <= WORTH_OF_TRUNK * without:
        return trunk, keys
    return 0, without


def _sequence(packed: PackedBin, rows: TokenRows, length: int) -> TreeSequence:
    blocks = key_blocks(packed, blocks=length // rows.block, block=rows.block)
    return TreeSequence(packed, blocks)
