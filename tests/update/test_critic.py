"""critic.py: values, one step down the gradient from the definition, learning a constant."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_call_updates import update_critic
from shared_rows import one_micro_batch

from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model import lora
from ragen_jax.model.likelihood import unpack
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update import critic
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.passes import over_rows, values
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import ForwardContext

V, T, D = 30, 10, 32
LOSS = critic.ValueLoss(clip=0.3, aggregation="token-mean", norm_length=T)


@pytest.fixture(scope="module")
def policy():
    kind = dict(family="qwen3", qkv_bias=False, qk_norm=True)
    config = ModelConfig(V, D, 2, 4, 2, 8, 48, tied=False, **kind)
    return Qwen(config), init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=-1, fsdp=1, tensor=1)


def make_critic(policy, mesh, optimizer, seed=1):
    """Return a critic whose head is not zero."""
    state = critic.init_critic(critic.backbone_of(policy[1]), D, optimizer, mesh)
    head = 0.1 * jax.random.normal(jax.random.key(seed), (D,))
    return state.replace(params=state.params | {"value": head})


def make_rows(rows, seed=0):
    rng = np.random.default_rng(seed)
    mask = (rng.random((rows, T)) < 0.6).astype(np.float32)
    mask[:, 0], mask[:, 4] = 0.0, 1.0
    batch = Batch(
        tokens_BT=rng.integers(0, V, (rows, T)).astype(np.int32),
        mask_BT=mask,
        logp_BT=np.zeros((rows, T), np.float32),
        turn_BT=np.where(mask > 0, 0, -1).astype(np.int32),
        turn_end_BT=np.zeros((rows, T), bool),
        span_BT=np.zeros((rows, T), np.int8),
        reward_BT=np.zeros((rows, T), np.float32),
        episode_B=np.arange(rows, dtype=np.int32),
        group_B=np.zeros(rows, np.int32),
        weight_B=np.ones(rows, np.float32),
    )
    value, target = rng.normal(size=(2, rows, T)).astype(np.float32)
    return batch, value, target


def run(policy, mesh, state, batch, value, target, *, optimizer, frozen=None, **changes):
    settings = dict(
        mesh=mesh,
        rng=np.random.default_rng(0),
        minibatches=1,
        micro_batch=2,
        minibatch_rows=len(batch.weight_B),
        loss_scale=1.0,
        rates=np.ones(1, np.float32),
        frozen=frozen,
    )
    rows = np.arange(len(batch.weight_B))
    state = jax.tree.map(jnp.copy, state)  # the update donates it
    arrays = (batch, value, target, rows)
    return update_critic(policy[0], optimizer, LOSS, state, *arrays, **(settings | changes))


def token_values(model, params, tokens_BT, frozen=None):
    """Return the value before each token, [B, T]; entry 0 is 0."""
    packed, entry_BW = one_micro_batch(tokens_BT)
    values_BW = unpack(critic.packed_values(model, params, packed, frozen), entry_BW)
    return np.asarray(values_BW)[:, : tokens_BT.shape[1]]


def test_a_value_is_of_the_tokens_before(policy, mesh):
    state = make_critic(policy, mesh, optax.sgd(1.0))
    batch, _, _ = make_rows(3)
    found = token_values(policy[0], state.params, batch.tokens_BT)
    hidden, _ = policy[0].apply({"params": policy[1]}, jnp.asarray(batch.tokens_BT))
    want = np.asarray(hidden @ state.params["value"])
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[:, 1:], want[:, :-1], atol=1e-5)
    changed = batch.tokens_BT.copy()
    changed[:, 5] = (changed[:, 5] + 1) % V
    other = token_values(policy[0], state.params, changed)
    np.testing.assert_allclose(other[:, :6], found[:, :6], atol=1e-6)
    assert np.abs(other[:, 6] - found[:, 6]).min() > 1e-6


def test_a_fresh_critic_says_nothing_and_needs_no_output_head(policy, mesh):
    state = critic.init_critic(critic.backbone_of(policy[1]), D, optax.adam(1e-3), mesh)
    assert "head" in policy[1] and "head" not in state.params["backbone"]
    batch, _, _ = make_rows(2)
    assert not token_values(policy[0], state.params, batch.tokens_BT).any()


def test_one_update_is_one_step_down_the_gradient_of_the_definition(policy, mesh):
    state = make_critic(policy, mesh, optax.sgd(0.5))
    batch, value, target = make_rows(5)

    def objective(params):
        whole = params["backbone"] | {"head": policy[1]["head"]}
        hidden, _ = policy[0].apply({"params": whole}, jnp.asarray(batch.tokens_BT))
        new = (hidden @ params["value"])[:, :-1]
        old, want, mask = value[:, 1:], target[:, 1:], batch.mask_BT[:, 1:]
        near = old + jnp.clip(new - old, -LOSS.clip, LOSS.clip)
        term = 0.5 * jnp.maximum((new - want) ** 2, (near - want) ** 2)
        return (mask * term).sum() / mask.sum()

    loss, grads = jax.jit(jax.value_and_grad(objective))(state.params)
    found, metrics = run(policy, mesh, state, batch, value, target, optimizer=optax.sgd(0.5))
    want = jax.tree.map(lambda p, g: p - 0.5 * g, state.params, grads)
    for x, y in zip(jax.tree.leaves(found.params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
    assert metrics["critic/loss"] == pytest.approx(float(loss), abs=1e-5)
    for micro_batch, minibatch_rows in ((5, 5), (3, 12)):
        other, _ = run(
            policy,
            mesh,
            state,
            batch,
            value,
            target,
            optimizer=optax.sgd(0.5),
            micro_batch=micro_batch,
            minibatch_rows=minibatch_rows,
        )
        for x, y in zip(jax.tree.leaves(found.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-6)


def test_it_learns_what_it_is_told(policy, mesh):
    optimizer = optax.adam(1e-2)
    state = critic.init_critic(critic.backbone_of(policy[1]), D, optimizer, mesh)
    batch, _, _ = make_rows(6)
    target = np.where(np.arange(6) % 2, 1.0, -1.0)[:, None] * np.ones((6, T), np.float32)
    rows = np.arange(6)
    layout = MinibatchLayout(mesh, 1, 3, 6)
    for _ in range(40):
        (value,) = over_rows(values, policy[0], state.params, token_rows(batch), rows, None, layout)
        state, metrics = run(policy, mesh, state, batch, value, target, optimizer=optimizer)
    assert metrics["critic/explained_variance"] > 0.9


@pytest.mark.long
def test_adapters_on_a_frozen_base(policy, mesh):
    model, params = policy
    adapters = lora.init_adapters(model.config, jax.random.key(3), rank=2, targets=("q", "v"))
    optimizer = optax.sgd(0.5)
    state = critic.init_critic(adapters, D, optimizer, mesh)
    state = state.replace(params=state.params | {"value": jnp.ones(D)})
    frozen = ForwardContext(params, np.float32(2.0))
    batch, value, target = make_rows(4)
    found = token_values(model, state.params, batch.tokens_BT, frozen)
    whole = token_values(model, {"backbone": params, "value": jnp.ones(D)}, batch.tokens_BT)
    np.testing.assert_allclose(found, whole, atol=1e-5)  # new adapters change nothing
    after, _ = run(policy, mesh, state, batch, value, target, optimizer=optimizer, frozen=frozen)
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)
    assert float(jnp.abs(after.params["value"] - 1.0).max()) > 0


def test_explained_variance_by_hand():
    assert critic.explained_variance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 1.0
    assert critic.explained_variance(np.array([5.0, 5.0]), np.array([1.0, 3.0])) == 0.0
    assert critic.explained_variance(np.array([0.0, 6.0]), np.array([0.0, 8.0])) == 1 - 1 / 16
    assert np.isnan(critic.explained_variance(np.array([1.0, 2.0]), np.array([3.0, 3.0])))
