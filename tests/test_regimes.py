"""regimes.py: the four regimes, signs and the alarm by hand, and a state that survives a resume."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from ragen_jax.checkpoint import Checkpoints
from ragen_jax.diagnostics.regimes import ACTIONS, EITHER, FALLING, init_regimes, update_regimes

# All the figures of a step, as a run starts.
START = {
    "collapse/first_turn/mi_released": 2.0,
    "collapse/first_turn/h_cond": 0.25,
    "collapse/first_turn/retrieval_acc": 0.875,
    "collapse/first_turn/retrieval_chance": 0.125,
    "collapse/trajectory/mi_released": 2.0,
    "collapse/trajectory/retrieval_acc": 0.75,
    "collapse/trajectory/retrieval_chance": 0.25,
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
    "retrieval": "collapse/first_turn/retrieval_acc",
    "think": "rollout/valid_think_rate",
    "action": "rollout/valid_rate",
    "grounded": "reasoning/grounded_rate",
    "length": "rollout/response_length",
    "entropy": "update/entropy",
}


def settings(**changes):
    """Levels that are easy to count with, and those changed."""
    found = base.get_config().regimes.to_dict()
    found |= dict(baseline=2, patience=2, clear_patience=3, recover=0.5, low=0.5)
    found |= dict.fromkeys(FALLING, 0.25) | dict.fromkeys(EITHER, dict(fall=0.25, rise=4.0))
    return copy.deepcopy(found | changes)


def row(**figures):
    """START with figures changed by their short names; None leaves one out."""
    found = START | {SHORT[name]: value for name, value in figures.items()}
    return {key: value for key, value in found.items() if value is not None}


def run(steps, rules, state=None):
    """(state, metrics of each step, [(step from 1, action)]) behind the first two steps."""
    if state is None:
        state, _, _ = run([row(), row()], rules, init_regimes())
    history, fired = [], []
    for index, figures in enumerate(steps, 1):
        state, metrics, alarms = update_regimes(state, rules, figures)
        history.append(metrics)
        fired += [(index, alarm.action) for alarm in alarms]
    return state, history, fired


def alarms(steps, rules):
    return [int(metrics["regime/alarm"]) for metrics in run(steps, rules)[1]]


WORST = row(mi=1e-6, retrieval=0.126, think=0.0, action=0.0)
BAD = row(mi=0.4, retrieval=0.2)  # 0.2 of the start; 0.075 above chance of 0.75: 0.1 of it


def test_the_four_regimes():
    steps = [row(), row(h=0.1), row(mi=0.9), row(h=0.1, mi=0.9), row(h=3.0, mi=4.0)]
    _, history, _ = run(steps, settings())
    assert [metrics["regime/index"] for metrics in history] == [0, 1, 2, 3, 0]
    assert [metrics["regime/h_relative"] for metrics in history] == pytest.approx(
        [1, 0.4, 1, 0.4, 12]
    )
    assert [metrics["regime/mi_relative"] for metrics in history] == [
        pytest.approx(x) for x in (1, 1, 0.45, 0.45, 2)
    ]


def test_relative_to_the_mean_of_the_first_steps_that_have_the_figure():
    # 2 and 6 are the first two: mean 4. Step 2 has no MI, so no place on the axes.
    steps = [row(mi=2.0), row(mi=None), row(mi=6.0), row(mi=1.0)]
    _, history, _ = run(steps, settings(), init_regimes())
    found = [metrics.get("regime/mi_relative") for metrics in history]
    assert found == [1.0, None, 1.5, 0.25]
    assert "regime/index" not in history[1]


def test_first_steps_are_no_signs():
    _, history, fired = run([row()] + [WORST] * 19, settings(baseline=20), init_regimes())
    assert fired == []
    assert {metrics["regime/signs"] for metrics in history} == {0}


def test_raised_after_patience_and_cleared_after_longer_at_a_laxer_level():
    # Levels: a sign below 0.25 of the start (0.5), ended at 0.25 ** 0.5 of it (1.0) and above.
    middle = row(mi=0.9, retrieval=0.2)
    better = row(mi=1.1, retrieval=0.2)
    steps = [BAD, row(), BAD, BAD, middle, middle, middle, middle]
    assert alarms(steps, settings()) == [0, 0, 0, 1, 1, 1, 1, 1]
    # The third step in a row above the laxer level ends it; one below it starts the count anew.
    steps = [BAD, BAD, better, better, middle, better, better, better, BAD]
    assert alarms(steps, settings()) == [0, 1, 1, 1, 1, 1, 1, 0, 0]


def test_one_kind_is_no_alarm_and_neither_are_length_and_entropy():
    rules = settings()
    both_scopes = row(mi=0.1, mi2=0.1)
    for figures in (both_scopes, row(action=0.01), row(length=1.0, entropy=9.0, h=9.0)):
        assert alarms([figures] * 4, rules) == [0] * 4
    for figures in (
        row(mi2=0.1, entropy=1.1),  # more than 4 times the first
        row(mi2=0.1, entropy=0.05),
        row(action=0.1, length=81.0),
        row(action=0.1, length=4.9),
        row(think=0.1, action=0.1),
        row(retrieval=0.2, h=1.1),
        row(grounded=0.1, length=81.0),
    ):
        assert alarms([figures] * 4, rules) == [0, 1, 1, 1]
    _, history, _ = run([row(think=0.1, action=0.1, mi=0.1, mi2=0.1)] * 2, rules)
    assert history[-1]["regime/signs"] == 3


def test_retrieval_is_read_above_chance():
    # First-turn retrieval 0.125 above a chance of 0.5: 1/6 of the start's 0.75.
    rules = settings()
    chance = {"collapse/first_turn/retrieval_chance": 0.5}
    figures = row(retrieval=0.625, action=0.1)
    assert alarms([figures | chance] * 2, rules) == [0, 1]
    assert alarms([figures] * 2, rules) == [0, 0]


def test_steps_without_a_figure_leave_its_streak():
    # Diagnosis every third step: MI and retrieval are bad twice in a row of those.
    none = {key: value for key, value in START.items() if not key.startswith("collapse/")}
    steps = [BAD, none, none, BAD, none, none]
    assert alarms(steps, settings()) == [0, 0, 0, 1, 1, 1]
    undefined = dict.fromkeys((key for key in START if key not in none), math.nan)
    assert alarms([BAD, none | undefined, BAD], settings()) == [0, 0, 1]


def test_a_figure_that_was_never_above_zero_says_nothing():
    rules = settings(baseline=1)
    steps = [row(mi=-0.1, retrieval=0.125, think=0.0)] + [
        row(mi=-5.0, retrieval=0.0, think=0.0)
    ] * 5
    _, history, fired = run(steps, rules, init_regimes())
    assert fired == []
    assert "regime/mi_relative" not in history[-1]


def test_the_reason_tells_the_numbers():
    _, _, alarms = update_regimes(run([BAD], settings())[0], settings(), BAD)
    assert [alarm.reason for alarm in alarms] == [
        "signs of collapse: first-turn MI 0.4, 0.20 of the first steps' 2; first-turn retrieval "
        "above chance 0.075, 0.10 of the first steps' 0.75; regime: template collapse (regimes)"
    ]
    # At a step without those figures, a rule that still fires names them.
    rest = {key: value for key, value in START.items() if "collapse" not in key}
    rules = settings(action="stop")
    _, _, alarms = update_regimes(run([BAD, BAD], rules)[0], rules, rest)
    assert [alarm.reason for alarm in alarms] == [
        "signs of collapse: first-turn MI, when last seen; first-turn retrieval above chance, "
        "when last seen (regimes)"
    ]


def test_actions():
    steps = [BAD] * 7 + [row()] * 3 + [BAD] * 3
    fires = {
        "warn": [2, 12],
        "checkpoint": [2, 12],
        "stop": [*range(2, 10), 12, 13],
        "tighten": [2, 4, 6, 8, 12],  # and after every further `patience` steps
        "off": [],
    }
    assert set(fires) == set(ACTIONS)
    for action, expected in fires.items():
        _, history, fired = run(steps, settings(action=action))
        assert fired == [(step, action) for step in expected]
        assert [metrics["regime/alarm"] for metrics in history] == [0] + [1] * 8 + [0, 0, 1, 1]


def test_tightening_lowers_the_filters_value_to_a_floor():
    rules = settings(action="tighten", tighten=dict(factor=0.5, least=0.2))
    steps = [BAD] * 7 + [row()] * 3
    state, history, fired = run(steps, rules)
    scales = [metrics["regime/filter_scale"] for metrics in history]
    assert scales == pytest.approx([1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert state.filter_scale == np.float32(0.2)  # and stays tight behind the alarm
    _, _, alarms = update_regimes(run([BAD], rules)[0], rules, BAD)
    assert "; filter.value now times 0.5 (regimes)" in alarms[0].reason
    # Other actions leave it.
    assert run(steps, settings())[0].filter_scale == 1
    assert "regime/filter_scale" not in run(steps, settings())[1][-1]


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
    rules = settings(action="tighten", tighten=dict(factor=0.9, least=0.3))
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
