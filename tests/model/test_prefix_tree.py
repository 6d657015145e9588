"""prefix_tree.py: every row keeps its path, and each shared position is there once."""

import itertools

import numpy as np
import pytest
from shared_rows import random_tree

from ragen_jax.model.prefix_tree import build_tree, cut_tree, key_blocks, pack

pytestmark = pytest.mark.fast


def arrays(rows, T):
    """Return (tokens_BT, count_B: all tokens but the last)."""
    tokens_BT = np.zeros((len(rows), T), np.int32)
    for tokens_T, row in zip(tokens_BT, rows, strict=True):
        tokens_T[: len(row)] = row
    return tokens_BT, np.array([max(len(row) - 1, 0) for row in rows])


def test_a_tree_by_hand():
    """Rows 0 and 2 share 3 positions, row 3 is a beginning of row 1, and row 4 equals row 0."""
    rows = [[7, 7, 7, 1, 2], [5, 5, 5, 5, 9], [7, 7, 7, 3, 4, 6], [5, 5, 5, 8], [7, 7, 7, 1, 2]]
    tokens_BT, count_B = arrays(rows, 6)
    tree = build_tree(tokens_BT, count_B, np.arange(5), least_run=1)
    assert tree.rows.tolist() == [3, 1, 0, 4, 2]  # 555 | 5555 | 7771 | 7771 | 77734
    assert tree.shared.tolist() == [0, 3, 0, 4, 3]
    assert tree.positions == 4 + 4 + 2
    read_BT = np.zeros((5, 6), bool)
    for row, tokens in enumerate(rows):
        read_BT[row, len(tokens) - 1] = True
    packed = pack(tree, tokens_BT, read_BT)
    packed_tokens = tokens_BT[packed.row_L, packed.depth_L]
    assert packed_tokens.tolist() == [5, 5, 5, 5, 7, 7, 7, 1, 3, 4]
    assert packed.end_L.tolist() == [4, 4, 4, 4, 10, 10, 10, 8, 10, 10]
    # Rows 0 and 4 predict the same token from the same position; row 3 and row 1 from others.
    assert packed.source_E.tolist() == [2, 3, 7, 9] and packed.target_E.tolist() == [8, 9, 2, 6]
    last = [packed.entry_RT[r, len(rows[row]) - 1] for r, row in enumerate(tree.rows)]
    assert last == [0, 1, 2, 2, 3]


def test_a_position_before_a_branch_predicts_each_branch():
    tokens_BT, count_B = arrays([[7, 7, 1, 2], [7, 7, 3, 4]], 4)
    packed = pack(
        build_tree(tokens_BT, count_B, np.arange(2), least_run=1), tokens_BT, np.ones((2, 4))
    )
    pairs = list(zip(packed.source_E.tolist(), packed.target_E.tolist(), strict=True))
    assert pairs == [(0, 7), (1, 1), (1, 3), (2, 2), (3, 4)]


def test_short_runs_are_no_branch_points():
    rows = [[1] * 20 + [2], [1] * 20 + [3] * 9, [1] * 20 + [3] * 3 + [4] * 9, [1] * 4 + [5] * 9]
    tokens_BT, count_B = arrays(rows, 40)
    tree = build_tree(tokens_BT, count_B, np.arange(4), least_run=8)
    # Row 2 shares 23 positions with row 1, of which 3 after the branch at 20; row 3 shares 4.
    assert dict(zip(tree.rows.tolist(), tree.shared.tolist(), strict=True)) == {
        0: 0,
        1: 20,
        2: 20,
        3: 4,
    } | {3: 0}


def paths_are_right(packed, tokens_BT, count_B):
    for r, row in enumerate(packed.bin.rows):
        path = packed.path_RT[r, : count_B[row]]
        np.testing.assert_array_equal(
            tokens_BT[packed.row_L[path], packed.depth_L[path]], tokens_BT[row, : count_B[row]]
        )
        np.testing.assert_array_equal(packed.depth_L[path], np.arange(count_B[row]))
        for depth, position in enumerate(path):  # it reads its path, and nothing else
            before = np.arange(position + 1)
            read = before[position < packed.end_L[: position + 1]]
            np.testing.assert_array_equal(read, path[: depth + 1])


@pytest.mark.parametrize("seed", range(25))
def test_random_trees(seed):
    """Every row is on its path, every needed token has its prediction, and blocks of keys are those
    that the mask needs."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        T, rows = 30, random_tree(rng, rng.integers(1, 14), 30, 3)
        tokens_BT, count_B = arrays(rows, T)
        inside_BT = np.arange(T) < np.array([len(row) for row in rows])[:, None]
        read_BT = inside_BT & (rng.random(inside_BT.shape) < 0.5)
        tree = build_tree(
            tokens_BT, count_B, np.arange(len(rows)), least_run=int(rng.integers(1, 6))
        )
        assert sorted(tree.rows.tolist()) == list(range(len(rows)))
        start = int(rng.integers(len(rows)))
        for one in (tree, tree.part(start, len(rows))):
            packed = pack(one, tokens_BT, read_BT)
            assert len(packed.row_L) == one.positions <= count_B[one.rows].sum()
            paths_are_right(packed, tokens_BT, count_B)
            for r, row in enumerate(one.rows):
                for t in range(1, T):
                    entry = packed.entry_RT[r, t]
                    assert (entry >= 0) == bool(read_BT[row, t])
                    if entry >= 0:
                        assert packed.source_E[entry] == packed.path_RT[r, t - 1]
                        assert packed.target_E[entry] == tokens_BT[row, t]
            assert len(packed.source_E) == len(
                {*zip(packed.source_E, packed.target_E, strict=True)}
            )
            for block in (4, 8):
                blocks = max(1, -(-one.positions // block))
                mask = np.zeros((blocks * block,) * 2, bool)
                q, k = np.indices((one.positions,) * 2)
                mask[: one.positions, : one.positions] = (k <= q) & (q < packed.end_L[k])
                needed = mask.reshape(blocks, block, blocks, block).any((1, 3))
                np.testing.assert_array_equal(
                    key_blocks(packed, blocks=blocks, block=block),
                    needed | np.eye(blocks, dtype=bool),
                )


def test_a_tree_without_its_branches_is_its_rows():
    """Without common beginnings, a position is there for every token."""
    rng = np.random.default_rng(0)
    rows = [np.append(b, rng.integers(0, 9, 9)) for b in range(6)]
    tokens_BT, count_B = arrays(rows, 10)
    tree = build_tree(tokens_BT, count_B, np.arange(6))
    assert tree.positions == count_B.sum() and not tree.shared.any()


def cheapest(tree, alone, added, room, max_rows):
    """Return the fewest positions of all ways to cut a tree, tried one by one."""
    rows = len(tree.rows)
    best = None
    for cuts in itertools.product((False, True), repeat=rows - 1):
        edges = [0, *(i + 1 for i in range(rows - 1) if cuts[i]), rows]
        total = 0
        for start, stop in itertools.pairwise(edges):
            part = tree.part(start, stop)
            reads = alone[start] + added[start + 1 : stop].sum()
            lengths = [n for n, most in room.items() if part.positions <= n and reads <= most]
            if stop - start > max_rows or not lengths:
                # A row that fits nowhere is a bin of the longest length.
                total += max(room) if stop - start == 1 else 10**6
            else:
                total += min(lengths)
        best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("seed", range(10))
def test_a_tree_is_cut_into_the_fewest_positions(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        rows = random_tree(rng, rng.integers(1, 9), 30, 3)
        tokens_BT, count_B = arrays(rows, 30)
        tree = build_tree(tokens_BT, count_B, np.arange(len(rows)), least_run=1)
        alone = rng.integers(1, 9, len(rows))
        added = np.minimum(alone, rng.integers(1, 9, len(rows)))
        room = {int(n): int(rng.integers(4, 30)) for n in rng.choice([16, 24, 32, 48], 3, False)}
        max_rows = int(rng.integers(1, 6))
        found = cut_tree(tree, alone, added, room, max_rows=max_rows)
        assert np.concatenate([one.rows for _, one in found]).tolist() == tree.rows.tolist()
        assert all(len(one.rows) <= max_rows for _, one in found)
        total = sum(length for length, _ in found)
        assert total == cheapest(tree, alone, added, room, max_rows)


def test_a_tree_is_cut_where_little_is_computed_again():
    # Eight rows of 10 positions: two groups of four that share 8.
    tokens_BT = np.array([[g] * 8 + [m, m, 9] for g in range(2) for m in range(4)], np.int32)
    tree, one = build_tree(tokens_BT, np.full(8, 10), np.arange(8)), np.ones(8, int)

    def sizes(room, max_rows=8):
        found = cut_tree(tree, one, one, room, max_rows=max_rows)
        return [(length, len(part.rows)) for length, part in found]

    assert tree.positions == 2 * (8 + 4 * 2)
    assert sizes({60: 99}) == [(60, 8)]
    # Five rows would fit into 26 positions; the second group begins with the fifth.
    assert sizes({26: 99, 16: 99}) == [(16, 4), (16, 4)]
    assert sizes({26: 99}) == [(26, 4), (26, 4)]
    assert sizes({60: 3}) == [(60, 2), (60, 3), (60, 3)]  # predictions
    assert sizes({3: 99}) == [(3, 1)] * 8  # a row that does not fit is a bin by itself
