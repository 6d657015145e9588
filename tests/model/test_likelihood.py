"""likelihood.py against plain softmaxes over the whole vocabulary."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import ROOT, on_devices

from ragen_jax.algorithm import losses
from ragen_jax.model import likelihood
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits

V, T = 30, 12


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48
    )
    return Qwen(config), init_params(config, jax.random.key(0))


def test_token_logps_against_a_plain_softmax(policy):
    model, params = policy
    tokens = np.random.default_rng(0).integers(0, V, (3, T))
    hidden, _ = jax.jit(model.apply)({"params": params}, tokens)
    p = np.asarray(jax.nn.softmax(logits(params, hidden) / 0.7))
    found = np.asarray(likelihood.token_logps(model, params, tokens, temperature=0.7))
    assert np.array_equal(found[:, 0], np.zeros(3))
    for b in range(3):
        for t in range(1, T):
            assert abs(found[b, t] - np.log(p[b, t - 1, tokens[b, t]])) < 1e-5
    statistics = functools.partial(likelihood.token_statistics, model, temperature=0.7)
    _, entropy = jax.jit(statistics)(params, tokens)
    np.testing.assert_allclose(entropy[:, 1:], -(p * np.log(p)).sum(-1)[:, :-1], atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 10, 29])
def test_vocabulary_chunks_change_neither_values_nor_gradients(policy, monkeypatch, chunk):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(3 * rng.normal(size=(2, 5, 8)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(V, 8)), jnp.float32)
    target = jnp.asarray(rng.integers(0, V, (2, 5)))

    def both(hidden, head):
        logp, entropy = likelihood.vocabulary_statistics(hidden, head, target, 0.9)
        return (logp * jnp.arange(5.0)).sum() + 2 * (entropy**2).sum()

    def values_and_gradients():
        return jax.jit(lambda *x: jax.value_and_grad(both, argnums=(0, 1))(*x))(hidden, head)

    whole = values_and_gradients()
    monkeypatch.setattr(likelihood, "VOCAB_CHUNK", chunk)
    pieces = values_and_gradients()
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [7, 10, 8192])
def test_exact_kl_and_its_gradient(policy, monkeypatch, chunk):
    monkeypatch.setattr(likelihood, "VOCAB_CHUNK", chunk)
    model, params = policy
    other = jax.tree.map(lambda x: 1.1 * x, params)
    tokens = np.random.default_rng(0).integers(0, V, (3, T))

    def table(params):
        hidden, _ = model.apply({"params": params}, jnp.asarray(tokens))
        return jax.nn.log_softmax(logits(params, hidden) / 0.7)[:, :-1]

    @jax.jit
    def ours(params, reference):
        return likelihood.token_statistics(
            model, params, tokens, temperature=0.7, reference=reference
        )[2][:, 1:]

    @jax.jit
    def plain(params, reference):
        return losses.exact_kl(table(params), table(reference))

    found, want = ours(params, other), plain(params, other)
    assert float(want.mean()) > 1e-3
    np.testing.assert_allclose(found, want, atol=2e-6)
    np.testing.assert_allclose(ours(params, params), 0.0, atol=2e-6)
    weight = jnp.arange(T - 1.0)
    got, expected = (
        jax.jit(jax.grad(lambda p, kl=kl: (weight * kl(p, other)).sum()))(params)
        for kl in (ours, plain)
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_no_device_gathers_the_head():
    """Under tensor parallelism each device reads only its part of the vocabulary (compiled HLO)."""
    process = on_devices(4, [ROOT / "tests" / "model" / "output_head_script.py"])
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    for name, found in json.loads(out).items():
        assert found["error"] < 5e-6, (name, found)
        if name.startswith("(1, 1"):
            assert found["gathered"] == 0, (name, found)
        else:  # fsdp splits the width: a chunk of the device's part, 31 ids by 16, is gathered
            assert 0 < found["gathered"] <= 31 * 16, (name, found)
