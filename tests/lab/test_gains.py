"""lab/gains.py on simulated runs with known gains, and the claims of the experiments."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab import gains, rivals
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.gains import MI, TIME, judge
from ragen_jax.lab.pages import PAGES, write_page

pytestmark = pytest.mark.fast


EXPERIMENT = EXPERIMENTS["groups"]


def run(success, mi, time=1.0):
    """Twenty steps: success every fifth step, MI every second."""
    rows = [{"step": 0, SUCCESS: 0.3}]
    for step in range(1, 21):
        row = {"step": step, "update/count": 4.0, TIME: time}
        if step % 5 == 0:
            row[SUCCESS] = success if step > 10 else 9.0  # only the last two count
        if step % 2 == 0:
            row[MI] = mi
        rows.append(row)
    return rows


def world(gain, noise=0.004):
    """Two settings with the given gains of filtered runs; three seeds with different levels."""
    rng = np.random.default_rng(0)
    runs = {}
    for seed in range(3):
        for setting, extra in zip(("a", "b"), gain, strict=True):
            level = 0.4 + 0.05 * seed
            for name, more in (("top-p", extra), ("none", 0.0)):
                runs[setting, name, seed] = run(
                    level + more + rng.normal(0, noise), 1.0 + more, 1.0 - more
                )
    return runs


def test_the_end_of_a_run():
    rows = run(0.5, 2.0)
    assert gains.end(rows, SUCCESS) == 0.5 and gains.end(rows, MI) == 2.0
    assert gains.end(rows[:8], SUCCESS) == pytest.approx((0.3 + 9.0) / 2)
    assert np.isnan(gains.end(rows, "update/entropy"))


def test_verdicts():
    runs = world((0.1, -0.1))
    for claim, expected in (
        (Claim("", "top-p", settings=("a",)), "reproduced"),
        (Claim("", "top-p", sign=-1, settings=("a",)), "reversed"),
        (Claim("", "top-p", settings=("b",)), "reversed"),
        (Claim("", "top-p"), "undecided"),  # +0.1 and -0.1
        (Claim("", "top-p", sign=0), "reproduced"),
        (Claim("", "top-p", sign=0, settings=("a",)), "reversed"),
        (Claim("", "top-p", figure=TIME, sign=-1, settings=("a",)), "reproduced"),
    ):
        found = judge(claim, runs, EXPERIMENT)
        assert found.verdict == expected and found.half_width < 0.05
        assert (found.p < 0.05) == (expected != "undecided")
    found = judge(Claim("", "top-p", settings=("a",)), runs, EXPERIMENT)
    assert found.mean == pytest.approx(0.1, abs=0.02)
    wide = world((0.02, 0.02), noise=0.03)
    assert judge(Claim("", "top-p", sign=0), wide, EXPERIMENT).verdict == "undecided"


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    experiment = dataclasses.replace(
        EXPERIMENTS["groups"], claims=(Claim("table 5: success", "top-p", settings=("a",)),)
    )
    text = write_page("groups", tmp_path / "g.md", "run groups", experiment, world((0.1, -0.1)))
    assert "# Laboratory: groups" in text
    assert "| table 5: success | top-p | a | `eval/success` | higher | +0." in text
    assert "| **reproduced** |" in text
    assert "| a | none | 80 |  | 0.4" in text and "| b | top-p | 80 | -0.1" in text
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")
    # The table shows the figures that the runs have.
    assert "| success | mi_seq | CPU s per step |" in text and "| 0.9 |" in text
    older = world((0.1, -0.1))
    for rows in older.values():
        for row in rows:
            row.pop(TIME, None)
    text = gains.markdown(experiment, older, "g.png")
    assert "| success | mi_seq |\n" in text and "nan" not in text.partition("## Every arm")[2]


def test_claims_name_what_their_experiment_has():
    judged = [name for name, page in PAGES.items() if page is gains]
    for name in judged:
        experiment = EXPERIMENTS[name]
        *others, _ = experiment.treatments
        assert experiment.claims
        for claim in experiment.claims:
            assert claim.treatment in (experiment.treatments if claim.since_start else others)
            assert set(claim.settings) <= set(experiment.settings)
            assert claim.figure in gains.FIGURES
    judged += [name for name, page in PAGES.items() if page is rivals]  # tests/lab/test_rivals.py
    assert not any(x.claims for name, x in EXPERIMENTS.items() if name not in judged)


def test_what_has_become_of_the_same_runs():
    """Replies of 30 tokens at the start and 20 at the end, whatever the lengths in other arms."""
    runs = world((0.1, 0.1))
    for (_, treatment, seed), rows in runs.items():
        for row in rows[1:]:
            long = 30.0 if row["step"] <= 10 else 20.0 + 0.1 * seed
            row[gains.LENGTH] = long if treatment == "top-p" else 100.0
    claim = Claim("", "top-p", gains.LENGTH, -1, since_start=True)
    found = judge(claim, runs, EXPERIMENT)
    assert found.verdict == "reproduced" and found.half_width < 0.5
    assert found.mean == pytest.approx(-9.9)
    other = judge(dataclasses.replace(claim, treatment="none"), runs, EXPERIMENT)
    assert other.verdict == "undecided"
    # The start of success is the first evaluation, 0.3; the end is 0.5 to 0.6.
    claim = Claim("", "top-p", since_start=True)
    assert judge(claim, runs, EXPERIMENT).mean == pytest.approx(0.25, abs=0.02)


@pytest.mark.medium
def test_spread_of_reward_variance_against_gain():
    """Six settings, whose filter gains a tenth of their spread of reward variance."""
    rng = np.random.default_rng(0)
    runs = {}
    for i in range(6):
        for seed in range(3):
            for treatment, more in (("top-p", 0.04 * i), ("none", 0.0)):
                rows = run(0.4 + more + rng.normal(0, 0.002), 1.0)
                for row in rows[1:]:
                    row |= {
                        gains.VARIANCE: 2.0,
                        gains.SPREAD: 0.8 * i if treatment == "none" else 9,
                    }
                runs[f"s{i}", treatment, seed] = rows
    found = gains.predictor(runs)
    assert found.points["s3"] == pytest.approx((1.2, 0.12), abs=0.01)
    assert found.correlation == pytest.approx(1) and found.verdict == "reproduced"
    assert found.p == pytest.approx(2 / 720)  # of all orders of six: this one and its reverse
    text = gains.markdown(dataclasses.replace(EXPERIMENTS["groups"], claims=()), runs, "g.png")
    assert "Spearman +1.00 (exact p = 0.003), over settings: **reproduced**" in text
    assert "| s3 | 1.20 | +0.1" in text
    few = {key: rows for key, rows in runs.items() if key[0] < "s5"}
    assert gains.predictor(few).verdict == "too few settings" and gains.predictor(few).p is None
    text = gains.markdown(dataclasses.replace(EXPERIMENT, claims=()), few, "g.png")
    assert "**too few settings**. Fewer than 6 settings cannot decide" in text
    assert gains.predictor({key: rows for key, rows in runs.items() if key[0] < "s2"}) is None
