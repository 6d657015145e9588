"""lab/dead_groups.py on simulated runs with known correlations."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import dead_groups
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.dead_groups import ALIVE, MI, VALID, verdicts
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast
EXPERIMENT = EXPERIMENTS["dead_groups"]


def run(early, late, initial, final, kept):
    """Twenty steps with an evaluation every ten and a probe in steps 1, 10 and 20."""
    rows = [{"step": 0, SUCCESS: initial}]
    for step in range(1, 21):
        row = {"step": step, ALIVE: 1 - (early if step <= 10 else late), "update/count": 4.0}
        if step in (1, 10, 20):
            row |= {MI: {1: 2.0, 10: 1.5, 20: 2.0 * kept}[step], VALID: 0.98}
        if step % 10 == 0:
            row[SUCCESS] = final
        rows.append(row)
    return rows


def world(*, through_initial=False, blind=True, seeds=4):
    """Ten settings: the rate is high where final success is low, or where initial success is."""
    rng, runs = np.random.default_rng(0), {}
    shift = rng.normal(0, 0.1, (2, 10))  # of each setting
    for seed in range(seeds):
        for i in range(10):
            initial = 0.1 + 0.05 * i if through_initial else 0.3 + 0.001 * ((7 * i) % 10)
            early = 0.9 - 0.08 * i + rng.normal(0, 0.002)
            final = 0.2 + 0.05 * i + rng.normal(0, 0.002)
            if through_initial:  # both depend on initial success, plus unrelated noise
                early, final = early + shift[0, i], final + shift[1, i]
            kept = 0.2 + 0.08 * ((3 * i + 2 * seed) % 10)
            late = early + (rng.normal(0, 0.1) if blind else -0.3 * kept)
            runs[f"s{i}", "no filter", seed] = run(early, late, initial, final, kept)
    return runs


def test_what_is_read_by_hand():
    reading = dead_groups.read(run(0.4, 0.6, 0.3, 0.5, 0.25))
    assert reading == pytest.approx((0.4, 0.6, 0.3, 0.5, 0.25))
    assert dead_groups.r_squared(np.array([0.0, 1.0, 2.0]), np.array([5.0, 3.0, 1.0])) == 1
    assert dead_groups.r_squared(np.zeros(3), np.arange(3.0)) == 0
    # Ranks of y that are those of x leave nothing.
    assert not dead_groups.residuals(np.array([1.0, 5.0, 9.0]), np.array([2.0, 3.0, 4.0])).any()
    assert dead_groups.residuals(np.array([1.0, 5.0]), np.ones(2)).tolist() == [-0.5, 0.5]


def test_verdicts():
    words = [v.verdict for v in verdicts(EXPERIMENT, world())]
    assert words[:2] == ["reproduced", "reproduced"]
    first, beyond, _ = verdicts(EXPERIMENT, world(through_initial=True))
    assert first.verdict == "reproduced" and beyond.verdict == "undecided"
    assert verdicts(EXPERIMENT, world(blind=False))[2].verdict == "reversed"
    turned = {
        key: [r | ({SUCCESS: 1 - r[SUCCESS]} if SUCCESS in r and r["step"] else {}) for r in rows]
        for key, rows in world().items()
    }
    assert verdicts(EXPERIMENT, turned)[0].verdict == "reversed"
    few = {key: rows for key, rows in world().items() if key[0] in ("s0", "s1", "s2")}
    assert verdicts(EXPERIMENT, few)[0].verdict == "too few settings"


def test_equal_agents_cannot_tell_what_success_before_training_explains():
    same = {
        key: [row | ({SUCCESS: 0.4} if row["step"] == 0 else {}) for row in rows]
        for key, rows in world().items()
    }
    first, beyond, _ = verdicts(EXPERIMENT, same)
    assert first.verdict == "reproduced"
    assert (beyond.verdict, beyond.p) == ("not testable", None)
    assert beyond.figures == "success before training is 0.40 in all settings"


def test_a_constant_rate_predicts_nothing():
    constant = {
        key: [row | ({ALIVE: 0.5} if ALIVE in row else {}) for row in rows]
        for key, rows in world().items()
    }
    assert [(v.verdict, v.p) for v in verdicts(EXPERIMENT, constant)[:2]] == [("undecided", 1)] * 2


def test_noise_is_blind():
    """Many seeds of a rate that is unrelated to information."""
    *_, seen = verdicts(EXPERIMENT, world(seeds=40))
    assert seen.verdict == "reproduced" and seen.p < 0.05


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_page("dead_groups", tmp_path / "dead_groups.md", "run x", EXPERIMENT, world())
    assert "40 runs of 20 steps: 10 settings, seeds 0, 1, 2, 3." in text
    assert "explains R2 = 1.00 of the variance of final success (the paper: 0.617" in text
    assert "| s0 | 0.90 |" in text and (tmp_path / "dead_groups.png").exists()
