"""Log-probs, the loss of a minibatch and the optimizer step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from layer_kinds import mixture
from one_call_updates import update_policy
from random_rows import LOSS, V, random_batch

from ragen_jax.algorithm.losses import Weights
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import likelihood
from ragen_jax.model.layout import param_shardings
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits
from ragen_jax.update import optimize
from ragen_jax.update.micro_batches import split_rows
from ragen_jax.update.optimize import micro_batches
from ragen_jax.update.pieces import Grouping, token_rows
from ragen_jax.update.policy import init_state, policy_gradient


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48
    )
    return Qwen(config), init_params(config, jax.random.key(0))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=-1, fsdp=1, tensor=1)


def make_rows(policy, rows, seed=0):
    """Return a batch of random rows whose log-probs differ a little from the policy's."""
    rng = np.random.default_rng(seed)
    batch = random_batch(
        policy, rng, episode_B=np.arange(rows), group_B=np.zeros(rows), weight_B=np.ones(rows)
    )
    advantage = rng.normal(size=(rows, 1)).astype(np.float32) * batch.mask_BT
    return batch, advantage


def run(policy, mesh, batch, advantage, *, optimizer=None, loss=LOSS, ref=None, **changes):
    """Run one update; return (params, metrics)."""
    model, params = policy
    # The update donates its state.
    params = jax.tree.map(jnp.copy, params)
    optimizer = optimizer or optax.sgd(1.0)
    settings = dict(
        mesh=mesh,
        rng=np.random.default_rng(0),
        minibatches=1,
        micro_batch=2,
        minibatch_rows=len(batch.weight_B),
        loss_scale=1.0,
        rates=np.ones(4, np.float32),
    )
    state, metrics = update_policy(
        model,
        optimizer,
        loss,
        init_state(params, optimizer, mesh),
        policy[1] if ref is None else ref,
        batch,
        advantage,
        np.arange(len(batch.weight_B)),
        **(settings | changes),
    )
    return state.params, metrics


def pieces_of(batch, *, minibatches):
    """Return the pieces that `run` splits a batch into."""
    rows = np.random.default_rng(0).permutation(len(batch.weight_B))
    split = split_rows(
        np.array_split(rows, minibatches), token_rows(batch), Grouping(2, 1, len(rows), "xla")
    )
    return [piece for pieces in split.pieces for piece in pieces]


def largest_difference(a, b):
    return max(
        float(jnp.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)
    )


def reference_loss(policy, params, batch, advantage, loss):
    """Return the loss of the whole minibatch in one pass, from its definition (token-mean)."""
    model, ref = policy
    ref_model = loss.reference_model or model
    hidden, _ = model.apply({"params": params}, jnp.asarray(batch.tokens_BT))
    table = jax.nn.log_softmax(logits(params, hidden) / loss.temperature)[:, :-1]
    ref_hidden, _ = ref_model.apply({"params": ref}, jnp.asarray(batch.tokens_BT))
    ref_table = jax.nn.log_softmax(logits(ref, ref_hidden) / loss.temperature)[:, :-1]
    target = batch.tokens_BT[:, 1:, None]
    logp = jnp.take_along_axis(table, target, -1)[..., 0]
    ref_logp = jnp.take_along_axis(ref_table, target, -1)[..., 0]
    mask, a = batch.mask_BT[:, 1:], advantage[:, 1:]
    ratio = jnp.exp(logp - batch.logp_BT[:, 1:])
    term = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high))
    term = jnp.where(a < 0, jnp.minimum(term, -a * loss.clip_c), term)
    kl = jnp.exp(ref_logp - logp) - (ref_logp - logp) - 1
    if loss.kl_kind == "exact":
        kl = (jnp.exp(table) * (table - ref_table)).sum(-1)
    entropy = -(jnp.exp(table) * table).sum(-1)
    total = term + loss.kl_coef * kl - loss.entropy_coef * entropy
    return (mask * total).sum() / mask.sum()


@pytest.mark.parametrize("teacher", [False, pytest.param(True, marks=pytest.mark.medium)])
@pytest.mark.parametrize("kl_kind", ["k3", "exact"])
def test_one_update_is_one_step_down_the_gradient_of_the_definition(policy, mesh, kl_kind, teacher):
    """Also with a reference of another architecture (`teacher`), as in distillation."""
    loss = dataclasses.replace(LOSS, kl_kind=kl_kind)
    batch, advantage = make_rows(policy, 6)
    moved = jax.tree.map(lambda x: 1.05 * x, policy[1])  # differs from the reference
    ref = policy[1]
    if teacher:
        shape = dataclasses.replace(policy[0].config, width=24, layers=3, mlp_width=40)
        loss = dataclasses.replace(loss, reference_model=Qwen(shape))
        ref = init_params(shape, jax.random.key(5))
    objective = functools.partial(reference_loss, (policy[0], ref))
    value, grads = jax.jit(
        jax.value_and_grad(lambda params: objective(params, batch, advantage, loss))
    )(moved)
    found, metrics = run((policy[0], moved), mesh, batch, advantage, ref=ref, loss=loss)
    expected = jax.tree.map(lambda p, g: p - g, moved, grads)
    assert largest_difference(found, expected) < 2e-6
    assert metrics["update/loss"] == pytest.approx(float(value), abs=1e-5)
    assert metrics["update/kl"] > 0 and metrics["update/count"] == 1


def test_a_state_starts_at_the_first_problem(policy, mesh):
    params = jax.tree.map(jnp.copy, policy[1])
    state = init_state(params, optax.sgd(1.0), mesh, environments=("a", "b"))
    assert state.step == 0 and state.kl_scale == 1
    assert state.seed_cursor == {"a": 0, "b": 0}


@pytest.mark.slow
def test_all_updates_share_the_programs_of_their_lengths(policy, mesh):
    batch, advantage = make_rows(policy, 8)
    lengths = {piece.sizes for piece in pieces_of(batch, minibatches=4)}
    model, params = policy
    policy = model, jax.device_put(params, param_shardings(model, mesh))  # the layout of hf.load
    optimizer = optax.adam(1e-3)  # not shared with other tests
    loss = dataclasses.replace(LOSS, clip_low=0.21)  # not shared with other tests
    programs = policy_gradient, optimize.apply_gradient
    before = [program._cache_size() for program in programs]
    for _ in range(2):
        run(policy, mesh, batch, advantage, optimizer=optimizer, loss=loss, minibatches=4)
    after = [program._cache_size() for program in programs]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(lengths), 1]


@pytest.mark.long
def test_micro_batch_size_and_padding_do_not_change_the_update(policy, mesh):
    batch, advantage = make_rows(policy, 7)
    one, metrics = run(policy, mesh, batch, advantage, micro_batch=1)
    for micro_batch, minibatch_rows in ((3, 7), (7, 7), (4, 20)):
        other, again = run(
            policy,
            mesh,
            batch,
            advantage,
            micro_batch=micro_batch,
            minibatch_rows=minibatch_rows,
        )
        assert largest_difference(one, other) < 1e-6
        for name in metrics.keys() - {"update/real_share", "update/positions", "update/shared"}:
            value = metrics[name]
            assert again[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.medium
@pytest.mark.parametrize("micro_batch", [2, 6])
def test_the_load_of_experts_is_that_of_the_trained_tokens(policy, mesh, micro_batch):
    """Of the positions that predict them: counted one row at a time."""
    shape = dataclasses.replace(policy[0].config, **mixture(policy[0].config.layers))
    model, params = Qwen(shape), init_params(shape, jax.random.key(3))
    batch, advantage = make_rows((model, params), 6)
    _, metrics = run((model, params), mesh, batch, advantage, ref=params, micro_batch=micro_batch)
    *_, routing = model.apply({"params": params}, batch.tokens_BT, keep_routing=True)
    index_LBTk = routing.index
    count_LX = np.zeros((shape.layers, shape.experts.count))
    for layer, row, at in np.ndindex(index_LBTk.shape[:3]):
        if at + 1 < batch.mask_BT.shape[1] and batch.mask_BT[row, at + 1]:
            np.add.at(count_LX[layer], index_LBTk[layer, row, at], batch.weight_B[row] > 0)
    share_LX = count_LX / count_LX.sum(1, keepdims=True)
    load = (share_LX.max(1) / share_LX.mean(1)).mean()
    entropy = np.mean([-(p[p > 0] * np.log(p[p > 0])).sum() for p in share_LX]) / np.log(4)
    assert metrics["update/expert_load"] == pytest.approx(load, abs=1e-5)
    assert metrics["update/expert_entropy"] == pytest.approx(entropy, abs=1e-5)
    assert load > 1.02


@pytest.mark.medium
@pytest.mark.parametrize("micro_batch", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_the_load_balancing_loss_is_that_of_its_definition(policy, mesh, micro_batch):
    """Its value, and the gradient of the whole loss."""
    shape = dataclasses.replace(policy[0].config, **mixture(policy[0].config.layers))
    model, params = Qwen(shape), init_params(shape, jax.random.key(3))
    batch, advantage = make_rows((model, params), 6)
    loss = dataclasses.replace(LOSS, balance_coef=0.7)

    def mean_balance(params):
        *_, routing = model.apply({"params": params}, batch.tokens_BT, keep_routing=True)
        total = 0.0
        for row, mask_T in enumerate(batch.mask_BT):
            at = np.flatnonzero(mask_T) - 1  # the positions that predict the row's tokens
            of_layers = 0.0
            for layer in range(shape.layers):
                chosen = np.bincount(np.ravel(routing.index[layer, row, at]), minlength=4)
                fraction_X = chosen / chosen.sum()
                of_layers += 4 * (fraction_X * routing.probability[layer, row, at].mean(0)).sum()
            total += of_layers / shape.layers * len(at)
        return total / batch.mask_BT.sum()

    def objective(params):
        plain = reference_loss((model, policy_params), params, batch, advantage, loss)
        return plain + 0.7 * mean_balance(params)

    policy_params = params
    value, grads = jax.value_and_grad(objective)(params)
    found, metrics = run(
        (model, params), mesh, batch, advantage, loss=loss, micro_batch=micro_batch
    )
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    assert largest_difference(found, expected) < 2e-6
    assert metrics["update/loss"] == pytest.approx(float(value), abs=1e-5)
    assert metrics["update/balance"] == pytest.approx(float(mean_balance(params)), abs=1e-5)
    assert 1.0 < metrics["update/balance"] < 2.0


def test_loss_scale_multiplies_the_step(policy, mesh):
    batch, advantage = make_rows(policy, 4)
    full, _ = run(policy, mesh, batch, advantage)
    half, _ = run(policy, mesh, batch, advantage, loss_scale=0.5)
    expected = jax.tree.map(lambda p, f: p + 0.5 * (f - p), policy[1], full)
    assert largest_difference(half, expected) < 1e-6


def test_without_signal_nothing_moves(policy, mesh):
    """Zero advantages, no KL, no entropy, no weight decay: parameters stay bit-identical."""
    batch, _ = make_rows(policy, 4)
    loss = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
    optimizer = optimize.AdamW(**ADAM)
    params, metrics = run(
        policy, mesh, batch, np.zeros_like(batch.mask_BT), optimizer=optimizer, loss=loss
    )
    assert all(
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (params, policy[1])), strict=True)
    )
    assert metrics["update/grad_norm"] == 0


ADAM = dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def test_norms_and_biases_do_not_decay(policy, mesh):
    batch, _ = make_rows(policy, 4)
    loss = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
    params = jax.tree.map(lambda x: x + 0.5, policy[1])
    optimizer = optimize.AdamW(**ADAM | dict(weight_decay=0.1))
    found, _ = run(
        (policy[0], params),
        mesh,
        batch,
        np.zeros_like(batch.mask_BT),
        optimizer=optimizer,
        loss=loss,
        rates=np.full(1, 0.5, np.float32),
    )
    before = flatten_dict(params)
    kept = [path for path, x in flatten_dict(found).items() if np.array_equal(x, before[path])]
    assert {path[-1] for path in kept} == {"scale", "bias"}
    assert len(kept) == 6  # three norm scales; biases of q, k and v
    for path, x in flatten_dict(found).items():
        if path not in kept:
            np.testing.assert_allclose(x, 0.95 * before[path], rtol=1e-6)


def test_a_non_finite_update_is_skipped_and_counted(policy, mesh):
    batch, advantage = make_rows(policy, 4)
    advantage[1, 6] = np.nan
    params, metrics = run(policy, mesh, batch, advantage, optimizer=optax.adam(1e-2))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (params, policy[1])), strict=True)
    )
    assert metrics["update/skipped"] == 1


def test_every_kept_row_is_used_once(policy, mesh, monkeypatch):
    batch, advantage = make_rows(policy, 11)
    seen = []

    def spy(piece, *args):
        seen.append(piece.rows.tolist())
        return micro_batches(piece, *args)

    monkeypatch.setattr(optimize, "micro_batches", spy)
    _, metrics = run(policy, mesh, batch, advantage, minibatches=3)
    assert sorted(sum(seen, [])) == list(range(11))
    assert seen == [piece.rows.tolist() for piece in pieces_of(batch, minibatches=3)]
    assert metrics["update/count"] == 3


def test_nothing_kept_updates_nothing(policy, mesh):
    batch, advantage = make_rows(policy, 4)
    state = init_state(jax.tree.map(jnp.copy, policy[1]), optax.sgd(1.0), mesh)
    after, metrics = update_policy(
        policy[0],
        optax.sgd(1.0),
        LOSS,
        state,
        policy[1],
        batch,
        advantage,
        np.array([], int),
        mesh=mesh,
        rng=np.random.default_rng(0),
        minibatches=2,
        micro_batch=2,
        minibatch_rows=4,
        loss_scale=1.0,
        rates=np.ones(2, np.float32),
    )
    assert after is state and metrics == {"update/count": 0}


def test_logp_gap_is_the_largest_difference_on_sampled_tokens(policy, mesh):
    batch, advantage = make_rows(policy, 4)
    own = np.asarray(token_logps(*policy, batch.tokens_BT, temperature=LOSS.temperature))
    _, metrics = run(policy, mesh, batch, advantage)
    expected = np.abs((own - batch.logp_BT) * batch.mask_BT).max()
    assert metrics["update/logp_gap"] == pytest.approx(expected, abs=1e-5)


def test_each_minibatch_steps_at_its_own_rate(policy, mesh):
    """Adam's step equals the learning rate in every coordinate whose gradient is not tiny."""
    batch, advantage = make_rows(policy, 8)
    optimizer = optimize.AdamW(**ADAM | dict(b1=0.0, b2=0.0, eps=0.0))
    rates = np.array([0.0, 3e-4], np.float32)
    found, metrics = run(
        policy, mesh, batch, advantage, optimizer=optimizer, minibatches=2, rates=rates
    )
    moved = np.concatenate(
        [
            np.abs(x - y).ravel()
            for x, y in zip(*map(jax.tree.leaves, (found, policy[1])), strict=True)
        ]
    )
    assert np.median(moved) == pytest.approx(3e-4, rel=1e-2) and moved.max() < 3.1e-4
    assert metrics["update/learning_rate"] == pytest.approx(1.5e-4)


@pytest.mark.long
def test_memory_does_not_grow_with_the_vocabulary():
    """Beyond one chunk, only arrays with the parameters' shapes grow; there is no [B, T, V]
    array."""
    rows, length, width = 4, 129, 8

    def temporary_bytes(vocab_size):
        model = Qwen(ModelConfig(vocab_size, width, 1, 1, 1, width, 8))
        params = jax.eval_shape(lambda: init_params(model.config, jax.random.key(0)))
        shape, reads = (1, rows, length + 1), jax.ShapeDtypeStruct((1, 1, rows * length), "int32")
        pieces = {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, dtype in dict(entry="int32", logp="f4", advantage="f4", mask="f4").items()
        }
        tokens = jax.ShapeDtypeStruct((1, rows, length), "int32")
        pieces["packed"] = likelihood.PackedRows(tokens, reads, reads)
        pieces["weights"] = Weights(pieces["mask"], pieces["mask"])
        loss = dataclasses.replace(LOSS, kl_coef=0.0)
        count, factor = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), "f4")
        lowered = policy_gradient.lower(
            model, loss, params, None, params, pieces, count, (factor, factor)
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = 2 * likelihood.VOCAB_CHUNK, 16 * likelihood.VOCAB_CHUNK
    grown = temporary_bytes(large) - temporary_bytes(small)
    assert grown < 3 * 4 * width * (large - small)  # embedding: a padded copy, gradients
    assert grown < 0.1 * 4 * rows * length * (large - small)  # logits
