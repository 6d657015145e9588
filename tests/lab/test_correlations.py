"""lab/correlations.py on simulated runs with known correlations."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import correlations
from ragen_jax.lab.correlations import ENTROPY, MI_SEQ, MI_ZSCORE, correlation, verdict
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast


def world(seed=0):
    """Twelve treatments, three seeds: the MI z-score follows success, MI per sequence falls with
    it, and entropy is noise."""
    rng = np.random.default_rng(seed)
    runs = {}
    for treatment in range(12):
        for number in range(3):
            success = 0.03 * treatment + rng.normal(0, 0.02)
            row = {MI_ZSCORE: success + rng.normal(0, 0.05), MI_SEQ: 1 - success}
            row |= {ENTROPY: rng.normal(), "probe/mi": 0.5}
            rows = [{"step": 0, SUCCESS: 9.0}]
            for step in range(1, 21):
                last = {SUCCESS: success} if step % 5 == 0 else {}
                rows.append({"step": step, **(row if step > 10 else {MI_ZSCORE: 9.0}), **last})
            runs["s", f"t{treatment}", number] = rows
    return runs


def test_correlations_of_known_runs():
    runs = world()
    value, low, high = correlation(runs, MI_ZSCORE)
    assert 0.7 < low < value < high < 1
    by_hand = spearmanr(
        correlations.ends(runs, MI_ZSCORE), correlations.ends(runs, SUCCESS)
    ).statistic
    assert value == pytest.approx(by_hand)
    assert correlations.ends(runs, SUCCESS).max() < 1  # only the end of a run counts
    value, low, high = correlation(runs, MI_SEQ)
    assert value == pytest.approx(-1, abs=1e-5) and high < -0.99
    value, low, high = correlation(runs, ENTROPY)
    assert low < 0 < high
    assert correlation(runs, "probe/mi") is None  # constant
    assert correlation(runs, "probe/mi_seq") is None  # not measured


@pytest.mark.medium
@pytest.mark.parametrize("of_treatment", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_the_interval_holds_as_often_as_it_says(rho, of_treatment):
    """Two normal figures; a fraction of their variance comes from the treatment."""
    rng = np.random.default_rng(1)
    treatment_R = [str(i // 3) for i in range(90)]
    root = np.linalg.cholesky([[1, rho], [rho, 1]])
    truth = 6 / np.pi * np.arcsin(rho / 2)
    inside = 0
    for _ in range(200):
        common, own = rng.standard_normal((30, 1, 2)), rng.standard_normal((30, 3, 2))
        mixed = np.sqrt(of_treatment) * common + np.sqrt(1 - of_treatment) * own
        x, y = (mixed @ root.T).reshape(-1, 2).T
        _, low, high = correlations.with_interval(
            lambda kept, x=x, y=y: float(spearmanr(x[kept], y[kept]).statistic), treatment_R
        )
        inside += low <= truth <= high
    assert 0.90 <= inside / 200 <= 0.99


def test_verdicts():
    for name, low, high, expected in (
        (MI_ZSCORE, 0.1, 0.5, "reproduced"),
        (MI_ZSCORE, -0.1, 0.5, "undecided"),
        (MI_ZSCORE, -0.5, -0.1, "reversed"),
        (ENTROPY, -0.2, 0.2, "reproduced"),
        (ENTROPY, -0.4, 0.2, "undecided"),
        (ENTROPY, -0.6, -0.4, "reversed"),
        (ENTROPY, 0.4, 0.6, "reversed"),
    ):
        assert verdict(name, low, high) == expected


@pytest.mark.medium
def test_the_page(tmp_path):
    experiment = EXPERIMENTS["figures"]
    assert (experiment.treatments, experiment.common_fields, experiment.seeds) == (
        EXPERIMENTS["cures"].treatments,
        EXPERIMENTS["cures"].common_fields,
        EXPERIMENTS["cures"].seeds,
    )  # names the runs that it uses
    text = write_page("figures", tmp_path / "figures.md", "run figures", experiment, world())
    assert "The runs are the 36 runs of experiment cures: 12 treatments" in text
    assert f"| `{MI_ZSCORE}` | +0.39 | +0." in text and "**reproduced**" in text
    assert f"| `{MI_SEQ}` | +0.22 | -1.00" in text and "**reversed**" in text
    assert (tmp_path / "figures.png").stat().st_size > 5000
