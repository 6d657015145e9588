"""Log-probs of ragged rows: those of padded rows, with few programs, and refusals."""

import jax
import numpy as np
import pytest
from device_processes import ROOT, on_devices
from layer_kinds import hybrid
from shared_rows import random_tree

import ragen_jax
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update.reading import read_micro_batches

pytestmark = pytest.mark.fast

V, T = 30, 40


@pytest.fixture(
    scope="module",
    params=[{}, pytest.param(hybrid(2, every=2), marks=pytest.mark.medium)],
    ids=["full", "hybrid"],
)
def policy(request):
    config = ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False, max_positions=64, **request.param)
    return Qwen(config), init_params(config, jax.random.key(0))


def expected(policy, rows, temperature=1.0):
    """Return the log-probs by a forward pass over padded rows."""
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for tokens_T, row in zip(tokens_BT, rows, strict=True):
        tokens_T[: len(row)] = row
    logp_BT = np.asarray(token_logps(*policy, tokens_BT, temperature=temperature))
    return [logp_T[: len(row)] for logp_T, row in zip(logp_BT, rows, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_are_those_of_padded_rows(policy, temperature):
    rows = random_tree(np.random.default_rng(0), 25, T, V)
    rows = [*rows, np.array([3]), rows[0], rows[4][:2]]  # one token, an equal row, a beginning
    found = ragen_jax.row_logps(*policy, [row.tolist() for row in rows], temperature=temperature)
    for logp_T, row_T, wanted_T in zip(
        found, rows, expected(policy, rows, temperature), strict=True
    ):
        assert logp_T.shape == row_T.shape and logp_T.dtype == np.float32 and logp_T[0] == 0
        np.testing.assert_allclose(logp_T, wanted_T, atol=2e-5)


def test_the_order_of_rows_does_not_matter(policy):
    rows = random_tree(np.random.default_rng(1), 12, T, V)
    found = ragen_jax.row_logps(*policy, rows)
    again = ragen_jax.row_logps(*policy, rows[::-1])[::-1]
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_to_score(policy):
    assert ragen_jax.row_logps(*policy, []) == []
    (only,) = ragen_jax.row_logps(*policy, [[5]])
    np.testing.assert_array_equal(only, np.zeros(1, np.float32))


def test_fifty_calls_need_few_programs(policy):
    """Each has another number of rows, of other lengths."""
    rng, before = np.random.default_rng(2), read_micro_batches._cache_size()
    for _ in range(50):
        longest = int(rng.integers(20, T + 1))
        ragen_jax.row_logps(*policy, random_tree(rng, int(rng.integers(2, 200)), longest, V))
    assert read_micro_batches._cache_size() - before <= 16


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[1], []], "row 1 must be a sequence of at least one token id, got shape"),
        (
            [[1.5, 2.0]],
            "row 0 must be a sequence of at least one token id, got shape .2,. of fl",
        ),
        ([[[1, 2]]], "row 0 must be a sequence of at least one token id, got shape .1, 2."),
        ([[1], [2, 30]], "row 1 has the token id 30; the vocabulary has 30 tokens"),
        ([[-1, 2]], "row 0 has the token id -1; the vocabulary has 30 tokens"),
        ([[1] * 65], "row 0 has 65 tokens, but the model has 64 positions"),
    ],
)
def test_unusable_rows_are_refused(policy, rows, message):
    with pytest.raises(ValueError, match=message):
        ragen_jax.row_logps(*policy, rows)


@pytest.mark.long
def test_on_eight_devices():
    process = on_devices(8, [ROOT / "tests" / "update" / "row_logps_script.py"])
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert float(out) < 2e-5
