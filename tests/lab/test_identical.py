"""lab/identical.py: identical runs count once, and pages report treatments without effect."""

import dataclasses

import pytest
from test_correlations import world as correlated
from test_gains import world as gained

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab import collapse, correlations, detectors, gains, mechanism, treatments
from ragen_jax.lab.correlations import MI_ZSCORE, correlation
from ragen_jax.lab.identical import classes, count_unchanged, describe, distinct, is_unchanged
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast


def rows(value, time=1.0):
    return [{"step": 1, "eval/success": value, "time/cpu": time, "throughput/tokens": time}]


RUNS = {
    ("s", "a", 0): rows(0.1),
    ("s", "b", 0): rows(0.1, time=2.0),  # times are not compared
    ("s", "c", 0): rows(0.2),
    ("s", "a", 1): rows(0.3),
    ("s", "b", 1): rows(0.3),
    ("s", "c", 1): rows(0.3),
}


def test_classes_by_hand():
    found = classes(RUNS)
    assert found == [
        [("s", "a", 0), ("s", "b", 0)],
        [("s", "c", 0)],
        [("s", "a", 1), ("s", "b", 1), ("s", "c", 1)],
    ]
    assert list(distinct(RUNS)) == [keys[0] for keys in found]
    assert is_unchanged(RUNS, "b", "a") and not is_unchanged(RUNS, "c", "a")
    assert not is_unchanged(RUNS, "a", "a")
    assert count_unchanged(RUNS, "c", "a") == (1, 2)
    assert describe(RUNS) == (
        "These arms have identical runs, which count once: "
        "`a` and `b` (seed 0); `a`, `b` and `c` (seed 1)."
    )
    assert describe(distinct(RUNS)) == ""
    whole = {key: value for key, value in RUNS.items() if key[1] != "c"}
    assert describe(whole) == "These arms have identical runs, which count once: `a` and `b`."
    two = RUNS | {("r", "c", 0): rows(0.2)}
    assert "`c` (s) and `c` (r) (seed 0)" in describe(two)


@pytest.mark.medium
def test_a_correlation_counts_identical_runs_once():
    """Three copies of an extreme treatment would shift the correlation and narrow its interval."""
    runs = correlated()
    copies = dict(runs)
    for name in ("x", "y", "z"):
        copies |= {("s", name, seed): list(runs["s", "t11", seed]) for seed in range(3)}
    assert correlation(copies, MI_ZSCORE) == correlation(runs, MI_ZSCORE)
    experiment = EXPERIMENTS["figures"]
    assert correlations.verdicts(experiment, copies) == correlations.verdicts(experiment, runs)
    text = correlations.markdown(experiment, copies, "x.png")
    assert "Without copies of identical runs, 36 runs of 12 treatments remain" in text


def test_an_area_counts_identical_runs_once():
    from test_detectors import MI, world

    runs = world()
    copies = runs | {(s, "copy", n): list(x) for (s, _, n), x in runs.items()}
    assert detectors.judge(copies, MI) == detectors.judge(runs, MI)
    assert detectors.verdicts(EXPERIMENTS["detectors"], copies) == detectors.verdicts(
        EXPERIMENTS["detectors"], runs
    )


def test_a_claim_on_a_treatment_that_changed_nothing_is_not_testable():
    runs = gained((0.1, 0.1))
    idle = {(s, t, n): list(runs[s, "none", n]) if s == "a" else x for (s, t, n), x in runs.items()}
    experiment = dataclasses.replace(
        EXPERIMENTS["groups"],
        claims=(Claim("", "top-p", settings=("a",)), Claim("", "top-p", sign=0, settings=("a",))),
    )
    found = gains.verdicts(experiment, idle)
    assert [v.verdict for v in found] == ["not testable (identical runs)"] * 2
    assert [v.p for v in found] == [None, None]
    text = gains.markdown(experiment, idle, "x.png")
    assert "| a | top-p | 80 | identical runs |" in text and "| b | top-p | 80 | +0.1" in text


def test_cures_count_a_filter_that_changed_nothing_once():
    from test_treatments import world

    runs = world()
    for name, of in (("top-p 1.0", "no filter"), ("smallest variance", "no filter")):
        runs |= {("s", name, seed): list(runs["s", of, seed]) for seed in range(3)}
    found = {v.claim: v for v in treatments.verdicts(EXPERIMENTS["cures"], runs)}
    once = [v for claim, v in found.items() if "top-p 1.0" in claim]
    again = [v for claim, v in found.items() if "smallest" in claim]
    assert len(once) == len(again) == 2 and all(v.p is not None for v in once)
    assert {v.verdict for v in again} == {"not testable (identical runs)"}
    assert {v.figures for v in again} == {"identical to `top-p 1.0`, counted once"}
    idle = runs | {("s", "top-p 1.0", n): list(runs["s", "top-p 0.9", n]) for n in range(3)}
    found = treatments.verdicts(EXPERIMENTS["cures"], idle)
    assert found[0].figures == "top-p 1.0 changed nothing" and found[0].p is None
    text = treatments.markdown(EXPERIMENTS["cures"], runs, "x.png")
    assert "| identical runs |" in text
    assert "correction for 4 treatments with different runs" in text


@pytest.mark.medium
def test_other_pages_say_that_a_treatment_changed_nothing(tmp_path):
    from test_lab import COLLAPSED, of_seed
    from test_mechanism import world

    runs = world(-0.1, -0.02, 0.9, 0.4)
    for seed in range(5):
        runs["s", mechanism.UPPER, seed] = runs["s", mechanism.LOWER, seed]
    found = mechanism.verdicts(EXPERIMENTS["mechanism"], runs)
    assert found[1].verdict == "not testable (identical runs)" and found[1].p is None
    same = {("a", f, s): of_seed(COLLAPSED, s) for f in ("f", "none") for s in range(3)}
    assert "| a | identical runs |" in collapse.markdown(EXPERIMENTS["collapse"], same, "x.png")
    pytest.importorskip("matplotlib")
    text = write_page("collapse", tmp_path / "c.md", "", EXPERIMENTS["collapse"], same)
    assert "These arms have identical runs, which count once: `f` and `none`." in text
