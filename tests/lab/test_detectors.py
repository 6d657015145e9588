"""lab/detectors.py on runs whose truth is known."""

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from ragen_jax.configs import sokoban
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import detectors
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.detectors import HEALTHY, Reading, area, area_interval, judge, read, truth
from ragen_jax.lab.organism import GROUNDED, MI
from ragen_jax.lab.pages import figures, write_page
from ragen_jax.lab.recorded import cut, read_runs, write_runs

pytestmark = pytest.mark.fast

ENTROPY, SWAP = "update/entropy", "flow/first_turn/za_swap"


def run(mi, grounded, *, entropy=None, swap=None, alarm=None):
    """Rows with a probe in step 1 and every fourth, flow every fifth, an evaluation every 20th."""
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


FALLING = [0.5, 0.5, 0.4, 0.3, 0.2] + [0.1] * 15  # collapsed from the fifth probe, step 16


def test_the_truth_and_the_scores_of_a_run_by_hand():
    rows = run([2.0, 1.0, 1.5, 0.75] + [0.3] * 16, FALLING, swap=lambda step: 10.0 + step)
    steps, collapsed = truth(rows)
    assert steps[:6].tolist() == [1, 4, 8, 12, 16, 20]
    assert collapsed.tolist() == [False] * 4 + [True] * 16  # 0.2 < 0.25
    reading = read(rows, MI)
    assert reading.step_P[:3].tolist() == [8, 12, 16]
    # From the mean of the first two probes, 1.5, downwards.
    assert reading.score_P[:3].tolist() == pytest.approx([0.0, 0.5, 0.8])
    assert reading.collapsed_P.tolist() == [False, False] + [True] * 16
    # Flow of step 5 is the only one near step 4, none near step 1; then 10 for 8 and 12, 15 for 16.
    swap = read(rows, SWAP)
    assert swap.score_P[:3].tolist() == pytest.approx([-5 / 15, -5 / 15, -10 / 15])
    # Every step: means of five.
    rows = run([1.0] * 20, FALLING, entropy=lambda step: 2.0 - step / 100)
    first = (2 - 0.02 + 2 - 0.04) / 2  # steps 1 to 3, steps 2 to 6
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


@pytest.mark.parametrize("shift, of_runs", [(1.0, 0.5), (2.0, 0.5), (0.0, 0.5)])
def test_the_interval_holds_as_often_as_it_says(shift, of_runs):
    """Twelve runs, half of which collapse, whose figures differ from run to run."""
    rng = np.random.default_rng(1)

    def world():
        readings = []
        for i in range(12):
            collapsed = np.arange(39) >= (rng.integers(3, 8) if i < 6 else 39)
            score = shift * collapsed + of_runs * rng.normal() + rng.normal(size=39)
            readings.append(Reading(np.arange(39), score, collapsed))
        return readings

    true = np.mean([area(world()) for _ in range(300)])
    intervals = [area_interval(world()) for _ in range(150)]
    held = np.mean([low <= true <= high for low, high in intervals])
    assert 0.89 <= held <= 0.99
    assert np.mean([high - low for low, high in intervals]) < 0.5


def test_one_run_that_decides_alone_leaves_the_area_open():
    ill = Reading(np.arange(4), np.arange(4.0), np.arange(4) > 1)
    healthy = Reading(np.arange(4), np.zeros(4), np.zeros(4, bool))
    assert area_interval([ill, healthy]) == (0.0, 1.0)


def world():
    """Three runs that collapse and three that do not: MI tells, entropy does not."""
    rng = np.random.default_rng(0)
    runs = {}
    for seed in range(3):
        noise = rng.normal(0, 0.02, 20)
        runs["entropy 0.05", "no filter", seed] = run(
            np.array([2.0] * 4 + [0.5] * 16) + noise, FALLING, alarm=20
        )
        runs[HEALTHY, "no filter", seed] = run(2.0 + noise, [0.5] * 20, alarm=40 if seed else None)
    for rows in runs.values():
        for row in rows:
            row[ENTROPY] = 1 + rng.normal(0, 0.1)
    return runs


def test_what_tells_is_told_from_what_does_not(tmp_path):
    runs = world()
    mi, entropy = judge(runs, MI), judge(runs, ENTROPY)
    assert mi.auc == 1 and mi.low > 0.9 and mi.runs == 3 and mi.delay == 0
    # Means of two evaluations: 0.4 to step 40, 0.25 at 60, below 0.3 two thirds of the way.
    assert mi.lead == pytest.approx(40 + 20 * 2 / 3 - 16)
    assert mi.false < 0.2
    assert 0.3 < entropy.auc < 0.7 and entropy.low < 0.5 < entropy.high
    assert judge(runs, "probe/mi") is None
    assert detectors.judge_alarm(runs) == (3, 2, 3, 3, 4.0)

    pytest.importorskip("matplotlib")
    path = tmp_path / "detectors.md"
    text = write_page("detectors", path, "run detectors", EXPERIMENTS["detectors"], runs)
    assert "| `probe/mi_seq` | fall | 1.00 (1.00 to 1.00) | " in text
    assert "3 of 3 | +0 | +37 |" in text
    assert "| `regime/alarm` | | | 2 of 3 runs | 3 of 3 | +4 | |" in text
    assert "3 of 3 runs with the entropy bonus fell below half" in text
    assert text.index("`probe/mi_seq`") < text.index("`update/entropy`")
    plan = [Arm(*key, sokoban.get_config()) for key in runs]
    write_runs(
        path.with_suffix(".jsonl"),
        plan,
        {key: cut(rows_, figures("detectors")) for key, rows_ in runs.items()},
    )
    again = read_runs(path.with_suffix(".jsonl"), plan)
    assert write_page("detectors", path, "run detectors", EXPERIMENTS["detectors"], again) == text


def test_a_healthy_run_is_judged_by_the_level_of_the_others():
    """One of three drifts: nearly all of its probes are false alarms, those of the others few."""
    runs = world()
    noise = np.random.default_rng(5).normal(0, 0.02, 20)
    drifting = np.array([2.0] * 3 + [1.7] * 17) + noise
    runs[HEALTHY, "no filter", 2] = run(drifting, [0.5] * 20)
    assert 17 / 18 / 3 <= judge(runs, MI).false < 0.45
