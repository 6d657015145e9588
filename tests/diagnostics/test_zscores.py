"""zscores.py: the moving average by hand, absent scopes, state that survives a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.diagnostics.scopes import SCOPES
from ragen_jax.diagnostics.zscores import init_zscores, update_zscores
from ragen_jax.run.checkpoint import Checkpoints

pytestmark = pytest.mark.fast


def step(scope, mi, std, mi_seq=0.0, std_seq=1.0):
    """The figures of one scope from which the z-scores are computed."""
    figures = {"mi": mi, "marginal_std": std, "mi_seq": mi_seq, "marginal_std_seq": std_seq}
    return {f"collapse/{scope}/{name}": value for name, value in figures.items()}


def test_by_hand():
    # Spread 2, 4, 0.5: averages 2, 0.9 * 2 + 0.1 * 4 = 2.2, 0.9 * 2.2 + 0.1 * 0.5 = 2.03.
    # The sequence form has 10, 30, 20: averages 10, 12, 12.8.
    state, found = init_zscores(SCOPES), []
    for figures in [(1.0, 2.0, 3.0, 10.0), (1.1, 4.0, 6.0, 30.0), (-0.5, 0.5, 6.4, 20.0)]:
        state, metrics = update_zscores(state, step("first_turn", *figures))
        assert set(metrics) == {
            "collapse/first_turn/mi_zscore_ema",
            "collapse/first_turn/mi_zscore_seq_ema",
        }
        assert all(type(value) is float for value in metrics.values())
        found.append(list(metrics.values()))
    want = [
        [1 / 2.001, 3 / 10.001],
        [1.1 / 2.201, 6 / 12.001],
        [-0.5 / 2.031, 6.4 / 12.801],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-6)
    np.testing.assert_allclose(state.std["first_turn"], [2.03, 12.8], rtol=1e-6)


def test_scopes_begin_and_pause_on_their_own():
    state, _ = update_zscores(init_zscores(SCOPES), step("first_turn", 1.0, 2.0))
    state, found = update_zscores(state, {"rollout/success": 0.5})  # a step without diagnostics
    assert found == {}
    state, found = update_zscores(state, step("trajectory", 1.0, 5.0) | {"update/entropy": 1.0})
    assert found["collapse/trajectory/mi_zscore_ema"] == pytest.approx(1 / 5.001)
    _, found = update_zscores(state, step("first_turn", 1.0, 3.0))
    assert found["collapse/first_turn/mi_zscore_ema"] == pytest.approx(1 / 2.101)


def test_a_spread_of_zero_is_a_batch_like_any_other():
    state, found = update_zscores(init_zscores(["one"]), step("one", 0.5, 0.0))
    assert found["collapse/one/mi_zscore_ema"] == pytest.approx(500)
    _, found = update_zscores(state, step("one", 0.5, 1.0))
    assert found["collapse/one/mi_zscore_ema"] == pytest.approx(0.5 / 0.101)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_spread_that_is_not_finite_is_left_out(value):
    state, _ = update_zscores(init_zscores(["one"]), step("one", 0.5, 2.0))
    state, found = update_zscores(state, step("one", 0.5, value))
    assert list(found) == ["collapse/one/mi_zscore_seq_ema"]
    _, found = update_zscores(state, step("one", 0.5, 4.0))
    assert found["collapse/one/mi_zscore_ema"] == pytest.approx(0.5 / 2.201)


def test_a_resumed_run_gets_the_same_numbers(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for index in range(12):
        row = step("first_turn", *rng.exponential(size=4)) if index % 3 else {}
        steps.append(row | (step("trajectory", *rng.exponential(size=4)) if index > 6 else {}))

    def run(state, rows):
        found = []
        for row in rows:
            state, metrics = update_zscores(state, row)
            found.append(metrics)
        return state, found

    whole, expected = run(init_zscores(SCOPES), steps)
    for cut in (0, 5, 9):
        state, before = run(init_zscores(SCOPES), steps[:cut])
        checkpoints = Checkpoints(tmp_path / str(cut))
        checkpoints.save(cut, state)
        checkpoints.manager.wait_until_finished()
        restored = checkpoints.restore(cut, init_zscores(SCOPES))
        checkpoints.close()
        for kind in (restored, jax.tree.map(jnp.asarray, state)):  # or as TrainState arrays
            resumed, after = run(kind, steps[cut:])
            assert before + after == expected
            for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
                assert x.dtype == y.dtype == np.float32 and np.array_equal(x, y)


def test_the_state_given_is_left_alone():
    state = init_zscores(SCOPES)
    update_zscores(state, step("first_turn", 1.0, 2.0))
    assert np.all(state.std["first_turn"] == -1)
