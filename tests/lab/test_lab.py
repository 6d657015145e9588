"""The laboratory: its arms, and what its report says of runs made by hand."""

import math

import pytest

from ragen_jax.configs import sokoban
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import report
from ragen_jax.lab.arms import arms, finished
from ragen_jax.lab.report import ENTROPY, MI, MI_SEQ, SUCCESS

pytestmark = pytest.mark.fast


def rows(success, mi, *, entropy=0.2, updates=4):
    """Rows of a run: success every 10 steps from step 0, MI and entropy at every step from 1."""
    found = [{"step": 0, SUCCESS: success[0]}]
    for step in range(1, len(mi) + 1):
        row = {"step": step, MI: mi[step - 1], ENTROPY: entropy, "update/count": updates}
        row[MI_SEQ] = 1.0  # never falls
        row |= {report.VALID: 0.9, report.RETRIEVAL: 1.0}
        if step % 10 == 0:
            row[SUCCESS] = success[step // 10]
        found.append(row)
    return found


HEALTHY = rows([0.4, 0.5, 0.6], [0.15] * 20)
# At step 10 MI is the mean of steps 9 to 13: (2 * 0.15 + 3 * 0) / 5 = 0.06 < 0.075.
COLLAPSED = rows([0.4, 0.5, 0.2], [0.15] * 10 + [0.0] * 10)


def test_when_half_is_lost():
    """One rule: at the evaluations, of the highest so far, on straight lines."""
    for name in (SUCCESS, MI):
        assert report.lost(HEALTHY, name) is None
    # From 0.5 at step 10 to 0.2 at step 20 it passes 0.25 behind five sixths of the way.
    assert report.lost(COLLAPSED, SUCCESS) == pytest.approx(10 + 10 * 5 / 6)
    back = rows([0.4, 0.1, 0.6], [0.1] * 20)
    assert report.lost(back, SUCCESS) == pytest.approx(10 * 2 / 3)
    # MI from 0.15 at step 0 to 0.06 at step 10 passes 0.075 behind five sixths, too.
    steps, values = report.at_evaluations(COLLAPSED, MI)
    assert steps.tolist() == [0, 10, 20]
    assert values.tolist() == pytest.approx([0.15, 0.06, 0.0])
    assert report.lost(COLLAPSED, MI) == pytest.approx(10 * 5 / 6)
    assert report.lost(COLLAPSED, MI_SEQ) is None
    # A rise before the crash: half of what it had risen to, not of the start.
    risen = rows([0.4, 0.4, 0.4, 0.4], [0.1] * 8 + [0.4] * 8 + [0.15] * 14)
    assert report.lost(risen, MI) == pytest.approx(10 + 10 * (0.4 - 0.2) / (0.4 - 0.15))
    assert report.share(COLLAPSED, ENTROPY, 10, of_first=True) == pytest.approx(1.0)
    assert report.share(COLLAPSED, MI, 5) == pytest.approx((0.15 + 0.06) / 2 / 0.15)
    assert report.share(risen, MI, 20) == pytest.approx(0.15 / 0.4)
    assert report.share(risen, MI, 20, of_first=True) == pytest.approx(1.5)
    # A figure that ends, as it does where no reply holds a reasoning, is read as far as it goes.
    assert report.lost(rows([0.4, 0.5, 0.2], [0.15] * 5), MI) is None


def test_arms_are_compared_after_equally_many_updates():
    rising = rows([0.4, 0.5, 0.6], [0.1 * i for i in range(20)], updates=2)
    # 20 updates are ten steps: MI 0.5 to 0.9 there.
    assert report.at_update(rising, MI, 20) == pytest.approx(0.7)
    assert report.at_update(rising, SUCCESS, 20) == 0.5
    assert report.at_update(rising, SUCCESS, 19) == 0.4
    assert report.updates(rising) == 40
    runs = {
        ("s", "filter", 0): rising,  # 40 updates
        ("s", "none", 0): rows([0.4, 0.3, 0.2], [0.0] * 20, updates=4),  # 80
    }
    # After 40 updates the second run is at step 10.
    mean, half_width = report.compare(runs, SUCCESS)["s"]
    assert mean == pytest.approx(0.6 - 0.3) and half_width == math.inf


def test_interval_by_hand():
    # 1, 2, 3: standard deviation 1, t with two degrees of freedom 4.303.
    mean, half_width = report.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_verdicts_by_hand():
    fine = {("a", f, s): HEALTHY for f in ("filter", "none") for s in (0, 1)}
    assert "Not tested" in report.order_verdict(fine)
    assert "Not tested" in report.filter_verdict(fine)
    bad = fine | {("a", "none", 0): COLLAPSED, ("a", "none", 1): COLLAPSED}
    text = report.order_verdict(bad)
    assert text.startswith("**Reproduced.** 2 of 4 runs lost half of their success. In 2 of them ")
    assert "in 0 `mi_seq` had; in 2 of the former entropy" in text
    # At step 18.3 a sixth of the 0.06 of step 10 was left.
    assert "`mi_released` stood at 0.07 to 0.07 (median 0.07) of its highest" in text
    assert "`mi_seq` at 1.00 to 1.00 (median 1.00)" in text
    text = report.filter_verdict(bad)
    assert text.startswith("**Reproduced.** 2 runs with none")
    assert "on average: 0.20 with none, 0.60 with filter." in text
    both = bad | {("a", "filter", 0): COLLAPSED}
    assert report.filter_verdict(both).startswith("**Reproduced in part.**")
    # Success was lost, but not MI.
    other = rows([0.4, 0.5, 0.1], [0.15] * 20)
    none = {key: other for key in fine}
    assert report.order_verdict(none).startswith("**Not reproduced at this scale.**")
    assert report.filter_verdict(none).startswith("**Not reproduced at this scale.**")
    # MI went behind success (which passed half at step 6.7; MI does at 8.3).
    late = {("a", "none", 0): rows([0.4, 0.1, 0.1], [0.15] * 10 + [0.0] * 10)}
    assert "In 0 of them `mi_released`" in report.order_verdict(late)
    # Entropy had tripled by then.
    wild = rows([0.4, 0.5, 0.2], [0.15] * 10 + [0.0] * 10)
    for row in wild[6:]:
        row[ENTROPY] = 1.0
    assert "0 of the former entropy" in report.order_verdict({("a", "none", 0): wild})


def test_the_alarm_is_judged_by_when_it_came():
    def alarmed(made, step):
        return [row | {"regime/alarm": row["step"] >= step} for row in made]

    runs = {
        ("a", "none", 0): alarmed(COLLAPSED, 18),
        ("a", "none", 1): alarmed(COLLAPSED, 19),
        ("a", "none", 2): COLLAPSED,
        ("a", "filter", 0): alarmed(HEALTHY, 3),
        ("a", "filter", 1): HEALTHY,
    }
    assert report.alarm_step(runs["a", "none", 0]) == 18
    assert report.alarm_verdict(runs) == (
        "Of the 3 runs that lost half of their success it came before in 1, later in 1, never in "
        "1. Of the other 2 it came in 1."
    )


def test_a_report_is_written(tmp_path):
    runs = {("a", "filter", 0): HEALTHY, ("a", "none", 0): COLLAPSED}
    pytest.importorskip("matplotlib")
    path = report.write_report("collapse", runs, tmp_path / "docs")
    text = path.read_text()
    assert "| a | none | 0 | 80 | 0.20, 0.50 | 0.15 -> 0.00 | 1.00 -> 1.00 | 0.20 ->" in text
    # Neither grounded facts nor flow in these rows.
    assert "| 0.90 -> 0.90 |  |  | 18 | 8 |  |" in text
    assert (tmp_path / "docs" / "lab_collapse.png").read_bytes().startswith(b"\x89PNG")


def test_the_arms_of_an_experiment():
    plan = arms(EXPERIMENTS["collapse"], sokoban.get_config())
    assert len(plan) == 5 * 2 * 3 == len({arm.folder for arm in plan})
    assert sum(arm.config.steps for arm in plan) == 1800
    assert {arm.seed for arm in plan[:10]} == {0}
    for arm in plan:
        assert arm.config.seed == arm.seed
        assert (arm.config.filter.strategy == "none") == (arm.filter == "no filter")
        assert arm.config.algorithm.entropy_coef == (
            0.1 if arm.setting == "entropy 0.1" else 0.05 if "0.05" in arm.setting else 0.001
        )
        assert all(rule.action == "warn" for rule in arm.config.stopping.values())
    config = sokoban.get_config()
    config.rollout.groups = 0
    with pytest.raises(ValueError, match="rollout.groups is 0"):
        arms(EXPERIMENTS["collapse"], config)


def test_what_is_finished_is_not_run_again(tmp_path):
    assert not finished(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert not finished(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert finished(tmp_path, 3)
