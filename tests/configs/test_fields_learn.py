"""Fields of a learning step: filter, reward, algorithm, critic, optimizer, model.lora.

Each field is changed in a step of update/learner.py on episodes made by hand. Other tests check the
values that one part of a step passes to the next.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from field_entries import Entry, check_entry, configured, once
from flax.traverse_util import flatten_dict
from layer_kinds import mixture
from shared_rows import NEVER

from ragen_jax.algorithm import advantage
from ragen_jax.algorithm.batch import take_rows
from ragen_jax.config.build_learner import build_learner, build_penalties
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.core.sharding import rests_on_host
from ragen_jax.model.likelihood import packed_statistics, token_statistics
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run.diagnose import task_gradients
from ragen_jax.run.stages import rewarded_batch
from ragen_jax.update import micro_batches
from ragen_jax.update import policy as policy_file
from ragen_jax.update.learner import Outcomes, assign_credit, select, update

pytestmark = pytest.mark.long

V, G, K = 40, 4, 4
STEP = 3
MEAN_G = np.array([1.0, 2.0, 0.5, 1.0])  # mean return of each group
SPREAD_G = np.array([2.0, 1.0, 0.5, 0.0])  # return variances 6.7 to 0
MEMBER_K = np.array([1.5, -0.5, 0.5, -1.5])
LONGEST = 6  # tokens of each reply of group 2; other replies have two to four


def start():
    return configured(
        {
            **{"env.context": "single_turn", "env.max_turns": 2, "steps": 10},
            **{"rollout.groups": G, "rollout.group_size": K, "rollout.max_new_tokens": LONGEST},
            **{"optimizer.minibatches": 1, "optimizer.micro_batch": 4},
            **{"optimizer.learning_rate": 1e-3, "critic.learning_rate": 1e-3},
        }
    )


@pytest.fixture(scope="module")
def episodes(make_turn, make_episode):
    """context -> G groups; member k plays 1 + k % 2 turns; in the last group all play two."""

    def play(context, rng, g, k):
        parts = [0.25, 0.75] if k % 2 or g == G - 1 else [1.0]
        turns = []
        for part in parts:
            count = LONGEST if g == 2 else int(rng.integers(2, 5))
            prompt, sampled = rng.integers(0, V, 5), rng.integers(0, V, count)
            if turns and context == "full":
                prompt = np.concatenate([turns[-1].prompt, turns[-1].sampled, prompt])
            reward = part * (MEAN_G[g] + SPREAD_G[g] * MEMBER_K[k])
            turns.append(make_turn(prompt, sampled, reward=reward))
        return turns

    def groups(context):
        rng = np.random.default_rng(0)
        return [
            make_episode(g, k, play(context, rng, g, k), success=k == 0 or g == G - 1)
            for g in range(G)
            for k in range(K)
        ]

    return {context: groups(context) for context in ("single_turn", "full")}


CREDIT, GRADIENTS, EXPERTS = "credit", "gradients", "experts"
# The sampler's log-probs minus the policy's.
SHIFTS = {
    "near": lambda noise_BT: 0.2 * noise_BT,
    "same": lambda noise_BT: 0.0,
    "low": lambda noise_BT: 0.5,  # ratios of 0.61
    "high": lambda noise_BT: -1.5,  # ratios of 4.5
}


@pytest.fixture(scope="module")
def outcome(episodes):
    @functools.cache
    def policy_of(kinds):
        """(model, initial parameters, moved parameters, its log-probs and entropies)."""
        shape = ModelConfig(
            vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24
        )
        if kinds == EXPERTS:
            shape = dataclasses.replace(shape, **mixture(1))
        model, initial = Qwen(shape), init_params(shape, jax.random.key(0))
        rng = np.random.default_rng(1)
        moved = jax.tree.map(
            lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), initial
        )
        statistics = jax.jit(
            lambda params, tokens, t: token_statistics(model, params, tokens, temperature=t)
        )
        return model, initial, moved, statistics

    @once
    def stage(config, given):
        """A step of a policy that has moved away from the run's initial policy.

        given: a key of SHIFTS; CREDIT, to stop after tokens are credited; GRADIENTS, to stop after
        the gradient report; EXPERTS, for a model with experts; or a number that multiplies all
        rewards.
        """
        shift = given if given in SHIFTS else "near"
        kinds = EXPERTS if given == EXPERTS else "dense"
        model, initial, moved, statistics = policy_of(kinds)
        mesh, _ = build_meshes(config)
        learner, state = build_learner(
            load_config(config), model, jax.tree.map(jnp.copy, initial), mesh
        )
        if not config.model.lora.rank:
            state = state.replace(params=jax.tree.map(jnp.copy, moved))
        if state.critic is not None:
            value = 0.3 * jnp.asarray(np.random.default_rng(2).normal(size=16), jnp.float32)
            params = state.critic.params | {"value": value}
            state = state.replace(critic=state.critic.replace(params=params))
        played = episodes[config.env.context]
        batch, return_GK = rewarded_batch(played, build_penalties(config))
        batch = take_rows(batch, np.arange(len(batch.weight_B)), size=step_rows(config))
        if isinstance(given, float):
            batch = batch.replace(reward_BT=np.float32(given) * batch.reward_BT)
            return_GK = np.float32(given) * return_GK
        reads = initial if config.model.lora.rank else moved
        own_BT, entropy_BT, ref_BT = (
            batch.mask_BT * np.asarray(x_BT)
            for x_BT in (
                *statistics(reads, batch.tokens_BT, config.rollout.temperature),
                statistics(initial, batch.tokens_BT, config.rollout.temperature)[0],
            )
        )
        noise_BT = np.random.default_rng(3).normal(size=own_BT.shape)
        logp_BT = batch.mask_BT * (own_BT + SHIFTS[shift](noise_BT))
        batch = batch.replace(logp_BT=logp_BT.astype(np.float32))
        before = jax.device_get((state.params, state.critic))
        with jax.set_mesh(mesh):
            if given == GRADIENTS:
                task = types.SimpleNamespace(group_rows=step_rows(config) // G, styles={})
                settings = load_config(config).diagnose
                return task_gradients(learner, state, batch, return_GK, task, settings)
            outcomes = Outcomes(
                return_GK=return_GK,
                length_GK=np.reshape(
                    [sum(len(t.sampled) for t in e.turns) for e in played], (G, K)
                ),
                success_GK=np.reshape([e.success for e in played], (G, K)),
            )
            selection, _ = select(learner, state, batch, outcomes)
            plain = dataclasses.replace(
                learner,
                filter=dataclasses.replace(learner.filter, loss_scale="none"),
                mismatch=None,
            )
            credit = assign_credit(plain, state, batch, selection, outcomes)
            metrics, advantage_BT = {}, None
            if given != CREDIT:
                scaled = assign_credit(learner, state, batch, selection, outcomes)
                advantage_BT = scaled.advantage_BT
                state = state.replace(step=state.step + STEP - 1)
                state, metrics = update(learner, state, batch, selection, scaled)
        after = jax.device_get((state.params, state.critic))
        return types.SimpleNamespace(
            config=config,
            batch=batch,
            mask_BT=batch.mask_BT > 0,
            ratio_BT=np.exp(own_BT - logp_BT),
            log_ratio_BT=own_BT - logp_BT,
            kl_BT=own_BT - ref_BT,
            entropy_BT=entropy_BT,
            return_GK=return_GK,
            length_GK=outcomes.length_GK,
            score_G=selection.score_G,
            keep_GK=selection.keep_GK,
            kept=np.flatnonzero(selection.keep_GK.all(1)).tolist(),
            credited_BT=credit.advantage_BT,  # before any factor of the loss
            advantage_BT=advantage_BT,
            target_BT=credit.target_BT,
            value_BT=credit.value_BT,
            metrics={name: float(x) for name, x in metrics.items()},
            opt_state=jax.device_get(state.opt_state),
            kl_scale=float(state.kl_scale),
            rests=learner.reference is not None and rests_on_host(learner.reference),
            before=before[0],
            after=after[0],
            critic_before=before[1],
            critic_after=after[1],
            policy_moved=distance(before[0], after[0]),
            critic_moved=before[1] and distance(before[1].params, after[1].params),
        )

    return stage


# ---- helpers that read an outcome ---------------------------------------------------------------


def distance(a, b):
    return float(optax.tree.norm(jax.tree.map(lambda x, y: np.float64(x) - y, a, b)))


def near(a, b, rel=1e-3):
    """Whether numbers or arrays are equal up to rounding."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return bool(np.abs(a - b).max() <= rel * np.abs(b).max() + 1e-6)


def of_episodes(x_BT, o):
    """The value of an episode's last token, [G, K]."""
    value = np.zeros(G * K)
    for b in np.argsort(o.batch.turn_BT.max(1), kind="stable"):
        if o.batch.weight_B[b]:
            value[o.batch.episode_B[b]] = x_BT[b][o.mask_BT[b]][-1]
    return value.reshape(G, K)


def rows(o, alone=False):
    """(row, positions of its sampled tokens); alone: only episodes of one turn."""
    count_E = np.bincount(o.batch.episode_B[o.batch.weight_B > 0])
    for b in np.flatnonzero(o.batch.weight_B):
        if not alone or count_E[o.batch.episode_B[b]] == 1:
            yield b, np.flatnonzero(o.mask_BT[b])


def by_group(o, x_G):
    """A number per group, spread over the group's sampled tokens."""
    return np.where(o.mask_BT, np.asarray(x_G)[o.batch.group_B][:, None], 0.0)


def by_episode(o, x_GK):
    """A number per episode, spread over the episode's sampled tokens."""
    return np.where(o.mask_BT, np.reshape(x_GK, -1)[o.batch.episode_B][:, None], 0.0)


def centred(x_GK):
    return x_GK - x_GK.mean(1, keepdims=True)


def metric(name):
    return lambda o: o.metrics[name]


loss, kl, entropy = map(metric, ("update/loss", "update/kl", "update/entropy"))
policy_loss, grad_norm = metric("update/policy_loss"), metric("update/grad_norm")
clipped, lower_clipped = metric("update/clip_fraction"), metric("update/lower_clip_fraction")
rate = metric("update/learning_rate")


def moment(o, name):
    """Return the norm of a moment of Adam after the first update: (1 - b1) g, or (1 - b2) g^2."""
    return float(optax.tree.norm(optax.tree.get(o.opt_state, name)))


def decay_moves(before, behind):
    """Kernels shrink by an additional fraction of their value; norms and biases do not."""
    extra = 1e-3 * (0.5 - 0.01)
    for path, x in flatten_dict(behind.after).items():
        own = 0.0 if path[-1] in ("scale", "bias") else flatten_dict(behind.before)[path]
        if not near(x, flatten_dict(before.after)[path] - extra * own, 1e-5):
            return False
    return True


# ---- the entries --------------------------------------------------------------------------------

ALL = {"filter.strategy": "none"}
PPO = {**ALL, "algorithm.name": "ppo"}
BI_LEVEL = {**PPO, "env.context": "full", "algorithm.gamma": 0.9, "algorithm.lam": 0.8}
NO_KL = {**ALL, "algorithm.kl_coef": 0.0}
LORA = {**NO_KL, "model.lora.rank": 2}
BARE = {**NO_KL, "algorithm.entropy_coef": 0.0, "algorithm.name": "dr_grpo"}
BARE |= {"algorithm.kl_kind": "k1"}  # for KL in the reward
# Changed together; each has a separate claim.
CLIPS = {"algorithm.clip_low": 0.9, "algorithm.clip_high": 9.0, "algorithm.clip_c": 9.0}
COEFS = {"algorithm.kl_coef": 0.5, "algorithm.entropy_coef": 0.3, "algorithm.kl_kind": "k1"}


def balanced(before, behind):
    """The loss grows by the coefficient times the load-balancing loss, which is at least 1."""
    added = behind.metrics["update/loss"] - before.metrics["update/loss"]
    loss = behind.metrics.get("update/balance", 0)
    return "update/balance" not in before.metrics and loss > 1 and near(added, 0.3 * loss)


def kept(*groups):
    """The filter keeps these groups, and only their rows take part in the update."""

    def claim(before, behind):
        inside_B = np.isin(behind.batch.group_B, groups)
        credited = np.any(behind.credited_BT != 0, axis=1)
        return behind.kept == [*groups] and not credited[~inside_B].any()

    return claim


FILTER = {
    "filter.strategy": Entry("top_k_abs", kept(0), {"filter.value": 1.0}),
    "filter.value": Entry(0.5, kept(0)),
    "filter.metric": Entry(
        "length",
        lambda _, o: near(o.score_G, o.length_GK.mean(1)) and o.kept == [2],
        {"filter.strategy": "top_k", "filter.value": 0.25},
    ),
    "filter.mode": Entry("softmax", kept(0)),
    "filter.keep": Entry("smallest", kept(1, 2), {"filter.value": 0.2}),
    "filter.include_zero": Entry(True, kept(0, 1, 2, 3), {"filter.value": 1.0}),
    "filter.eps": Entry(2.0, kept(0)),
    "filter.at_random": Entry(
        True,
        lambda a, b: a.kept == [0] and len(b.kept) == 1 and b.kept != [0],
        {"filter.strategy": "top_k_abs", "filter.value": 1.0},
    ),
    "filter.loss_scale": Entry(
        "none",
        lambda before, behind: (
            before.keep_GK.mean() == 0.5
            and near(loss(behind), 2 * loss(before))
            and near(grad_norm(behind), 2 * grad_norm(before))
        ),
    ),
    "filter.top_members": Entry(
        1, lambda _, o: o.keep_GK[:3].tolist() == [[True, False, False, False]] * 3, ALL
    ),
    "filter.bottom_members": Entry(
        1, lambda _, o: o.keep_GK[:3].tolist() == [[False, False, False, True]] * 3, ALL
    ),
}


def overlong(before, behind):
    """Each of the last three of six tokens costs a third."""
    penalty = np.zeros(G * K)
    for b, at in rows(behind):
        penalty[behind.batch.episode_B[b]] += max(len(at) - 3, 0) / 3
    lowered = before.return_GK - penalty.reshape(G, K)
    return near(behind.return_GK, lowered) and near(
        of_episodes(behind.advantage_BT, behind), centred(lowered)
    )


REWARD = {
    "reward.overlong_buffer": Entry(3, overlong, ALL | {"algorithm.name": "dr_grpo"}),
    "reward.normalize": Entry(
        "mean",
        lambda _, o: near(of_episodes(o.target_BT, o), centred(o.return_GK)),
        PPO,
    ),
    "reward.grouping": Entry(
        "batch",
        lambda _, o: near(of_episodes(o.target_BT, o), o.return_GK - o.return_GK.mean()),
        PPO | {"reward.normalize": "mean"},
    ),
    "reward.level": Entry(
        "token",
        lambda before, o: all(
            near(o.target_BT[b, at[-1]], o.batch.reward_BT[b].sum() / len(at))
            and near(o.target_BT[b, at[0]], before.target_BT[b, at[0]])
            for b, at in rows(o, alone=True)
        ),
        PPO,
    ),
}


def discounted(_, o):
    """The reward halves with each token of distance from the end."""
    return all(
        near(o.target_BT[b, at], 0.5 ** np.arange(len(at))[::-1] * o.batch.reward_BT[b].sum())
        for b, at in rows(o, alone=True)
    )


def one_step_ahead(_, o):
    """With lambda 0 the target of a value is the next value."""
    return all(
        near(o.target_BT[b, at], [*o.value_BT[b, at[1:]], o.batch.reward_BT[b].sum()])
        for b, at in rows(o, alone=True)
    )


def gae(function, **factors):
    """The critic's target equals the result of a function of advantage.py."""

    def claim(_, o):
        ends = (o.batch.turn_end_BT,) if function is advantage.bi_level_gae else ()
        arrays = (o.batch.reward_BT, o.value_BT, o.batch.mask_BT, *ends)
        return near(o.target_BT, function(*arrays, gamma=0.9, lam=0.8, **factors)[1])

    return claim


def regularised(_, o):
    return abs(kl(o)) > 0.01 and near(loss(o), policy_loss(o) + 0.5 * kl(o) - 0.3 * entropy(o))


def of_the_upper_half(_, o):
    """Only the two groups with the largest scores get the entropy bonus."""
    largest = np.argsort(o.score_G)[-2:]
    here_BT = o.mask_BT & np.isin(o.batch.group_B, o.kept)[:, None]
    upper_BT = here_BT & np.isin(o.batch.group_B, largest)[:, None]
    bonus = o.entropy_BT[upper_BT].sum() / here_BT.sum()
    return 0 < upper_BT.sum() < here_BT.sum() and near(
        loss(o), policy_loss(o) + 0.5 * kl(o) - 0.3 * bonus
    )


def aggregated(_, o):
    """-A of each token, summed over a row, then averaged over rows."""
    return near(policy_loss(o), -o.advantage_BT.sum() / o.batch.weight_B.sum())


def gspo(before, o):
    """A row's ratio uses the update's log-probs and is 1 at the first minibatch; token ratios
    use the sampler's log-probs."""
    return o.metrics["update/ratio_mean"] == 1 and not near(np.exp(o.log_ratio_BT), 1, 1e-3)


def kl_in_reward(_, o):
    """KL lowers the returns and is not part of the loss."""
    kl_E = np.zeros(G * K)
    for b, at in rows(o):
        kl_E[o.batch.episode_B[b]] += 0.5 * o.kl_BT[b, at].sum()
    lowered = centred(o.return_GK - kl_E.reshape(G, K))
    return near(o.advantage_BT, by_episode(o, lowered)) and near(loss(o), policy_loss(o))


def capped(before, o):
    weight_BT = np.minimum(o.ratio_BT, 2.0)
    return near(o.advantage_BT, before.advantage_BT * weight_BT) and weight_BT.max() == 2


def of_sequence(_, o):
    ratio_B1 = np.exp(o.log_ratio_BT.sum(1, keepdims=True))
    return near(o.advantage_BT, o.credited_BT * ratio_B1)


def with_virtual_rewards(before, o):
    """The last group, always solved and without variance, joins two virtual failures."""
    last_BT = o.mask_BT & (o.batch.group_B == G - 1)[:, None]
    size = np.sqrt(2 * (K + 1) / (K * (K + 2)))
    changed_BT = o.credited_BT - before.credited_BT
    return near(changed_BT[last_BT], size) and not np.any(changed_BT[~last_BT])


def shaped(before, o):
    """The last group, always solved and without variance, is credited by its tokens' entropies."""
    last_B1 = (o.batch.group_B == G - 1)[:, None]
    return near(o.advantage_BT, before.advantage_BT + 0.5 * last_B1 * o.entropy_BT)


def soft(before, o):
    return near(o.advantage_BT, before.advantage_BT * by_group(o, SPREAD_G / SPREAD_G.max()))


ALGORITHM = {
    "algorithm.name": Entry(
        "rloo",
        lambda _, o: near(o.advantage_BT, by_episode(o, centred(o.return_GK) * K / (K - 1))),
        ALL,
    ),
    "algorithm.gamma": Entry(0.5, discounted, PPO),
    "algorithm.lam": Entry(0.0, one_step_ahead, PPO),
    "algorithm.bi_level": Entry(
        True, gae(advantage.bi_level_gae, turn_gamma=1.0), BI_LEVEL, given=CREDIT
    ),
    "algorithm.turn_gamma": Entry(
        0.5,
        gae(advantage.bi_level_gae, turn_gamma=0.5),
        BI_LEVEL | {"algorithm.bi_level": True},
        given=CREDIT,
    ),
    "algorithm.soft_weights": Entry(True, soft, ALL | {"algorithm.name": "dr_grpo"}),
    "algorithm.objective": Entry("gspo", gspo, ALL),
    "algorithm.clip_low": Entry(
        0.9, lambda a, b: clipped(a) > 0.1 > clipped(b) == 0, ALL, CLIPS, given="low"
    ),
    "algorithm.clip_high": Entry(
        9.0, lambda a, b: clipped(a) > 0.1 > clipped(b) == 0, ALL, CLIPS, given="high"
    ),
    "algorithm.clip_c": Entry(
        9.0, lambda a, b: lower_clipped(a) > 0.1 > lower_clipped(b) == 0, ALL, CLIPS, given="high"
    ),
    "algorithm.aggregation": Entry("seq-mean-token-sum", aggregated, BARE, given="same"),
    "algorithm.kl_kind": Entry(
        "k1", lambda _, o: near(kl(o), o.kl_BT[o.mask_BT].mean()), ALL, COEFS
    ),
    "algorithm.kl_coef": Entry(0.5, regularised, ALL, COEFS),
    "algorithm.kl_in": Entry(
        "reward",
        kl_in_reward,
        BARE | {"algorithm.kl_coef": 0.5},
    ),
    "algorithm.kl_memory": Entry(
        "host",
        lambda a, b: (a.rests, b.rests) == (False, True) and kl(a) == kl(b),
        ALL,
    ),
    "algorithm.kl_target": Entry(
        1e-4,
        lambda a, b: a.kl_scale == 1 and near(b.metrics.get("update/kl_coef", 0), 0.001 * 1.02),
        ALL,
    ),
    "algorithm.kl_gain": Entry(
        1.0,
        lambda a, b: near(b.kl_scale, 1.2) and near(a.kl_scale, 1.02),
        ALL | {"algorithm.kl_target": 1e-4},
    ),
    "algorithm.entropy_coef": Entry(0.3, regularised, ALL, COEFS),
    "algorithm.balance_coef": Entry(0.3, balanced, ALL, given=EXPERTS),
    "algorithm.entropy_on": Entry(
        "upper_groups", of_the_upper_half, ALL | {"algorithm.entropy_coef": 0.3}, COEFS
    ),
    "algorithm.zvp_coef": Entry(0.5, shaped, ALL),
    "algorithm.virtual_rewards": Entry(2, with_virtual_rewards, ALL),
    "lab.sampler_noise": Entry(
        5.0,
        lambda a, b: b.metrics["rollout/logp_gap"] > 4 + a.metrics["rollout/logp_gap"],
        ALL,
    ),
    "algorithm.mismatch_cap": Entry(2.0, capped, ALL, given="high"),
    "algorithm.mismatch_level": Entry(
        "sequence", of_sequence, ALL | {"algorithm.mismatch_cap": 1e6}
    ),
}

value_clipped = metric("critic/value_clip_fraction")

CRITIC = {
    "critic.learning_rate": Entry(
        3e-3,
        lambda a, b: (
            near(b.metrics["critic/learning_rate"], 3e-3)
            and near(b.critic_moved, 3 * a.critic_moved, 0.01)
            and near(b.policy_moved, a.policy_moved)
        ),
        PPO,
    ),
    "critic.clip": Entry(
        1e-6,
        lambda a, b: value_clipped(a) < 0.05 < 0.2 < value_clipped(b),
        PPO | {"optimizer.minibatches": 2},
    ),
    "critic.warmup_steps": Entry(
        STEP,
        lambda a, b: b.policy_moved == 0 < a.policy_moved and near(b.critic_moved, a.critic_moved),
        PPO,
    ),
}


def scheduled(factor):
    """The steps are multiplied by the rate's factor."""

    def claim(a, b):
        return near(rate(b), factor * 1e-3) and near(b.policy_moved, factor * a.policy_moved, 0.01)

    return claim


def damped(_, o):
    """Adam's step of a gradient g is g / (|g| + eps)."""
    steps = jax.tree.map(
        lambda m: 1e-3 * (m / 0.1) / (np.abs(m / 0.1) + 1), optax.tree.get(o.opt_state, "mu")
    )
    return near(o.policy_moved, float(optax.tree.norm(steps)), 0.01)


NO_DECAY = ALL | {"optimizer.weight_decay": 0.0}

OPTIMIZER = {
    "optimizer.learning_rate": Entry(
        3e-3,
        lambda a, b: (
            near(rate(b), 3e-3)
            and near(b.policy_moved, 3 * a.policy_moved, 0.01)
            and near(b.critic_moved, a.critic_moved)
        ),
        PPO,
    ),
    # Step 3 of 10, with one update per step.
    "optimizer.schedule": Entry("linear", scheduled(0.8), NO_DECAY),
    "optimizer.warmup_updates": Entry(6, scheduled(0.5), NO_DECAY),
    "optimizer.b1": Entry(
        0.0,
        lambda a, b: (
            near(moment(b, "mu"), 10 * moment(a, "mu")) and near(moment(b, "nu"), moment(a, "nu"))
        ),
        ALL,
    ),
    "optimizer.b2": Entry(
        0.9,
        lambda a, b: (
            near(moment(b, "nu"), 100 * moment(a, "nu")) and near(moment(b, "mu"), moment(a, "mu"))
        ),
        ALL,
    ),
    "optimizer.eps": Entry(1.0, damped, NO_DECAY),
    "optimizer.weight_decay": Entry(0.5, decay_moves, ALL),
    "optimizer.max_grad_norm": Entry(
        1e-3,
        lambda a, b: near(moment(b, "mu"), 0.1 * 1e-3) and near(grad_norm(b), grad_norm(a)),
        ALL,
    ),
    "optimizer.minibatches": Entry(2, lambda _, o: o.metrics["update/count"] == 2, PPO),
}


def trained(o):
    """{projection: rank} of the adapters that an update has moved."""
    moved = {
        path[1] for path, x in flatten_dict(o.after).items() if x.any() and path[-1] == "lora_b"
    }
    return {name: o.after["layers"][name]["lora_a"].shape[-1] for name in moved}


ADAPTERS = {
    "model.lora.rank": Entry(
        3,
        lambda a, b: (
            "lora_a" in b.after["layers"]["q"]
            and "embed" in a.after
            and set(trained(b).values()) == {3}
            and len(trained(b)) == 7
        ),
        NO_KL,
    ),
    # The first gradient reaches only lora_b, and the scale multiplies it.
    "model.lora.alpha": Entry(96.0, lambda a, b: near(grad_norm(b), 3 * grad_norm(a)), LORA),
    "model.lora.targets": Entry(("q", "up"), lambda _, o: trained(o) == {"q": 2, "up": 2}, LORA),
}

ROLLOUT = {
    # The policy is scored at the sampling temperature: another temperature changes its log-probs.
    "rollout.temperature": Entry(
        0.5,
        lambda _, o: (
            o.config.rollout.temperature == 0.5
            and near(o.metrics["rollout/logp_gap"], np.abs(o.log_ratio_BT[o.mask_BT]).max())
        ),
        ALL,
    ),
}


def in_buckets(*counts):
    """Check the number of groups in each bucket, except the bucket without variance."""
    names = [f"gradient/bucket_{i}/groups" for i in range(len(counts))]

    def claim(_, found):
        groups = {n: x for n, x in found.items() if n.endswith("/groups") and "/zero/" not in n}
        return groups == dict(zip(names, counts, strict=True))

    return claim


SHOWN = {**ALL, "diagnose.gradients_every": 1}

BUCKETS = {
    "diagnose.gradients_buckets": Entry(2, in_buckets(2, 1), SHOWN, given=GRADIENTS),
    "diagnose.gradients_edges": Entry((1.0,), in_buckets(1, 2), SHOWN, given=GRADIENTS),
}

ENTRIES = FILTER | REWARD | ALGORITHM | CRITIC | OPTIMIZER | ADAPTERS | ROLLOUT | BUCKETS


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_field(name, outcome):
    check_entry(name, ENTRIES[name], outcome, start)


def test_micro_batch(outcome, monkeypatch):
    """micro_batch sets the rows of a forward and backward pass; the update does not change."""
    seen = []
    plain = packed_statistics

    def spy(model, params, rows, **settings):
        seen.append(len(rows.tokens_BL))
        return plain(model, params, rows, **settings)

    monkeypatch.setattr(policy_file, "packed_statistics", spy)
    monkeypatch.setattr(micro_batches, "WORTH_OF_TREES", NEVER)
    found = {}
    for size in (2, 6):
        seen.clear()
        config = configured(ALL | {"optimizer.micro_batch": size, "optimizer.eps": 1e-7}, start)
        found[size] = outcome(config, None)
        assert set(seen) == {size}
    assert near(found[2].policy_moved, found[6].policy_moved, 1e-4)


def test_the_filter_is_handed_what_its_metric_says(outcome):
    """Entropies are the policy's, averaged over each episode's sampled tokens."""
    o = outcome(configured({"filter.metric": "entropy"}, start), None)
    episode_E = np.arange(G * K)
    tokens_E = [o.mask_BT[o.batch.episode_B == e].sum() for e in episode_E]
    entropy_E = [o.entropy_BT[o.batch.episode_B == e].sum() for e in episode_E]
    assert near(o.score_G, (np.array(entropy_E) / tokens_E).reshape(G, K).mean(1))
    assert not near(o.score_G, o.length_GK.mean(1), 0.1)


def unmoved(before, after):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, before, after)))


def test_a_policy_update_without_a_finite_gradient_is_left_out(outcome):
    """Its loss is finite, but the squares of its gradient are not."""
    o = outcome(configured(BARE, start), 1e25)
    assert np.isfinite(loss(o)) and not np.isfinite(grad_norm(o))
    assert o.metrics["update/skipped"] == 1 and unmoved(o.before, o.after)
    # the optimizer did not count the step
    assert not any(x.any() for x in jax.tree.leaves(o.opt_state))
    o = outcome(configured(BARE, start), 1e5)
    assert o.metrics["update/skipped"] == 0 and not unmoved(o.before, o.after)


# NumPy's warnings for the overflow that the test provokes
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_a_critics_update_without_a_finite_gradient_is_left_out(outcome):
    o = outcome(configured(PPO, start), 3e18)
    assert np.isfinite(o.metrics["critic/loss"]) and not np.isfinite(o.metrics["critic/grad_norm"])
    assert o.metrics["critic/skipped"] == 1
    assert unmoved(o.critic_before.params, o.critic_after.params)
    assert not any(x.any() for x in jax.tree.leaves(o.critic_after.opt_state))
    o = outcome(configured(PPO, start), 1e5)
    assert o.metrics["critic/skipped"] == 0
    assert not unmoved(o.critic_before.params, o.critic_after.params)
