"""tree_attention.py: the plain form against attention with the whole mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_rows import random_tree

from ragen_jax.model import tree_attention
from ragen_jax.model.prefix_tree import build_tree, key_blocks, pack
from ragen_jax.model.tree_attention import Tree, attend_tree
from ragen_jax.update.trees import _key_counts

pytestmark = pytest.mark.fast

B, H, K, D, BLOCK, BLOCKS = 2, 4, 2, 8, 4, 24
T = BLOCK * BLOCKS


def random_trees(seed):
    """Return (Tree without lists, bool [B, Q, Q] which blocks read which) of two random trees."""
    rng = np.random.default_rng(seed)
    ends, depths, reads = [], [], []
    for _ in range(B):
        rows = random_tree(rng, 5, 16, 3)
        tokens_BT = np.zeros((len(rows), 20), np.int32)
        for tokens_T, row in zip(tokens_BT, rows, strict=True):
            tokens_T[: len(row)] = row
        count_B = np.array([len(row) for row in rows])
        packed = pack(
            build_tree(tokens_BT, count_B, np.arange(5), least_run=1), tokens_BT, tokens_BT > 0
        )
        n = len(packed.end_L)
        ends.append(np.concatenate([packed.end_L, np.arange(n + 1, T + 1)]))
        depths.append(np.concatenate([packed.depth_L, np.zeros(T - n, int)]))
        reads.append(key_blocks(packed, blocks=BLOCKS, block=BLOCK))
    end_BT, depth_BT = (np.array(x, np.int32) for x in (ends, depths))
    return Tree(end_BT, depth_BT=depth_BT, block=BLOCK), np.array(reads)


def with_lists(tree, reads_BQQ, trunk):
    """Return the tree with a trunk of some blocks, and lists of the others."""
    listed = reads_BQQ[:, trunk:, trunk:]
    keys_BQM = np.full((*listed.shape[:2], max(1, listed.sum(-1).max())), -1, np.int32)
    for b, q, k in zip(*np.nonzero(listed), strict=True):
        keys_BQM[b, q, listed[b, q, :k].sum()] = k + trunk
    return dataclasses.replace(tree, keys_BQM=keys_BQM, trunk=trunk)


def attend_whole(q_BTHD, k_BTKD, v_BTKD, tree, window):
    """Return attention with a mask of all pairs of positions."""
    k_BTHD, v_BTHD = (jnp.repeat(x, H // K, axis=2) for x in (k_BTKD, v_BTKD))
    score = jnp.einsum("bqhd,bkhd->bhqk", q_BTHD, k_BTHD) / D**0.5
    at = np.arange(T)
    reads = (at <= at[:, None]) & (at[:, None] < tree.end_BT[:, None])
    if window is not None:
        reads &= tree.depth_BT[:, :, None] - tree.depth_BT[:, None] < window
    weight = jax.nn.softmax(jnp.where(reads[:, None], score, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weight, v_BTHD)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [None, 3])  # blocks of queries at a time; None: all
@pytest.mark.parametrize("trunk", [0, 1, 3, BLOCKS - 1])
def test_lists_and_trunk_are_attention_over_paths(monkeypatch, trunk, chunk, window):
    """Of any length: a trunk may end within a branch, and blocks of it may have other readers."""
    if chunk is not None:
        monkeypatch.setattr(tree_attention, "WHOLE_TREE", 0)
        monkeypatch.setattr(tree_attention, "TREE_SCORES", chunk * H * 8 * BLOCK**2)
    tree, reads_BQQ = random_trees(trunk)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weights = (
        jax.random.normal(key, (B, T, heads, D))
        for key, heads in zip(keys, (H, K, K, H), strict=True)
    )

    def read(attend, tree):
        def total(q, k, v):
            out = attend(q, k, v, tree, window)
            return (out * weights).sum(), out

        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)

    found = read(attend_tree, with_lists(tree, reads_BQQ, trunk))
    expected = read(attend_whole, tree)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def star(trunk, branches):
    """Return which blocks read which: `branches` of one block after a trunk, as a sequence."""
    blocks = trunk + branches
    reads_QQ = np.eye(blocks, dtype=bool)
    reads_QQ[:, :trunk] = np.tri(blocks, trunk, dtype=bool)
    return reads_QQ


def test_a_trunk_is_used_where_it_shortens_the_lists():
    """A long prompt of many replies is a trunk; prompts of which each has few readers are not."""
    several = np.kron(np.eye(4, dtype=bool), star(3, 4))
    assert _key_counts([star(5, 8)], row_blocks=6) == (4, 3)
    assert _key_counts([several], row_blocks=4) == (0, 6)
    assert _key_counts([star(5, 8), several], row_blocks=6) == (0, 8)  # the largest need decides
    assert _key_counts([np.eye(1, dtype=bool)], row_blocks=2) == (0, 4)  # a block is left
