"""The gated delta rule: chunks against the rule token by token, gradients, padding, states."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import hybrid

from ragen_jax.model import delta_rule, qwen, weights
from ragen_jax.programs.roofline import Work

B, H, K, V = 2, 3, 6, 5


def inputs(T, seed=0):
    """Return the arguments of `gated_delta_rule`; some decays forget at once, some hardly."""
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k = (delta_rule._unit(jax.random.normal(key, (B, T, H, K))) for key in keys[:2])
    v = jax.random.normal(keys[2], (B, T, H, V))
    log_decay = -jnp.exp(3 * jax.random.normal(keys[3], (B, T, H)))
    rate = jax.nn.sigmoid(2 * jax.random.normal(keys[4], (B, T, H)))
    return q, k, v, log_decay, rate, jax.random.normal(keys[5], (B, H, K, V))


def in_a_loop(q, k, v, log_decay, rate, S):
    """The definition, one token at a time."""
    out = []
    for t in range(q.shape[1]):
        S = jnp.exp(log_decay[:, t])[..., None, None] * S
        known = jnp.einsum("bhkv,bhk->bhv", S, k[:, t])
        write = rate[:, t, :, None] * (v[:, t] - known)
        S = S + jnp.einsum("bhk,bhv->bhkv", k[:, t], write)
        out.append(jnp.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return jnp.stack(out, 1), S


@pytest.mark.parametrize("T", [1, 2, 7, 19])
def test_chunks_are_the_rule_token_by_token(monkeypatch, T):
    """With their gradients, for lengths that chunks do not divide."""
    monkeypatch.setattr(delta_rule, "CHUNK", 8)

    def total(rule, *args):
        out, S = rule(*args)
        return (jnp.sin(out).sum() + jnp.sin(S).sum()), (out, S)

    found, want = (
        jax.jit(jax.value_and_grad(total, argnums=range(1, 7), has_aux=True), static_argnums=0)(
            rule, *inputs(T)
        )
        for rule in (delta_rule._run_rule, in_a_loop)
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def test_equal_keys_are_no_problem():
    """All keys equal and all rates 1: the system is as far from diagonal as it can be."""
    q, k, v, _, rate, S = inputs(150)
    args = q, jnp.broadcast_to(k[:, :1], k.shape), v, jnp.zeros(rate.shape), jnp.ones_like(rate), S
    (out, _), (want, _) = delta_rule._run_rule(*args), in_a_loop(*args)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=[4, 8], ids=["unrolled", "scanned"])
def policy(request):
    config = qwen.ModelConfig(40, 24, request.param, 4, 2, 8, 20, **hybrid(request.param))
    return qwen.Qwen(config), qwen.init_params(config, jax.random.key(1))


def test_padding_does_not_enter_the_state(policy):
    """The state after `count_B` tokens is that of these tokens alone, whatever follows them."""
    model, params = policy
    tokens_BT = np.random.default_rng(0).integers(0, 40, (4, 13))
    count_B = np.array([13, 1, 6, 0])

    def state(tokens_BT, count_B=None):
        _, (*_, state) = model.apply({"params": params}, tokens_BT, keep_kv=True, count_B=count_B)
        return jax.tree.map(lambda *x: jnp.stack(x), *state) if type(state) is tuple else state

    found = state(tokens_BT, count_B)
    for row, count in enumerate(count_B[:3]):
        want = state(tokens_BT[row : row + 1, :count])
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x[:, row], y[:, 0], rtol=0, atol=1e-5)
    assert all(not np.any(x[:, 3]) for x in jax.tree.leaves(found))


@pytest.mark.medium
def test_recomputed_activations_give_the_same_gradient(policy):
    model, params = policy
    tokens_BT = np.random.default_rng(0).integers(0, 40, (2, 9))

    def gradient(model):
        def loss(params):
            return jnp.sin(model.apply({"params": params}, tokens_BT)[0]).sum()

        return jax.jit(jax.grad(loss))(params)

    again = qwen.Qwen(dataclasses.replace(model.config, remat=True))
    for x, y in zip(*map(jax.tree.leaves, (gradient(model), gradient(again))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(x).max())
        assert np.any(x)


def test_a_tree_is_refused(policy):
    model, params = policy
    with pytest.raises(ValueError, match="linear-attention layers cannot read a prefix tree"):
        model.apply({"params": params}, np.zeros((1, 4), int), tree=object())


def test_its_work_is_counted():
    """All matrices, keys of the full layers alone, and a state in each of the others."""
    config = qwen.ModelConfig(40, 24, 8, 4, 2, 8, 20, **hybrid(8))
    work, heads = Work(config), config.delta
    small = ("norm", "decay")
    sizes = {leaf.path: math.prod(leaf.shape) for leaf in weights.plan(config)}
    matrices = [n for path, n in sizes.items() if not any(x in y for x in small for y in path)]
    assert work.parameters == sum(matrices)
    assert work.cache_bytes(10) == 4 * 2 * 2 * 2 * 8 * 10
    _, (*_, state) = jax.eval_shape(
        lambda key: qwen.Qwen(config).apply(
            {"params": qwen.init_params(config, key)}, jnp.zeros((3, 2), int), keep_kv=True
        ),
        jax.random.key(0),
    )
    assert work.state_bytes(3) == sum(4 * x.size for x in jax.tree.leaves(state))
    assert state.memory.shape == (6, 3, heads.value_heads, heads.key_dim, heads.value_dim)
