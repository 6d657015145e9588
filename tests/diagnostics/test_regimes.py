"""regimes.py: which figures are signs, which signs raise an alarm, and the alarm's actions. When a
figure has left its level is tested in test_levels.py."""

import dataclasses
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.config.fields import FIELDS
from ragen_jax.configs.base import Regimes, Tighten
from ragen_jax.diagnostics import levels, regimes
from ragen_jax.diagnostics.regimes import (
    ALONE,
    EITHER,
    FALLING,
    FIGURES,
    SCOPES,
    information_share,
    init_regimes,
    update_regimes,
)
from ragen_jax.run.checkpoint import Checkpoints

pytestmark = pytest.mark.fast

# All figures of a step at the start of a run.
START = {
    "collapse/first_turn/own_margin": 20.0,
    "collapse/first_turn/mi_upper_bound": math.log(8),
    "collapse/first_turn/h_cond": 0.25,
    "collapse/first_turn/retrieval_acc": 0.875,
    "collapse/first_turn/mi_released": 1.5,
    "collapse/trajectory/own_margin": 20.0,
    "rollout/valid_think_rate": 1.0,
    "rollout/valid_rate": 0.5,
    "reasoning/grounded_rate": 0.8,
    "rollout/response_length": 20.0,
    "update/entropy": 0.25,
}
SHORT = {
    "mi": "collapse/first_turn/own_margin",
    "mi2": "collapse/trajectory/own_margin",
    "h": "collapse/first_turn/h_cond",
    "think": "rollout/valid_think_rate",
    "action": "rollout/valid_rate",
    "grounded": "reasoning/grounded_rate",
    "length": "rollout/response_length",
}
BEFORE = 15  # number of steps of START
AFTER = 8  # number of steps that fill the recent mean, which covers a third of all steps


@dataclasses.dataclass(frozen=True)
class Rules:
    """The config section, and the module constants that differ."""

    section: Regimes = Regimes()
    constants: dict = dataclasses.field(default_factory=lambda: dict(FALL=regimes.FALL))


DEFAULT = Rules()


def settings(*, mi_sign=0.25, clear_patience=3, tighten=None, **changes):
    """Fractions that are easy to calculate with, and the given changes."""
    fall = dict.fromkeys((*FALLING, *EITHER), 0.25) | dict(mi_sign=mi_sign)
    rise = dict.fromkeys(EITHER, 4.0)
    section = Regimes(tighten=Tighten(**(tighten or dict(every=2))), **(dict(mi=0.25) | changes))
    return Rules(section, dict(FALL=fall, RISE=rise, CLEAR_PATIENCE=clear_patience))


def update(state, rules, rows, labels=("",)):
    """update_regimes with the section and the constants of `Rules`."""
    with mock.patch.multiple(regimes, **rules.constants):
        return update_regimes(state, rules.section, rows, labels)


def row(**figures):
    """START with figures changed by their short names (mi_ci95: its half-width; `both`: both
    scopes); None removes a figure."""
    if "both" in figures:
        figures |= dict.fromkeys(("mi", "mi2"), figures.pop("both"))
    found = dict(START)
    for name, value in figures.items():
        short, _, suffix = name.partition("_")
        found[SHORT[short] + ("_" + suffix if suffix else "")] = value
    return {key: value for key, value in found.items() if value is not None}


def run(steps, rules, state=None):
    """(state, metrics of each step, [(step, from 1; action)]) after BEFORE steps of START."""
    if state is None:
        state, _, _ = run([row()] * BEFORE, rules, init_regimes())
    history, fired = [], []
    for index, figures in enumerate(steps, 1):
        state, (metrics,), alarms = update(state, rules, [figures])
        history.append(metrics)
        fired += [(index, alarm.action) for alarm in alarms]
    return state, history, fired


def alarms(steps, rules):
    return [int(metrics["regime/alarm"]) for metrics in run(steps, rules)[1]]


def on(figures, rules):
    """Whether a lasting change ends in an alarm."""
    return alarms([figures] * AFTER, rules)[-1]


BAD = row(both=2.0)  # a tenth of the start


@pytest.mark.medium
def test_the_four_regimes():
    cases = [row(), row(h=0.1), row(both=9.0), row(h=0.1, both=9.0), row(h=3.0)]
    ends = [run([figures] * AFTER, settings()) for figures in cases]
    last = [history[-1] for _, history, _ in ends]
    assert [metrics["regime/index"] for metrics in last] == [0, 1, 2, 3, 0]
    assert [m["regime/h_relative"] for m in last] == pytest.approx([1, 0.4, 1, 0.4, 12])
    assert [m["regime/mi_relative"] for m in last] == pytest.approx([1, 1, 0.45, 0.45, 1])
    share = [information_share(state).item() for state, *_ in ends]
    assert share == pytest.approx([1, 1, 0.45, 0.45, 1])
    assert np.isnan(information_share(init_regimes(2))).tolist() == [True, True]


def test_both_scopes_are_one_figure_their_mean():
    _, history, _ = run([row(mi=4.0, mi2=14.0)] * AFTER, settings())
    # The mean of log(1 + margin).
    assert history[-1]["regime/mi_relative"] == pytest.approx(((5 * 15) ** 0.5 - 1) / 20)
    # A run may have one scope alone; the missing scope is not a change.
    alone = [row(mi2=None)] * BEFORE + [row(mi=9.0, mi2=None)] * AFTER
    _, history, _ = run(alone, settings(), init_regimes())
    assert history[-1]["regime/mi_relative"] == pytest.approx(9 / 20)


def test_rows_with_the_mean_margin_alone_are_read_as_of_rooms_that_are_alike():
    logs = {f"{scope}/own_margin_log": math.log(10) for scope in SCOPES}
    _, history, _ = run([row(both=9.0)] * AFTER, settings())
    steps = [row(both=1e3) | {key: math.log(21) for key in logs}] * BEFORE
    steps += [row(both=1e3) | logs] * AFTER  # the logarithms are used
    _, by_logs, _ = run(steps, settings(), init_regimes())
    assert by_logs[-1]["regime/mi_relative"] == pytest.approx(9 / 20)
    assert by_logs[-1]["regime/mi_relative"] == pytest.approx(history[-1]["regime/mi_relative"])


def rooms_that_differ(rng, runs, steps, fall_at, left):
    """Rows of steps of 8 rooms whose margins are log-normal (1.2) around 8: [T] lists of R rows."""
    found = []
    for step in range(1, steps + 1):
        margin_RG = 8 * (left if step > fall_at else 1) * np.exp(1.2 * rng.normal(size=(runs, 8)))
        log_RG = np.log1p(margin_RG)
        values = {
            "own_margin": margin_RG.mean(axis=1),
            "own_margin_ci95": 2.36 * margin_RG.std(axis=1, ddof=1) / np.sqrt(8),
            "own_margin_log": log_RG.mean(axis=1),
            "own_margin_log_ci95": 2.36 * log_RG.std(axis=1, ddof=1) / np.sqrt(8),
            "mi_upper_bound": np.full(runs, np.log(8)),
        }
        columns = {f"{scope}/{name}": x for scope in SCOPES for name, x in values.items()}
        found.append([{key: x[r] for key, x in columns.items()} for r in range(runs)])
    return found


@pytest.mark.medium
def test_a_fall_of_rooms_that_differ_is_seen_within_15_steps():
    """The mean of the margins varies by half from step to step, with the rooms that are drawn."""
    rules, labels = DEFAULT, [""] * 60
    state, on = init_regimes(60), []
    for rows in rooms_that_differ(np.random.default_rng(0), 60, 115, 100, 0.36):
        state, metrics, _ = update(state, rules, rows, labels)
        on.append([found["regime/alarm"] for found in metrics])
    on_TR = np.array(on, bool)
    quiet_R = ~on_TR[:100].any(axis=0)
    assert quiet_R.mean() >= 0.95
    assert on_TR[100:, quiet_R].any(axis=0).mean() >= 0.9


def test_a_shallow_fall_must_be_surer_than_a_deep_one(monkeypatch):
    """A figure between 0.5 and 0.63 of its level must exceed the bound by 0.6 as well."""

    def measured(above, *args):
        levels, z_EF = regimes.levels_update(*args)
        far_EF = regimes.bound(levels.count_EF) + above
        return levels, np.where(z_EF == 0, 0, np.sign(z_EF) * far_EF)

    monkeypatch.setattr(regimes, "levels_update", regimes.update_levels, raising=False)
    rules = DEFAULT
    for left, above, alarm in ((0.45, 0.1, 1), (0.6, 0.1, 0), (0.6, 0.5, 0), (0.6, 0.7, 1)):
        monkeypatch.setattr(regimes, "update_levels", functools.partial(measured, above))
        state, _, _ = run([row()] * BEFORE, settings(mi=0.01, mi_sign=0.01), init_regimes())
        _, history, _ = run([row(both=20 * left)] * AFTER, rules, state)
        assert history[-1]["regime/mi_relative"] == pytest.approx(left)
        assert history[-1]["regime/alarm"] == alarm


def test_a_reply_that_gets_longer_by_tokens_that_carry_nothing_changes_no_information():
    longer = row(length=100.0, h=0.6) | {"collapse/first_turn/mi_released": 0.3}
    _, history, fired = run([longer] * 40, DEFAULT)
    assert not fired and history[-1]["regime/mi_relative"] == pytest.approx(1)
    assert history[-1]["regime/index"] == 0
    shorter = row(length=4.0, both=10.0) | {"collapse/first_turn/mi_released": 1.5}
    assert on(shorter, DEFAULT)  # the reverse holds as well


def test_steps_without_a_figure_leave_it_as_it_is():
    none = {key: value for key, value in START.items() if not key.startswith("collapse/")}
    steps = [BAD] * AFTER + [none] * 3
    _, history, _ = run(steps, settings())
    assert {m["regime/mi_relative"] for m in history[AFTER:]} == {
        history[AFTER - 1]["regime/mi_relative"]
    }
    assert [int(m["regime/alarm"]) for m in history[-4:]] == [1, 1, 1, 1]
    assert run([row(both=math.nan)] * 9, settings())[1][-1]["regime/mi_relative"] == 1


def test_first_steps_are_no_signs():
    worst = row(both=1e-6, think=0.0, action=0.0)
    _, history, fired = run([row()] + [worst] * 7, settings(), init_regimes())
    assert fired == [] and {metrics["regime/signs"] for metrics in history} == {0}


@pytest.mark.medium
def test_cleared_after_some_steps_nearer_to_the_level():
    # A sign begins below 0.25 of the start (5) and ends above 0.25 ** 0.5 of it (10).
    middle, better = row(both=9.0), row(both=11.0)
    assert alarms([BAD] * AFTER + [middle] * 30, settings())[-1] == 1
    on_at = alarms([BAD] * AFTER + [better] * 30, settings())
    cleared = on_at.index(0, AFTER)
    # The mean of the last third exceeds 10 after its last BAD has left; then three steps follow.
    assert cleared < AFTER + 16 and set(on_at[cleared:]) == {0}
    assert alarms([BAD] * AFTER + [better] * 30 + [BAD] * 16, settings())[-1] == 1

    # Patience counts steps: with a figure every fifth step, two values are enough.
    def spaced(value, first, count):
        return [row(both=value) | {"step": first + 5 * i} for i in range(count)]

    steps = spaced(20.0, 5, BEFORE) + spaced(2.0, 5 * BEFORE + 5, AFTER)
    steps += spaced(20.0, 5 * (BEFORE + AFTER) + 5, 20)
    _, history, _ = run(steps, settings(clear_patience=6), init_regimes())
    back = [m["regime/mi_relative"] > 0.5 for m in history[BEFORE + AFTER :]].index(True)
    ends = [int(m["regime/alarm"]) for m in history[BEFORE + AFTER :]].index(0)
    assert ends == back + 1


@pytest.mark.medium
def test_what_is_an_alarm():
    rules = settings()
    assert ALONE == ("mi",)
    for figures in (
        row(both=4.0),
        row(think=0.1, action=0.1),
        row(grounded=0.1, h=1.1),  # more than 4 times the level
        row(action=0.1, length=81.0),
        row(action=0.1, length=4.9),
        row(think=0.1, h=0.05),
    ):
        assert on(figures, rules)
    for figures in (
        row(action=0.01),
        row(grounded=0.01),
        row(length=1.0, h=9.0),
        row(think=0.3, action=0.2),
        row(mi=1.0, mi2=20.0),  # one scope lost everything, but more than half of the mean is left
    ):
        assert not on(figures, rules)
    # A smaller fall of the information is a sign: it needs another sign to raise an alarm.
    laxer = settings(mi_sign=0.5)
    for figures in (row(both=9.0, action=0.1), row(both=9.0, h=1.1), row(both=9.0, length=4.9)):
        assert on(figures, laxer) and not on(figures, rules)
    assert not on(row(both=9.0), laxer)
    # Both scopes are one kind of sign, and no other figure from a score matrix is a sign.
    for share in (0.01, 0.25, 0.5):
        _, history, _ = run([BAD] * AFTER, settings(mi_sign=share))
        assert history[-1]["regime/signs"] == 1
    lost = row() | {
        "collapse/first_turn/retrieval_acc": 0.125,
        "collapse/first_turn/mi_released": 0.0,
        "update/entropy": 9.0,
    }
    assert not on(lost, rules)


def test_wide_intervals_of_rates_hide_no_fall():
    """A rate near 1 over eight groups has an interval of a third, and hardly varies."""
    wide = {f"{SHORT[name]}_ci95": 0.35 for name in ("think", "action")}
    steps = [row(think=0.98) | wide] * 20 + [row(think=0.85, action=0.4) | wide] * AFTER
    _, history, _ = run(steps, DEFAULT, init_regimes())
    assert [int(metrics["regime/alarm"]) for metrics in history[:20]] == [0] * 20
    assert history[-1]["regime/alarm"] == 1


def test_a_margin_that_was_never_above_zero_says_nothing():
    steps = [row(both=-0.1, think=0.0)] * 8 + [row(both=-5.0, think=0.0)] * 9
    _, history, fired = run(steps, settings(), init_regimes())
    assert fired == [] and "regime/mi_relative" not in history[-1]


def test_the_reason_has_the_numbers():
    state, _, _ = run([BAD] * (AFTER - 1), settings(mi=0.01))
    _, _, alarms = update(state, settings(), [BAD], ["sokoban"])
    assert [alarm.reason for alarm in alarms] == [
        "sokoban: signs of collapse: own-prompt margin 2, 0.10 of its level 20; regime: "
        "template collapse (regimes)"
    ]
    # At a step without those figures, a rule that still fires reports the last known values.
    rest = {key: value for key, value in START.items() if "collapse" not in key}
    rules = settings(action="stop")
    _, _, alarms = update(run([BAD] * AFTER, rules)[0], rules, [rest])
    assert alarms[0].reason.startswith("signs of collapse: own-prompt margin 2, 0.10 of its")


def test_every_environment_has_its_own_alarm():
    labels, rules = ["a", "b", "c"], settings(action="tighten")
    state = init_regimes(3)
    for _ in range(BEFORE):
        state, _, _ = update(state, rules, [row(), row(both=500.0), row()], labels)
    # The mean over the three environments hardly changes.
    found = []
    for _ in range(AFTER + 2):
        state, metrics, fired = update(state, rules, [row(), row(both=500.0), BAD], labels)
        found += [alarm.reason[:3] for alarm in fired]
    assert [one["regime/alarm"] for one in metrics] == [0, 0, 1]
    assert set(found) == {"c: "} and state.alarm_E[:2].tolist() == [0, 0]
    assert state.filter_scale_E.tolist() == pytest.approx([1, 1, 0.95 ** len(found)])


@pytest.mark.medium
def test_actions():
    """An alarm, its end, and another alarm: the steps at which each action fires."""
    garbage = row(think=0.1, action=0.1)
    steps = [garbage] * 14 + [row()] * 30 + [BAD] * 16
    shown = alarms(steps, settings())
    first, ends = shown.index(1) + 1, shown.index(0, 14) + 1
    again = shown.index(1, ends - 1) + 1
    spans = [*range(first, ends), *range(again, len(steps) + 1)]
    assert [i for i, alarm in enumerate(shown, 1) if alarm] == spans
    fires = {
        "warn": [first, again],
        "checkpoint": [first, again],
        "stop": spans,
        # and after every further `tighten.every` steps
        "tighten": [*range(first, ends, 2), *range(again, len(steps) + 1, 2)],
        "off": [],
    }
    assert all(FIELDS["regimes.action"].accepts(action) for action in fires)
    for action, expected in fires.items():
        _, history, fired = run(steps, settings(action=action))
        assert fired == [(step, action) for step in expected]
        assert [metrics["regime/alarm"] for metrics in history] == shown


@pytest.mark.medium
def test_tightening_lowers_the_filters_value_to_a_floor():
    rules = settings(action="tighten", tighten=dict(every=2, factor=0.5, least=0.2))
    steps = [BAD] * 12 + [row()] * 3
    state, history, fired = run(steps, rules)
    first = next(i for i, metrics in enumerate(history) if metrics["regime/alarm"])
    scales = [metrics["regime/filter_scale"] for metrics in history]
    assert scales[:first] == [1.0] * first
    assert scales[first : first + 6] == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.2, 0.2])
    assert state.filter_scale_E == np.float32(0.2)  # it stays tight after the alarm
    before, _, _ = run([BAD] * (AFTER - 1), settings(mi=0.01))
    _, _, found = update(before, rules, [BAD])
    assert "; filter.value is now multiplied by 0.5 (regimes)" in found[0].reason
    # Other actions leave the filter unchanged.
    assert run(steps, settings())[0].filter_scale_E == 1
    assert "regime/filter_scale" not in run(steps, settings())[1][-1]


def test_every_kind_has_a_threshold_and_a_figure():
    kinds = {figure.kind for figure in FIGURES}
    assert kinds == {*FALLING, *EITHER} == {*regimes.FALL, "mi"} >= set(regimes.RISE)


def test_a_level_may_have_as_many_values_as_are_kept():
    accepts = FIELDS["regimes.baseline"].accepts
    assert accepts(levels.FIRST) and not accepts(levels.FIRST + 1)
    assert regimes.LONGEST_LEVEL <= levels.FIRST and regimes.RECENT <= levels.LAST


@pytest.mark.medium
def test_a_resumed_run_is_the_whole_one(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for step in range(60):
        worse = 1 if step < 16 or step > 40 else 0.1
        figures = {key: value * (0.9 + 0.2 * rng.random()) for key, value in START.items()}
        for name in ("mi", "mi2", "think", "action"):
            figures[SHORT[name]] *= worse
        kept = {key: value for key, value in figures.items() if step % 3 or "collapse" not in key}
        steps.append(kept)
    rules = settings(action="tighten", tighten=dict(every=3, factor=0.9, least=0.3))
    whole, history, fired = run(steps, rules, init_regimes())
    assert {metrics["regime/alarm"] for metrics in history} == {0, 1}
    for cut in (1, 14, 33, 50):  # inside the first steps; before, during and after an alarm
        state, *before = run(steps[:cut], rules, init_regimes())
        checkpoints = Checkpoints(tmp_path / str(cut))
        checkpoints.save(cut, state)
        checkpoints.manager.wait_until_finished()
        restored = checkpoints.restore(cut, init_regimes())
        checkpoints.close()
        for kind in (restored, jax.tree.map(jnp.asarray, state)):  # or as TrainState arrays
            resumed, *after = run(steps[cut:], rules, kind)
            assert before[0] + after[0] == history
            assert before[1] + [(step + cut, action) for step, action in after[1]] == fired
            same = jax.tree.map(np.array_equal, resumed, whole)
            assert all(jax.tree.leaves(same))
            types = jax.tree.map(lambda x, y: x.dtype == y.dtype, resumed, init_regimes())
            assert all(jax.tree.leaves(types))
