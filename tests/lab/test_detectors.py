"""lab/detectors.py on simulated runs with a known onset of collapse."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from ragen_jax.configs import sokoban
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import detectors, noise
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.detectors import (
    HEALTHY,
    Reading,
    area,
    area_interval,
    area_p,
    judge,
    read,
    truth,
)
from ragen_jax.lab.model_organism import GROUNDED, MI
from ragen_jax.lab.pages import figures, write_page
from ragen_jax.lab.recorded import read_runs, trim_rows, write_runs

pytestmark = pytest.mark.fast

ENTROPY, SWAP = "update/entropy", "flow/first_turn/za_swap"


def run(mi, grounded, *, entropy=None, swap=None, alarm=None):
    """Rows with probes in step 1 and every 4th step, flow every 5th, an evaluation every 20th."""
    probes = [1, *range(4, 4 * len(mi), 4)]
    rows = [{"step": 0, SUCCESS: 0.4}]
    for step in range(1, probes[-1] + 1):
        row = {"step": step, ENTROPY: 1.0 if entropy is None else entropy(step)}
        if step % 5 == 0 and swap:
            row[SWAP] = swap(step)
        if step % 20 == 0:
            row[SUCCESS] = 0.4 if step < 60 else 0.1
        if step in probes:
            row |= {MI: mi[probes.index(step)], GROUNDED: grounded[probes.index(step)]}
        row["regime/alarm"] = float(alarm is not None and step >= alarm)
        rows.append(row)
    return rows


FALLING = [0.5, 0.5, 0.4, 0.3, 0.2] + [0.1] * 15  # collapsed from the fifth probe, at step 16


def test_the_truth_and_the_scores_of_a_run_by_hand():
    rows = run([2.0, 1.0, 1.5, 0.75] + [0.3] * 16, FALLING, swap=lambda step: 10.0 + step)
    steps, collapsed = truth(rows)
    assert steps[:6].tolist() == [1, 4, 8, 12, 16, 20]
    assert collapsed.tolist() == [False] * 4 + [True] * 16  # 0.2 < 0.25
    reading = read(rows, MI)
    assert reading.step_P[:3].tolist() == [8, 12, 16]
    # The relative fall from the mean of the first two probes, 1.5.
    assert reading.score_P[:3].tolist() == pytest.approx([0.0, 0.5, 0.8])
    assert reading.collapsed_P.tolist() == [False, False] + [True] * 16
    # Step 1 has no flow nearby, and step 4 uses step 5. Then steps 8 and 12 use 10, and 16 uses 15.
    swap = read(rows, SWAP)
    assert swap.score_P[:3].tolist() == pytest.approx([-5 / 15, -5 / 15, -10 / 15])
    # A figure of every step: means of five.
    rows = run([1.0] * 20, FALLING, entropy=lambda step: 2.0 - step / 100)
    first = (2 - 0.02 + 2 - 0.04) / 2  # steps 1 to 3 and 2 to 6
    assert read(rows, ENTROPY).score_P[0] == pytest.approx((first - (2 - 0.08)) / first)
    assert read(rows, "step").score_P[:2].tolist() == [8, 12]
    assert read(rows, "probe/mi") is None


def test_the_area_is_that_of_mann_and_whitney():
    rng = np.random.default_rng(0)
    readings = [
        Reading(np.arange(30), rng.integers(0, 6, 30).astype(float), rng.random(30) < 0.4)
        for _ in range(3)
    ]
    score = np.concatenate([r.score_P for r in readings])
    ill = np.concatenate([r.collapsed_P for r in readings])
    u = mannwhitneyu(score[ill], score[~ill]).statistic
    assert area(readings) == pytest.approx(u / (ill.sum() * (~ill).sum()))
    assert area([Reading(np.arange(2), np.array([0.0, 1.0]), np.array([False, True]))]) == 1
    assert np.isnan(area([Reading(np.arange(2), np.zeros(2), np.zeros(2, bool))]))


def covered(runs, shift, of_runs, varying, *, worlds):
    """(true AUC, coverage, mean width) of the intervals over simulated worlds.

    Half of the runs collapse, by a shift that varies from run to run; figures differ between runs.
    """
    rng = np.random.default_rng(1)

    def world():
        readings = []
        for i in range(runs):
            collapsed = np.arange(39) >= (rng.integers(3, 8) if i < runs // 2 else 39)
            moved = shift * (1 + varying * rng.normal()) * collapsed
            score = moved + of_runs * rng.normal() + rng.normal(size=39)
            readings.append(Reading(np.arange(39), score, collapsed))
        return readings

    true = float(np.mean([area(world()) for _ in range(4 * worlds)]))
    found = [world() for _ in range(worlds)]
    intervals = [area_interval(readings) for readings in found]
    missed = [not low <= true <= high for low, high in intervals]
    assert missed == [area_p(readings, true) < 0.05 for readings in found]
    return true, 1 - np.mean(missed), np.mean([high - low for low, high in intervals])


@pytest.mark.medium
@pytest.mark.parametrize("shift", [0.0, 2.0, 5.0])
def test_the_interval_of_an_area_covers_it(shift):
    """With the runs of experiment detectors and an AUC of 0.5, 0.85 and 0.99."""
    true, held, width = covered(12, shift, 1.0, 0.0, worlds=150)
    assert true == pytest.approx({0.0: 0.5, 2.0: 0.845, 5.0: 0.994}[shift], abs=0.02)
    assert held >= 0.92 and width < {0.0: 0.5, 2.0: 0.35, 5.0: 0.15}[shift]


@pytest.mark.long
@pytest.mark.parametrize("varying", [0.0, 0.4])
@pytest.mark.parametrize("of_runs", [0.2, 1.0])
@pytest.mark.parametrize("runs", [pytest.param(8, marks=pytest.mark.slow), 12])
def test_the_interval_of_an_area_covers_it_everywhere(runs, of_runs, varying):
    """AUC from 0.5 to 1.0, few runs that differ, collapses that differ."""
    for shift in (0.0, 1.0, 2.0, 3.5, 5.0):
        _, held, _ = covered(runs, shift, of_runs, varying, worlds=250)
        assert held >= 0.92, (shift, held)  # 0.93 less the standard error of 250 worlds


def noise_figure(rng, kind, runs):
    """Replaces MI by a figure that is unrelated to the runs."""
    found = {}
    for key, rows in runs.items():
        steps = rng.normal(0, 0.05, sum(MI in row for row in rows))
        values = iter(20 + (steps.cumsum() if kind == "drift" else steps))
        found[key] = [row | {MI: next(values)} if MI in row else row for row in rows]
    return found


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["white", "drift"])
def test_a_detector_of_noise_is_marked_as_such(kind):
    """Sixty noise figures, as on two pages: at most one of them counts as a detector."""
    rng, runs = np.random.default_rng(2), many()
    control = detectors.controls(runs)
    seen = [judge(noise_figure(rng, kind, runs), MI) for _ in range(60)]
    assert sum(detectors.compare_with_noise(x, control) != "**no**" for x in seen) <= 1
    # The control reports how often and how early noise seems to detect a collapse.
    low, middle, high = control[kind].spread("runs")
    assert low <= np.mean([x.runs for x in seen]) <= high
    assert abs(np.median([x.runs for x in seen]) - middle) <= 1
    leads = [x.lead for x in seen if x.lead is not None]
    low, _, high = control[kind].spread("lead")
    assert np.mean([low <= x <= high for x in leads]) > 0.85
    real = judge(runs, MI)
    assert detectors.compare_with_noise(real, control) == "yes"
    turned = {k: [r | ({MI: 9 - r[MI]} if MI in r else {}) for r in v] for k, v in runs.items()}
    assert detectors.compare_with_noise(judge(turned, MI), control) == "yes, in the other direction"


def test_the_control_counts_by_hand():
    """Two probes after the baseline: the AUC of a noise detector is Mann and Whitney's."""
    truths = {
        "ill": noise.Truth(np.array([8, 12]), np.array([False, True]), False, 20.0),
        "well": noise.Truth(np.array([8, 12]), np.array([False, False]), True, None),
        "fine": noise.Truth(np.array([8, 12]), np.array([False, False]), True, None),
    }
    draws = noise.control(truths, "white", baseline=2, level=0.5).draws
    assert set(np.round(draws["auc"] * 5, 9)) == set(map(float, range(6)))  # one against five
    assert draws["auc"].mean() == pytest.approx(0.5, abs=0.03)
    assert set(draws["runs"]) == {0.0, 1.0}
    delays = draws["delay"][draws["runs"] == 1]
    assert set(delays) == {-4.0, 0.0} and np.isnan(draws["delay"][draws["runs"] == 0]).all()
    assert np.array_equal(draws["lead"][draws["runs"] == 1], 20 - (delays + 12))


def many():
    """Six runs that collapse and six that do not, like experiment detectors."""
    rng, runs = np.random.default_rng(4), {}
    for seed in range(6):
        onset = int(rng.integers(4, 9))
        grounded = [0.5] * onset + [0.1] * (40 - onset)
        mi = np.array([2.0] * onset + [0.5] * (40 - onset)) + rng.normal(0, 0.02, 40)
        runs["entropy 0.05", "no filter", seed] = run(mi, grounded)
        runs[HEALTHY[0], "no filter", seed] = run(2.0 + rng.normal(0, 0.02, 40), [0.5] * 40)
    return runs


def test_one_run_that_decides_alone_leaves_the_area_open():
    ill = Reading(np.arange(4), np.arange(4.0), np.arange(4) > 1)
    healthy = Reading(np.arange(4), np.zeros(4), np.zeros(4, bool))
    assert area_interval([ill, healthy]) == (0.0, 1.0)


def world():
    """Three runs that collapse and three that do not: MI detects the collapse, entropy does not."""
    rng = np.random.default_rng(0)
    runs = {}
    for seed in range(3):
        noise = rng.normal(0, 0.02, 20)
        runs["entropy 0.05", "no filter", seed] = run(
            np.array([2.0] * 4 + [0.5] * 16) + noise, FALLING, alarm=20
        )
        runs[HEALTHY[0], "no filter", seed] = run(
            2.0 + noise, [0.5] * 20, alarm=40 if seed else None
        )
    for rows in runs.values():
        for row in rows:
            row[ENTROPY] = 1 + rng.normal(0, 0.1)
    return runs


@pytest.mark.medium
def test_what_tells_is_told_from_what_does_not(tmp_path):
    runs = world()
    mi, entropy = judge(runs, MI), judge(runs, ENTROPY)
    assert mi.auc == 1 and 0.75 < mi.low < 0.9 and mi.runs == 3 and mi.delay == 0
    # Means of two evaluations: 0.4 until step 40, 0.25 at 60; 0.3 is passed after two thirds.
    assert mi.lead == pytest.approx(40 + 20 * 2 / 3 - 16)
    assert mi.false < 0.2
    assert 0.3 < entropy.auc < 0.7 and entropy.low < 0.5 < entropy.high
    assert judge(runs, "probe/mi") is None
    assert detectors.judge_alarm(runs) == (3, 2, 3, 3, 4.0)

    pytest.importorskip("matplotlib")
    path = tmp_path / "detectors.md"
    text = write_page("detectors", path, "run detectors", EXPERIMENTS["detectors"], runs)
    assert "| `probe/mi_seq` | fall | 1.00 (0.78 to 1.00) | " in text
    assert "3 of 3 ~ | +0 ~ | +37 ~ | yes |" in text
    assert "| `regime/alarm` | | | 2 of 3 runs | 3 of 3 | +4 | | |" in text
    assert "In the setting `entropy 0.05`, 3 of 3 runs fell below half" in text
    assert text.index("`probe/mi_seq`") < text.index("`update/entropy`")
    plan = [Arm(*key, sokoban.get_config()) for key in runs]
    write_runs(
        path.with_suffix(".jsonl"),
        plan,
        {key: trim_rows(rows_, figures("detectors")) for key, rows_ in runs.items()},
    )
    again = read_runs(path.with_suffix(".jsonl"), plan)
    assert write_page("detectors", path, "run detectors", EXPERIMENTS["detectors"], again) == text


def test_a_healthy_run_is_judged_by_the_level_of_the_others():
    """One of three runs drifts: nearly all of its probes, few of the others', are false alarms."""
    runs = world()
    noise = np.random.default_rng(5).normal(0, 0.02, 20)
    drifting = np.array([2.0] * 3 + [1.7] * 17) + noise
    runs[HEALTHY[0], "no filter", 2] = run(drifting, [0.5] * 20)
    assert 17 / 18 / 3 <= judge(runs, MI).false < 0.45


def test_noise_without_a_lead_has_no_spread():
    """Runs that keep their success give no detector a lead."""
    nothing = noise.Control({"lead": np.full(5, np.nan), "delay": np.arange(5.0)})
    assert nothing.spread("lead") is None and not nothing.contains("lead", 0.0)
    assert nothing.spread("delay")[1] == 2.0 and nothing.contains("delay", 2.0)
