"""Prefix trees of token rows: positions that rows share are computed once.

    rows               tree                 packed
    p p p a a a        p p p ─┬─ a a a      p p p a a a b b
    p p p b b                 └─ b b

Two rows share their common prefix: same tokens, hence same positions and the same keys and values.
In depth-first order, a row shares nothing with the rows before it that it does not share with the
row just before it. So a tree is an order of rows and, for each row, the number of positions that it
shares with the row before it. Any run of consecutive rows is a tree as well: a `Bin`, which one
forward pass computes. The trunk of rows in different bins is computed in each of them.

Everything here is on the host, and a function of the tokens alone.

Axes: B rows of a batch, T tokens, R rows of a bin, L packed positions, E predictions, N tokens.
"""

import dataclasses

import numpy as np

# Shortest run of positions that is worth a branch point.
LEAST_RUN = 8


@dataclasses.dataclass(frozen=True)
class Bin:
    """Consecutive rows of a tree in depth-first order, computed together."""

    rows: np.ndarray  # int [R], indices of rows of the batch
    shared: np.ndarray  # int [R], positions that each shares with the row before it; the first: 0
    count: np.ndarray  # int [R], positions of each row

    @property
    def positions(self) -> int:
        """Number of different positions."""
        return int((self.count - self.shared).sum())

    def part(self, start: int, stop: int) -> "Bin":
        """Return the bin of rows start to stop - 1."""
        shared = self.shared[start:stop].copy()
        shared[:1] = 0
        return Bin(self.rows[start:stop], shared, self.count[start:stop])


def build_tree(
    tokens_BT: np.ndarray, count_B: np.ndarray, rows: np.ndarray, *, least_run: int = LEAST_RUN
) -> Bin:
    """Return the tree of some rows, as one bin of all of them.

    Args:
      tokens_BT: ids >= 0.
      count_B: number of positions of each row: its leading tokens that a forward pass reads.
      rows: int, indices of rows.
      least_run: the shortest run of positions between two branch points.
    """
    sortable = tokens_BT.astype(">u4")  # compares as bytes in the order of the ids
    rows = np.array(
        sorted(np.asarray(rows).tolist(), key=lambda b: (sortable[b, : count_B[b]].tobytes(), b)),
        int,
    )
    shared = np.zeros(len(rows), int)
    branches = [0]  # positions at which the path of the row before branches
    for i in range(1, len(rows)):
        before, row = rows[i - 1], rows[i]
        both = min(count_B[before], count_B[row])
        differs = tokens_BT[before, :both] != tokens_BT[row, :both]
        common = int(differs.argmax()) if differs.any() else int(both)
        while branches[-1] > common:
            branches.pop()
        if common - branches[-1] >= least_run:
            branches.append(common)
        shared[i] = branches[-1]
    return Bin(rows, shared, np.asarray(count_B)[rows])


def cut_tree(
    tree: Bin, alone: np.ndarray, added: np.ndarray, room: dict[int, int], *, max_rows: int
) -> list[tuple[int, Bin]]:
    """Return (length, bin) of consecutive bins that fill the fewest positions, padding included.

    The trunk of a bin's first row is computed again, if it was in the bin before: a cut costs least
    where the next row shares little.

    Args:
      alone: int [R], predictions of each row by itself.
      added: int [R], predictions that each row adds to those of the rows before it.
      room: {length: number of predictions} that a bin may have. A row that does not fit is a bin of
        the longest length.
      max_rows: maximum number of rows of a bin.
    """
    rows = len(tree.rows)
    ends = np.concatenate([[0], np.cumsum(tree.count - tree.shared)])  # positions before a row
    reads = np.concatenate([[0], np.cumsum(added)])
    weight = int(tree.count.sum()) + 1  # computed positions count first, then distinct ones
    cost, longest = np.zeros(rows + 1, np.int64), max(room)
    choice = [(0, 0)] * rows  # the end and the length of the best bin that begins with a row
    for start in range(rows - 1, -1, -1):
        # As the first row, it has all of its positions and predictions.
        stops = slice(start + 1, start + 1 + max_rows)
        positions = ends[stops] - ends[start] + tree.shared[start]
        predictions = reads[stops] - reads[start] + alone[start] - added[start]
        best = cost[start + 1] + longest * weight + positions[0], start + 1, longest
        for length, most in room.items():
            fits = min(
                positions.searchsorted(length, side="right"),
                predictions.searchsorted(most, side="right"),
            )
            if fits:
                total = cost[start + 1 : start + 1 + fits] + length * weight + positions[:fits]
                end = int(total.argmin())
                best = min(best, (total[end], start + 1 + end, length))
        cost[start], choice[start] = best[0], best[1:]
    found, start = [], 0
    while start < rows:
        stop, length = choice[start]
        found.append((length, tree.part(start, stop)))
        start = stop
    return found


@dataclasses.dataclass(frozen=True)
class PackedBin:
    """A bin as one sequence: its positions, what they read, and which tokens they predict."""

    bin: Bin
    row_L: np.ndarray  # int, the row of the batch that a position is taken from
    depth_L: np.ndarray  # int, its position in that row
    end_L: np.ndarray  # int32, `tree_attention.Tree.end_BT`
    path_RT: np.ndarray  # int32, the packed position of each position of a row; 0 after its last
    source_E: np.ndarray  # int32, packed positions that predict a token
    target_E: np.ndarray  # int32, the tokens that they predict
    entry_RT: np.ndarray  # int32, index of the prediction of each token of each row; -1: not read


def pack(one: Bin, tokens_BT: np.ndarray, read_BT: np.ndarray) -> PackedBin:
    """Return the packed sequence of a bin.

    Each prediction is there once, however many rows share its token; a position before a branch
    predicts the first token of each branch.

    Args:
      read_BT: nonzero where the probability of a token is needed; entry 0 is ignored.
    """
    L, R, T = one.positions, len(one.rows), tokens_BT.shape[1]
    row_L, depth_L, end_L = np.zeros(L, int), np.zeros(L, int), np.full(L, L, np.int32)
    path_RT = np.zeros((R, T), np.int32)
    path_T, start, length = np.zeros(T, np.int32), 0, 0
    for r, (row, shared, count) in enumerate(zip(one.rows, one.shared, one.count, strict=True)):
        end_L[path_T[shared:length]] = start  # no later row passes through these positions
        stop, length = start + count - shared, count
        path_T[shared:count] = np.arange(start, stop)
        row_L[start:stop], depth_L[start:stop] = row, np.arange(shared, count)
        path_RT[r, :count] = path_T[:count]
        start = stop
    at_N, before_N = np.nonzero(read_BT[one.rows, 1:])  # of the rows; of the token before
    source_N = path_RT[at_N, before_N].astype(np.int64)
    target_N = tokens_BT[one.rows[at_N], before_N + 1].astype(np.int64)
    pair_E, entry_N = np.unique(source_N << 32 | target_N, return_inverse=True)
    entry_RT = np.full((R, T), -1, np.int32)
    entry_RT[at_N, before_N + 1] = entry_N
    source_E, target_E = (pair_E >> 32).astype(np.int32), (pair_E & 0xFFFFFFFF).astype(np.int32)
    return PackedBin(one, row_L, depth_L, end_L, path_RT, source_E, target_E, entry_RT)


def key_blocks(packed: PackedBin, *, blocks: int, block: int) -> np.ndarray:
    """Return bool [blocks, blocks]: whether a block of queries reads a block of keys.

    Args:
      blocks: number of blocks of the padded sequence; each reads itself.
      block: positions per block.
    """
    reads = np.eye(blocks, dtype=bool)
    start = 0
    shared_R, count_R = packed.bin.shared, packed.bin.count
    for path_T, shared, count in zip(packed.path_RT, shared_R, count_R, strict=True):
        stop = start + count - shared
        for query in range(start // block, -(-stop // block)):
            last = shared + min((query + 1) * block, stop) - start  # the row's, in this block
            reads[query, path_T[:last] // block] = True
        start = stop
    return reads
