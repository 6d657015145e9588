"""diagnostics/gradients.py: buckets of reward variance, gradients of parts of the loss, SNR.

Axes: B rows, T tokens, G groups, K episodes per group, N groups of a bucket, D gradient components.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_call_updates import update_policy
from random_rows import LOSS, T, V, random_batch

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.advantage import deviations, sample_variance
from ragen_jax.core import progress
from ragen_jax.core.sharding import make_mesh
from ragen_jax.diagnostics import gradients
from ragen_jax.diagnostics.gradients import ZERO, bucket_gradients, figures, variance_buckets
from ragen_jax.model import lora
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits
from ragen_jax.update.buckets import split_by_length
from ragen_jax.update.optimize import MinibatchLayout, micro_batches
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import ForwardContext, PolicyLoss, init_state

G, K = 5, 3

# ---- buckets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variance", "settings", "expected"),
    [
        ([0.3, 0.1, 0.2, 0.4], dict(buckets=2), [1, 0, 0, 1]),
        ([5, 4, 3, 2, 1], dict(buckets=2), [1, 1, 0, 0, 0]),  # the lower bucket is larger
        ([0, 7, 1e-11, 3, 0], dict(buckets=2), [ZERO, 1, ZERO, 0, ZERO]),
        ([2, 1, 1, 1, 1, 2], dict(buckets=3), [2, 0, 0, 1, 1, 2]),  # ties: lower index first
        ([9, 0, 4], dict(buckets=6), [1, ZERO, 0]),  # fewer groups than buckets
        ([1, 2, 3, 4, 5, 6, 7], {}, [0, 0, 1, 2, 3, 4, 5]),  # six by default
        ([0, 0], {}, [ZERO, ZERO]),
        ([], {}, []),
        ([0.5, 1, 1.5, 2, 9, 0], dict(edges=(1, 2)), [0, 1, 1, 2, 2, ZERO]),
        ([0.5, 5], dict(buckets=9, edges=[1.0]), [0, 1]),
    ],
)
def test_buckets_by_hand(variance, settings, expected):
    assert variance_buckets(np.array(variance, np.float32), **settings).tolist() == expected


def test_unusable_buckets_are_refused():
    with pytest.raises(ValueError, match="buckets is 0; it must be at least 1"):
        variance_buckets([1.0], buckets=0)
    for edges in ((0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (-1.0,)):
        with pytest.raises(
            ValueError, match="edges is .*; it must be increasing variances above 0"
        ):
            variance_buckets([1.0], edges=edges)


# ---- figures ------------------------------------------------------------------------------------


def products(gradient_NPD):
    """The return value of `bucket_products` for known gradients."""
    sums_PD = gradient_NPD.sum(0)
    return sums_PD @ sums_PD.T, np.einsum("npd,nqd->pq", gradient_NPD, gradient_NPD)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_figures_are_those_of_the_vectors():
    gradient_NPD = np.random.default_rng(0).normal(size=(4, 3, 7))
    weight = 2.5
    found = figures(
        *products(gradient_NPD),
        ("task", "kl", "entropy"),
        weight=weight,
        groups=4,
        tokens=30,
        episodes=12,
    )
    task, kl, entropy = gradient_NPD.sum(0) / weight
    vectors = dict(
        task=task, kl=kl, entropy=entropy, regulariser=kl + entropy, total=task + kl + entropy
    )
    for name, vector in vectors.items():
        norm = np.linalg.norm(vector)
        assert found[f"{name}_norm"] == pytest.approx(norm)
        assert found[f"{name}_norm_per_episode"] == pytest.approx(norm * 30 / 12)
    assert found["cos_task_kl"] == pytest.approx(cosine(task, kl))
    assert found["cos_task_entropy"] == pytest.approx(cosine(task, entropy))
    assert found["cos_kl_entropy"] == pytest.approx(cosine(kl, entropy))
    norms = [np.linalg.norm(vectors[name]) for name in ("task", "regulariser")]
    assert found["dominance"] == pytest.approx(norms[1] / sum(norms))

    # Signal and noise: the mean over all splits of the groups into halves.
    for name, own_ND in (
        ("task", gradient_NPD[:, 0] * 4 / weight),
        ("regulariser", gradient_NPD[:, 1:].sum(1) * 4 / weight),
    ):
        halves = [
            (own_ND[list(half)].mean(0), np.delete(own_ND, half, axis=0).mean(0))
            for half in itertools.combinations(range(4), 2)
        ]
        signal = np.mean([a @ b for a, b in halves])
        noise = np.mean([(a - b) @ (a - b) / 4 for a, b in halves])
        assert found[f"{name}_signal_squared"] == pytest.approx(signal)
        assert found[f"{name}_noise_squared"] == pytest.approx(noise)
        assert found[f"{name}_norm"] ** 2 == pytest.approx(signal + noise)
    assert found["snr"] == pytest.approx(found["task_signal_squared"] / found["task_noise_squared"])


def test_signal_and_noise_of_a_simulation():
    """Known signal and noise, 4,000 buckets: the mean estimates are within 5 standard errors."""
    rng, groups, D, sigma = np.random.default_rng(1), 8, 20, 1.5
    signal_D = rng.normal(size=D) * 0.3
    draws = []
    for _ in range(4000):
        gradient_NPD = (signal_D + sigma * rng.normal(size=(groups, D)))[:, None]
        found = figures(
            *products(gradient_NPD), ("task",), weight=groups, groups=groups, tokens=1, episodes=1
        )
        draws.append((found["task_signal_squared"], found["task_noise_squared"]))
    error = 5 * np.std(draws, 0) / np.sqrt(len(draws))
    np.testing.assert_array_less(
        np.abs(np.mean(draws, 0) - [signal_D @ signal_D, D * sigma**2 / groups]), error
    )
    assert min(signal for signal, _ in draws) < 0  # unbiased, so not clipped at 0


def test_what_is_undefined_is_left_out():
    gradient_NPD = np.ones((3, 2, 5))
    gradient_NPD[:, 0] = 0.0  # groups without variance
    counts = dict(weight=3.0, tokens=3, episodes=3)
    found = figures(*products(gradient_NPD), ("task", "kl"), groups=3, **counts)
    assert found["task_norm"] == 0 and found["dominance"] == 1
    assert "cos_task_kl" not in found and "snr" not in found
    alone = figures(*products(gradient_NPD[:1]), ("task", "kl"), groups=1, **counts)
    assert not [name for name in alone if "signal" in name or "noise" in name]
    nothing = figures(*products(0 * gradient_NPD[:, :1]), ("task",), groups=3, **counts)
    assert "dominance" not in nothing
    task = figures(*products(gradient_NPD[:, 1:]), ("task",), groups=3, **counts)
    assert task["dominance"] == 0 and task["total_norm"] == task["task_norm"]
    assert all(np.isfinite(list(x.values())).all() for x in (found, alone, nothing, task))


# ---- gradients of a model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    """(model, parameters, reference parameters)."""
    config = ModelConfig(
        vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24
    )
    reference = init_params(config, jax.random.key(0))
    return Qwen(config), jax.tree.map(lambda x: 1.05 * x, reference), reference


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=-1, fsdp=1, tensor=1)


@pytest.fixture(scope="module")
def rows(policy):
    """(batch, return_GK, advantage_BT) of G groups of K episodes; the first of each has two rows.

    Group 1 has no variance; the last row is padding.
    """
    rng = np.random.default_rng(0)
    episode = np.array([e for e in range(G * K) for _ in range(1 + (e % K == 0))])
    batch = random_batch(
        policy[:2],
        rng,
        episode_B=np.append(episode, -1),
        group_B=np.append(episode // K, -1),
        weight_B=np.append(np.ones(len(episode)), 0),
    )
    return_GK = rng.normal(size=(G, K)).astype(np.float32) * np.arange(1, G + 1)[:, None]
    return_GK[1] = 2.5
    advantage = np.asarray(deviations(return_GK)).reshape(-1)[batch.episode_B]
    return batch, return_GK, advantage[:, None] * batch.mask_BT


def report(
    policy, mesh, batch, advantage, bucket_G, *, loss=LOSS, micro_batch=2, group_rows=K + 1, **rest
):
    model, params, reference = policy
    layout = MinibatchLayout(mesh, len(bucket_G), micro_batch, group_rows)
    given = PolicyLoss(model, loss, reference, **rest), params, batch, advantage
    return bucket_gradients(*given, np.array(bucket_G), layout)


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@functools.partial(jax.jit, static_argnames="model")
def defined_parts(model, params, reference, batch, advantage, inside_B):
    """{part: gradient of its mean over the sampled tokens of the selected rows}, by definition."""
    mask = batch.mask_BT[:, 1:] * inside_B[:, None]

    def table(params):
        hidden, _ = model.apply({"params": params}, batch.tokens_BT)
        return jax.nn.log_softmax(logits(params, hidden) / LOSS.temperature)[:, :-1]

    def picked(table):
        return jnp.take_along_axis(table, batch.tokens_BT[:, 1:, None], -1)[..., 0]

    def parts(params):
        own, ref = table(params), picked(table(reference))
        logp, a = picked(own), advantage[:, 1:]
        ratio = jnp.exp(logp - batch.logp_BT[:, 1:])
        term = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 1 - LOSS.clip_low, 1 + LOSS.clip_high))
        term = jnp.where(a < 0, jnp.minimum(term, -a * LOSS.clip_c), term)
        kl = jnp.exp(ref - logp) - (ref - logp) - 1
        entropy = -(jnp.exp(own) * own).sum(-1)
        found = dict(task=term, kl=LOSS.kl_coef * kl, entropy=-LOSS.entropy_coef * entropy)
        return {name: (mask * x).sum() / mask.sum() for name, x in found.items()}

    return {
        name: jax.grad(lambda params, name=name: parts(params)[name])(params)
        for name in ("task", "kl", "entropy")
    }


def one_length(mesh, batch, advantage, weights, *, micro_batch):
    """Return (all rows as micro-batches of plain rows of one length, number of micro-batches)."""
    size = len(batch.mask_BT)
    layout = MinibatchLayout(mesh, 1, micro_batch, size)
    rows = token_rows(batch)
    split = split_by_length([np.arange(size)], rows, layout.grouping, max_lengths=1)
    ((piece,),) = split.pieces
    data = dict(logp=batch.logp_BT, advantage=advantage, mask=batch.mask_BT, weights=weights)
    return micro_batches(piece, rows, layout, data)


def test_norms_and_cosines_are_those_of_the_definition(policy, mesh, rows):
    batch, _, advantage = rows
    bucket_G = [0, ZERO, 1, 0, 1]
    progress.enter_phase("diagnose")
    found = report(policy, mesh, batch, advantage, bucket_G)
    assert progress.NOW.done == progress.NOW.total == len(bucket_G)
    assert list(found) == [ZERO, 0, 1]
    for bucket, values in found.items():
        inside_B = np.isin(batch.group_B, np.flatnonzero(np.equal(bucket_G, bucket)))
        parts = {
            name: flat(gradient)
            for name, gradient in defined_parts(*policy, batch, advantage, inside_B).items()
        }
        parts["regulariser"] = parts["kl"] + parts["entropy"]
        parts["total"] = parts["task"] + parts["regulariser"]
        for name, vector in parts.items():
            assert values[f"{name}_norm"] == pytest.approx(
                np.linalg.norm(vector), rel=1e-5, abs=1e-7
            )
        assert values["cos_kl_entropy"] == pytest.approx(
            cosine(parts["kl"], parts["entropy"]), abs=1e-5
        )
        if bucket != ZERO:
            for other in ("kl", "entropy"):
                assert values[f"cos_task_{other}"] == pytest.approx(
                    cosine(parts["task"], parts[other]), abs=1e-5
                )
        groups = bucket_G.count(bucket)
        assert (values["groups"], values["episodes"]) == (groups, groups * K)
        assert values["tokens"] == batch.mask_BT[inside_B].sum()
        assert values["task_norm_per_episode"] == pytest.approx(
            values["task_norm"] * values["tokens"] / values["episodes"]
        )
    assert found[ZERO]["task_norm"] == 0 and found[ZERO]["dominance"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(kl_coef=0.0, objective="gspo", clip_c=None, aggregation="seq-mean-token-mean"),
        pytest.param(
            dict(kl_kind="exact", aggregation="seq-mean-token-sum-norm"), marks=pytest.mark.slow
        ),
    ],
)
def test_parts_add_up_to_what_an_update_does(policy, mesh, rows, changes):
    """With plain gradient descent at rate 1, an update is the gradient of the training loss."""
    batch, _, advantage = rows
    loss = dataclasses.replace(LOSS, **changes)
    model, params, reference = policy
    before = jax.tree.map(jnp.copy, params)
    optimizer = optax.sgd(1.0)
    state, _ = update_policy(
        model,
        optimizer,
        loss,
        init_state(before, optimizer, mesh).replace(kl_scale=jnp.float32(0.7)),
        reference,
        batch,
        advantage,
        np.arange(len(batch.weight_B)),
        mesh=mesh,
        rng=np.random.default_rng(0),
        minibatches=1,
        micro_batch=4,
        minibatch_rows=len(batch.weight_B),
        loss_scale=1.0,
        rates=np.ones(1, np.float32),
    )
    whole = flat(params) - flat(state.params)
    found = report(policy, mesh, batch, advantage, [0] * G, loss=loss, kl_scale=jnp.float32(0.7))
    weights = losses.minibatch_weights(batch.mask_BT, loss.aggregation, norm_length=T)
    pieces, count = one_length(mesh, batch, advantage, weights, micro_batch=7)
    assert count == 3
    parts = jax.jit(gradients.part_gradients)(
        PolicyLoss(model, loss, reference, 0.7), params, pieces, count
    )
    names = gradients.part_names(loss)
    assert all(len(x) == len(names) for x in jax.tree.leaves(parts))
    np.testing.assert_allclose(
        flat(jax.tree.map(lambda x: x.sum(0), parts)), whole, rtol=0, atol=1e-5
    )
    # A single bucket of all groups: the loss's gradient over the sum of its weights.
    weight = float(np.sum(weights.loss_BT))
    assert found[0]["total_norm"] * weight == pytest.approx(np.linalg.norm(whole), rel=1e-5)


@pytest.mark.long
def test_micro_batch_size_changes_nothing(policy, mesh, rows):
    batch, _, advantage = rows
    one = report(policy, mesh, batch, advantage, [0, 0, 1, 1, 0], micro_batch=1)
    for micro_batch, group_rows in ((3, 4), (8, 20)):
        other = report(
            policy,
            mesh,
            batch,
            advantage,
            [0, 0, 1, 1, 0],
            micro_batch=micro_batch,
            group_rows=group_rows,
        )
        for bucket, values in one.items():
            assert other[bucket] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_all_buckets_share_one_program(policy, mesh, rows):
    batch, _, advantage = rows
    report(policy, mesh, batch, advantage, [0, 0, 0, 0, 0])
    compiled = gradients.bucket_products._cache_size()
    report(policy, mesh, batch, 2 * advantage, [0, ZERO, 1, 2, 2])
    assert gradients.bucket_products._cache_size() == compiled


def test_task_gradient_is_within_the_bound_of_appendix_h(policy, mesh, rows):
    """|g| <= sqrt(RV) sqrt(E |s|^2), where s is the gradient of an episode's log-likelihood."""
    batch, return_GK, advantage = rows
    model, params, _ = policy
    own_BT = token_logps(model, params, batch.tokens_BT, temperature=LOSS.temperature)
    batch = batch.replace(logp_BT=np.asarray(own_BT) * batch.mask_BT)  # the sampling policy
    found = report(policy, mesh, batch, advantage, range(G))
    variance_G = np.asarray(sample_variance(return_GK))

    @jax.jit
    def score(episode):
        def logp(params):
            logp_BT = token_logps(model, params, batch.tokens_BT, temperature=LOSS.temperature)
            return ((batch.episode_B == episode)[:, None] * batch.mask_BT * logp_BT).sum()

        return jax.grad(logp)(params)

    score_ED = np.stack([flat(score(episode)) for episode in range(G * K)])
    for g in range(G):
        own = slice(g * K, (g + 1) * K)
        deviation_K = return_GK[g] - return_GK[g].mean()
        exact = np.linalg.norm((deviation_K[:, None] * score_ED[own]).mean(0))
        assert found[g]["task_norm_per_episode"] == pytest.approx(exact, rel=1e-4, abs=1e-6)
        bound = np.sqrt(variance_G[g] * (score_ED[own] ** 2).sum(1).mean())
        assert found[g]["task_norm_per_episode"] <= bound * (1 + 1e-5)


@pytest.mark.long
def test_adapters_over_a_frozen_model(policy, mesh, rows):
    batch, _, advantage = rows
    model, params, _ = policy
    adapters = lora.init_adapters(model.config, jax.random.key(1), rank=2, targets=("q", "down"))
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    frozen = ForwardContext(params, np.float32(1.5))
    found = report((model, adapters, None), mesh, batch, advantage, [0] * G, context=frozen)
    weights = losses.minibatch_weights(batch.mask_BT, LOSS.aggregation)
    pieces, _ = one_length(mesh, batch, advantage, weights, micro_batch=len(batch.mask_BT))
    piece = jax.tree.map(lambda x: x[0], pieces)

    def total(adapters):
        parts, *_ = PolicyLoss(model, LOSS, params).parts(frozen.attach(adapters), piece)
        return sum(parts.values())

    whole = jax.jit(jax.grad(total))(adapters)
    assert found[0]["total_norm"] == pytest.approx(np.linalg.norm(flat(whole)), rel=1e-5)
