"""How rows are cut into micro-batches: by length, at few lengths, so that little of what is
computed is padding.

    minibatch, the longest row first    micro-batches of two    padded to
    ##########                          ##########
    ########                            ########..              10
    ######                              ######
    #####                               #####.
    #####                               #####.
    ####                                ####..                   6

Which rows a minibatch has is not decided here, and a loss's token weights are those of the whole
minibatch: how it is cut changes no gradient.

Axes: B rows of a batch, R rows of a minibatch, N micro-batches, T tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.types import Batch

# Different ones, at most, in the minibatches that are cut together. Their grid has four an octave,
# so that a run of many steps meets hardly more programs for eight than for four.
LENGTHS = 8
WORTH = 0.01  # share of the positions that one more length must save: each is a program


@dataclasses.dataclass(frozen=True)
class Piece:
    """The micro-batches of one length, of a minibatch."""

    rows: np.ndarray  # int, indices of a batch's rows, micro-batch after micro-batch
    length: int  # tokens of a row, padding included

    def positions(self, micro_batch: int) -> int:
        """Tokens that are computed, padding and empty rows of the last micro-batch included."""
        return -(-len(self.rows) // micro_batch) * micro_batch * self.length


def row_lengths(batch: Batch) -> np.ndarray:
    """int [B]: tokens of each row up to the last sampled one, behind which nothing is learnt."""
    inside_BT = np.asarray(batch.mask_BT) != 0
    last_B = inside_BT.shape[1] - inside_BT[:, ::-1].argmax(1)
    return np.where(inside_BT.any(1), last_B, 0)


def choose_bucket_lengths(longest_N: np.ndarray, T: int) -> np.ndarray:
    """At most LENGTHS padded lengths for micro-batches, of the grid of `padding.length_bucket`.

    Those with the fewest positions in all, where every length beyond the first must save a share of
    WORTH. The numbers alone decide: a run that goes on cuts as one that never stopped.

    Args:
      longest_N: int, tokens of the longest row of each micro-batch.
      T: of the batch; no length is above it.

    Returns:
      int, rising; the last is enough for all.
    """
    padded_N = [min(length_bucket(max(longest, 2)), T) for longest in np.asarray(longest_N)]
    grid, count = np.unique(padded_N, return_counts=True)
    before = np.concatenate([[0], np.cumsum(count)])  # micro-batches below each of the grid

    # plans[j]: the fewest positions of the micro-batches up to grid[j], the longest length being
    # that, with a given number of lengths; and those.
    plans = [(int(before[j + 1] * grid[j]), (j,)) for j in range(len(grid))]
    best, chosen = plans[-1]
    for more in range(1, min(LENGTHS, len(grid))):
        plans = [
            min(
                (
                    (
                        plans[i][0] + int((before[j + 1] - before[i + 1]) * grid[j]),
                        (*plans[i][1], j),
                    )
                    for i in range(more - 1, j)
                ),
                default=plans[j],
            )
            for j in range(len(grid))
        ]
        positions, steps = plans[-1]
        if positions * (1 + WORTH * more) < best:
            best, chosen = positions * (1 + WORTH * more), steps
    return grid[list(chosen)]


def split_by_length(
    minibatches: Sequence[np.ndarray], length_B: np.ndarray, T: int, *, micro_batch: int
) -> list[list[Piece]]:
    """The pieces of each minibatch, the longest first, at `few_lengths` for all of them.

    Args:
      minibatches: int [R] each, at least one row in each: indices of a batch's rows.
      length_B: of `row_lengths`. T: of the batch.
      micro_batch: rows of one.
    """
    if not minibatches:
        return []
    # The last micro-batch may be short of rows: it is the one with the shortest.
    ordered = [rows[np.argsort(-length_B[rows], kind="stable")] for rows in minibatches]
    longest = [length_B[rows[::micro_batch]] for rows in ordered]
    lengths = choose_bucket_lengths(np.concatenate(longest), T)
    cuts = []
    for rows, longest_N in zip(ordered, longest, strict=True):
        at_N = np.searchsorted(lengths, np.minimum(longest_N, lengths[-1]))
        at_R = np.repeat(at_N, micro_batch)[: len(rows)]
        cuts.append([Piece(rows[at_R == at], int(lengths[at])) for at in np.unique(at_N)[::-1]])
    return cuts


def token_efficiency(
    cuts: Sequence[Sequence[Piece]], length_B: np.ndarray, *, micro_batch: int
) -> float:
    """Tokens of rows over the positions that are computed for them; nan for no row."""
    pieces = [piece for minibatch in cuts for piece in minibatch]
    positions = sum(piece.positions(micro_batch) for piece in pieces)
    tokens = sum(int(length_B[piece.rows].sum()) for piece in pieces)
    return tokens / positions if positions else float("nan")


def padded_rows(batch: Batch, *, micro_batch: int) -> np.ndarray:
    """int [B]: the length at which each row is read in passes over a step's rows; 0: no row.

    It is the same whichever rows a pass reads, so that what two passes find of a row may be
    compared to the last digit.
    """
    padded_B = np.zeros(len(batch.weight_B), int)
    real = [rows for rows in (np.flatnonzero(batch.weight_B > 0),) if len(rows)]
    for pieces in split_by_length(
        real, row_lengths(batch), batch.tokens_BT.shape[1], micro_batch=micro_batch
    ):
        for piece in pieces:
            padded_B[piece.rows] = piece.length
    return padded_B
