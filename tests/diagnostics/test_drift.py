"""diagnostics/drift.py: which part of the loss, on which groups, moves an agent between styles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_rows import LOSS, V, random_batch

from ragen_jax.core.sharding import make_mesh
from ragen_jax.diagnostics.drift import log_odds_gradient, openings
from ragen_jax.diagnostics.gradients import bucket_gradients
from ragen_jax.envs.styles import Style, sentences
from ragen_jax.model import lora
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.policy import ForwardContext, PolicyLoss

G, K = 4, 3
IDS = ((3,), (5, 6, 9))


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24
    )
    return Qwen(config), jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(0)))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=-1, fsdp=1, tensor=1)


@pytest.fixture(scope="module")
def batch(policy):
    """One row per episode; the last row is padding."""
    made = random_batch(
        policy,
        np.random.default_rng(0),
        episode_B=np.append(np.arange(G * K), -1),
        group_B=np.append(np.arange(G * K) // K, -1),
        weight_B=np.append(np.ones(G * K), 0),
    )
    return made


def log_odds(model, params, batch):
    """D, computed from its definition."""
    hidden, _ = model.apply({"params": params}, batch.tokens_BT)
    p_BTV = jax.nn.softmax(logits(params, hidden))
    found = []
    for row in range(G * K):
        p_V = p_BTV[row, int(np.flatnonzero(batch.mask_BT[row])[0]) - 1]
        found.append(jnp.log(p_V[3]) - jnp.log(p_V[5] + p_V[6] + p_V[9]))
    return sum(found) / len(found)


@pytest.mark.slow
@pytest.mark.long
def test_the_log_odds_and_their_gradient_are_those_of_the_definition(policy, mesh, batch):
    model, params = policy
    expected, gradient = jax.value_and_grad(lambda p: log_odds(model, p, batch))(params)
    for micro_batch in (2, 8):
        found, value = log_odds_gradient(
            model, params, batch, IDS, mesh=mesh, micro_batch=micro_batch
        )
        assert value == pytest.approx(float(expected), rel=1e-4)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_small_step_moves_the_log_odds_by_the_pull(policy, mesh, batch):
    """The entropy part alone, over all groups; the buckets' pulls add up to it."""
    model, params = policy
    loss = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.5)
    direction, before = log_odds_gradient(model, params, batch, IDS, mesh=mesh, micro_batch=4)
    advantage_BT = np.zeros_like(batch.mask_BT)

    def pulls(bucket_G):
        return bucket_gradients(
            *(PolicyLoss(model, loss, None), params, batch, advantage_BT, np.array(bucket_G)),
            MinibatchLayout(mesh, G, 4, K),
            direction=direction,
        )

    (whole,) = pulls([0] * G).values()
    assert whole["task_pull"] == 0 and whole["entropy_pull"] == pytest.approx(whole["total_pull"])
    split = pulls([0, 1, 0, 1])
    assert sum(x["entropy_pull"] for x in split.values()) == pytest.approx(
        whole["entropy_pull"], rel=1e-3
    )
    assert split[0]["entropy_pull"] != pytest.approx(split[1]["entropy_pull"], rel=0.01)

    @jax.jit
    def entropy_loss(params):
        hidden, _ = model.apply({"params": params}, batch.tokens_BT)
        logp = jax.nn.log_softmax(logits(params, hidden) / loss.temperature)[:, :-1]
        mask = batch.mask_BT[:, 1:] * batch.weight_B[:, None]
        return 0.5 * (mask * (jnp.exp(logp) * logp).sum(-1)).sum() / mask.sum()

    rate = 1e-3
    moved = jax.tree.map(lambda x, g: x - rate * g, params, jax.grad(entropy_loss)(params))
    _, after = log_odds_gradient(model, moved, batch, IDS, mesh=mesh, micro_batch=4)
    assert (after - before) / rate == pytest.approx(whole["entropy_pull"], rel=0.05)
    assert abs(whole["entropy_pull"]) > 1e-3


def test_of_adapters(policy, mesh, batch):
    """The gradient of the adapters, which start at 0, so the log-odds are the base model's."""
    model, params = policy
    adapters = lora.init_adapters(model.config, jax.random.key(1), rank=2, targets=("q", "o"))
    frozen = ForwardContext(params, np.float32(2.0))
    settings = dict(mesh=mesh, micro_batch=4)
    gradient, value = log_odds_gradient(model, adapters, batch, IDS, frozen=frozen, **settings)
    assert value == pytest.approx(
        log_odds_gradient(model, params, batch, IDS, **settings)[1], rel=1e-5
    )
    assert jax.tree.structure(gradient) == jax.tree.structure(adapters)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 0


class Plain:
    """A chat whose template encodes each word as its length."""

    class template:
        @staticmethod
        def plain(text):
            return np.array([len(word) for word in text.split()])


def test_the_openings_of_the_styles():
    grounded = Style(None, None, ("abc",))
    template = sentences((("abcd", "ab", "abc"), (" x",)))
    silent = Style(None, None, ())
    styles = {"grounded": grounded, "template": template, "silent": silent}
    assert openings(styles, Plain) == ((3,), (2, 4))  # shared openings carry no information
    assert openings({"grounded": grounded, "silent": silent}, Plain) is None
