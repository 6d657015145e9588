"""algorithm/pairs.py: Weighted GRPO's advantages, by hand and against a loop."""

import numpy as np
import pytest

from ragen_jax.algorithm.pairs import pair_groups, pair_relative

pytestmark = pytest.mark.fast
ALL = np.ones(2, bool)


def advantages(return_GK, keep_G=None, sound_GK=None, **more):
    return_GK = np.asarray(return_GK, np.float32)
    keep_G = np.ones(len(return_GK), bool) if keep_G is None else np.asarray(keep_G)
    pairs = pair_groups(return_GK, keep_G, sound_GK=sound_GK, **more)
    return np.asarray(pair_relative(return_GK, pairs, eps=0.0, sound_GK=sound_GK))


def test_only_rare_outcomes_count():
    """A success of a hard prompt and a failure of an easy prompt, one in four each."""
    found = advantages([[1, 1, 0, 1], [0, 0, 1, 0]])
    # Outcomes of the pair: a 1, a -1 and six 0; mean 0, sample std sqrt(2 / 7).
    np.testing.assert_allclose(found, [[0, 0, -np.sqrt(3.5), 0], [0, 0, np.sqrt(3.5), 0]])


def test_lowest_and_highest_means_are_pairs_and_the_middle_is_alone():
    return_GK = [
        [1, 1, 0, 1],
        [1, 0, 0, 1],
        [0, 0, 1, 0],
        [1, 1, 1, 1],
        [0.1, 0, 0, 0],
        [1, 1, 1, 0.9],
    ]
    pairs = pair_groups(np.array(return_GK, np.float32), np.ones(6, bool))
    assert np.asarray(pairs.partner_G).tolist() == [2, 1, 0, 3, 5, 4]
    assert np.asarray(pairs.side_G).tolist() == [-1, 0, 1, 0, 1, -1]
    assert np.asarray(pairs.paired_G).tolist() == [True, True, True, False, True, True]
    found = advantages(return_GK)
    np.testing.assert_allclose(found[1], np.array([1, -1, -1, 1]) * np.sqrt(3) / 2, rtol=1e-6)
    assert not found[3].any()  # no variance
    np.testing.assert_allclose(found[[0, 2]].sum(), 0, atol=1e-6)


def test_ties_go_to_the_lower_index_and_groups_that_are_not_kept_are_in_no_pair():
    return_GK = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    pairs = pair_groups(return_GK, np.array([True, True, False, True]))
    assert np.asarray(pairs.partner_G).tolist() == [3, 1, 2, 0]
    assert np.asarray(pairs.side_G).tolist() == [1, 0, 0, -1]
    assert not advantages(return_GK, [True, True, False, True])[2].any()


def test_pairs_are_within_environments():
    return_GK = np.array([[0, 0, 1], [10, 0, 10], [1, 0, 1], [0, 10, 0]], np.float32)
    environment_G = np.array([0, 1, 0, 1])
    found = advantages(return_GK, environment_G=environment_G, unit_G=np.array([1, 10, 1, 10.0]))
    np.testing.assert_allclose(found[0], found[3, [0, 2, 1]], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[1], rtol=1e-6)


def test_against_a_loop_with_broken_members():
    rng = np.random.default_rng(0)
    for _ in range(20):
        G, K = rng.integers(2, 9), rng.integers(2, 6)
        return_GK = rng.integers(0, 4, (G, K)).astype(np.float32)
        sound_GK, keep_G = rng.random((G, K)) < 0.8, rng.random(G) < 0.8
        members = [return_GK[g][sound_GK[g]].astype(float) for g in range(G)]
        alive = [g for g in range(G) if keep_G[g] and len(members[g]) > 1 and np.ptp(members[g])]
        order = sorted(alive, key=lambda g: (members[g].mean(), g))
        want = np.zeros((G, K))
        for low, high in zip(order, order[::-1], strict=True):
            if order.index(low) > order.index(high):
                continue
            if low == high:
                x = members[low]
                want[low, sound_GK[low]] = (x - x.mean()) / x.std(ddof=1)
                continue
            hard, easy = members[low] - members[low].min(), members[high] - members[high].max()
            both = np.concatenate([hard, easy])
            want[low, sound_GK[low]] = (hard - both.mean()) / both.std(ddof=1)
            want[high, sound_GK[high]] = (easy - both.mean()) / both.std(ddof=1)
        returned = np.where(sound_GK, return_GK, np.nan)
        found = advantages(returned, keep_G, sound_GK)
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
