"""stopping.py: each rule by hand, one warning per streak, state that survives a checkpoint."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.configs.base import Stopping
from ragen_jax.diagnostics.stopping import RULES, init_stopping, update_stopping
from ragen_jax.run.checkpoint import Checkpoints

pytestmark = pytest.mark.fast

FINE = dict(variance_E=[1.0], kept=0.5, skipped=0)


def settings(**changes):
    """The defaults with `rule__field=value` changed."""
    found = Stopping()
    for name, value in changes.items():
        rule, field = name.split("__")
        changed = dataclasses.replace(getattr(found, rule), **{field: value})
        found = dataclasses.replace(found, **{rule: changed})
    return found


def run(steps, rules, state=None):
    """(state, [(step from 1, rule, action)]) after the given iterations' figures."""
    state, fired = state or init_stopping(), []
    for index, figures in enumerate(steps, 1):
        state, found = update_stopping(state, rules, **(FINE | figures))
        fired += [(index, one.rule, one.action) for one in found]
    return state, fired


def test_the_papers_numbers_are_the_defaults():
    found = settings().to_dict()
    assert set(found) == set(RULES)
    assert found["variance"] == dict(action="stop", patience=5, ratio=0.1, baseline=10)
    assert found["success"] == dict(action="stop", patience=5, least=0.01)
    assert found["empty"] == dict(action="stop", patience=5)
    assert found["nonfinite"] == dict(action="stop", patience=3)


def test_variance_below_a_share_of_the_first_iterations_mean():
    # Three iterations with mean 4, so a value below 1 is bad. The first three are never bad.
    rules = settings(variance__baseline=3, variance__ratio=0.25, variance__patience=2)
    variances = [0.0, 0.0, 12.0, 0.9, 1.0, 0.99, 0.5, 0.5, 3.0, 0.0, 0.0]
    steps = [dict(variance_E=[v]) for v in variances]
    state, fired = run(steps, rules)
    # 0.9 starts a streak that 1.0 (not below) ends; 0.99, 0.5, 0.5 and the last two are streaks.
    assert fired == [(step, "variance", "stop") for step in (7, 8, 11)]
    assert (state.variance_sum_E, state.variance_count) == ([12.0], 3)
    assert state.variance_streak_E == [2]


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [1, 5])
def test_a_variance_that_is_not_finite_leaves_its_iteration_out(value, at):
    rules = settings(variance__baseline=3, variance__patience=2)
    variances = [6.0, 6.0, 6.0, 0.1, 0.1, 6.0]
    told = [(step, "variance", "stop") for step in (5,)]
    assert run([dict(variance_E=[v]) for v in variances], rules)[1] == told
    variances.insert(at - 1, value)
    state, fired = run([dict(variance_E=[v]) for v in variances], rules)
    assert fired == [(6, "variance", "stop")]  # one iteration later
    assert (state.variance_sum_E, state.variance_count) == ([18.0], 3)


def test_a_run_without_any_variance_from_the_start_is_not_a_collapse():
    _, fired = run([dict(variance_E=[0.0])] * 30, settings())
    assert fired == []


def test_the_variance_of_each_environment_is_compared_with_its_own_start():
    """Rewards around 100 next to rewards around 1: their mean would show only the former."""
    rules = settings(variance__baseline=2, variance__patience=2)
    first, fired = run([dict(variance_E=[100.0, 1.0])] * 2, rules, init_stopping(2))
    state, found = first, []
    for step, variance_E in enumerate([(90.0, 0.05)] * 3 + [(1.0, 0.05)] * 3, 1):
        figures = FINE | dict(variance_E=variance_E)
        state, now = update_stopping(state, rules, **figures, labels=["large", "small"])
        found += [(step, one.action, one.reason) for one in now]
    assert fired == [] and [(step, action) for step, action, _ in found] == [
        (2, "warn"),  # one warning for that environment; the run continues with the other
        (5, "stop"),
        (6, "stop"),
    ]
    assert found[0][2] == (
        "the mean reward variance of small, now 0.05, was below 0.1 (0.1 of its mean over the "
        "first 2 iterations) in 2 iterations in a row (stopping.variance)"
    )
    assert "of large, now 1, was below 10 " in found[1][2] and "; the mean" in found[1][2]
    off = settings(variance__baseline=2, variance__patience=2, variance__action="off")
    assert run([dict(variance_E=[90.0, 0.05])] * 5, off, first)[1] == []


def test_success_counts_evaluations_only():
    rules = settings(success__patience=3)
    low, none, high = dict(success=0.009), {}, dict(success=0.01)
    _, fired = run([low, none, low, none, none, low, none, low, high, low, low, none, low], rules)
    assert fired == [(step, "success", "stop") for step in (6, 8, 13)]


def test_empty_batches_in_a_row():
    _, fired = run([dict(kept=k) for k in (0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0)], settings())
    assert fired == [(10, "empty", "stop")]


def test_skipped_updates_in_a_row():
    # Any skipped update marks an iteration; the third marked iteration in a row stops the run.
    state, fired = run([dict(skipped=n) for n in (1, 4, 0, 2, 1, 1)], settings())
    assert fired == [(6, "nonfinite", "stop")]
    assert state.streak["nonfinite"] == 3


def test_reasons_tell_the_numbers():
    patience = {f"{rule}__patience": 1 for rule in RULES}
    rules = settings(variance__baseline=2, **patience)
    state, _ = run([dict(variance_E=[8.0]), dict(variance_E=[4.0])], rules)
    _, fired = update_stopping(state, rules, variance_E=[0.25], kept=0, skipped=1, success=0.005)
    assert [one.reason for one in fired] == [
        "the mean reward variance, now 0.25, was below 0.6 (0.1 of its mean over the first 2 "
        "iterations) in 1 iterations in a row (stopping.variance)",
        "held-out success, now 0.005, was below 0.01 in 1 evaluations in a row (stopping.success)",
        "the filter kept no group in 1 iterations in a row (stopping.empty)",
        "updates were not finite in 1 iterations in a row (stopping.nonfinite)",
    ]


@pytest.mark.parametrize("rule", RULES)
def test_warn_says_it_once_a_streak_and_off_never(rule):
    bad = dict(variance_E=[0.0], kept=0, skipped=1, success=0.0)
    good = dict(success=1.0)
    steps = [good] + [bad] * 4 + [good] + [bad] * 3
    others = {f"{other}__action": "off" for other in RULES if other != rule}
    short = {f"{rule}__patience": 2, "variance__baseline": 1}
    _, fired = run(steps, settings(**others, **short, **{f"{rule}__action": "warn"}))
    assert fired == [(3, rule, "warn"), (8, rule, "warn")]
    _, fired = run(steps, settings(**others, **short, **{f"{rule}__action": "stop"}))
    assert fired == [(step, rule, "stop") for step in (3, 4, 5, 8, 9)]
    state, fired = run(steps, settings(**others, **short, **{f"{rule}__action": "off"}))
    assert fired == []
    # A rule that is off still counts, so that it can be turned on for the rest of a run.
    streaks = state.streak | {"variance": state.variance_streak_E}
    assert streaks[rule] == 3


@pytest.mark.medium
def test_a_resumed_run_fires_when_the_whole_one_does(tmp_path):
    rng = np.random.default_rng(0)
    steps = [
        dict(
            variance_E=[float(rng.random() * (1.0 if step < 12 else 0.02))],
            kept=int(rng.integers(2)),
            skipped=int(rng.integers(2)),
            success=float(rng.integers(2)) if step % 3 == 0 else None,
        )
        for step in range(40)
    ]
    rules = settings(empty__patience=3, success__patience=2, success__action="warn")
    whole, fired = run(steps, rules)
    assert {rule for _, rule, _ in fired} == set(RULES)
    for cut in (4, 10, 25):  # inside and after the first iterations
        state, before = run(steps[:cut], rules)
        checkpoints = Checkpoints(tmp_path / str(cut))
        checkpoints.save(cut, state)
        checkpoints.manager.wait_until_finished()
        restored = checkpoints.restore(cut, init_stopping())
        checkpoints.close()
        for kind in (restored, jax.tree.map(jnp.asarray, state)):  # or as TrainState arrays
            resumed, after = run(steps[cut:], rules, kind)
            assert before + [(step + cut, *rest) for step, *rest in after] == fired
            assert jax.tree.map(np.array_equal, resumed, whole) == jax.tree.map(
                lambda x: True, whole
            )
            assert [x.dtype for x in jax.tree.leaves(resumed)] == [
                x.dtype for x in jax.tree.leaves(whole)
            ]
