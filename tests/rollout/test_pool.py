"""pool.py: fresh seeds, epochs of a finite pool, and skipped problems."""

import numpy as np
import pytest

from ragen_jax.rollout.pool import (
    allocation_chances,
    count_solved,
    count_visits,
    draw_seeds,
    init_streaks,
    init_tallies,
    play_chances,
)

pytestmark = pytest.mark.fast


def problems(seeds, seed=0):
    """Numbers in the pool; the high half of an environment seed is the run's seed."""
    assert all(s >> 32 == seed for s in seeds)
    return [s & 0xFFFFFFFF for s in seeds]


def draw_many(times, groups, *, cursor=0, chance_P=None, pool, seed=0):
    """[problems of each draw], last cursor."""
    found = []
    for _ in range(times):
        seeds, cursor = draw_seeds(cursor, groups, pool=pool, seed=seed, chance_P=chance_P)
        found.append(problems(seeds, seed))
    return found, cursor


def test_without_a_pool_seeds_are_fresh():
    assert draw_seeds(0, 3, pool=0, seed=2) == ([2 << 32, (2 << 32) + 1, (2 << 32) + 2], 3)
    assert draw_seeds(3, 2, pool=0, seed=2) == ([(2 << 32) + 3, (2 << 32) + 4], 5)


def test_an_epoch_visits_every_problem_once_in_an_order_of_its_own():
    epochs = []
    for epoch in range(6):
        found, cursor = draw_many(3, 4, pool=12, cursor=12 * epoch, seed=7)
        assert cursor == 12 * (epoch + 1)
        epochs.append(sum(found, []))
        assert sorted(epochs[-1]) == list(range(12))
    assert len({tuple(order) for order in epochs}) == 6
    other, _ = draw_many(3, 4, pool=12, seed=8)
    assert sum(other, []) != epochs[0]


def test_the_order_never_changes():
    # Raw Philox words: equal for every version of NumPy and on every machine.
    assert draw_many(2, 4, pool=8, seed=3)[0] == [[1, 3, 2, 5], [4, 6, 0, 7]]


def test_a_draw_that_reaches_into_the_next_epoch_has_no_problem_twice():
    found, cursor = draw_many(40, 5, pool=7, seed=1)
    assert all(len(set(drawn)) == 5 for drawn in found)
    # 200 problems drawn; if a problem came up again in the same draw, that visit was skipped.
    assert cursor >= 200
    counts = np.bincount(sum(found, []), minlength=7)
    assert counts.min() >= 25
    whole, _ = draw_many(10, 7, pool=7)
    assert all(sorted(drawn) == list(range(7)) for drawn in whole)


def test_draws_go_on_from_the_cursor():
    chance_P = play_chances(np.arange(9) % 4, explore=0.5, least=0.1)
    whole, last = draw_many(12, 4, pool=9, chance_P=chance_P)
    first, cursor = draw_many(5, 4, pool=9, chance_P=chance_P)
    rest, end = draw_many(7, 4, pool=9, cursor=cursor, chance_P=chance_P)
    assert first + rest == whole and end == last


def test_chances_by_hand():
    found = play_chances(np.array([0, 1, 2, 3, 4, 50]), explore=0.5, least=0.1)
    np.testing.assert_array_equal(found, [1, 0.5, 0.25, 0.125, 0.1, 0.1])
    assert (play_chances(np.array([0, 5, 10**9]), explore=1.0, least=0.01) == 1).all()


def test_passed_over_as_often_as_told():
    # One problem is played in half of its visits, one in a quarter, one in a tenth, others always.
    streak_P = np.array([1, 2, 9, 0, 0, 0])
    chance_P = play_chances(streak_P, explore=0.5, least=0.1)
    found, cursor = draw_many(4000, 1, pool=6, chance_P=chance_P)
    epochs = cursor / 6
    share_P = np.bincount(sum(found, []), minlength=6) / epochs
    # Four standard errors of a fraction over 1,000 epochs are at most 0.064.
    np.testing.assert_allclose(share_P, [0.5, 0.25, 0.1, 1, 1, 1], atol=0.064)
    # Skipping is drawn anew for each epoch and each problem.
    assert draw_many(50, 6, pool=6)[0] != draw_many(50, 6, pool=6, chance_P=chance_P)[0]


def test_a_chance_of_one_changes_nothing():
    ones = play_chances(init_streaks(10), explore=0.5, least=0.01)
    assert draw_many(20, 3, pool=10, chance_P=ones) == draw_many(20, 3, pool=10)


def test_streaks_by_hand():
    first = init_streaks(4)
    assert first.dtype == np.int32
    high = 5 << 32
    streak_P = count_visits(first, [high + 1, high + 3, high + 1], [False, False, False])
    np.testing.assert_array_equal(streak_P, [0, 2, 0, 1])
    streak_P = count_visits(streak_P, [high + 3, high + 0, high + 1], [False, False, True])
    np.testing.assert_array_equal(streak_P, [1, 0, 0, 2])
    assert streak_P.dtype == np.int32
    np.testing.assert_array_equal(first, 0)  # an array from a checkpoint must not change


def test_more_groups_than_problems_are_refused():
    with pytest.raises(ValueError, match="rollout.groups is 5, but env.pool has only 4"):
        draw_seeds(0, 5, pool=4, seed=0)


def test_allocation_by_hand():
    tally_P2 = np.array([[0, 0], [2, 6], [6, 6], [0, 6], [98, 98]], np.float32)
    found = allocation_chances(tally_P2, least=0.3)
    want = [1, 2 * np.sqrt(15) / 8, 2 * np.sqrt(7) / 8, 2 * np.sqrt(7) / 8, 0.3]
    np.testing.assert_allclose(found, want)


def test_older_visits_count_half():
    high = 3 << 32
    tally_P2 = count_solved(init_tallies(3), [high + 1, high + 2], [1, 0], [4, 2])
    np.testing.assert_array_equal(tally_P2, [[0, 0], [1, 4], [0, 2]])
    tally_P2 = count_solved(tally_P2, [high + 1, high + 1], [4, 0], [4, 4])
    np.testing.assert_array_equal(tally_P2, [[0, 0], [2.25, 7], [0, 2]])
    assert tally_P2.dtype == np.float32
