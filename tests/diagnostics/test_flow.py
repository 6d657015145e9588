"""diagnostics/flow.py: does the action follow the reasoning, and does it follow the prompt?"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ragen_jax.diagnostics.flow import (
    PANEL,
    Panel,
    contrast,
    draw_panels,
    flow_metrics,
    score_flow,
)
from ragen_jax.diagnostics.intervals import jackknife
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, collapse_metrics
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params

KEYS = {"za_swap", "xa_swap", "za_given_x", "xa_given_z"}
NEITHER = Panel(np.zeros((2, 1)), np.array([[0], [1]]))  # each reasoning alone, without others


# ---- the figures, by hand -----------------------------------------------------------------------


def test_contrast_by_hand():
    matched = np.log([0.8, 0.5])
    swapped = np.log([[0.8, 0.2], [0.5, 0.1]])
    # log(0.8 / mean(0.8, 0.2)), log(0.5 / mean(0.5)): the second cell of row 1 has no weight
    found = contrast(matched, swapped, np.array([[1.0, 1.0], [3.0, 0.0]]))
    np.testing.assert_allclose(found, [math.log(0.8 / 0.5), 0.0], atol=1e-12)
    # weights 3 : 1 give the mean (3 * 0.8 + 0.2) / 4 = 0.65
    found = contrast(matched[:1], swapped[:1], np.array([[3.0, 1.0]]))
    np.testing.assert_allclose(found, math.log(0.8 / 0.65), atol=1e-12)


def test_prompt_figures_by_hand():
    score = np.log([[0.6, 0.2], [0.1, 0.3]])  # posteriors 3/4, 1/4 and 1/4, 3/4
    action = np.log([[0.9, 0.5], [0.2, 0.4]])
    found = flow_metrics(score, action, [0, 1], [0, 1], others=NEITHER)
    assert found.keys() == {"xa_swap", "xa_given_z"}  # two prompts: no interval
    xa_swap = (math.log(0.9 / 0.7) + math.log(0.4 / 0.3)) / 2
    xa_given_z = (math.log(0.9 / 0.8) + math.log(0.4 / 0.35)) / 2
    np.testing.assert_allclose([found["xa_swap"], found["xa_given_z"]], [xa_swap, xa_given_z])


def test_panel_figures_by_hand():
    action = np.log([[0.8, 0.1], [0.1, 0.6], [0.5, 0.5]])
    others = Panel(
        np.log([[0.8, 0.4, 0.3], [0.6, 0.2, 1.0], [0.5, 1.0, 1.0]]),
        np.array([[0, 1, 1], [1, 0, -1], [0, -1, -1]]),  # the third has no other: it is left out
    )
    found = flow_metrics(np.zeros((3, 2)), action, [0, 1, 0], [5, 7], others=others)
    np.testing.assert_allclose(
        found["za_swap"], (math.log(0.8 / 0.5) + math.log(0.6 / 0.4)) / 2, atol=1e-12
    )
    assert "za_given_x" not in found


def test_jackknife_by_hand():
    # deleted figures 1, 2, 3: mean 2, spread 2, se = sqrt(2 / 3 * 2), t(0.975, 2) = 4.302653
    np.testing.assert_allclose(jackknife([1.0, 2.0, 3.0]), 4.302653 * math.sqrt(4 / 3), rtol=1e-6)
    assert jackknife([2.0, 2.0, 2.0]) == 0
    assert np.isnan(jackknife([1.0, np.nan, 2.0]))


@pytest.mark.parametrize("groups", [None, [6, 6, 8, 5, 5, 8, 1]])
def test_intervals_delete_groups_with_their_actions_columns_and_reasonings(groups):
    rng = np.random.default_rng(0)
    ids_N = np.array([4, 9, 4, 2, 7, 1, 3])  # columns 0 and 2 are the same prompt
    group_N = ids_N if groups is None else np.array(groups)
    A, N = 15, len(ids_N)
    prompt_A = np.concatenate([np.arange(N), rng.integers(0, N, A - N)])
    score, action = -rng.exponential(2.0, (2, A, N))
    others = Panel(-rng.exponential(1.0, (A, 3)), rng.integers(0, N, (A, 3)))
    others.prompt_AJ[:, 0] = prompt_A
    others.logp_AJ[:, 0] = action[np.arange(A), prompt_A]
    found = flow_metrics(score, action, prompt_A, ids_N, others=others, group_N=groups)

    def contrasts(left_N):
        """{figure: [(group of the action, value)]} with the columns of `left_N` alone."""
        values = {"xa_swap": [], "xa_given_z": [], "za_swap": []}
        for a in range(A):
            if not left_N[prompt_A[a]]:
                continue
            own, group = action[a, prompt_A[a]], group_N[prompt_A[a]]
            p, w = np.exp(action[a][left_N]), np.exp(score[a][left_N])
            values["xa_swap"].append((group, own - np.log(p.mean())))
            values["xa_given_z"].append((group, own - np.log((w * p).sum() / w.sum())))
            z = np.exp(others.logp_AJ[a][left_N[others.prompt_AJ[a]]])
            if len(z) > 1:
                values["za_swap"].append((group, own - np.log(z.mean())))
        return values

    distinct = sorted(set(group_N.tolist()))
    G, full = len(distinct), contrasts(ids_N == ids_N)
    t = {4: 3.182446, 6: 2.570582}[G]
    for name, values in full.items():
        mean = np.mean([value for _, value in values])
        np.testing.assert_allclose(found[name], mean, rtol=1e-9)
        deleted = [np.mean([v for _, v in contrasts(group_N != g)[name]]) for g in distinct]
        half = t * np.sqrt((G - 1) / G * np.sum((np.array(deleted) - np.mean(deleted)) ** 2))
        if name == "za_swap":  # averaged with the variance of the groups' own actions
            sums = [sum(v - mean for h, v in values if h == g) for g in distinct]
            own = t * np.sqrt(G / (G - 1) * np.sum(np.square(sums))) / len(values)
            half = np.sqrt((half**2 + own**2) / 2)
        np.testing.assert_allclose(found[f"{name}_ci95"], half, rtol=1e-6)


def test_two_groups_have_figures_and_no_interval():
    rng = np.random.default_rng(1)
    score, action = -rng.exponential(2.0, (2, 4, 4))
    others = Panel(action[:, [0, 1]], np.array([[n, (n + 1) % 4] for n in range(4)]))
    case = (score, action, np.arange(4), np.arange(4))
    assert flow_metrics(*case, others=others).keys() > {"za_swap_ci95", "xa_swap_ci95"}
    found = flow_metrics(*case, others=others, group_N=[0, 0, 1, 1])
    assert found.keys() == {"za_swap", "xa_swap", "xa_given_z"}


def test_undefined_figures_are_left_out_and_bad_scores_refused():
    empty = Panel(np.zeros((0, PANEL)), np.zeros((0, PANEL), int))
    assert flow_metrics(np.zeros((0, 3)), np.zeros((0, 3)), [], [0, 1, 2], others=empty) == {}
    assert flow_metrics(np.zeros((2, 2)), np.zeros((2, 2)), [0, 1], [3, 3], others=NEITHER) == {}
    with pytest.raises(ValueError, match="action_AN holds 1 values"):
        flow_metrics(np.zeros((2, 2)), [[0, np.nan], [0, 0]], [0, 1], [0, 1], others=NEITHER)


# ---- planted actors, as tables of probabilities -------------------------------------------------


def planted(actor, thinker, *, prompts=8, members=6, seed=0):
    """`flow_metrics` of a policy given by p(z | x) = thinker[x, z] and p(a | x, z) = actor."""
    rng = np.random.default_rng(seed)
    prompt_M = np.repeat(np.arange(prompts), members)

    def draw(p):
        return (rng.random((len(p), 1)) > np.cumsum(p, axis=1)[:, :-1]).sum(axis=1)

    z_M = draw(thinker[prompt_M])
    a_M = draw(actor[prompt_M, z_M])
    log = np.log(actor)
    panels = {}
    for name, same in (("others", False), ("siblings", True)):
        drawn = draw_panels(rng, prompt_M, np.ones(len(prompt_M), bool), same=same)
        panel_MJ = np.full((len(prompt_M), PANEL), -1)  # -1 where fewer reasonings are available
        for m, others in enumerate(drawn):
            panel_MJ[m, : 1 + len(others)] = [m, *others]
        logp_MJ = log[prompt_M[:, None], z_M[panel_MJ], a_M[:, None]]
        panels[name] = Panel(logp_MJ, np.where(panel_MJ < 0, -1, prompt_M[panel_MJ]))
    return flow_metrics(
        np.log(thinker[:, z_M]).T, log[:, z_M, a_M].T, prompt_M, np.arange(prompts), **panels
    )


def table(count, sharpness):
    """[count, count] rows of probabilities: `sharpness` on the diagonal, the rest elsewhere."""
    return np.full((count, count), (1 - sharpness) / (count - 1)) + np.eye(count) * (
        sharpness - (1 - sharpness) / (count - 1)
    )


def test_an_actor_that_ignores_its_reasoning():
    N = 8
    actor = np.repeat(table(N, 0.99)[:, None], N, axis=1)  # p(a | x)
    found = planted(actor, table(N, 0.5))
    assert abs(found["za_swap"]) < 1e-9 and abs(found["za_given_x"]) < 1e-9
    assert found["za_swap_ci95"] < 1e-9
    assert found["xa_swap"] > 0.9 * math.log(N)
    assert found["xa_given_z"] > 0.1  # the reasoning carries some of the prompt's information


def test_an_actor_that_only_reads_its_reasoning():
    N = 8
    actor = np.repeat(table(N, 0.99)[None], N, axis=0)  # p(a | z)
    found = planted(actor, table(N, 0.5))
    assert abs(found["xa_swap"]) < 1e-9 and abs(found["xa_given_z"]) < 1e-9
    assert found["za_swap"] > 0.7 * math.log(PANEL)
    assert found["za_given_x"] > 0.3
    # If the prompt determines the reasoning, no information is left within a group.
    settled = planted(actor, table(N, 1 - 1e-12))
    assert settled["za_swap"] > 0.9 * math.log(PANEL) and abs(settled["za_given_x"]) < 1e-9


def test_conditional_forms_estimate_conditional_information():
    """x_given_z tends to I(X;A|Z), za_given_x to the four-sample bound on I(Z;A|X)."""
    rng = np.random.default_rng(3)
    X, Z, A = 4, 3, 5
    actor, thinker = rng.dirichlet(np.ones(A), (X, Z)), rng.dirichlet(np.ones(Z), X)
    joint = thinker[:, :, None] * actor / X
    p_za = joint.sum(0)
    x_given_z = (joint * np.log(actor / (p_za / p_za.sum(-1, keepdims=True)))).sum()
    p_xa = joint.sum(1)
    z_given_x = (joint * np.log(actor / (X * p_xa)[:, None])).sum()
    found = planted(actor, thinker, prompts=X, members=1000)
    assert abs(found["xa_given_z"] - x_given_z) < 0.03
    assert 0.5 * z_given_x < found["za_given_x"] < z_given_x + 0.03


def coverage(strength_z, strength_x, prompts, members, batches):
    """{figure: fraction of batches whose interval holds the figure's mean over all batches}.

    Each batch draws new prompts: their distributions over 6 reasonings, and their effects on the 4
    actions. The effect of a reasoning on the actions is the same for all prompts.
    """
    rng = np.random.default_rng(0)
    says = strength_z * rng.normal(size=(6, 4))
    found = []
    for seed in range(batches):
        thinker = rng.dirichlet(np.full(6, 0.5), prompts) + 1e-3
        own = rng.normal(size=(prompts, 1, 4)) + rng.normal(size=(prompts, 6, 4)) / 2
        weight = np.exp(says + strength_x * own)
        actor = weight / weight.sum(-1, keepdims=True)
        thinker /= thinker.sum(-1, keepdims=True)
        found.append(planted(actor, thinker, prompts=prompts, members=members, seed=seed))
    shares = {}
    for name in found[0].keys() & KEYS:
        mean = np.mean([one[name] for one in found])
        shares[name] = np.mean([abs(one[name] - mean) <= one[f"{name}_ci95"] for one in found])
    return shares


@pytest.mark.parametrize("strengths", [(3.0, 0.3), (0.3, 3.0)])
def test_intervals_cover(strengths):
    shares = coverage(*strengths, prompts=8, members=8, batches=300)
    assert shares.keys() == KEYS
    for share in shares.values():  # the standard deviation is 0.013
        assert 0.90 <= share <= 0.995


@pytest.mark.slow
@pytest.mark.parametrize("strengths", [(1.0, 0.3), (3.0, 0.3), (0.3, 1.0), (0.3, 3.0), (2.0, 2.0)])
@pytest.mark.parametrize("prompts, members", [(8, 4), (8, 8), (16, 4), (64, 2)])
def test_intervals_cover_at_more_sizes(strengths, prompts, members):
    shares = coverage(*strengths, prompts, members, batches=400)
    print(strengths, prompts, members, shares)
    assert all(0.90 <= share <= 0.997 for share in shares.values())


# ---- panels -------------------------------------------------------------------------------------


def test_panels_are_of_other_prompts_or_of_the_same():
    ids = np.array([0, 0, 0, 1, 1, 2])
    acts = np.array([True, True, False, True, True, True])
    own = np.flatnonzero(acts)
    for seed in range(20):
        others = draw_panels(np.random.default_rng(seed), ids, acts, same=False)
        same = draw_panels(np.random.default_rng(seed), ids, acts, same=True)
        assert [len(p) for p in others] == [3, 3, 3, 3, 3]
        assert [len(p) for p in same] == [2, 2, 1, 1, 0]
        for m, other, sibling in zip(own, others, same, strict=True):
            assert len(set(other)) == len(other) and not set(ids[other]) & {ids[m]}
            assert set(ids[sibling]) <= {ids[m]} and m not in sibling


# ---- a real model -------------------------------------------------------------------------------

X, Z, TAG, END, V = range(0, 6), range(6, 12), 12, 13, 14  # token ids


def turn_of(make_turn, x, z, a):
    """[x, TAG] -> z TAG a END."""
    turn = make_turn([x, TAG], [z, TAG, a, END], reasoning=(0, 1))
    return dataclasses.replace(turn, answer=(2, 3))


@pytest.fixture(scope="module")
def config():
    return ModelConfig(
        vocab_size=V, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_width=64
    )


def test_scores_equal_forward_passes_over_the_joined_tokens(config, make_turn):
    model, params = (
        Qwen(config),
        jax.tree.map(lambda x: 2 * x, init_params(config, jax.random.key(1))),
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, V, size) for size in (4, 9, 6, 5)]
    prompt_M = np.array([0, 0, 0, 1, 1, 2, 3, 3])
    turns = []
    for n, spans in zip(prompt_M, [3, 1, 4, 2, 0, 3, 5, 2], strict=True):
        sampled = rng.integers(0, V, 12)
        turn = make_turn(prompts[n], sampled, reasoning=(0, 4))
        # a fifth of the turns have no answer; the other answers begin at different positions
        turns.append(dataclasses.replace(turn, answer=(5, 5 + spans) if spans else (0, 0)))
    score, length, found = score_flow(
        model,
        params,
        prompts,
        turns,
        prompt_M,
        np.arange(4),
        siblings=True,
        micro_batch=8,
        rng=np.random.default_rng(7),
    )

    naive = jax.jit(token_logps, static_argnums=0)

    def logp(prompt, behind, scored):
        """The sum over the last `scored` tokens."""
        ids = np.concatenate([prompt, behind])
        row = np.zeros((1, 32), np.int32)
        row[0, : len(ids)] = ids
        return float(np.asarray(naive(model, params, row))[0, len(ids) - scored : len(ids)].sum())

    acts = [m for m in range(8) if turns[m].answer[1]]
    for m in range(8):
        for n in range(4):
            expected = logp(prompts[n], turns[m].sampled[:4], 4)
            np.testing.assert_allclose(score[m, n], expected, atol=4e-4)
    assert length.tolist() == [4] * 8

    def action(m, n, z):
        first, last = turns[m].answer
        return logp(
            prompts[n],
            np.concatenate([turns[z].sampled[:4], turns[m].sampled[4:last]]),
            last - first,
        )

    action_AN = [[action(m, n, m) for n in range(4)] for m in acts]
    rng = np.random.default_rng(7)
    acts_M = np.isin(np.arange(8), acts)
    panels = {}
    for name, same in (("others", False), ("siblings", True)):
        logp_AJ, prompt_AJ = np.zeros((7, PANEL)), np.full((7, PANEL), -1)
        drawn = draw_panels(rng, prompt_M, acts_M, same=same)
        for a, (m, panel) in enumerate(zip(acts, drawn, strict=True)):
            for j, z in enumerate([m, *panel]):
                logp_AJ[a, j], prompt_AJ[a, j] = action(m, prompt_M[m], z), prompt_M[z]
        panels[name] = Panel(logp_AJ, prompt_AJ)
    expected = flow_metrics(score[acts], action_AN, prompt_M[acts], np.arange(4), **panels)
    assert found.keys() == expected.keys() >= KEYS
    for name in KEYS:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4)


def imitate(config, actor, steps=150):
    """A model trained on x TAG z TAG a END with uniform z and a = actor(x, z)."""
    model, params = Qwen(config), init_params(config, jax.random.key(0))
    optimizer = optax.adam(5e-3)

    def loss(params, tokens):
        return -token_logps(model, params, tokens)[:, 2:].sum(-1).mean()

    @jax.jit
    def step(carry, key):
        params, state = carry
        x = jax.random.randint(key, (64,), 0, len(X))
        z = jax.random.randint(jax.random.fold_in(key, 1), (64,), 0, len(Z))
        tag = jnp.full(64, TAG)
        rows = jnp.stack([x, tag, len(X) + z, tag, actor(x, z), tag + 1], axis=1)
        gradient = jax.grad(loss)(params, rows)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(2), steps)
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, keys))(
        (params, optimizer.init(params))
    )
    return model, params


@pytest.mark.parametrize("reads", ["prompt", "reasoning"])
def test_a_trained_actor(config, make_turn, make_episode, reads):
    pick = {"prompt": lambda x, z: x, "reasoning": lambda x, z: z}[reads]
    model, params = imitate(config, pick)
    rng = np.random.default_rng(0)
    episodes = []
    for x in X:
        for k in range(4):
            z = rng.integers(len(Z))
            episodes.append(make_episode(x, k, [turn_of(make_turn, x, len(X) + z, pick(x, z))]))
    sizes = ScopeSizes(first_turn_samples=24, trajectory_samples=24, micro_batch=64)
    metrics = collapse_metrics(model, params, episodes, sizes, ScopeKey(0, 5), flow=True)
    plain = collapse_metrics(model, params, episodes, sizes, ScopeKey(0, 5))
    flow = {name: value for name, value in metrics.items() if name.startswith("flow/")}
    assert metrics.keys() - flow.keys() == plain.keys()
    for name, value in plain.items():
        assert np.isclose(value, metrics[name], atol=1e-4), name
    for scope in ("first_turn", "trajectory"):
        za, xa = (flow[f"flow/{scope}/{name}"] for name in ("za_swap", "xa_swap"))
        if reads == "prompt":
            assert abs(za) < 0.02 and xa > 0.9 * math.log(len(X))
            assert flow[f"flow/{scope}/xa_given_z"] > 0.9 * math.log(len(X))
        else:
            assert abs(xa) < 0.02 and za > 0.5 * math.log(PANEL)
        assert flow[f"flow/{scope}/za_swap_ci95"] >= 0
    assert "flow/first_turn/za_given_x" in flow and "flow/trajectory/za_given_x" not in flow
    if reads == "reasoning":  # reasonings differ within each group, so actions do
        assert flow["flow/first_turn/za_given_x"] > 0.3
