"""passes.py, reading.py: forward passes of a function with a known result over selected rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update import critic, passes, reading
from ragen_jax.update.optimize import MinibatchLayout, plan_minibatches

pytestmark = pytest.mark.fast

V, T = 20, 24
LENGTH_B = np.array([20, 4, 8, 23, 6, 2, 0])  # pads to 8 or 24; the last row is padding
PADDED_B = np.array([24, 8, 8, 24, 8, 8, 0])


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def batch():
    rng, inside_BT = np.random.default_rng(0), np.arange(T) < LENGTH_B[:, None]
    mask_BT = (inside_BT & (np.arange(T) > 0)).astype(np.float32)
    zeros_BT = np.zeros((len(LENGTH_B), T))
    return Batch(
        tokens_BT=np.where(inside_BT, rng.integers(1, V, zeros_BT.shape), 0).astype(np.int32),
        mask_BT=mask_BT,
        logp_BT=(-1.5 * mask_BT).astype(np.float32),
        turn_BT=np.where(mask_BT > 0, 0, -1).astype(np.int32),
        turn_end_BT=zeros_BT.astype(bool),
        span_BT=zeros_BT.astype(np.int8),
        reward_BT=zeros_BT.astype(np.float32),
        episode_B=np.arange(len(LENGTH_B), dtype=np.int32),
        group_B=np.zeros(len(LENGTH_B), np.int32),
        weight_B=(LENGTH_B > 0).astype(np.float32),
    )


def scaled_and_length(model, params, tokens_BT, extra):
    """Return tokens times `params` times `extra`, and the padded length that the pass reads."""
    scaled_BT = params * extra * tokens_BT.astype(jnp.float32)
    return scaled_BT, jnp.full(tokens_BT.shape, float(tokens_BT.shape[1]))


def read(batch, mesh, rows, *, micro_batch=2, size=8, extra=0.5):
    return passes.over_rows(
        scaled_and_length,
        "no model",
        np.float32(3.0),
        batch,
        np.array(rows, int),
        np.float32(extra),
        mesh=mesh,
        micro_batch=micro_batch,
        size=size,
    )


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [3, 1], [5], [0, 3]])
def test_chosen_rows_are_read_at_their_padded_length(batch, mesh, rows):
    scaled_BT, length_BT = read(batch, mesh, rows)
    chosen = np.isin(np.arange(7), rows)[:, None]
    np.testing.assert_array_equal(scaled_BT, 1.5 * batch.tokens_BT * chosen)
    read_BT = chosen & (np.arange(T) < PADDED_B[:, None])
    np.testing.assert_array_equal(length_BT, PADDED_B[:, None] * read_BT)
    assert scaled_BT.dtype == length_BT.dtype == np.float32


def test_no_rows_are_zeros_of_every_result(batch, mesh):
    found = read(batch, mesh, [])
    assert [x.shape for x in found] == [(7, T)] * 2 and not np.any(found)


@pytest.mark.medium
def test_micro_batches_and_sizes_change_no_row(batch, mesh):
    expected = read(batch, mesh, range(6))[0]
    for micro_batch, size in ((1, 6), (3, 6), (8, 8)):
        found = read(batch, mesh, range(6), micro_batch=micro_batch, size=size)[0]
        np.testing.assert_array_equal(found, expected)


def test_steps_share_a_program_per_length(batch, mesh):
    """The program does not depend on the selected rows or on `extra`."""
    before = passes.read_micro_batches._cache_size()
    for rows, extra in ((range(6), 0.1), ([0, 1], 0.2), ([3, 4, 5], 0.3), ([2], 0.4)):
        read(batch, mesh, rows, micro_batch=4, size=12, extra=extra)
    assert passes.read_micro_batches._cache_size() == before + 2


def test_micro_batches_without_rows_are_not_read():
    tokens_AML = jnp.ones((3, 2, 4), jnp.int32)
    scaled, _ = reading.read_micro_batches(
        scaled_and_length, "no model", np.float32(2), tokens_AML, jnp.int32(2), np.float32(1)
    )
    np.testing.assert_array_equal(scaled, 2.0 * np.array([1, 1, 0])[:, None, None] * tokens_AML)


# ------------------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=16
    )
    return Qwen(config), init_params(config, jax.random.key(0))


@pytest.mark.medium
def test_passes_of_a_model_are_those_of_whole_rows(batch, mesh, policy):
    """Shorter padding changes no token's log-prob, entropy or value."""
    model, params = policy
    settings = dict(mesh=mesh, micro_batch=2, size=6)
    rows, inside_BT = np.arange(6), batch.mask_BT > 0
    logp_BT, _ = passes.over_rows(
        passes.statistics, model, params, batch, rows, np.float32(0.7), **settings
    )
    expected_BT = token_logps(model, params, batch.tokens_BT, temperature=0.7)
    np.testing.assert_allclose(logp_BT[inside_BT], expected_BT[inside_BT], atol=1e-5)
    some = np.array([3, 1, 5])  # bit-identical for any selection of other rows
    again_BT, _ = passes.over_rows(
        passes.statistics, model, params, batch, some, np.float32(0.7), **settings
    )
    np.testing.assert_array_equal(again_BT[some], logp_BT[some])
    rows = np.array([1, 2, 4, 5])
    value = {"backbone": critic.backbone_of(params), "value": np.arange(16, dtype=np.float32)}
    (value_BT,) = passes.over_rows(passes.values, model, value, batch, rows, None, **settings)
    expected_BT = critic.token_values(model, value, batch.tokens_BT)
    inside_BT = inside_BT & np.isin(np.arange(7), rows)[:, None]
    np.testing.assert_allclose(value_BT[inside_BT], expected_BT[inside_BT], atol=1e-4)


@pytest.mark.medium
def test_old_logps_of_later_minibatches_are_read_again(batch, mesh, policy):
    """The first minibatch keeps the sampler's log-probs of -1.5."""
    model, params = policy
    arrays = {"tokens": batch.tokens_BT, "logp": batch.logp_BT, "mask": batch.mask_BT}
    plan = plan_minibatches(
        arrays,
        np.arange(6),
        LENGTH_B,
        MinibatchLayout(mesh, minibatches=2, micro_batch=2, minibatch_rows=6),
        rng=np.random.default_rng(0),
        aggregation="token-mean",
        norm_length=T,
    )
    found = reading.minibatch_logps(plan, model, params, temperature=0.7)
    first, later = (
        np.concatenate([piece.rows for piece in pieces]).tolist() for pieces in plan.cuts
    )
    assert sorted(first + later) == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(found.arrays["logp"][first], batch.logp_BT[first])
    expected_BT = np.asarray(token_logps(model, params, batch.tokens_BT, temperature=0.7))
    inside = batch.mask_BT[later] > 0
    np.testing.assert_allclose(
        found.arrays["logp"][later][inside], expected_BT[later][inside], atol=1e-5
    )
    np.testing.assert_array_equal(batch.logp_BT, -1.5 * batch.mask_BT)  # not changed in place
    assert dataclasses.replace(found, arrays=plan.arrays) == plan
