"""The rows that a forward pass reads, and the pieces of equal shapes that it reads them in.

    rows of a minibatch -> pieces (buckets.py: plain rows; trees.py: rows that share positions)
                        -> micro-batches on the devices (micro_batches.py)

Axes: B rows of a batch, T tokens, Q blocks of a tree's positions.
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.types import Batch
from ragen_jax.model.prefix_tree import Bin, PackedBin

PLAIN = "plain"  # ModelConfig.row_form of models that read no trees
READ_PARTS = 16  # the number of predictions is padded to a multiple of the positions over this
# Rows of a tree's micro-batch over those of a micro-batch of plain rows, at most. Kernels of
# attention unpack the rows.
TREE_ROWS, TREE_ROWS_OF_KERNELS = 8, 4


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The rows of a batch as forward passes read them; arrays on the host."""

    tokens_BT: np.ndarray  # int32
    read_BT: np.ndarray  # bool, the tokens whose probabilities are needed; not the first
    parts: int = 8  # padded widths per octave are half of this, at least one
    experts_BTX: np.ndarray | None = None  # as in `Batch`; None: routers choose them

    @functools.cached_property
    def count_B(self) -> np.ndarray:
        """Positions that a pass reads, int [B]: the tokens before the last one that is needed."""
        return np.maximum(_last(self.read_BT) - 1, 0)

    @functools.cached_property
    def block(self) -> int:
        """Positions per block of a tree's attention: a power of two, a fifth to a tenth of a row.

        Larger blocks are multiplied faster, smaller ones hold fewer keys outside of a path.
        """
        return 1 << min(max((self.width // 10).bit_length(), 3), 7)

    @property
    def width(self) -> int:
        """Padded positions of the longest row, with few values in a run."""
        return length_bucket(max(int(self.count_B.max(initial=0)), 1), parts=self.parts)


def token_rows(batch: Batch, *, replay: bool = False) -> TokenRows:
    """Return a batch's rows, of which the sampled tokens of real rows are needed.

    Args:
      replay: whether the experts that sampling used are used again, if there is a record.
    """
    read_BT = (np.asarray(batch.mask_BT) != 0) & (np.asarray(batch.weight_B) > 0)[:, None]
    read_BT[:, 0] = False
    experts_BTX = batch.experts_BTX if replay else None
    return TokenRows(np.asarray(batch.tokens_BT), read_BT, experts_BTX=experts_BTX)


def _last(inside_BT: np.ndarray) -> np.ndarray:
    """Return int [B], the tokens of each row up to and including the last inside; 0: none."""
    last_B = inside_BT.shape[1] - inside_BT[:, ::-1].argmax(1)
    return np.where(inside_BT.any(1), last_B, 0)


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How the rows of a minibatch or of a pass are divided over micro-batches and devices."""

    micro_batch: int  # rows per forward and backward pass
    shards: int  # parts of a micro-batch on different devices; they divide it
    rows: int  # maximum number of rows
    attention: str  # ModelConfig.row_form, which decides what a tree holds, if there are any

    @property
    def micro_batches(self) -> int:
        """Maximum number of micro-batches, at least 1."""
        return max(1, -(-self.rows // self.micro_batch))

    @property
    def shard_rows(self) -> int:
        """Plain rows of a micro-batch on a shard."""
        return self.micro_batch // self.shards

    @property
    def tree_rows(self) -> int:
        """Maximum number of rows of a tree, which is a micro-batch on a shard."""
        most = TREE_ROWS if self.attention == "xla" else TREE_ROWS_OF_KERNELS
        return most * self.shard_rows


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The padded sizes of a piece: a program is compiled for each."""

    length: int  # positions per sequence
    reads: int  # predictions per shard
    width: int = 0  # positions per row, in trees
    keys: int = 0  # blocks of keys after the trunk that a block of queries reads, in trees
    trunk: int = 0  # first blocks of keys, which most blocks of queries read, in trees


@dataclasses.dataclass(frozen=True)
class TreeSequence:
    """Rows that share their beginnings, as one sequence."""

    packed: PackedBin
    reads_QQ: np.ndarray  # bool, whether a block of queries reads a block of keys


@dataclasses.dataclass(frozen=True)
class Piece:
    """Micro-batches of the same padded sizes in a minibatch."""

    rows: np.ndarray  # int, indices of rows of the batch, micro-batch after micro-batch
    sizes: Sizes
    # The sequences, one per shard of a micro-batch, if they hold several rows; None: a row each.
    trees: tuple[TreeSequence, ...] | None = None

    def micro_batches(self, grouping: Grouping) -> int:
        """Return the number of micro-batches."""
        if self.trees is not None:
            return -(-len(self.trees) // grouping.shards)
        return -(-len(self.rows) // grouping.micro_batch)

    def positions(self, grouping: Grouping) -> int:
        """Return the computed positions, including padding and empty rows."""
        sequences = grouping.micro_batch if self.trees is None else grouping.shards
        return self.micro_batches(grouping) * sequences * self.sizes.length

    def of_rows(self, rows: np.ndarray) -> "Piece":
        """Return the piece with only the given rows or, in trees, only the sequences with any."""
        if self.trees is None:
            return dataclasses.replace(self, rows=self.rows[np.isin(self.rows, rows)])
        trees = tuple(tree for tree in self.trees if np.isin(tree.packed.bin.rows, rows).any())
        return Piece(rows_of(tree.packed.bin for tree in trees), self.sizes, trees)


@dataclasses.dataclass(frozen=True)
class Split:
    """The pieces of minibatches, or of the rows of a pass."""

    pieces: list[list[Piece]]  # of each minibatch
    positions: int  # computed positions, padding included
    distinct: int  # positions without padding; those of a shared prefix once per micro-batch
    row_positions: int  # positions of all rows

    @property
    def token_efficiency(self) -> float:
        """Fraction of the computed positions that hold tokens, in (0, 1]; nan without rows."""
        return self.distinct / self.positions if self.positions else float("nan")

    @property
    def shared(self) -> float:
        """Fraction of the rows' positions that are not computed, in [0, 1)."""
        return 1.0 - self.distinct / self.row_positions if self.row_positions else 0.0


def rows_of(bins: Iterable[Bin]) -> np.ndarray:
    """Return the indices of the rows of bins, int."""
    return np.concatenate([np.zeros(0, int), *(one.rows for one in bins)])


def padded_row(positions: int) -> int:
    """Return the padded length of a plain row."""
    return length_bucket(max(positions, 1))


def padded_reads(most: int, positions: int) -> int:
    """Return the padded number of predictions of a shard with some positions."""
    unit = -(-positions // READ_PARTS)
    return max(1, -(-most // unit)) * unit
