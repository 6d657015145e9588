"""update/learner.py: a step's advantages and updates from episodes, with settings from the
config."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.algorithms import ALGORITHMS, DISTILL, OF_TOKENS
from ragen_jax.algorithm.batch import take_rows
from ragen_jax.algorithm.rewards import GROUPINGS, METHODS, PLACEMENTS
from ragen_jax.config.build_learner import build_learner, build_penalties
from ragen_jax.config.build_model import build_meshes, check_host_memory
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.configs import base, recipes
from ragen_jax.core.sharding import MEMORIES
from ragen_jax.core.task_shares import Part
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run.stages import rewarded_batch
from ragen_jax.update.learner import (
    Outcomes,
    assign_credit,
    deal_at_random,
    filter_metrics,
    select,
    update,
)

V, G, K = 40, 4, 4
REWARDED = [name for name in ALGORITHMS if name != DISTILL]


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(
        vocab_size=V, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=48
    )
    return Qwen(config), init_params(config, jax.random.key(0))


@pytest.fixture
def config():
    config = base.get_config()
    config.env.update(context="single_turn", max_turns=2, format_penalty=-0.5)
    config.rollout.update(groups=G, group_size=K, max_new_tokens=6)
    config.optimizer.update(minibatches=2, micro_batch=4)
    config.algorithm.kl_coef = 0.0
    return config


@pytest.fixture(scope="module")
def episodes(make_turn, make_episode):
    """make(context) -> G groups of one or two turns; all members of the last group have the same
    return."""

    def play(context, rng, group, turns):
        played = []
        for _ in range(turns):
            prompt, sampled = rng.integers(0, V, 5), rng.integers(0, V, rng.integers(2, 7))
            if played and context == "full":
                prompt = np.concatenate([played[-1].prompt, played[-1].sampled, prompt])
            equal = group == G - 1
            reward = 1.0 if equal else rng.normal()
            valid = equal or rng.random() < 0.8
            played.append(make_turn(prompt, sampled, valid=valid, reward=reward))
        return played

    def groups(context):
        rng = np.random.default_rng(0)
        return [
            make_episode(
                g, k, play(context, rng, g, 2 if g == G - 1 else 1 + k % 2), success=k == 0
            )
            for g in range(G)
            for k in range(K)
        ]

    return {context: groups(context) for context in ("single_turn", "full")}


def outcomes_of(config, episodes):
    """Return (batch with rewards, `Outcomes`) of the episodes in the config's context."""
    config = load_config(config)
    episodes = episodes[config.env.context]
    penalty_G = np.repeat(config.env.format_penalty, G)
    penalties = build_penalties(config)
    batch, return_GK = rewarded_batch(episodes, penalties, format_penalty_G=penalty_G)
    batch = take_rows(batch, np.arange(len(batch.weight_B)), size=step_rows(config))
    return batch, Outcomes(
        return_GK=return_GK,
        length_GK=np.reshape([len(e.turns) for e in episodes], (G, K)),
        success_GK=np.reshape([e.success for e in episodes], (G, K)),
    )


def advantages(config, policy, episodes, keep_GK=None):
    """Return (advantages as in train.py, batch, mask of the kept episodes, update/* metrics)."""
    config, (model, params) = load_config(config), policy
    mesh, _ = build_meshes(config)
    learner, state = build_learner(config, model, jax.tree.map(lambda x: x + 0, params), mesh)
    batch, outcomes = outcomes_of(config, episodes)
    with jax.set_mesh(mesh):
        selection, _ = select(learner, state, batch, outcomes)
        if keep_GK is not None:
            selection = dataclasses.replace(selection, keep_GK=keep_GK)
        # A factor on the loss would make the compared numbers small.
        plain = dataclasses.replace(learner.filter, loss_scale="none")
        learner = dataclasses.replace(learner, filter=plain, mismatch=None)
        credit = assign_credit(learner, state, batch, selection, outcomes)
    return credit.advantage_BT, batch, selection.keep_GK, credit.metrics


def test_shaping_by_success_needs_to_know_what_is_solved(config, policy, episodes, monkeypatch):
    config.filter.strategy = "none"
    config.algorithm.zvp_coef = 0.1
    advantages(config, policy, episodes)

    def undefined(*arguments, known=outcomes_of):
        batch, outcomes = known(*arguments)
        return batch, dataclasses.replace(outcomes, success_GK=None)

    monkeypatch.setitem(globals(), "outcomes_of", undefined)
    with pytest.raises(ValueError, match="algorithm.zvp_coef is 0.1, but .*success_reward=NUMBER"):
        advantages(config, policy, episodes)
    config.algorithm.zvp_coef = 0.0
    advantages(config, policy, episodes)


# ---- KL in the reward ---------------------------------------------------------------------------


def random_settings(config, rng):
    """Return the config with random values in the fields that advantages depend on; a run could use
    it."""

    def pick(options):
        options = list(options)
        return options[rng.integers(len(options))]

    c = config.copy_and_resolve_references()
    c.algorithm.name = pick(REWARDED)
    c.algorithm.update(
        gamma=pick([1.0, 0.95]),
        lam=pick([1.0, 0.9]),
        bi_level=pick([True, False]),
        soft_weights=pick([True, False]),
        kl_kind=pick(losses.KL_KINDS),
        mismatch_cap=pick([0.0, 2.0]),
    )
    c.reward.normalize, c.reward.grouping = pick(METHODS), pick(GROUPINGS)
    c.reward.level = pick(PLACEMENTS) if c.reward.normalize == "identity" else "turn"
    c.filter.strategy = pick(["none", "top_p", "top_k", "min_p"])
    c.filter.value = 0.5
    c.filter.update(metric=pick(["reward_variance", "reward_mean", "entropy", "length"]))
    c.filter.update(include_zero=pick([True, False]), keep=pick(["largest", "smallest"]))
    c.filter.update(top_members=pick([0, 1]), bottom_members=pick([0, 1]))
    c.filter.loss_scale = pick(["none", "linear", "advantage"])
    c.env.context = pick(["single_turn", "full"])
    if pick([True, False]):  # the last two groups belong to another environment
        c.rollout.groups = 2
        c.also.second = ConfigDict(dict(groups=2, env=c.env.copy_and_resolve_references()))
    if c.filter.strategy == "none":
        c.algorithm.zvp_coef = pick([0.0, 0.1])
    return c


def assert_reference_changes_nothing(config, policy, episodes, seeds):
    told_apart = 0
    for seed in seeds:
        plain = random_settings(config, np.random.default_rng(seed))
        penalised = plain.copy_and_resolve_references()
        penalised.algorithm.update(kl_coef=0.5, kl_in="reward")
        want, *_ = advantages(plain, policy, episodes)
        found, _, _, metrics = advantages(penalised, policy, episodes)
        np.testing.assert_allclose(found, want, atol=1e-6, err_msg=str(plain))
        assert metrics.get("update/kl", 0.0) in (0.0, pytest.approx(np.nan, nan_ok=True))
        told_apart += bool(np.abs(want).max() > 0.1)
    assert told_apart > 0.7 * len(seeds)  # most advantages are not zero


@pytest.mark.slow
@pytest.mark.long
def test_a_policy_that_is_its_reference_is_credited_as_without_kl(config, policy, episodes):
    assert_reference_changes_nothing(config, policy, episodes, range(12))


@pytest.mark.slow
def test_200_settings_of_a_policy_that_is_its_reference(config, policy, episodes):
    assert_reference_changes_nothing(config, policy, episodes, range(200))


def test_adapters_are_scaled_by_alpha_over_rank(config, policy):
    config.model.lora.update(rank=2, alpha=6.0)
    learner, _ = build_learner(load_config(config), *policy, build_meshes(config)[0])
    assert learner.frozen.scale == 3.0


@pytest.mark.long
@pytest.mark.parametrize("kl_in", ["reward", pytest.param("loss", marks=pytest.mark.slow)])
def test_a_reference_that_rests_on_the_host_gives_the_same_update(config, policy, episodes, kl_in):
    config.algorithm.update(kl_coef=0.5, kl_in=kl_in)
    config.optimizer.learning_rate = 1e-2
    done = {}
    for memory in MEMORIES:
        config.algorithm.kl_memory = memory
        mesh, _ = build_meshes(config)
        copied = jax.tree.map(jnp.copy, policy[1])
        learner, state = build_learner(load_config(config), policy[0], copied, mesh)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(learner.reference)}
        assert kinds == {MEMORIES[memory]}
        batch, outcomes = outcomes_of(config, episodes)
        with jax.set_mesh(mesh):
            for _ in range(2):
                selection, _ = select(learner, state, batch, outcomes)
                credit = assign_credit(learner, state, batch, selection, outcomes)
                state, metrics = update(learner, state, batch, selection, credit)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(learner.reference)}
        assert kinds == {MEMORIES[memory]}
        done[memory] = jax.device_get((learner.reference, state.params)), metrics
    assert done["device"][1]["update/kl"] > 0
    jax.tree.map(np.testing.assert_array_equal, *done.values())


def test_a_device_without_pinned_memory_is_refused(config):
    """The error is one line; without a reference in host memory there is no error."""
    device = types.SimpleNamespace(
        device_kind="Chip", addressable_memories=lambda: [types.SimpleNamespace(kind="device")]
    )
    config.algorithm.update(kl_coef=0.1, kl_memory="host")
    check_host_memory(config, jax.devices()[0])
    message = "kl_memory is 'host', but Chip has no pinned host memory, only device; set"
    with pytest.raises(ValueError, match=message):
        check_host_memory(config, device)
    config.model.lora.rank = 2
    check_host_memory(config, device)
    config.model.lora.rank = 0
    config.algorithm.kl_coef = 0.0
    check_host_memory(config, device)


def test_adapters_at_their_start_are_the_reference(config, policy, episodes):
    config.model.lora.rank = 2
    config.filter.update(strategy="none", top_members=1, bottom_members=1)
    config.algorithm.update(kl_coef=0.5, kl_in="reward")
    found, batch, keep_GK, _ = advantages(config, policy, episodes)
    config.algorithm.kl_coef = 0.0
    want, *_ = advantages(config, policy, episodes)
    assert keep_GK.sum() == 2 * G
    np.testing.assert_allclose(found, want, atol=1e-6)
    # The returns of the last group are equal: it gets no credit, not even from rounding in the KL.
    assert not found[batch.group_B == G - 1].any()


def of_a_pair(return_GK, low, high):
    """Return the advantages of Weighted GRPO if only these two groups are kept."""
    found_GK = np.zeros_like(return_GK)
    found_GK[low] = return_GK[low] - return_GK[low].min()
    found_GK[high] = return_GK[high] - return_GK[high].max()
    both = found_GK[[low, high]]
    found_GK[[low, high]] = (both - both.mean()) / (both.std(ddof=1) + 1e-6)
    return found_GK


@pytest.mark.parametrize("name", [name for name in REWARDED if name not in OF_TOKENS])
@pytest.mark.parametrize("normalize, grouping", [("identity", "state"), ("mean_std", "batch")])
def test_a_group_is_compared_with_the_kl_of_all_its_members(
    config, policy, episodes, monkeypatch, name, normalize, grouping
):
    """Compare with the formula; the log-probs of the reference differ from the policy's."""
    config.algorithm.update(name=name, kl_coef=0.5, kl_in="reward", kl_kind="k1")
    config.reward.update(normalize=normalize, grouping=grouping)
    keep_GK = np.zeros((G, K), bool)
    keep_GK[0, :2] = keep_GK[2, 1:] = True
    model, params = policy
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32), params)
    build = build_learner

    def of_another_reference(*args):
        learner, state = build(*args)
        return learner, state.replace(params=jax.tree.map(lambda x: x + 0, moved))

    monkeypatch.setitem(globals(), "build_learner", of_another_reference)
    found, batch, _, metrics = advantages(config, policy, episodes, keep_GK)

    def logps(params):
        return np.asarray(token_logps(model, params, batch.tokens_BT))

    kl_BT = batch.mask_BT * (logps(moved) - logps(params))
    played = episodes["single_turn"]
    _, return_GK = rewarded_batch(played, build_penalties(config))
    lowered = return_GK.astype(float).copy()
    for b in np.flatnonzero(batch.weight_B):
        lowered.reshape(-1)[batch.episode_B[b]] -= 0.5 * kl_BT[b].sum()
    if normalize == "mean_std":
        lowered = (lowered - lowered[keep_GK].mean()) / lowered[keep_GK].std(ddof=1)
    away = lowered - lowered.mean(1, keepdims=True)
    want = {
        "grpo": away / (lowered.std(1, ddof=1, keepdims=True) + 1e-6),
        "dr_grpo": away,
        "rloo": away * K / (K - 1),
        "raft": (away == away.max(1, keepdims=True)) & (away.max(1, keepdims=True) > 1e-5),
        "weighted_grpo": of_a_pair(lowered, *sorted((0, 2), key=lambda g: return_GK[g].mean())),
    }.get(name, away)
    want_BT = want.reshape(-1)[batch.episode_B][:, None] * batch.mask_BT
    inside = (keep_GK.reshape(-1)[batch.episode_B] & (batch.weight_B > 0))[:, None] & (
        batch.mask_BT > 0
    )
    if name == "reinforce_plus_plus_baseline":
        want_BT = (want_BT - want_BT[inside].mean()) / want_BT[inside].std(ddof=1)
    np.testing.assert_allclose(found, np.where(inside, want_BT, 0), atol=2e-4)
    assert metrics["update/kl"] == pytest.approx(kl_BT[inside].mean(), abs=1e-5)


@pytest.mark.long
def test_a_broken_member_leaves_its_group_as_the_sound_ones_alone(config, policy, episodes):
    """In group 0 one member broke; in group 1 only one member is sound and has no other to be
    compared with. This holds for every selection of groups."""
    config.filter.strategy = "none"
    learner, state = build_learner(load_config(config), *policy, build_meshes(config)[0])
    batch, outcomes = outcomes_of(config, episodes)
    broken_GK = np.zeros((G, K), bool)
    broken_GK[0, 2] = broken_GK[1, :3] = True
    outcomes = dataclasses.replace(outcomes, broken_GK=broken_GK)
    with jax.set_mesh(learner.mesh):
        selection, metrics = select(learner, state, batch, outcomes)
        credit = assign_credit(learner, state, batch, selection, outcomes)
    want_GK = np.ones((G, K), bool)
    want_GK[0, 2] = False
    want_GK[1] = False
    np.testing.assert_array_equal(selection.keep_GK, want_GK)
    assert metrics["filter/kept_ratio"] == 1 == credit.loss_scale  # the filter dropped nothing
    sound_K = np.delete(outcomes.return_GK[0].astype(float), 2)
    want = dict(zip([0, 1, 3], (sound_K - sound_K.mean()) / sound_K.std(ddof=1), strict=True))
    for b, episode in enumerate(batch.episode_B):
        if batch.weight_B[b] and episode < 2 * K:
            found = credit.advantage_BT[b, batch.mask_BT[b] > 0]
            np.testing.assert_allclose(found, want.get(int(episode), 0.0), rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("loss_scale", ["linear", "none"])
def test_dr_grpo_applies_the_keep_rate_once(config, policy, episodes, loss_scale):
    """A group without variance has advantages of 0. The gradient of a sum over the rows is the same
    whether the group is dropped or trained on."""
    recipes.apply(config, ["dr_grpo"])
    config.algorithm.entropy_coef = 0.0
    config.optimizer.minibatches = 1
    config.filter.update(value=1.0, loss_scale=loss_scale)
    norm = {}
    for strategy in ("none", "top_p"):
        config.filter.strategy = strategy
        mesh, _ = build_meshes(config)
        copied = jax.tree.map(jnp.copy, policy[1])
        learner, state = build_learner(load_config(config), policy[0], copied, mesh)
        batch, outcomes = outcomes_of(config, episodes)
        with jax.set_mesh(mesh):
            selection, _ = select(learner, state, batch, outcomes)
            credit = assign_credit(learner, state, batch, selection, outcomes)
            _, metrics = update(learner, state, batch, selection, credit)
        assert selection.keep_GK.mean() == (1 if strategy == "none" else 1 - 1 / G)
        norm[strategy] = metrics["update/grad_norm"]
    assert norm["none"] > 0 and norm["top_p"] == pytest.approx(norm["none"], rel=1e-4)


def test_the_control_keeps_as_many_groups_of_each_environment_whichever_they_are():
    parts, N = [Part("a", 5), Part("b", 3)], 4000
    members = np.array([[True, False], [True, True]])
    keep_GK = np.concatenate([np.zeros((3, 2), bool), members, np.zeros((2, 2), bool), members[:1]])
    dealt_NGK = np.array([deal_at_random(keep_GK, parts, 2**29 - 1, step) for step in range(N)])
    for first, last in ((0, 5), (5, 8)):
        rows = {tuple(map(tuple, sorted(x.tolist()))) for x in dealt_NGK[:, first:last]}
        assert rows == {tuple(map(tuple, sorted(keep_GK[first:last].tolist())))}
    # Each group is drawn equally often, within five standard deviations; successive steps are
    # independent.
    often_G = dealt_NGK.any(2).mean(0)
    np.testing.assert_allclose(often_G[:5], 2 / 5, atol=5 * (0.24 / N) ** 0.5)
    np.testing.assert_allclose(often_G[5:], 1 / 3, atol=5 * (0.22 / N) ** 0.5)
    follows = (dealt_NGK[1:, 5].any(1) & dealt_NGK[:-1, 5].any(1)).mean()
    assert abs(follows - 1 / 9) < 5 * (0.1 / N) ** 0.5
    again = deal_at_random(keep_GK, parts, 2**29 - 1, 7)
    np.testing.assert_array_equal(again, dealt_NGK[7])
    other = [deal_at_random(keep_GK, parts, 0, step) for step in range(50)]
    assert not np.array_equal(other, dealt_NGK[:50])


def test_what_is_told_of_the_filter():
    keep_GK = np.array([[True, True], [False, False], [True, False], [False, False]])
    metrics = filter_metrics(
        np.array([0.0, 1.0, 2.0, 5.0]), np.array([True, False, False, False]), keep_GK
    )
    assert metrics == pytest.approx(
        {
            "filter/kept_ratio": 3 / 8,
            "filter/score_mean": 2.0,
            "filter/score_max": 5.0,
            "filter/score_std": (14 / 4) ** 0.5,  # squares 4, 1, 0, 9
            "filter/zero_groups": 0.25,
            "filter/empty": 0.0,
        }
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_what_does_not_train_is_held_in_the_type_it_is_read_in(config, policy, rank):
    """The KL reference and LoRA's base give the log-probs of float32 parameters that are cast at
    use."""
    config.model.dtype, config.model.lora.rank = "bfloat16", rank
    config.algorithm.kl_coef = 0.1
    model = Qwen(dataclasses.replace(policy[0].config, dtype="bfloat16"))
    mesh, _ = build_meshes(config)
    learner, state = build_learner(
        load_config(config), model, jax.tree.map(lambda x: x + 0, policy[1]), mesh
    )
    held = learner.frozen.params if rank else learner.reference
    for path, x in jax.tree_util.tree_leaves_with_path(held):
        norm = "norm" in jax.tree_util.keystr(path)
        assert x.dtype == ("float32" if norm else "bfloat16"), path
    tokens = np.random.default_rng(0).integers(0, V, (3, 9))
    plain = np.asarray(token_logps(model, policy[1], tokens))
    np.testing.assert_array_equal(np.asarray(token_logps(model, held, tokens)), plain)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    if rank:
        assert learner.frozen_policy.params is held  # sampling reads it without a copy
    config.model.dtype = "float32"
    learner, state = build_learner(load_config(config), *policy, mesh)
    if rank:
        assert learner.frozen.params is policy[1]
    else:  # a copy, because the update donates the policy's arrays
        shared = jax.tree.map(lambda x, y: x is y, learner.reference, state.params)
        assert not any(jax.tree.leaves(shared))
        jax.tree.map(np.testing.assert_array_equal, learner.reference, policy[1])
