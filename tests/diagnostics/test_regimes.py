"""regimes.py: running means, levels, signs and the alarm by hand and on simulated runs."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.configs import base
from ragen_jax.diagnostics.regimes import (
    ACTIONS,
    ALONE,
    EITHER,
    FALLING,
    FIGURES,
    MI,
    information_share,
    init_regimes,
    update_regimes,
)
from ragen_jax.run.checkpoint import Checkpoints

pytestmark = pytest.mark.fast

# All the figures of a step, as a run starts.
START = {
    "collapse/first_turn/mi_released": 2.0,
    "collapse/first_turn/h_cond": 0.25,
    "collapse/first_turn/retrieval_acc": 0.875,
    "collapse/first_turn/retrieval_chance": 0.125,
    "collapse/trajectory/mi_released": 2.0,
    "rollout/valid_think_rate": 1.0,
    "rollout/valid_rate": 0.5,
    "reasoning/grounded_rate": 0.8,
    "rollout/response_length": 20.0,
    "update/entropy": 0.25,
}
SHORT = {
    "mi": "collapse/first_turn/mi_released",
    "mi2": "collapse/trajectory/mi_released",
    "h": "collapse/first_turn/h_cond",
    "think": "rollout/valid_think_rate",
    "action": "rollout/valid_rate",
    "grounded": "reasoning/grounded_rate",
    "length": "rollout/response_length",
}


def settings(**changes):
    """Numbers that are easy to count with (the recent mean is the last value, intervals do not
    matter), and those changed."""
    found = base.get_config().regimes.to_dict()
    found |= dict(baseline=2, recent=1, long=2, margin=0.0, clear_patience=3, recover=0.5, low=0.5)
    found |= dict.fromkeys(FALLING, 0.25) | dict.fromkeys(EITHER, dict(fall=0.25, rise=4.0))
    found["tighten"] = found["tighten"] | dict(every=2)
    return copy.deepcopy(found | changes)


def row(**figures):
    """START with figures changed by their short names (mi_ci95: its half-width); None leaves one
    out."""
    found = dict(START)
    for name, value in figures.items():
        short, _, suffix = name.partition("_")
        found[SHORT[short] + ("_" + suffix if suffix else "")] = value
    return {key: value for key, value in found.items() if value is not None}


def run(steps, rules, state=None):
    """(state, metrics of each step, [(step from 1, action)]) behind the first two steps."""
    if state is None:
        state, _, _ = run([row(), row()], rules, init_regimes())
    history, fired = [], []
    for index, figures in enumerate(steps, 1):
        state, (metrics,), alarms = update_regimes(state, rules, [figures])
        history.append(metrics)
        fired += [(index, alarm.action) for alarm in alarms]
    return state, history, fired


def alarms(steps, rules):
    return [int(metrics["regime/alarm"]) for metrics in run(steps, rules)[1]]


WORST = row(mi=1e-6, mi2=1e-6, think=0.0, action=0.0)
BAD = row(mi=0.4)  # 0.2 of the start


def test_the_four_regimes():
    steps = [row(), row(h=0.1), row(mi=0.9), row(h=0.1, mi=0.9), row(h=3.0)]
    _, history, _ = run(steps, settings())
    assert [metrics["regime/index"] for metrics in history] == [0, 1, 2, 3, 0]
    assert [metrics["regime/h_relative"] for metrics in history] == pytest.approx(
        [1, 0.4, 1, 0.4, 12]
    )
    assert [metrics["regime/mi_relative"] for metrics in history] == pytest.approx(
        [1, 1, 0.45, 0.45, 1]
    )
    share = [information_share(run(steps[:i], settings())[0]).tolist() for i in (1, 3, 4)]
    assert share == [pytest.approx([x]) for x in (1, 0.45, 0.45)]
    assert np.isnan(information_share(init_regimes(2))).tolist() == [True, True]


def test_means_levels_and_their_half_widths_by_hand():
    rules = settings(baseline=2, recent=2, long=4, margin=1.0)
    values = [1.0, 3.0, 2.0, 6.0, 4.0]
    state, _, _ = run([row(mi=x, mi_ci95=0.5) for x in values], rules, init_regimes())
    # Plain means at first (1, 2); then half of the new value, and half of what was: 2, 4, 4.
    assert state.recent_EF[0, MI] == 4.0
    assert state.long_EF[0, MI] == pytest.approx(0.75 * (1 + 3 + 2 + 6) / 4 + 4.0 / 4)
    # Half the squared differences are 2, 0.5, 8, 2, their running means:
    assert state.noise_EF[0, MI] == pytest.approx((2 + 0.5 + 8 + 2) / 4)
    own = np.maximum(0.25, 1.96**2 * np.array([0, 2, 1.25, 3.5, 3.125]))
    expected = own[0]
    for variance in own[1:]:
        expected = expected / 4 + variance / 4
    assert state.recent_variance_EF[0, MI] == pytest.approx(expected, rel=1e-5)
    # The level was 2, the mean of the first two, of which the second was uncertain; the long mean
    # is more, and its lower end is above.
    assert state.level_EF[0, MI] == state.long_EF[0, MI]
    two, _, _ = run([row(mi=x, mi_ci95=0.5) for x in values[:3]], rules, init_regimes())
    assert two.level_EF[0, MI] == 2.0
    assert two.level_variance_EF[0, MI] == pytest.approx(own[:3].sum() / 9, rel=1e-5)


def test_steps_without_a_figure_say_nothing_of_it():
    # 2 and 6 are the first two values: level 4. Step 2 has no MI.
    steps = [row(mi=2.0), row(mi=None), row(mi=6.0), row(mi=math.nan), row(mi=1.0)]
    state, history, _ = run(steps, settings(long=9), init_regimes())
    found = [metrics.get("regime/mi_relative") for metrics in history]
    assert found == [None, None, 1.5, 1.5, 0.25]
    assert state.count_EF[0, MI] == 3 and state.noise_EF[0, MI] == pytest.approx((8 + 12.5) / 2)
    # Diagnosis every third step: a sign stays until there are values that end it.
    none = {key: value for key, value in START.items() if not key.startswith("collapse/")}
    steps = [BAD, none, none, row(), none, row(), none, row(), none]
    assert alarms(steps, settings()) == [1, 1, 1, 1, 1, 1, 1, 0, 0]


def test_first_steps_are_no_signs():
    _, history, fired = run([row()] + [WORST] * 19, settings(baseline=20), init_regimes())
    assert fired == []
    assert {metrics["regime/signs"] for metrics in history} == {0}


def test_cleared_after_some_steps_at_a_laxer_level():
    # Levels: a sign below 0.25 of the start (0.5), ended at 0.25 ** 0.5 of it (1.0) and above.
    middle, better = row(mi=0.9), row(mi=1.1)
    assert alarms([middle, BAD, middle, middle, middle], settings()) == [0, 1, 1, 1, 1]
    # The third step in a row above the laxer level ends it; one below it starts the count anew.
    steps = [BAD, better, better, middle, better, better, better, BAD]
    assert alarms(steps, settings()) == [1, 1, 1, 1, 1, 1, 0, 1]


def test_what_is_an_alarm():
    rules = settings()
    assert ALONE == ("mi",)
    for figures in (
        row(mi=0.4),
        row(mi2=0.4),
        row(think=0.1, action=0.1),
        row(grounded=0.1, h=1.1),  # more than 4 times the level
        row(action=0.1, length=81.0),
        row(action=0.1, length=4.9),
        row(think=0.1, h=0.05),
    ):
        assert alarms([figures] * 2, rules) == [1, 1]
    for figures in (
        row(action=0.01),
        row(grounded=0.01),
        row(length=1.0, h=9.0),
        row(think=0.3, action=0.2),
    ):
        assert alarms([figures] * 4, rules) == [0] * 4
    # A smaller fall of the information is a sign: an alarm beside another, in either scope.
    laxer = settings(mi_sign=0.5)
    for figures in (row(mi=0.9, action=0.1), row(mi2=0.9, h=1.1), row(mi=0.9, length=4.9)):
        assert alarms([figures] * 2, laxer) == [1, 1] and alarms([figures] * 2, rules) == [0, 0]
    assert alarms([row(mi=0.9, mi2=0.9)] * 4, laxer) == [0] * 4
    # Both scopes are one kind, and what else a matrix of scores says is no figure at all.
    for share in (0.01, 0.25, 0.5):
        _, history, _ = run([row(mi=0.1, mi2=0.1)] * 2, settings(mi_sign=share))
        assert history[-1]["regime/signs"] == 1
    lost = row() | {"collapse/first_turn/retrieval_acc": 0.125, "update/entropy": 9.0}
    assert alarms([lost] * 3, rules) == [0, 0, 0]


def defaults():
    return base.get_config().regimes.to_dict()


def first_alarm(values, half_width, rules=None):
    """The first step of the alarm in a run of first-turn MIs, or None."""
    steps = [row(mi=x, mi_ci95=half_width) for x in values]
    _, history, _ = run(steps, rules or defaults(), init_regimes())
    return next((i for i, metrics in enumerate(history) if metrics["regime/alarm"]), None)


def test_a_fall_counts_only_beyond_its_own_interval():
    """To 0.6 of the level behind 30 steps, with intervals of 10 % and of 60 % a step."""
    values = [1.0] * 30 + [0.6] * 30
    assert first_alarm(values, 0.1) in range(32, 40)
    assert first_alarm(values, 0.6) is None
    # A fall of a fifth is none, however sure.
    assert first_alarm([1.0] * 30 + [0.8] * 90, 1e-6) is None


def test_the_level_rises_with_the_figure_and_does_not_fall():
    """A rise to three times the start, then back to it: seen against what it had risen to."""
    rise, top, crash = np.linspace(1, 3, 60), [3.0] * 40, [1.0] * 30
    assert first_alarm([*[1.0] * 10, *rise, *top, *crash], 0.1) in range(112, 118)
    # A slow fall does not take its level along: below 0.75 of the start at step 110.
    slow = first_alarm([*[1.0] * 10, *np.linspace(1, 0.25, 300)], 0.05)
    assert slow in range(110, 135)


def test_noise_is_measured_where_no_interval_is_given():
    """Jumps of a third up and down are no fall; without them, the same fall is one."""
    jumps = np.where(np.arange(120) % 2, 1.35, 0.65)
    for scale, found in ((0.65, None), (0.4, range(60, 75))):
        values = np.concatenate([jumps[:60], scale * jumps[60:]])
        step = first_alarm(values, math.nan)
        assert step is None if found is None else step in found
    assert first_alarm([1.0] * 60 + [0.65] * 60, math.nan) in range(62, 75)


@pytest.mark.parametrize("relative_noise", [0.05, 0.2, 0.35])
def test_error_rates_on_simulated_runs(relative_noise):
    """200 stationary runs of 200 steps, and falls to half; all are environments of one state.

    Noise is of prompts, with the interval that a jackknife over eight of them gives. Where noise is
    a third of the figure, 15 steps are too few for one fall in five.
    """
    rng = np.random.default_rng(0)
    runs, steps = 200, 200

    def simulate(mean_T):
        draws = rng.gamma(1 / 8 / relative_noise**2, size=(runs, len(mean_T), 8))
        draws *= 8 * relative_noise**2 * mean_T[:, None]
        value, error = draws.mean(2), draws.std(2, ddof=1) / np.sqrt(8)
        state, found = init_regimes(runs), []
        for t in range(len(mean_T)):
            rows = [
                row(mi=v, mi_ci95=2.365 * e) for v, e in zip(value[:, t], error[:, t], strict=True)
            ]
            state, metrics, _ = update_regimes(state, defaults(), rows, [""] * runs)
            found.append([one["regime/alarm"] for one in metrics])
        return np.array(found)

    stationary = simulate(np.ones(steps))
    assert stationary.any(0).mean() <= 0.05
    fallen = simulate(np.where(np.arange(100) < 80, 1.0, 0.5))[80:95]
    assert fallen.any(0).mean() >= (0.8 if relative_noise > 0.3 else 0.97)


def test_a_figure_that_was_never_above_zero_says_nothing():
    steps = [row(mi=-0.1, mi2=0.0, think=0.0)] + [row(mi=-5.0, mi2=-1.0, think=0.0)] * 5
    _, history, fired = run(steps, settings(baseline=1), init_regimes())
    assert fired == []
    assert "regime/mi_relative" not in history[-1]


def test_a_figure_too_near_to_zero_for_its_noise_is_not_judged():
    # 0.3 for 60 steps, then nothing. The long mean's half-width is 1 / root 39 of a value's, and
    # 8 * 0.7 of it are 0.305 with values of 0.34, 0.29 with values of 0.325.
    falls = [0.3] * 60 + [0.0] * 40
    assert first_alarm(falls, 0.34) is None
    assert first_alarm(falls, 0.325) in range(61, 70)
    # A fall it is: 0 + 0.7 * 0.34 / 3 is below 0.75 * (0.3 - 0.7 * 0.34 / root 39).
    assert first_alarm(falls, 0.34, defaults() | {"margin": 0.0}) in range(61, 70)


def test_the_reason_tells_the_numbers():
    _, _, alarms = update_regimes(run([], settings())[0], settings(), [BAD], ["sokoban"])
    assert [alarm.reason for alarm in alarms] == [
        "sokoban: signs of collapse: first-turn MI 0.4, 0.20 of its level 2; regime: template "
        "collapse (regimes)"
    ]
    # At a step without those figures, a rule that still fires says what was last seen.
    rest = {key: value for key, value in START.items() if "collapse" not in key}
    rules = settings(action="stop")
    _, _, alarms = update_regimes(run([BAD], rules)[0], rules, [rest])
    assert alarms[0].reason.startswith("signs of collapse: first-turn MI 0.4, 0.20 of its level 2;")


def test_every_environment_has_an_alarm_of_its_own():
    labels, rules = ["a", "b", "c"], settings(action="tighten")
    state = init_regimes(3)
    for _ in range(2):
        state, _, _ = update_regimes(state, rules, [row(), row(mi=50.0), row()], labels)
    # The mean over the three hardly moves: 18 to 17.5.
    for step in range(3):
        state, metrics, fired = update_regimes(state, rules, [row(), row(mi=50.0), BAD], labels)
        assert [one["regime/alarm"] for one in metrics] == [0, 0, 1]
        assert [alarm.reason[:3] for alarm in fired] == (["c: "] if step != 1 else [])
    assert state.filter_scale_E.tolist() == pytest.approx([1, 1, 0.95**2])
    assert state.alarm_E.tolist() == [0, 0, 3]


def test_actions():
    steps = [BAD] * 7 + [row()] * 3 + [BAD] * 3
    fires = {
        "warn": [1, 11],
        "checkpoint": [1, 11],
        "stop": [*range(1, 10), 11, 12, 13],
        "tighten": [1, 3, 5, 7, 9, 11, 13],  # and after every further `tighten.every` steps
        "off": [],
    }
    assert set(fires) == set(ACTIONS)
    for action, expected in fires.items():
        _, history, fired = run(steps, settings(action=action))
        assert fired == [(step, action) for step in expected]
        assert [metrics["regime/alarm"] for metrics in history] == [1] * 9 + [0, 1, 1, 1]


def test_tightening_lowers_the_filters_value_to_a_floor():
    rules = settings(action="tighten", tighten=dict(every=2, factor=0.5, least=0.2))
    steps = [BAD] * 6 + [row()] * 3
    state, history, fired = run(steps, rules)
    scales = [metrics["regime/filter_scale"] for metrics in history]
    assert scales == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert state.filter_scale_E == np.float32(0.2)  # and stays tight behind the alarm
    _, _, alarms = update_regimes(run([], rules)[0], rules, [BAD])
    assert "; filter.value now times 0.5 (regimes)" in alarms[0].reason
    # Other actions leave it.
    assert run(steps, settings())[0].filter_scale_E == 1
    assert "regime/filter_scale" not in run(steps, settings())[1][-1]


def test_every_kind_is_a_setting_and_a_figure():
    kinds = {figure.kind for figure in FIGURES}
    assert kinds == {*FALLING, *EITHER} <= set(defaults())


def test_a_resumed_run_is_the_whole_one(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for step in range(40):
        worse = 1 if step < 12 or step > 30 else 0.1
        figures = {key: value * (0.9 + 0.2 * rng.random()) for key, value in START.items()}
        for name in ("mi", "think", "action"):
            figures[SHORT[name]] *= worse
        kept = {key: value for key, value in figures.items() if step % 3 or "collapse" not in key}
        steps.append(kept)
    rules = settings(action="tighten", tighten=dict(every=3, factor=0.9, least=0.3), recent=3)
    whole, history, fired = run(steps, rules, init_regimes())
    assert {metrics["regime/alarm"] for metrics in history} == {0, 1}
    for cut in (1, 14, 33):  # inside the first steps, under a streak, with the alarm on
        state, *before = run(steps[:cut], rules, init_regimes())
        checkpoints = Checkpoints(tmp_path / str(cut))
        checkpoints.save(cut, state)
        checkpoints.manager.wait_until_finished()
        restored = checkpoints.restore(cut, init_regimes())
        checkpoints.close()
        for kind in (restored, jax.tree.map(jnp.asarray, state)):  # or as arrays of a TrainState
            resumed, *after = run(steps[cut:], rules, kind)
            assert before[0] + after[0] == history
            assert before[1] + [(step + cut, action) for step, action in after[1]] == fired
            same = jax.tree.map(np.array_equal, resumed, whole)
            assert all(jax.tree.leaves(same))
            types = jax.tree.map(lambda x, y: x.dtype == y.dtype, resumed, init_regimes())
            assert all(jax.tree.leaves(types))
