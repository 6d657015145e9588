"""Play, score and update on a mesh of virtual devices and on one device, and compare.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 \
        python tests/core/mesh_equality_script.py MODEL_DIR DATA,FSDP,TENSOR ...

Run by tests/core/test_sharding.py in a separate process, because the number of devices is
fixed when JAX starts. Prints one JSON object per mesh.
"""

import json
import sys

import jax
import numpy as np
import optax
from one_call_updates import update_policy

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.configs import sokoban
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.sharding import make_mesh
from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.flow import score_flow
from ragen_jax.diagnostics.gradients import bucket_gradients
from ragen_jax.diagnostics.scopes import first_turns, reasoning_ids
from ragen_jax.model import hf
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import logits
from ragen_jax.rollout import drawing, sample
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.policy import Loss, PolicyLoss, init_state

BUDGETS = Budgets(max_turns=2, max_actions=4, max_new_tokens=22)
KEY = jax.random.key(3)
LOSS = Loss(1.0, "ppo", 0.2, 0.28, 3.0, "token-mean", 16, "k3", 0.01, 0.01)
GROUPS, MEMBERS = 4, 16
PARTS = ("task", "kl", "entropy", "total")


def play(directory, mesh):
    """(model, params, episodes with full history) on `mesh`; 62 episodes do not split evenly."""
    config = sokoban.get_config()
    config.env.context = "full"
    environment = build_environment(config.env, "train")
    model, params, tokenizer = hf.load(directory, mesh=mesh)
    chat = build_chat(config, tokenizer, environment)
    episodes = []
    with jax.set_mesh(mesh):
        for seeds, members in ((range(GROUPS), MEMBERS), (range(10, 12), 31)):
            episodes += rollout(
                model,
                sampling_params(params, model, mesh),
                PlaySettings(
                    chat, environment, budgets=BUDGETS, sampling=Sampling(temperature=1.0)
                ),
                list(seeds),
                [environment.reset(seed) for seed in seeds],
                group_size=members,
                key=KEY,
            )
    return model, params, episodes


def score(model, params, episodes, mesh):
    """Log-probs per token of reasonings, and flow figures of actions; with and without a prefix
    that all prompts share."""
    sample = first_turns(episodes[: GROUPS * MEMBERS], samples=24)
    prompts, turns, prompt_M = sample.prompts, sample.turns, sample.prompt_M
    longer = [np.concatenate([np.arange(70) % 10, prompt]) for prompt in prompts]
    options = dict(siblings=True, micro_batch=64)
    found = []
    with jax.set_mesh(mesh):
        score_MN, length_M = cross_score(
            model, params, prompts, [reasoning_ids(turn) for turn in turns], micro_batch=64
        )
        found.append(score_MN / length_M[:, None])
        for shown in (prompts, longer):
            score_MN, length_M, flow = score_flow(
                model, params, shown, turns, prompt_M, np.arange(GROUPS), rng=rng(0), **options
            )
            assert len(flow) == 8
            found += [score_MN / length_M[:, None], [[x] * GROUPS for x in flow.values()]]
    return np.concatenate(found)


def rng(seed):
    """The same generator in every process."""
    return generator(Purpose.POLICY_ORDER, seed)


def training_rows(params, episodes):
    """(batch, random advantages, parameters of the KL reference)."""
    batch = make_batch(episodes[: GROUPS * MEMBERS])
    advantage_BT = rng(0).standard_normal(batch.mask_BT.shape).astype(np.float32) * batch.mask_BT
    return batch, advantage_BT, jax.tree.map(lambda x: x + 0.01 * np.float32(1), params)


def bucket_norms(model, params, episodes, mesh):
    """The norms of the gradients of the loss's parts, in two buckets of groups."""
    batch, advantage_BT, reference = training_rows(params, episodes)
    with jax.set_mesh(mesh):
        found = bucket_gradients(
            PolicyLoss(model, LOSS, reference),
            params,
            batch,
            advantage_BT,
            np.arange(GROUPS) % 2,
            MinibatchLayout(mesh, GROUPS, 32, MEMBERS * BUDGETS.max_turns),
        )
    return np.array([[row[f"{part}_norm"] for part in PARTS] for row in found.values()])


def update(model, params, episodes, mesh):
    """(first gradient, parameters after 3 updates)."""
    batch, advantage_BT, reference = training_rows(params, episodes)
    found = []
    # With plain gradient descent at rate 1 the first step is the gradient itself. Adam's eps keeps
    # a gradient that is a rounding of 0 from becoming a full-size step.
    for optimizer, minibatches in ((optax.sgd(1.0), 1), (optax.adam(1e-3, eps=1e-6), 3)):
        with jax.set_mesh(mesh):
            state, metrics = update_policy(
                model,
                optimizer,
                LOSS,
                init_state(jax.tree.map(lambda x: x + 0, params), optimizer, mesh),
                reference,
                batch,
                advantage_BT,
                np.arange(len(batch.tokens_BT)),
                mesh=mesh,
                rng=rng(1),
                minibatches=minibatches,
                micro_batch=32,
                minibatch_rows=len(batch.tokens_BT),
                loss_scale=1.0,
                rates=np.ones(minibatches, np.float32),
            )
        assert metrics["update/count"] == minibatches and metrics["update/skipped"] == 0
        found.append(jax.tree.map(np.asarray, state.params))
    gradient = jax.tree.map(lambda old, new: np.asarray(old) - new, params, found[0])
    return gradient, found[1]


def near_tie(model, params, a, turn, index):
    """Whether the two best perturbed logits of a token are within 1e-4."""
    one = a.turns[turn]
    ids = np.concatenate([one.prompt, one.sampled[:index]])
    hidden, _ = model.apply({"params": params}, ids[None])
    key = sample.episode_keys(KEY, [a.seed], [a.member], turn)
    perturbed = (
        logits(params, hidden[0, -1]) + drawing.noise(key, index, model.config.vocab_size)[0]
    )
    best = np.sort(np.asarray(perturbed))[-2:]
    return best[1] - best[0] < 1e-4


def differences(model, params, ours, theirs):
    """(episodes that diverge at a near tie, episodes that diverge elsewhere)."""
    ties = wrong = 0
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.seed, a.member) == (b.seed, b.member)
        for turn, (s, t) in enumerate(zip(a.turns, b.turns, strict=False)):
            n = min(len(s.sampled), len(t.sampled))
            parted = np.flatnonzero(s.sampled[:n] != t.sampled[:n])
            if len(parted):
                tie = near_tie(model, params, a, turn, int(parted[0]))
                ties, wrong = ties + tie, wrong + (not tie)
                break
            if len(s.sampled) != len(t.sampled) or s.actions != t.actions:
                wrong += 1
                break
            assert np.abs(s.logp - t.logp).max() < 1e-4
    return ties, wrong


def main(directory, *meshes):
    one = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    model, params, episodes = play(directory, one)
    score_one = score(model, params, episodes, one)
    gradient_one, params_one = update(model, params, episodes, one)
    norms_one = bucket_norms(model, params, episodes, one)
    size = float(optax.tree.norm(gradient_one))
    for text in meshes:
        data, fsdp, tensor = map(int, text.split(","))
        mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
        found = {"mesh": text, "devices": mesh.size}
        _, sharded, played = play(directory, mesh)
        ties, wrong = differences(model, params, played, episodes)
        found |= {"episodes": len(played), "ties": int(ties), "wrong": int(wrong)}
        found["split"] = any(not x.is_fully_replicated for x in jax.tree.leaves(sharded))
        found["score"] = float(np.abs(score(model, sharded, episodes, mesh) - score_one).max())
        gradient, after = update(model, sharded, episodes, mesh)
        norms = bucket_norms(model, sharded, episodes, mesh)
        found["norms"] = float(np.abs(norms / norms_one - 1).max())
        difference = jax.tree.map(np.subtract, gradient, gradient_one)
        found["gradient"] = float(optax.tree.norm(difference)) / size
        apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after, params_one)
        found["params"] = max(jax.tree.leaves(apart))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
