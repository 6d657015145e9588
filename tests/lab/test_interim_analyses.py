"""lab/interim_analyses.py: early stopping does not raise the rate of false positives."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab.interim_analyses import analysis_seed_counts, certain, confidence, spending
from ragen_jax.lab.pages import PRIMARY

pytestmark = pytest.mark.fast
MECHANISM = EXPERIMENTS["mechanism"]


def test_after_how_many_seeds():
    assert len(MECHANISM.seeds) == 5 and analysis_seed_counts(MECHANISM) == [3, 4, 5]
    assert analysis_seed_counts(dataclasses.replace(MECHANISM, least_seeds=0)) == [5]
    assert analysis_seed_counts(dataclasses.replace(MECHANISM, least_seeds=9)) == [5]
    for name, experiment in EXPERIMENTS.items():  # a page with interim analyses names its figure
        assert bool(experiment.least_seeds) == (name in PRIMARY)


def test_the_looks_spend_five_percent_together():
    assert spending(3) == pytest.approx([0.05 / 21, 0.2 / 21, 0.8 / 21])
    assert sum(spending(4)) == pytest.approx(0.05) and spending(1) == [0.05]
    found = [confidence(MECHANISM, seeds) for seeds in (2, 3, 4, 5)]
    assert found == pytest.approx([1 - 0.05 / 21] * 2 + [1 - 0.2 / 21, 1 - 0.8 / 21])
    assert confidence(dataclasses.replace(MECHANISM, least_seeds=0), 5) == 0.95


def decided(differences):
    """Whether an experiment decides: interim analyses until it ends, then one verdict."""
    for count in analysis_seed_counts(MECHANISM):
        part = differences[:count].tolist()
        if certain(part, MECHANISM):
            break
    mean, half_width = interval(part, confidence=confidence(MECHANISM, count))
    return abs(mean) > half_width


@pytest.mark.medium
@pytest.mark.parametrize("draw", ["normal", "skewed"])
def test_looks_and_page_together_err_as_rarely_as_they_say(draw):
    """No difference: a page at 95 % after the analyses would err in 6.6 % of the experiments."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(6000, 5))
    if draw == "skewed":  # the difference of two skewed figures
        drawn = rng.exponential(size=(6000, 5)) - rng.exponential(size=(6000, 5))
    rate = np.mean([decided(differences) for differences in drawn])
    assert 0.02 <= rate <= 0.05


def test_a_difference_is_found():
    drawn = 4 + np.random.default_rng(0).normal(size=(500, 5))
    assert np.mean([decided(differences) for differences in drawn]) > 0.95
    assert np.mean([certain(x[:3].tolist(), MECHANISM) for x in drawn]) > 0.05  # some end early
