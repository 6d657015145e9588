"""Split plain rows into micro-batches by length, with few padded lengths and little padding.

    minibatch, longest row first        micro-batches of two    padded to
    ##########                          ##########
    ########                            ########..              10
    ######                              ######
    #####                               #####.
    #####                               #####.
    ####                                ####..                   6

This module does not decide which rows a minibatch has. The token weights of a loss are computed on
the whole minibatch, so that the split does not change the gradient.

Axes: R rows of a minibatch, N micro-batches.
"""

from collections.abc import Sequence

import numpy as np

from ragen_jax.update.pieces import (
    Grouping,
    Piece,
    Sizes,
    Split,
    TokenRows,
    padded_reads,
    padded_row,
)

# Largest number of different lengths in the minibatches that are split together. The grid has four
# lengths per octave, so that a run of many steps compiles hardly more programs with eight lengths
# than with four.
LENGTHS = 8
WORTH = 0.01  # fraction of the positions that each further length must save: it costs a program


def choose_bucket_lengths(longest_N: np.ndarray, max_lengths: int = LENGTHS) -> np.ndarray:
    """Choose at most `max_lengths` padded lengths for micro-batches, from `padded_row`.

    The choice has the fewest positions in total, where every length after the first must save a
    fraction of WORTH. It depends on the arguments alone: a resumed run splits its rows like an
    uninterrupted run.

    Args:
      longest_N: int, positions of the longest row of each micro-batch.

    Returns:
      int, ascending; the last length is enough for all micro-batches.
    """
    padded_N = [padded_row(int(longest)) for longest in np.asarray(longest_N)]
    grid, count = np.unique(padded_N, return_counts=True)
    before = np.concatenate([[0], np.cumsum(count)])  # micro-batches shorter than each grid length

    # plans[j]: (fewest positions of the micro-batches up to grid[j], indices of the lengths used),
    # for a given number of lengths, of which grid[j] is the longest.
    plans = [(int(before[j + 1] * grid[j]), (j,)) for j in range(len(grid))]
    best, chosen = plans[-1]
    for more in range(1, min(max_lengths, len(grid))):
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
    minibatches: Sequence[np.ndarray],
    rows: TokenRows,
    grouping: Grouping,
    *,
    max_lengths: int = LENGTHS,
) -> Split:
    """Split minibatches into pieces of plain rows, longest first.

    Args:
      minibatches: int [R] each, R >= 1: indices of rows of the batch.
    """
    micro, count_B, reads_B = grouping.micro_batch, rows.count_B, rows.read_BT.sum(1)
    if not minibatches:
        return Split([], 0, 0, 0)
    # The last micro-batch may have fewer rows: it holds the shortest rows.
    ordered = [chosen[np.argsort(-count_B[chosen], kind="stable")] for chosen in minibatches]
    longest = [count_B[chosen[::micro]] for chosen in ordered]
    lengths = choose_bucket_lengths(np.concatenate(longest), max_lengths)
    cuts = []  # (padded length, rows) of each piece of each minibatch
    for chosen, longest_N in zip(ordered, longest, strict=True):
        at_N = np.searchsorted(lengths, [padded_row(int(x)) for x in longest_N])
        at_R = np.repeat(at_N, micro)[: len(chosen)]
        cuts.append([(int(lengths[at]), chosen[at_R == at]) for at in np.unique(at_N)[::-1]])
    sizes = {}
    for length in lengths.tolist():
        here = np.concatenate([chosen for cut in cuts for at, chosen in cut if at == length])
        # Enough for any rows of this length, so that a pass over some of them has the same shapes.
        most = int(np.sort(reads_B[here])[-grouping.shard_rows :].sum())
        sizes[length] = Sizes(length, padded_reads(most, grouping.shard_rows * length))
    pieces = [[Piece(chosen, sizes[length]) for length, chosen in cut] for cut in cuts]
    positions = sum(piece.positions(grouping) for cut in pieces for piece in cut)
    real = sum(int(count_B[chosen].sum()) for chosen in ordered)
    return Split(pieces, positions, real, real)
