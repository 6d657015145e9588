"""diagnostics/mediation.py, against a dense forward pass with masks, written in this file."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.core import progress
from ragen_jax.core.types import Episode, Turn
from ragen_jax.diagnostics.mediation import MEASURES, mediation_metrics
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

CONFIG = ModelConfig(
    vocab_size=23, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=24
)
MODEL = Qwen(CONFIG)
FILLER = 7


@pytest.fixture(scope="module")
def params():
    made = init_params(CONFIG, jax.random.key(3))
    # Larger than initial values, so that blocked attention matters.
    return jax.tree.map(lambda x: 4 * x + 0.1, made)


def reply(rng, group, member, prompt, reasoning, tags, action, after=2):
    tokens = rng.integers(0, 23, reasoning + tags + action + after).astype(np.int32)
    first = reasoning + tags
    turn = Turn(
        prompt=rng.integers(0, 23, prompt).astype(np.int32),
        message="",
        sampled=tokens,
        logp=np.zeros(len(tokens), np.float32),
        reasoning=(0, reasoning),
        answer=(first, first + action),
        actions=(),
        valid=True,
        reward=0.0,
        info={},
    )
    return Episode(seed=group, group=group, member=member, turns=(turn,), success=False)


@pytest.fixture(scope="module")
def episodes():
    rng = np.random.default_rng(0)
    sizes = [(9, 5, 2, 1), (20, 3, 1, 2)] * 3
    return [reply(rng, i // 2, i % 2, *size) for i, size in enumerate(sizes)]


# ---- a forward pass from embeddings, with any mask ----------------------------------------------


def norm(x, weight):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps) * weight


def turned(x_TK, position_T):
    half = x_TK.shape[-1] // 2
    angle = position_T[:, None] / CONFIG.rope_theta ** (jnp.arange(half) / half)
    a, b = x_TK[..., :half], x_TK[..., half:]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def dense(params, embedded_TD, position_T, mask_TT):
    """float32 log-probabilities [T, V] of the next token, under a mask (query, key)."""
    x = embedded_TD
    for i in range(CONFIG.layers):
        layer = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        h = norm(x, layer["attention_norm"]["scale"])

        def project(name, h=h, layer=layer):
            return jnp.einsum("td,dhk->thk", h, layer[name]["kernel"]) + layer[name]["bias"]

        q, k, v = turned(project("q"), position_T), turned(project("k"), position_T), project("v")
        k, v = (jnp.repeat(y, CONFIG.heads // CONFIG.kv_heads, axis=1) for y in (k, v))
        score = jnp.einsum("qhk,shk->hqs", q, k) / np.sqrt(CONFIG.head_dim)
        weight = jax.nn.softmax(jnp.where(mask_TT, score, -jnp.inf), -1)
        mixed = jnp.einsum("hqs,shk->qhk", weight, v)
        x = x + jnp.einsum("qhk,hkd->qd", mixed, layer["o"]["kernel"])
        h = norm(x, layer["mlp_norm"]["scale"])
        gate = jax.nn.silu(h @ layer["gate"]["kernel"]) * (h @ layer["up"]["kernel"])
        x = x + gate @ layer["down"]["kernel"]
    return jax.nn.log_softmax(norm(x, params["final_norm"]["scale"]) @ params["embed"].T, -1)


def by_hand(params, turn):
    """The measures of one reply."""
    X, Z = len(turn.prompt), turn.reasoning[1]
    first, last = turn.answer
    spoken = turn.sampled[:last]

    def table(x, z, ending, blocked=()):
        """(log p [action, V], embeddings -> loss, ...), attention blocked between region pairs."""
        tokens = np.concatenate([x, z, ending])
        region = np.repeat([0, 1, 2], [len(x), len(z), len(ending)])
        mask = np.tril(np.ones((len(tokens), len(tokens)), bool))
        for query, key in blocked:
            mask &= ~((region[:, None] == query) & (region == key))
        at = np.arange(len(tokens) - (last - first), len(tokens))

        def logps(embedded):
            return dense(params, embedded, jnp.arange(len(tokens)), jnp.array(mask))[at - 1]

        def loss(embedded):
            return -logps(embedded)[np.arange(len(at)), tokens[at]].mean()

        return logps(params["embed"][tokens]), loss, params["embed"][tokens], tokens[at]

    x, z, ending = turn.prompt, spoken[:Z], spoken[Z:]
    full, loss, embedded, action = table(x, z, ending)
    through = table(x, z, ending, [(2, 0)])[0]
    without = table(x, z, ending, [(2, 1)])[0]
    alone = table(x, z, ending, [(2, 0), (1, 0)])[0]

    def kl(p, q):
        return (jnp.exp(p) * (p - q)).sum(-1).mean()

    def entropy(p):
        return -(jnp.exp(p) * p).sum(-1).mean()

    def exchanged(other):
        with_z, without_z = (p[np.arange(len(action)), action].sum() for p in (full, other))
        return (with_z - without_z) / -(with_z + without_z)

    size = jnp.linalg.norm(jax.grad(loss)(embedded), axis=-1)
    return {
        "kl_direct": kl(full, through),
        "kl_necessity": kl(full, without),
        "kl_leakage": kl(through, alone),
        "h_through": entropy(through) - entropy(full),
        "grad_prompt": size[:X].sum() / size.sum(),
        "grad_reasoning": size[X : X + Z].sum() / size.sum(),
        "necessity": exchanged(table(x, z[:0], ending)[0]),
        "substantivity": exchanged(table(x, np.full_like(z, FILLER), ending)[0]),
    }


# ---- tests --------------------------------------------------------------------------------------


def measured(params, episodes, micro_batch=4, model=MODEL):
    return mediation_metrics(model, params, episodes, filler=FILLER, micro_batch=micro_batch)


@pytest.mark.long
@pytest.mark.slow
def test_every_measure_against_a_dense_forward_pass(params, episodes):
    figures = measured(params, episodes)
    each = [by_hand(params, episode.turns[0]) for episode in episodes]
    for name in MEASURES:
        values = np.array([found[name] for found in each])
        assert np.ptp(values) > 1e-3, name
        assert figures[f"mediation/{name}"] == pytest.approx(values.mean(), rel=1e-3, abs=1e-5)
        assert 0 < figures[f"mediation/{name}_ci95"] < 10 * np.ptp(values)
    assert 0 < figures["mediation/grad_prompt"] + figures["mediation/grad_reasoning"] < 1


@pytest.mark.long
def test_rows_of_a_call_and_their_order_change_nothing(params, episodes):
    whole = measured(params, episodes)
    for again in (measured(params, episodes, micro_batch=1), measured(params, episodes[::-1])):
        assert again == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_a_policy_that_reads_nothing_but_its_last_token(params, episodes):
    """No attention: neither prompt nor reasoning can affect an action, and their effects are 0."""
    deaf = jax.tree.map(jnp.array, params)
    deaf["layers"]["o"]["kernel"] = jnp.zeros_like(deaf["layers"]["o"]["kernel"])
    progress.enter_phase("diagnose")
    figures = measured(deaf, episodes)
    assert progress.NOW.done == progress.NOW.total == 2  # calls for six replies, four at a time
    assert [figures[f"mediation/{name}"] for name in MEASURES] == pytest.approx([0.0] * 8, abs=1e-6)
    heard = measured(params, episodes)
    assert all(abs(heard[f"mediation/{name}"]) > 1e-3 for name in MEASURES)


def test_replies_without_reasoning_or_action_are_left_out(params, episodes):
    def changed(episode, **fields):
        return dataclasses.replace(
            episode, turns=(dataclasses.replace(episode.turns[0], **fields),)
        )

    silent = changed(episodes[1], reasoning=(0, 0))
    mute = changed(episodes[4], answer=(0, 0))
    some = [*episodes[:1], silent, *episodes[2:4], mute, *episodes[5:]]
    left = [by_hand(params, episodes[i].turns[0])["kl_direct"] for i in (0, 2, 3, 5)]
    assert measured(params, some)["mediation/kl_direct"] == pytest.approx(np.mean(left), rel=1e-3)
    assert measured(params, [silent, mute]) == {}


def test_a_head_of_its_own(episodes):
    """Untied weights: the gradient of the embedding table does not include the head."""
    config = dataclasses.replace(CONFIG, tied=False)
    untied = jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(3)))
    tied = {name: x for name, x in untied.items() if name != "head"}
    same = tied | {"head": tied["embed"]}
    assert measured(same, episodes, model=Qwen(config)) == pytest.approx(measured(tied, episodes))
    other = measured(untied, episodes, model=Qwen(config))["mediation/kl_direct"]
    assert other != pytest.approx(measured(tied, episodes)["mediation/kl_direct"], rel=1e-2)
