"""The laboratory: its arms, and its reports of hand-written runs."""

import dataclasses
import datetime
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ragen_jax.config.stored import fields_of
from ragen_jax.configs import organism as organism_config
from ragen_jax.configs import sokoban
from ragen_jax.configs.base import Config
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.core import progress
from ragen_jax.core.domains import freeze
from ragen_jax.diagnostics import intervals
from ragen_jax.lab import arms as lab_arms
from ragen_jax.lab import collapse, curves
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab.arms import Arm, arms, is_finished, run_arms, set_dates, shorten
from ragen_jax.lab.collapse import ENTROPY, MI, MI_SEQ
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.pages import PAGES, figures, write_page
from ragen_jax.lab.recorded import read_runs, trim_rows, write_runs

pytestmark = pytest.mark.fast


def rows(success, mi, *, entropy=0.2, updates=4):
    """Rows of a run: success every 10 steps from step 0, MI and entropy in each step from 1."""
    found = [{"step": 0, SUCCESS: success[0]}]
    for step in range(1, len(mi) + 1):
        row = {"step": step, MI: mi[step - 1], ENTROPY: entropy, "update/count": updates}
        row[MI_SEQ] = 1.0  # never falls
        row |= {collapse.VALID: 0.9, collapse.RETRIEVAL: 1.0}
        if step % 10 == 0:
            row[SUCCESS] = success[step // 10]
        found.append(row)
    return found


def of_seed(made, seed, name=""):
    """The same rows, marked so that two seeds are not identical runs."""
    return [row | {"seed": f"{name}{seed}"} for row in made]


HEALTHY = rows([0.4, 0.5, 0.6], [0.15] * 20)
# At step 10, MI is the mean of steps 9 to 13: (2 * 0.15 + 3 * 0) / 5 = 0.06 < 0.075.
COLLAPSED = rows([0.4, 0.5, 0.2], [0.15] * 10 + [0.0] * 10)


def test_when_half_is_lost():
    """At evaluations, half of the highest value so far, with linear interpolation."""
    for name in (SUCCESS, MI):
        assert collapse.step_of_loss(HEALTHY, name) is None
    # From 0.5 at step 10 to 0.2 at step 20, it passes 0.25 after five sixths of the way.
    assert collapse.step_of_loss(COLLAPSED, SUCCESS) == pytest.approx(10 + 10 * 5 / 6)
    back = rows([0.4, 0.1, 0.6], [0.1] * 20)
    assert collapse.step_of_loss(back, SUCCESS) == pytest.approx(10 * 2 / 3)
    # MI from 0.15 at step 0 to 0.06 at step 10 also passes 0.075 after five sixths of the way.
    steps, values = curves.at_evaluations(COLLAPSED, MI)
    assert steps.tolist() == [0, 10, 20]
    assert values.tolist() == pytest.approx([0.15, 0.06, 0.0])
    assert collapse.step_of_loss(COLLAPSED, MI) == pytest.approx(10 * 5 / 6)
    assert collapse.step_of_loss(COLLAPSED, MI_SEQ) is None
    # A rise before the crash: half of the highest value, not of the start.
    risen = rows([0.4, 0.4, 0.4, 0.4], [0.1] * 8 + [0.4] * 8 + [0.15] * 14)
    assert collapse.step_of_loss(risen, MI) == pytest.approx(10 + 10 * (0.4 - 0.2) / (0.4 - 0.15))
    assert collapse.share(COLLAPSED, ENTROPY, 10, of_first=True) == pytest.approx(1.0)
    assert collapse.share(COLLAPSED, MI, 5) == pytest.approx((0.15 + 0.06) / 2 / 0.15)
    assert collapse.share(risen, MI, 20) == pytest.approx(0.15 / 0.4)
    assert collapse.share(risen, MI, 20, of_first=True) == pytest.approx(1.5)
    # A figure that ends early (as when no reply has a reasoning) is read until it ends.
    assert collapse.step_of_loss(rows([0.4, 0.5, 0.2], [0.15] * 5), MI) is None


def test_arms_are_compared_after_equally_many_updates():
    rising = rows([0.4, 0.5, 0.6], [0.1 * i for i in range(20)], updates=2)
    # 20 updates are ten steps, with MI from 0.5 to 0.9.
    assert curves.at_update(rising, MI, 20) == pytest.approx(0.7)
    assert curves.at_update(rising, SUCCESS, 20) == 0.5
    assert curves.at_update(rising, SUCCESS, 19) == 0.4
    assert curves.updates(rising) == 40
    runs = {
        ("s", "filter", 0): rising,  # 40 updates
        ("s", "none", 0): rows([0.4, 0.3, 0.2], [0.0] * 20, updates=4),  # 80
    }
    # After 40 updates, the second run is at step 10.
    mean, half_width = curves.compare(runs, SUCCESS, "filter", "none")["s"]
    assert mean == pytest.approx(0.6 - 0.3) and half_width == math.inf


def test_interval_by_hand():
    # 1, 2, 3: standard deviation 1, t with two degrees of freedom 4.303.
    mean, half_width = intervals.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half_width == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_verdicts_by_hand():
    fine = {("a", f, s): of_seed(HEALTHY, s, f) for f in ("filter", "none") for s in range(6)}
    assert "Not testable" in collapse.order_verdict(fine)
    assert "Not testable" in collapse.filter_verdict(fine)
    bad = fine | {("a", "none", s): of_seed(COLLAPSED, s) for s in range(6)}
    text = collapse.order_verdict(bad)
    assert text.startswith("**Reproduced.** 6 of 12 runs lost half of their success. ")
    assert "`mi_released` had lost half in 6 of them and `mi_seq` in 0. In 6 of the runs" in text
    five = {key: value for key, value in bad.items() if key[2] < 5}
    assert collapse.order_verdict(five).startswith("**Undecided.**")  # five cannot decide
    # At step 18.3, a sixth of the 0.06 of step 10 is left.
    assert "`mi_released` was 0.07 to 0.07 (median 0.07) times its highest" in text
    assert "`mi_seq` 1.00 to 1.00 (median 1.00)" in text
    text = collapse.filter_verdict(bad)
    assert text.startswith("**Reproduced.** 6 runs with none")
    assert "these pairs is 0.20 with none and 0.60 with filter." in text
    both = bad | {("a", "filter", 0): of_seed(COLLAPSED, 0, "filter")}
    assert collapse.filter_verdict(both).startswith("**Undecided.**")
    # Success is lost, but not MI.
    other = rows([0.4, 0.5, 0.1], [0.15] * 20)
    none = {key: of_seed(other, key[2], key[1]) for key in fine}
    assert collapse.order_verdict(none).startswith("**Reversed.**")
    assert collapse.filter_verdict(none).startswith("**Reversed.**")
    # Runs that the filter left identical are no evidence about the filter.
    same = {key: of_seed(other, key[2]) for key in fine}
    assert collapse.filter_count(same) == (0, 0, 0)
    assert collapse.verdicts(EXPERIMENTS["collapse"], same)[1].verdict == "not testable"
    # A pair whose runs disagree counts for neither side.
    assert collapse.order_count(bad | {("a", "filter", 0): other}) == (5, 0, 1)
    # MI fell after success (success passes half at step 6.7, MI at 8.3).
    late = {("a", "none", 0): rows([0.4, 0.1, 0.1], [0.15] * 10 + [0.0] * 10)}
    assert "`mi_released` had lost half in 0 of them" in collapse.order_verdict(late)
    # Entropy had tripled by then.
    wild = rows([0.4, 0.5, 0.2], [0.15] * 10 + [0.0] * 10)
    for row in wild[6:]:
        row[ENTROPY] = 1.0
    assert "In 0 of the runs in which `mi_released` fell first" in collapse.order_verdict(
        {("a", "none", 0): wild}
    )


def test_the_words_of_the_claims():
    bad = {
        ("a", f, s): of_seed(COLLAPSED if f == "none" else HEALTHY, s)
        for f in ("f", "none")
        for s in range(6)
    }
    words = [v.verdict for v in collapse.verdicts(EXPERIMENTS["collapse"], bad)]
    assert words == ["reproduced", "reproduced"]
    fine = dict.fromkeys(bad, HEALTHY)
    words = [v.verdict for v in collapse.verdicts(EXPERIMENTS["collapse"], fine)]
    assert words == ["not testable"] * 2


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
    assert curves.alarm_step(runs["a", "none", 0]) == 18
    assert collapse.alarm_verdict(runs) == (
        "In the 3 runs that lost half of their success, the alarm came before the loss in 1, later "
        "in 1, and never in 1. It also came in 1 of the other 2 runs."
    )


@pytest.mark.medium
def test_a_report_is_written(tmp_path):
    runs = {("a", "filter", 0): HEALTHY, ("a", "none", 0): COLLAPSED}
    pytest.importorskip("matplotlib")
    path = tmp_path / "docs/collapse.md"
    text = write_page("collapse", path, "run collapse", EXPERIMENTS["collapse"], runs)
    assert "the runs, each about 1.8 min on one core" in text
    assert path.read_text() == text
    assert (
        EXPERIMENTS["collapse"].question in text
        and "python -m ragen_jax.lab run collapse\n" in text
    )
    assert "| a | none | 0 | 80 | 0.20, 0.50 | 0.15 -> 0.00 | 1.00 -> 1.00 | 0.20 ->" in text
    # These rows have neither grounded facts nor flow.
    assert "| 0.90 -> 0.90 |  |  | 18 | 8 |  |" in text
    assert (tmp_path / "docs" / "collapse.png").read_bytes().startswith(b"\x89PNG")


def test_the_arms_of_an_experiment():
    plan = arms(EXPERIMENTS["collapse"], sokoban.get_config())
    assert len(plan) == 5 * 2 * 3 == len({arm.folder for arm in plan})
    assert sum(arm.config.steps for arm in plan) == 1800
    assert {arm.seed for arm in plan[:10]} == {0}
    for arm in plan:
        assert arm.config.seed == arm.seed
        assert (arm.config.filter.strategy == "none") == (arm.treatment == "no filter")
        assert arm.config.algorithm.entropy_coef == (
            0.1 if arm.setting == "entropy 0.1" else 0.05 if "0.05" in arm.setting else 0.001
        )
        assert all(rule.action == "warn" for rule in vars(arm.config.stopping).values())
    config = sokoban.get_config()
    config.rollout.groups = 0
    with pytest.raises(ValueError, match="rollout.groups is 0"):
        arms(EXPERIMENTS["collapse"], config)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["figures", "members", "sweeps", "members_frozen_lake"])
def test_experiments_that_share_runs_agree_on_them(name):
    """Arms with the same folder in two experiments have the same config."""
    config, other = EXPERIMENTS[name].config.split(":")[0], EXPERIMENTS[name].runs
    module = importlib.import_module(f"ragen_jax.configs.{config}")
    plans = [arms(EXPERIMENTS[of], module.get_config()) for of in (name, other)]
    one, two = ({arm.folder: arm.config for arm in plan} for plan in plans)
    shared = set(one) & set(two)
    assert shared and all(fields_of(one[folder]) == fields_of(two[folder]) for folder in shared)


def test_every_experiment_has_a_page():
    assert set(PAGES) == set(EXPERIMENTS)


def test_a_quick_experiment_is_a_part_of_the_whole():
    whole, quick = EXPERIMENTS["organism"], shorten(EXPERIMENTS["organism"])
    assert set(quick.seeds) < set(whole.seeds) and set(quick.treatments) < set(whole.treatments)
    plan = arms(quick, organism_config.get_config())
    assert len(plan) == len(quick.seeds) * len(quick.treatments)
    assert {arm.config.steps for arm in plan} == {50} and whole.common_fields["steps"] == 160
    assert quick.minutes == pytest.approx(whole.minutes * 50 / 160)
    with pytest.raises(ValueError, match="--quick: this experiment has no shorter form"):
        shorten(EXPERIMENTS["collapse"])


def test_what_is_finished_is_not_run_again(tmp_path):
    assert not is_finished(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n')
    assert not is_finished(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
    assert is_finished(tmp_path, 3)


# ---- arms in parallel ---------------------------------------------------------------------------


@pytest.fixture
def plan():
    """Five arms of an experiment."""
    config = sokoban.get_config()
    config.model.path = "somewhere"  # no warm start
    config = freeze(Config, config)
    return [Arm("a", "none", seed, config) for seed in range(5)]


def processes_of(monkeypatch, code_of):
    """Arms become processes that exit with code_of[seed], or run for a minute if it is missing."""
    begun = []

    def begin(arm, folder):
        folder.mkdir(parents=True, exist_ok=True)
        begun.append(arm.seed)
        script = "import time; time.sleep(60)"
        if arm.seed in code_of:
            row = json.dumps({"step": arm.config.steps})
            script = f"open({str(folder / 'metrics.jsonl')!r}, 'w').write({row + chr(10)!r}); "
            script += f"raise SystemExit({code_of[arm.seed]})"
        return subprocess.Popen([sys.executable, "-c", script])

    monkeypatch.setattr(lab_arms, "_begin", begin)
    return begun


def test_arms_have_the_day_of_the_first_that_began(plan, tmp_path):
    """Arms that resume or begin on another day have that date as well."""

    def days(day, among=plan):
        return [
            a.config.model.date for a in set_dates(among, tmp_path, datetime.date(2026, 11, day))
        ]

    assert days(24) == ["2026-11-24"] * 5
    for arm in set_dates(plan[:2], tmp_path, datetime.date(2026, 11, 25)):
        (tmp_path / arm.folder).mkdir()
        (tmp_path / arm.folder / "config.json").write_text(json.dumps(arm.config.to_dict()))
    assert days(26) == ["2026-11-25"] * 5 and days(26, plan[2:]) == ["2026-11-26"] * 3
    assert {arm.config.model.date for arm in plan} == {"auto"}
    model = dataclasses.replace(plan[0].config.model, path="tiny")
    tiny = dataclasses.replace(plan[0].config, model=model)
    plan[0] = dataclasses.replace(plan[0], config=tiny)
    assert days(26) == ["auto", *["2026-11-25"] * 4]


@pytest.mark.medium
def test_arms_run_side_by_side_and_once(plan, tmp_path, monkeypatch, capsys):
    begun = processes_of(monkeypatch, dict.fromkeys(range(5), 0))
    assert run_arms(plan[:2], tmp_path, workers=2, minutes=1.0) == 0
    assert run_arms(plan, tmp_path, workers=2, minutes=1.0) == 0
    assert begun == [0, 1, 2, 3, 4]
    out = capsys.readouterr().out
    assert "2 of 2 arms, 2 at a time: about 1 min" in out
    assert "3 of 5 arms, 2 at a time: about 2 min" in out
    assert out.count("done;") == 5
    assert run_arms(plan, tmp_path, workers=2, minutes=1.0) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.medium
def test_the_steps_of_running_arms_are_counted(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "NOW", progress.Progress())
    steps = plan[0].config.steps

    def begin(arm, folder):
        folder.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps({"step": step}) + chr(10) for step in range(steps + 1))
        (folder / "metrics.jsonl").write_text(rows)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(lab_arms, "_begin", begin)
    (tmp_path / plan[0].folder).mkdir()
    (tmp_path / plan[0].folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert run_arms(plan[:3], tmp_path, workers=2, minutes=1.0) == 0
    assert progress.NOW.place == "running the arms" and progress.NOW.unit == "steps"
    assert progress.NOW.total == 3 * steps - 1  # a step of the first arm was done before
    assert progress.NOW.done == progress.NOW.total


@pytest.mark.medium
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are given out on Linux")
def test_each_arm_has_its_own_cores(plan, tmp_path, monkeypatch):
    mine = os.sched_getaffinity(0)
    given = []

    def begin(arm, folder):
        folder.mkdir(parents=True, exist_ok=True)
        given.append(os.sched_getaffinity(0))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": arm.config.steps}) + "\n")
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])

    monkeypatch.setattr(lab_arms, "_begin", begin)
    workers = len(mine)
    assert run_arms(plan, tmp_path, workers=workers, minutes=1.0) == 0
    assert os.sched_getaffinity(0) == mine
    together = given[:workers]
    assert set.union(*together) == mine and sum(map(len, together)) == len(mine)
    given.clear()
    # With more arms than cores, or one arm at a time, each arm has all cores.
    for workers in (len(mine) + 1, 1):
        assert run_arms(plan[:2], tmp_path / str(workers), workers=workers, minutes=1.0) == 0
    assert given == [mine] * 4


@pytest.mark.medium
def test_the_first_arm_that_fails_ends_the_others(plan, tmp_path, monkeypatch, capsys):
    begun = processes_of(monkeypatch, {0: 3})
    start = time.perf_counter()
    assert run_arms(plan, tmp_path, workers=3, minutes=1.0) == 3
    assert time.perf_counter() - start < 30  # seconds; the other arms would run for a minute
    assert begun == [0, 1, 2]
    assert "a, none, 0: exit code 3; see" in capsys.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, "143"), (signal.SIGINT, "130")])
def test_a_signal_ends_the_arms_too(number, code, plan, tmp_path, monkeypatch):
    begun = []

    def begin(arm, folder):
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        if len(begun) == 2:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        return begun[-1]

    monkeypatch.setattr(lab_arms, "_begin", begin)
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit, match=code):
        run_arms(plan, tmp_path, workers=2, minutes=1.0)
    assert [process.poll() for process in begun] == [-signal.SIGTERM] * 2
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("done", [False, True])
def test_a_folder_of_another_run_is_refused_before_any_begins(plan, tmp_path, monkeypatch, done):
    """A finished run in the folder, whose rows would be read as the arm's, is refused as well."""
    begun = processes_of(monkeypatch, {})
    folder = tmp_path / plan[3].folder
    folder.mkdir(parents=True)
    other = dataclasses.replace(plan[3].config, seed=7)
    (folder / "config.json").write_text(json.dumps(other.to_dict()))
    if done:
        (folder / "metrics.jsonl").write_text(json.dumps({"step": other.steps}) + "\n")
    with pytest.raises(ValueError, match="holds a run with config.seed=7"):
        run_arms(plan, tmp_path, workers=3, minutes=1.0)
    assert not begun


# ---- the model organism -------------------------------------------------------------------------


def probed(mi, success, *, valid=0.98, entropy=0.6):
    """Rows with a probe every 4 steps and an evaluation every 20, from step 0."""
    last = 4 * len(mi)
    made = {step: {"step": step, "update/count": 4} for step in range(1, last + 1)}
    made[0] = {"step": 0}
    for i, value in enumerate(mi):
        made[4 * (i + 1)] |= {organism.MI: value, organism.VALID_RATE: valid}
        made[4 * (i + 1)] |= {organism.ENTROPY: entropy + 0.01 * i, organism.GROUNDED: 0.5}
    for i, value in enumerate(success):
        made[20 * i] |= {SUCCESS: value}
    return [made[step] for step in range(last + 1)]


TEMPLATES = probed([2.0, 2.0, 1.5, 0.5] + [0.5] * 11, [0.4, 0.4, 0.4, 0.4])


def test_what_became_of_a_run_by_hand():
    found = organism.fall(TEMPLATES)
    # From 1.5 at step 12 to 0.5 at step 16, it passes 1.0 half-way.
    assert found.information == 14 and found.success is None and found.collapsed
    assert found.valid == pytest.approx(0.98)
    # 0.6 at step 4; step 34 is between the eighth and ninth probes.
    assert found.entropy == pytest.approx((0.6 + 0.075) / 0.6)
    mi = [2.0, 2.0, 1.5, 0.5] + [0.5] * 11
    # Means of two evaluations: 0.4, 0.3, 0.2; three quarters of 0.4 is 0.3, passed at step 40.
    both = organism.fall(probed(mi, [0.4, 0.4, 0.2, 0.2]))
    assert both.success == pytest.approx(40) and both.collapsed
    early = organism.fall(probed(mi, [0.4, 0.1, 0.1, 0.1]))
    assert early.success is not None and early.success < 14 + organism.LEAD
    assert not early.collapsed
    assert not organism.fall(probed([2.0] * 15, [0.4] * 4)).collapsed
    assert not organism.fall(probed(mi, [0.4] * 4, valid=0.9)).collapsed
    # A run that ends within the lead is undecided, unless success is lost or replies are malformed.
    assert organism.fall(probed(mi[:6], [0.4, 0.4])).collapsed is None
    assert organism.fall(probed(mi[:8], [0.4, 0.4])).collapsed is None
    assert organism.fall(probed(mi[:9], [0.4, 0.4])).collapsed is True
    assert organism.fall(probed(mi[:6], [0.4, 0.4], valid=0.9)).collapsed is False
    assert organism.fall(probed([2.0, 0.5] * 3, [0.4, 0.1])).success is None  # a single evaluation
    assert organism.fall(probed(mi[:5] + [0.5] * 5, [0.4, 0.1, 0.1])).collapsed is False
    falling = probed(mi, [0.4] * 4)
    for row in falling[20:]:
        row.update({organism.ENTROPY: 0.5} if organism.ENTROPY in row else {})
    assert not organism.fall(falling).collapsed


@pytest.mark.medium
def test_the_page_of_the_organism(tmp_path):
    pytest.importorskip("matplotlib")
    kept = probed([2.0] * 15, [0.4, 0.5, 0.5, 0.5])
    runs = {
        ("s", name, seed): rows_
        for seed in (0, 1)
        for name, rows_ in (("top-p", kept), ("no filter", TEMPLATES))
    }
    path = tmp_path / "lab/organism.md"
    text = write_page("organism", path, "run organism", EXPERIMENTS["organism"], runs)
    assert (
        "With no filter, 2 of 2 runs lost half of their information (at steps 14, 14); 2 of them "
        "are template collapses by the rule below. Success fell by a quarter in 0 runs. With "
        "top-p, 0 of 2 runs lost half of their information; 0 of them are template collapses"
    ) in text
    assert "| top-p | 0 | 240 | 2.00 -> 2.00 | 0.60 -> 0.74 |" in text
    assert "| no filter | 1 | 240 | 2.00 -> 0.50 |" in text
    # The seeds are alike: differences of 1.5 and 0.1 without spread.
    assert "| top-p | 100% | +1.500 ± 0.000 |" in text and "+0.100 ± 0.000 |" in text
    # A quarter is 15 of 60 steps, with probes at 4, 8 and 12; only the last differ, by 0.5.
    assert "| top-p | 25% | +0.167 ± 0.000 |" in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    def judged(made):
        return [v.verdict for v in organism.verdicts(EXPERIMENTS["organism"], made)]

    assert judged(runs) == ["undecided", "reproduced", "reproduced"]  # two runs; both differences
    six = {
        ("s", name, seed): of_seed(rows_, seed, name)
        for seed in range(6)
        for name, rows_ in (("top-p", kept), ("no filter", TEMPLATES))
    }
    assert judged(six) == ["reproduced"] * 3
    even = {key: of_seed(TEMPLATES, key[2], key[1]) for key in six}
    assert judged(even) == ["reproduced", "undecided", "undecided"]
    idle = {key: of_seed(TEMPLATES, key[2]) for key in six}
    assert judged(idle) == ["reproduced", *["not testable (identical runs)"] * 2]
    assert "| top-p | 100% | identical runs |" in organism.markdown(
        EXPERIMENTS["organism"], idle, "x.png"
    )
    well = {key: of_seed(kept, key[2], key[1]) for key in six}
    assert judged(well)[0] == "reversed"
    # Runs that end before the rule can decide are undecided, not evidence against the claim.
    short = {key: of_seed(TEMPLATES[:25], key[2], key[1]) for key in six}
    (claim, *_) = organism.verdicts(EXPERIMENTS["organism"], short)
    assert claim.verdict == "undecided" and "0 of 6 runs, 6 undecided" in claim.figures
    # The page can be rebuilt from the rows next to it.
    plan = [Arm(*key, sokoban.get_config()) for key in runs]
    write_runs(
        path.with_suffix(".jsonl"),
        plan,
        {key: trim_rows(rows_, figures("organism")) for key, rows_ in runs.items()},
    )
    again = read_runs(path.with_suffix(".jsonl"), plan)
    assert write_page("organism", path, "run organism", EXPERIMENTS["organism"], again) == text
