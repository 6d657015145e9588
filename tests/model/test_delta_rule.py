"""The gated delta rule: chunks against the rule token by token, gradients, padding, states."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import on_devices
from layer_kinds import hybrid
from safetensors.numpy import load_file

from ragen_jax.model import delta_rule, lora, qwen, weights
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


@pytest.mark.long
@pytest.mark.parametrize("layers", [4, pytest.param(8, marks=pytest.mark.slow)])  # 8: a scan
def test_on_eight_devices(layers):
    """Passes, gradients, sampled replies and the states after them, with heads split or not."""
    process = on_devices(8, ["tests/model/hybrid_on_mesh_script.py", str(layers)])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert len(found) == 3
    for name in ("logp", "gradient", "state"):
        assert max(x[name] for x in found.values()) < 3e-5, found


@pytest.mark.medium
def test_adapters_attach_and_merge_to_the_same_model(policy):
    model, params = policy
    adapters = lora.init_adapters(model.config, jax.random.key(1), rank=2, targets=lora.ALL_TARGETS)
    assert adapters["layers"]["delta_qkv"]["lora_a"].shape[0] == model.config.layers * 3 // 4
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    tokens_BT = np.random.default_rng(0).integers(0, 40, (2, 13))
    plain, attached, merged = (
        model.apply({"params": p}, tokens_BT)[0]
        for p in (params, *(f(params, adapters, scale=0.5) for f in (lora.attach, lora.merge)))
    )
    np.testing.assert_allclose(attached, merged, rtol=0, atol=1e-4)
    assert np.abs(attached - plain).max() > 0.1


@pytest.mark.medium
def test_adapters_are_saved_and_loaded(policy, tmp_path):
    """Their names are those of the layers that have them."""
    config, targets = policy[0].config, ("o", "delta_o", "down")
    adapters = lora.init_adapters(config, jax.random.key(1), rank=2, targets=targets)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    kept = dict(config=config, rank=2, alpha=4.0, targets=targets)
    lora.save_adapter(tmp_path / "x", adapters, base_model="base", **kept)
    names = load_file(tmp_path / "x" / lora.WEIGHTS).keys()
    assert {int(name.split(".")[4]) for name in names if "linear_attn.out_proj" in name} == {
        i for i in range(config.layers) if i % 4 != 3
    }
    again = lora.load_adapter(tmp_path / "x", config=config)
    for x, y in zip(jax.tree.leaves(again[0]), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_target_that_no_layer_has_is_refused():
    config = qwen.ModelConfig(40, 24, 2, 4, 2, 8, 20)
    with pytest.raises(ValueError, match="no layer has the targets delta_z; accepted: q, k, v, o"):
        lora.check_layers(config, ("q", "delta_z"))
