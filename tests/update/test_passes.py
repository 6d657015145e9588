"""passes.py, reading.py: forward passes of a function with a known result over selected rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_rows import ALWAYS, NEVER, trees

from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model.likelihood import PackedRows, token_logps, token_statistics
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update import critic, passes, reading
from ragen_jax.update.optimize import MinibatchLayout, plan_minibatches
from ragen_jax.update.pieces import token_rows

pytestmark = pytest.mark.fast

V, T = 20, 24
LENGTH_B = np.array([20, 4, 9, 23, 6, 2, 0])  # all but the last token: padded to 8 or 24
PADDED_B = np.array([24, 8, 8, 24, 8, 8, 0])  # the last row is padding


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


def scaled_and_length(model, params, rows, extra):
    """Return tokens times `params` times `extra`, and the padded length that the pass reads."""
    scaled_PE = params * extra * rows.target_PE.astype(jnp.float32)
    return scaled_PE, jnp.full(scaled_PE.shape, float(rows.tokens_BL.shape[-1]))


def read(batch, mesh, rows, *, micro_batch=2, size=8, extra=0.5):
    return passes.over_rows(
        scaled_and_length,
        "no model",
        np.float32(3.0),
        token_rows(batch),
        np.array(rows, int),
        np.float32(extra),
        MinibatchLayout(mesh, 1, micro_batch, size),
    )


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [3, 1], [5], [0, 3]])
def test_chosen_rows_are_read_at_their_padded_length(batch, mesh, rows):
    with trees(NEVER):
        scaled_BT, length_BT = read(batch, mesh, rows)
    needed_BT = (batch.mask_BT > 0) & np.isin(np.arange(7), rows)[:, None]
    np.testing.assert_array_equal(scaled_BT, 1.5 * batch.tokens_BT * needed_BT)
    np.testing.assert_array_equal(length_BT, PADDED_B[:, None] * needed_BT)
    assert scaled_BT.dtype == length_BT.dtype == np.float32


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [3, 1], [5], []])
def test_trees_hold_what_rows_hold(batch, mesh, rows):
    """Rows 1 to 5 begin like row 0. Only what the pass was asked for is returned."""
    tokens_BT = np.where(batch.mask_BT > 0, batch.tokens_BT[:1], 0)
    shared = batch.replace(tokens_BT=tokens_BT.astype(np.int32))
    with trees(NEVER):
        expected_BT, _ = read(shared, mesh, rows)
    with trees(ALWAYS):
        found_BT, length_BT = read(shared, mesh, rows)
    np.testing.assert_array_equal(found_BT, expected_BT)
    # Eighths of the positions of two rows of 24, in whole blocks of 8.
    assert set(length_BT[length_BT > 0]) <= {48.0, 40.0, 24.0, 16.0}


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
    with trees(NEVER):
        for rows, extra in ((range(6), 0.1), ([0, 1], 0.2), ([3, 4, 5], 0.3), ([2], 0.4)):
            read(batch, mesh, rows, micro_batch=4, size=12, extra=extra)
    assert passes.read_micro_batches._cache_size() == before + 2


def test_micro_batches_without_rows_are_not_read():
    reads_APE = jnp.ones((3, 1, 5), jnp.int32)
    packed = PackedRows(jnp.ones((3, 2, 4), jnp.int32), reads_APE, reads_APE)
    scaled, _ = reading.read_micro_batches(
        scaled_and_length, "no model", np.float32(2), packed, jnp.int32(2), np.float32(1)
    )
    np.testing.assert_array_equal(scaled, 2.0 * np.array([1, 1, 0])[:, None, None] * reads_APE)


# ------------------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=16
    )
    return Qwen(config), init_params(config, jax.random.key(0))


@pytest.mark.medium
@pytest.mark.parametrize("form", [NEVER, ALWAYS])
def test_passes_of_a_model_are_those_of_whole_rows(batch, mesh, policy, form):
    """Neither padding nor trees change a token's log-prob, entropy or value."""
    model, params = policy
    if form == ALWAYS:
        tokens_BT = np.where(batch.mask_BT > 0, batch.tokens_BT[:1], batch.tokens_BT)
        batch = batch.replace(tokens_BT=tokens_BT.astype(np.int32))
    layout = MinibatchLayout(mesh, 1, 2, 6)
    rows, inside_BT = np.arange(6), batch.mask_BT > 0
    with trees(form):
        logp_BT, entropy_BT = passes.over_rows(
            passes.statistics, model, params, token_rows(batch), rows, np.float32(0.7), layout
        )
        some = np.array([3, 1, 5])  # bit-identical for any selection of other rows
        again_BT, _ = passes.over_rows(
            passes.statistics, model, params, token_rows(batch), some, np.float32(0.7), layout
        )
        chosen = np.array([1, 2, 4, 5])
        value = {"backbone": critic.backbone_of(params), "value": np.arange(16, dtype=np.float32)}
        (value_BT,) = passes.over_rows(
            passes.values, model, value, token_rows(batch), chosen, None, layout
        )
    expected = token_statistics(model, params, batch.tokens_BT, temperature=0.7)
    for found_BT, expected_BT in zip((logp_BT, entropy_BT), expected, strict=True):
        np.testing.assert_allclose(found_BT[inside_BT], expected_BT[inside_BT], atol=1e-5)
    np.testing.assert_array_equal(again_BT[some], logp_BT[some])
    assert not again_BT[[0, 2, 4]].any()
    hidden_BTD, _ = model.apply({"params": params}, batch.tokens_BT)
    expected_BT = np.pad((hidden_BTD @ value["value"])[:, :-1], ((0, 0), (1, 0)))
    inside_BT = inside_BT & np.isin(np.arange(7), chosen)[:, None]
    np.testing.assert_allclose(value_BT, expected_BT * inside_BT, atol=1e-4)


@pytest.mark.medium
def test_old_logps_of_later_minibatches_are_read_again(batch, mesh, policy):
    """The first minibatch keeps the sampler's log-probs of -1.5."""
    model, params = policy
    plan = plan_minibatches(
        token_rows(batch),
        {"logp": batch.logp_BT, "mask": batch.mask_BT},
        np.arange(6),
        MinibatchLayout(mesh, minibatches=2, micro_batch=2, minibatch_rows=6),
        rng=np.random.default_rng(0),
        aggregation="token-mean",
        norm_length=T,
    )
    found = reading.minibatch_logps(plan, model, params, temperature=0.7)
    first, later = (
        np.concatenate([piece.rows for piece in pieces]).tolist() for pieces in plan.split.pieces
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
