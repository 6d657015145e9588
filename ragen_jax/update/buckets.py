"""Split rows into micro-batches by length, with few padded lengths, to compute little padding.

    minibatch, longest row first        micro-batches of two    padded to
    ##########                          ##########
    ########                            ########..              10
    ######                              ######
    #####                               #####.
    #####                               #####.
    ####                                ####..                   6

This module does not decide which rows a minibatch has. The token weights of a loss are computed on
the whole minibatch, so that the split does not change the gradient.

Axes: B rows of a batch, R rows of a minibatch, N micro-batches, T tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.types import Batch

# Largest number of different lengths in the minibatches that are split together. The grid has four
# lengths per octave, so that a run of many steps compiles hardly more programs with eight lengths
# than with four.
LENGTHS = 8
WORTH = 0.01  # fraction of the positions that each further length must save: it costs a program


@dataclasses.dataclass(frozen=True)
class Piece:
    """The micro-batches of one padded length in a minibatch."""

    rows: np.ndarray  # int, indices of rows of the batch, micro-batch after micro-batch
    length: int  # tokens per row, padding included

    def positions(self, micro_batch: int) -> int:
        """Return the tokens computed, including padding and empty rows of the last micro-batch."""
        return -(-len(self.rows) // micro_batch) * micro_batch * self.length


def row_lengths(batch: Batch) -> np.ndarray:
    """Return int [B], the tokens of each row up to and including its last sampled token.

    The tokens after that do not enter the loss.
    """
    inside_BT = np.asarray(batch.mask_BT) != 0
    last_B = inside_BT.shape[1] - inside_BT[:, ::-1].argmax(1)
    return np.where(inside_BT.any(1), last_B, 0)


def choose_bucket_lengths(longest_N: np.ndarray, T: int) -> np.ndarray:
    """Choose at most LENGTHS padded lengths for micro-batches, from `padding.length_bucket`.

    The choice has the fewest positions in total, where every length after the first must save a
    fraction of WORTH. It depends on the arguments alone: a resumed run splits its rows like an
    uninterrupted run.

    Args:
      longest_N: int, tokens of the longest row of each micro-batch.
      T: tokens per row of the batch; an upper bound of the lengths.

    Returns:
      int, ascending; the last length is enough for all micro-batches.
    """
    padded_N = [min(length_bucket(max(longest, 2)), T) for longest in np.asarray(longest_N)]
    grid, count = np.unique(padded_N, return_counts=True)
    before = np.concatenate([[0], np.cumsum(count)])  # micro-batches shorter than each grid length

    # plans[j]: (fewest positions of the micro-batches up to grid[j], indices of the lengths used),
    # for a given number of lengths, of which grid[j] is the longest.
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
    """Split each minibatch into pieces, longest first, with common `choose_bucket_lengths`.

    Args:
      minibatches: int [R] each, R >= 1: indices of rows of the batch.
      length_B: the result of `row_lengths`. T: tokens per row of the batch.
      micro_batch: rows per micro-batch.
    """
    if not minibatches:
        return []
    # The last micro-batch may have fewer rows: it holds the shortest rows.
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
    """Return the tokens of the rows divided by the positions computed for them; nan without rows.

    The result is a fraction in (0, 1].
    """
    pieces = [piece for minibatch in cuts for piece in minibatch]
    positions = sum(piece.positions(micro_batch) for piece in pieces)
    tokens = sum(int(length_B[piece.rows].sum()) for piece in pieces)
    return tokens / positions if positions else float("nan")


def padded_rows(batch: Batch, *, micro_batch: int) -> np.ndarray:
    """Return int [B], the padded length of each row in forward passes over a step; 0: padding row.

    The length does not depend on which rows a pass reads. The results of two passes on a row can
    therefore be compared to the last digit.
    """
    padded_B = np.zeros(len(batch.weight_B), int)
    real = [rows for rows in (np.flatnonzero(batch.weight_B > 0),) if len(rows)]
    for pieces in split_by_length(
        real, row_lengths(batch), batch.tokens_BT.shape[1], micro_batch=micro_batch
    ):
        for piece in pieces:
            padded_B[piece.rows] = piece.length
    return padded_B
