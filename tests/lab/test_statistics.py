"""lab/statistics.py: p-values, exact tests and Holm's correction on known numbers and data."""

import functools
import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr, ttest_1samp

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import gains
from ragen_jax.lab.curves import SUCCESS, judge_difference, judge_equivalence
from ragen_jax.lab.gains import SPREAD, VARIANCE
from ragen_jax.lab.statistics import (
    holm,
    in_words,
    judge_count,
    p_value,
    p_within,
    permutation_test,
)

pytestmark = pytest.mark.fast


def test_p_values_are_those_of_the_t_test():
    rng = np.random.default_rng(0)
    for count in (2, 3, 5):
        values = rng.normal(0.3, 1, count)
        expected = ttest_1samp(values, 0).pvalue
        for confidence in (0.95, 0.99):
            found = interval(values.tolist(), confidence=confidence)
            p = p_value(*found, count - 1, confidence=confidence)
            assert p == pytest.approx(expected)
    assert p_value(0.0, 0.0, 2) == 1 and p_value(0.1, 0.0, 2) == 0
    assert p_value(0.1, np.inf, 2) == 1


def test_an_estimate_of_one_run_has_no_interval():
    assert in_words(*interval([0.1, 0.3])) == "+0.200 ± 1.271 (95 % CI)"
    assert in_words(*interval([-0.2]), digits=2) == "-0.20 (no interval: one run)"


def test_p_values_agree_with_the_verdicts():
    rng = np.random.default_rng(1)
    words = set()
    for scale in (0.01, 0.03, 0.1):
        for _ in range(300):
            found = interval(rng.normal(rng.choice([0, 0.05, 0.2]), scale, 3).tolist())
            assert (p_value(*found, 2) < 0.05) == (judge_difference(*found) != "undecided")
            word = judge_equivalence(*found, 0.1)
            words.add(word)
            assert (p_within(*found, 2, 0.1) < 0.05) == (word != "undecided")
    assert words == {"reproduced", "reversed", "undecided"}


@pytest.mark.parametrize(
    ("counts", "word", "p"),
    [
        ((6, 0, 0), "reproduced", 2 / 64),
        ((0, 6, 0), "reversed", 2 / 64),
        ((5, 0, 0), "undecided", 2 / 32),
        ((5, 0, 1), "undecided", 14 / 64),  # 5 of 6 or more, two-sided
        ((0, 0, 6), "undecided", 1.0),
        ((8, 0, 1), "reproduced", 20 / 512),  # 8 of 9: (1 + 9) / 512, two-sided
        ((0, 8, 1), "reversed", 20 / 512),
        ((3, 3, 0), "undecided", 1.0),
    ],
)
def test_counts_of_runs_by_hand(counts, word, p):
    found = judge_count(*counts)
    assert found[0] == word and found[1] == pytest.approx(p)
    assert (found[1] < 0.05) == (word != "undecided")
    low, high = found[2]
    assert 0 <= low <= high <= 1
    if counts == (5, 0, 0):
        assert low == pytest.approx(0.025 ** (1 / 5)) and high == 1  # Clopper and Pearson


@pytest.mark.medium
def test_counts_err_as_rarely_as_they_say():
    """Each run confirms or contradicts the claim with equal probability, or is undecided."""
    rng, judge = np.random.default_rng(0), functools.cache(judge_count)
    for runs, undecided in ((5, 0.0), (10, 0.0), (10, 0.2), (30, 0.1)):
        wrong = 0
        for _ in range(1000):
            kind = rng.choice(3, runs, p=[(1 - undecided) / 2, (1 - undecided) / 2, undecided])
            counts = (int((kind == k).sum()) for k in range(3))
            wrong += judge(*counts)[0] != "undecided"
        assert wrong / 1000 <= 0.06


@pytest.mark.medium
def test_the_permutation_test_counts_all_orders():
    x, y = [0.1, 0.5, 0.2, 0.9, 0.4, 0.7], [1.0, 3.0, 2.5, 4.0, 2.0, 9.0]
    correlation, p = permutation_test(x, y)
    assert correlation == pytest.approx(spearmanr(x, y).statistic)
    by_hand = [abs(spearmanr(x, order).statistic) for order in itertools.permutations(y)]
    assert p == pytest.approx(np.mean(np.array(by_hand) >= correlation - 1e-9))
    rng = np.random.default_rng(0)
    long_x, long_y = rng.normal(size=9), rng.normal(size=9)  # sampled permutations
    assert permutation_test(long_x, long_y)[1] == pytest.approx(
        spearmanr(long_x, long_y).pvalue, abs=0.03
    )
    assert permutation_test(x, [2.0] * 6) == permutation_test([0.0] * 6, x) == (0, 1)


def settings_of(rng, count, slope=0.0):
    """A filtered and an unfiltered run per setting; the gain is noise plus `slope` times spread."""
    runs = {}
    for i in range(count):
        spread = rng.normal(2, 1)
        gain = slope * spread + rng.normal(0, 0.1)
        for treatment, success in (("top-p", 0.4 + gain), ("none", 0.4)):
            rows = [{"step": 1, SUCCESS: success, VARIANCE: 1.0, SPREAD: spread}]
            runs[f"s{i}", treatment, 0] = rows
    return runs


@pytest.mark.medium
@pytest.mark.parametrize("count", [4, 5, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_the_predictor_errs_as_rarely_as_it_says(count):
    """Four settings would decide in 16.7 % of the cases where spread predicts nothing."""
    rng = np.random.default_rng(count)
    words = [gains.predictor(settings_of(rng, count)).verdict for _ in range(600)]
    if count < 6:
        assert set(words) == {"too few settings"}
    else:
        assert 0.005 < np.mean([word != "undecided" for word in words]) < 0.065
        found = [gains.predictor(settings_of(rng, count, slope=0.5)).verdict for _ in range(100)]
        assert found.count("reproduced") > 80


def test_holm_by_hand():
    found = holm({0: 0.01, 1: 0.04, 2: 0.03, 3: 0.005})
    assert found == pytest.approx({3: 0.02, 0: 0.03, 2: 0.06, 1: 0.06})
    assert holm({0: 0.6, 1: 0.9}) == {0: 1.0, 1: 1.0} and holm({}) == {}


@pytest.mark.medium
def test_a_page_without_any_effect_decides_nothing_after_holm():
    """A page of twenty claims over three seeds; at 95 %, one decides by chance."""
    rng, alone, together = np.random.default_rng(0), [], []
    experiment = EXPERIMENTS["sweeps"]
    names = [f"t{i}" for i in range(20)]
    for _ in range(150):
        runs = {
            ("s", name, seed): [{"step": 1, SUCCESS: 0.4 + rng.normal(0, 0.03)}]
            for seed in range(3)
            for name in (*names, "none")
        }
        found = [gains.judge(Claim("", name), runs, experiment) for name in names]
        alone.append(sum(x.verdict != "undecided" for x in found))
        adjusted = holm({i: x.p for i, x in enumerate(found)})
        together.append(any(p < 0.05 for p in adjusted.values()))
    assert 0.5 < np.mean(alone) < 1.5
    assert np.mean(together) <= 0.08
