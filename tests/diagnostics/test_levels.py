"""levels.py: means, levels, noise and bounds by hand, and error rates on simulated figures."""

import dataclasses
import math

import numpy as np
import pytest

from ragen_jax.diagnostics.levels import (
    FIRST,
    LAG,
    LAST,
    RISE,
    SPARSE,
    Comparison,
    bound,
    init_levels,
    update_levels,
)

pytestmark = pytest.mark.fast


def comparison(**changes):
    """The comparison for one figure that does not wander."""
    one_F = np.array([0.0]), np.array([0.08]), np.array([False])
    found = Comparison(5, 15, 100, *one_F)
    return dataclasses.replace(found, **changes)


def follow(value_RT, test=None, *, error=0.0, weight=1.0, steps=None, fixed=None):
    """(Levels, z [R, T]) of one figure in R runs."""
    value_RT = np.atleast_2d(np.asarray(value_RT, float))
    R, T = value_RT.shape
    test, weight_T = test or comparison(), np.broadcast_to(weight, T)
    steps = range(1, T + 1) if steps is None else steps
    error_RT = np.broadcast_to(error, (R, T))
    levels, z_RT = init_levels(R, 1), np.zeros((R, T))
    for t, step in enumerate(steps):
        values = value_RT[:, t : t + 1], error_RT[:, t : t + 1], np.full((R, 1), weight_T[t])
        held = np.zeros((R, 1), bool) if fixed is None else np.full((R, 1), fixed[t])
        levels, z_R1 = update_levels(levels, test, np.full(R, step), *values, held)
        z_RT[:, t] = z_R1[:, 0]
    return levels, z_RT


def one(x):
    return np.asarray(x).ravel()[0]


# ---- by hand ------------------------------------------------------------------------------------


def test_nine_values_by_hand():
    values = [10.0, 12.0, 11.0, 13.0, 9.0, 6.0, 5.0, 7.0, 6.0]
    levels, z_RT = follow(values)
    # The first five values without the 13; the last four without the 5.
    assert one(levels.level_EF) == pytest.approx((10 + 12 + 11 + 9) / 4)
    assert one(levels.recent_EF) == pytest.approx((6 + 7 + 6) / 3)
    # Noise comes from the first five alone: half the mean square of 2, -1, 2, -4, that is 25 / 4 /
    # 2; raised by two fifths, and divided by four and by five values.
    v = 25 / 8 * (1 + 2 / 5)
    assert one(levels.noise_EF) == pytest.approx(25 / 8)
    expected = (42 / 4 - 19 / 3) / math.sqrt(v / 4 + v / 5)
    assert z_RT[0, -1] == pytest.approx(expected)
    assert not z_RT[0, :-1].any()  # eight values are too few
    # Wandering by a tenth of the level, of which means over 4 and 5 steps keep these fractions.
    _, z_RT = follow(values, comparison(prior_F=np.array([0.1])))
    wander = 0.1**2 * 10.5**2 * (1 / (1 + 4 / 20) + 1 / (1 + 5 / 20))
    assert z_RT[0, -1] == pytest.approx((42 / 4 - 19 / 3) / math.sqrt(v / 4 + v / 5 + wander))


def test_a_rise_leaves_out_the_other_ends():
    values = [10.0, 12.0, 11.0, 13.0, 9.0, 16.0, 15.0, 17.0, 16.0]
    levels, z_RT = follow(values)
    assert one(levels.level_EF) == pytest.approx((10 + 12 + 11 + 13) / 4)
    assert one(levels.recent_EF) == pytest.approx((16 + 15 + 16) / 3)
    assert z_RT[0, -1] < -2


def test_errors_that_come_with_values_are_noise_where_they_are_more():
    values = [10.0, 10.0, 10.0, 10.0, 10.0, 6.0, 6.0, 6.0, 6.0]
    levels, z_RT = follow(values, error=2.0, weight=8.0)
    assert one(levels.noise_EF) == 0 and one(levels.error_EF) == pytest.approx(2.0**2 * 8)
    v = 32 * (1 + 2 / 5)
    assert z_RT[0, -1] == pytest.approx(4 / math.sqrt(v / 32 + v / 40))


def test_values_weigh_as_their_prompts():
    weight = [24] * 5 + [8, 8, 24, 24]
    levels, _ = follow([10.0] * 5 + [6.0, 9.0, 6.0, 3.0], weight=weight)
    # Without the 3: (8 * 6 + 8 * 9 + 24 * 6) / 40.
    assert one(levels.recent_EF) == pytest.approx(264 / 40)
    # The variance of the difference of neighbours with weights 24 and 8 is v (1 / 24 + 1 / 8).
    levels, _ = follow([10.0, 11.0], weight=[24, 8])
    assert one(levels.noise_EF) == pytest.approx(1 / (1 / 24 + 1 / 8))


@pytest.mark.medium
def test_how_many_values_are_compared():
    """A third at either end, at least 5 and 4 values, of at most 100 values and `recent` steps.
    After more than 60 steps, the level is of all steps but the last 40."""
    for count, level_n, recent_n in (
        (9, 5, 4),
        (12, 5, 5),
        (24, 8, 8),
        (60, 20, 15),
        (90, 50, 15),
        (330, 100, 15),
    ):
        ramp = np.arange(1.0, count + 1)
        levels, _ = follow(ramp + 1e6)  # a rise: drops the lowest first and highest last value
        assert one(levels.level_values_EF) == level_n
        assert one(levels.level_EF) == pytest.approx(1e6 + ramp[1:level_n].mean(), abs=0.1)
        last = ramp[-recent_n:-1] if recent_n > 2 else ramp[-recent_n:]
        assert one(levels.recent_EF) == pytest.approx(1e6 + last.mean(), abs=0.1)
    # Every fifth step: 15 steps hold three values, but the minimum is six.
    ramp = np.arange(1.0, 31)
    levels, _ = follow(ramp + 1e6, steps=range(5, 151, 5))
    assert one(levels.recent_EF) == pytest.approx(1e6 + ramp[-SPARSE:-1].mean(), abs=0.1)
    # The level leaves out the newest 40 steps, which hold eight values.
    assert one(levels.level_values_EF) == 22
    assert one(levels.level_EF) == pytest.approx(1e6 + ramp[1:22].mean(), abs=0.1)


@pytest.mark.medium
def test_noise_is_not_learnt_from_the_newest_values_nor_while_fixed():
    rng = np.random.default_rng(0)
    values = 10 + rng.normal(size=40)
    before, _ = follow(values)
    falls, _ = follow(np.concatenate([values, [0.0] * LAG]))
    quiet, _ = follow(np.concatenate([values, values[:LAG]]))
    assert one(falls.noise_EF) == one(quiet.noise_EF) and one(falls.wander_EF) == one(
        quiet.wander_EF
    )
    assert one(falls.noise_EF) != one(before.noise_EF)
    fixed = [False] * 40 + [True] * 30
    held, _ = follow(np.concatenate([values, [0.0] * 30]), fixed=fixed)
    assert one(held.noise_EF) == one(before.noise_EF)
    assert one(held.level_EF) == pytest.approx(one(before.level_EF), rel=0.05)
    assert one(held.level_values_EF) == one(before.level_values_EF)


@pytest.mark.medium
def test_slow_wandering_is_measured_and_noise_is_not_taken_for_it():
    rng = np.random.default_rng(0)
    R, T = 60, 300
    noise_RT = 10 + rng.normal(size=(R, T))
    slow_RT = 2 * rng.normal(size=(R, T))  # AR(1) with standard deviation 2
    for t in range(1, T):
        slow_RT[:, t] = 0.9 * slow_RT[:, t - 1] + np.sqrt(1 - 0.9**2) * slow_RT[:, t]
    slow_RT += noise_RT
    trend_RT = noise_RT + np.linspace(0, 20, T)
    still, slow, trend = (follow(x)[0].wander_EF.mean() for x in (noise_RT, slow_RT, trend_RT))
    assert abs(still) < 0.003 and abs(trend) < 0.003
    assert 0.02 < slow < 0.08  # 0.04 of the squared level


@pytest.mark.medium
def test_blocks_of_noise_say_nothing_of_wandering():
    """The weight of the blocks falls with their noise; most of a noisy figure's w^2 comes from the
    prior, whatever the blocks show."""
    rng = np.random.default_rng(0)
    test = comparison(prior_F=np.array([0.14]))
    for noise, weight in ((0.02, 10.0), (0.4, 0.5)):
        values = 1 + noise * rng.normal(size=(50, 120))
        levels, _ = follow(values, test)
        assert (levels.blocks_EF > weight).all() == (noise < 0.1)
    assert np.abs(levels.blocks_EF * levels.wander_EF).max() < 4 * 0.14**2


def test_the_wandering_of_a_logarithm_is_of_what_it_is_the_logarithm_of():
    values = np.array([10.0, 12.0, 11.0, 13.0, 9.0, 6.0, 5.0, 7.0, 6.0]) / 10
    test = comparison(prior_F=np.array([0.1]), log_F=np.array([True]))
    _, z_RT = follow(values, test)
    v = 25 / 800 * (1 + 2 / 5)
    size = 1 - math.exp(-1.05)
    wander = 0.1**2 * size**2 * (1 / (1 + 4 / 20) + 1 / (1 + 5 / 20))
    expected = (1.05 - 19 / 30) / math.sqrt(v / 4 + v / 5 + wander)
    assert z_RT[0, -1] == pytest.approx(expected, rel=1e-5)


def test_a_missing_value_changes_nothing():
    values = np.array([10.0, 12.0, 11.0, 13.0, 9.0, 6.0, 5.0, 7.0, 6.0])
    gaps = np.full(18, np.nan)
    gaps[::2] = values
    whole, z_RT = follow(values, steps=range(1, 18, 2))
    spread, gaps_RT = follow(gaps)
    assert gaps_RT[0, -2] == z_RT[0, -1] and gaps_RT[0, -1] == 0
    for name, x in vars(whole).items():
        if name != "step_E":
            assert np.array_equal(x, getattr(spread, name)), name


@pytest.mark.medium
def test_a_level_rises_to_what_was_surely_reached_and_does_not_fall():
    rng = np.random.default_rng(0)
    values = np.concatenate([np.ones(30), np.linspace(1, 3, 40), np.full(40, 3.0)]) * 10
    values += 0.3 * rng.normal(size=len(values))
    levels, _ = follow(values)
    assert 15 < one(levels.level_EF) < 30  # below the mean of 30, at its lower end
    crash, z_RT = follow(np.concatenate([values, np.full(20, 12.0)]))
    assert z_RT[0, -1] > bound(np.array(130))  # though it is above the run's start
    assert one(crash.level_EF) == pytest.approx(one(levels.level_EF), rel=0.05)
    kept, _ = follow(values, comparison(rise_F=np.array([np.inf])))
    assert one(kept.level_EF) == pytest.approx(values[:70].mean(), rel=0.02)
    assert one(kept.raised_EF) == 0


@pytest.mark.medium
def test_a_level_too_near_to_zero_for_its_noise_is_not_judged():
    rng = np.random.default_rng(0)
    for level, judged in ((0.05, False), (1.0, True)):
        values = level + 0.3 * rng.normal(size=60)
        _, z_RT = follow(np.concatenate([values, np.full(30, -9.0)]))
        assert bool(z_RT[0, -1]) == judged
    assert not follow(np.full(30, -5.0))[1].any()


def test_the_bound():
    assert bound(np.array([1, 25, 100, 10**6])) == pytest.approx(
        [2.2, 2.2, 2.2 + 0.4 * math.log(4), 3.3]
    )


def test_what_is_kept_is_enough_for_what_is_compared():
    assert LAST >= max(RISE, LAG + 8) and FIRST >= 100


# ---- error rates --------------------------------------------------------------------------------


def noisy(rng, runs, steps, relative, tails):
    """Figures around 1 with relative noise: gamma, Student's t(3) or normal."""
    if tails == "gamma":
        return rng.gamma(1 / relative**2, size=(runs, steps)) * relative**2
    draws = (
        rng.standard_t(3, (runs, steps)) / np.sqrt(3)
        if tails == "t"
        else rng.normal(size=(runs, steps))
    )
    return 1 + relative * draws


TIGHT = comparison(prior_F=np.array([0.05]))


def fallen(value_RT, **options):
    """Where figures are surely below 0.63 of their level, as for the alarm; bool [R, T]."""
    R, T = value_RT.shape
    levels, found = init_levels(R, 1), []
    steps, weight_T = (
        options.get("steps", range(1, T + 1)),
        np.broadcast_to(options.get("weight", 1), T),
    )
    for t, step in enumerate(steps):
        values = value_RT[:, t : t + 1], np.zeros((R, 1)), np.full((R, 1), float(weight_T[t]))
        held = np.zeros((R, 1), bool)
        levels, z_R1 = update_levels(levels, TIGHT, np.full(R, step), *values, held)
        low_R1 = levels.recent_EF < 0.63 * levels.level_EF
        found.append((low_R1 & (z_R1 > bound(levels.count_EF)))[:, 0])
    return np.array(found).T


@pytest.mark.medium
@pytest.mark.parametrize("tails", ["gamma", "t", "normal"])
@pytest.mark.parametrize("relative", [0.05, 0.2, 0.35])
def test_few_of_400_steady_steps_are_a_fall(tails, relative):
    fallen_RT = fallen(noisy(np.random.default_rng(0), 300, 400, relative, tails))
    assert fallen_RT.any(axis=1).mean() <= 0.05


@pytest.mark.medium
@pytest.mark.parametrize("every", [1, 5])
def test_falls_to_half_are_seen(every):
    rng = np.random.default_rng(0)
    within = 15 if every == 1 else 30
    values = noisy(rng, 300, 100 + within, 0.15, "normal")
    values[:, 100:] -= 0.5
    steps = np.arange(every, 101 + within, every)
    fallen_RT = fallen(values[:, steps - 1], steps=steps)
    quiet_R = ~fallen_RT[:, steps <= 100].any(axis=1)
    assert quiet_R.mean() >= 0.95
    assert fallen_RT[quiet_R][:, steps > 100].any(axis=1).mean() >= (0.97 if every == 1 else 0.8)


@pytest.mark.medium
def test_a_change_of_weights_is_no_change():
    """A third of the prompts: means of a third of the draws, with the same expectation."""
    rng = np.random.default_rng(0)
    weight = np.array([24.0] * 200 + [8.0] * 200)
    values = 1 + rng.normal(size=(300, 400)) / np.sqrt(weight)
    assert fallen(values, weight=weight).any(axis=1).mean() <= 0.05
