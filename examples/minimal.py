"""The training loop of ragen_jax on one page, for reading.

    python examples/minimal.py [STEPS]

It trains the tiny Sokoban agent with the library's own functions:

    play -> batch -> measure information -> filter groups -> advantages -> update

The mathematics is that of `python -m ragen_jax.train --config=configs/sokoban.py
--config.algorithm.kl_coef=0.01`: the same problems, random numbers, rewards, filter, advantages,
loss and optimizer. tests/test_minimal.py runs both and compares their figures, which agree to
float32 rounding. What the real loop adds: evaluation, checkpoints and exact resume, the other
diagnostics and the alarm, stopping rules, several devices, other algorithms, and the handling of
environments that break.

The first run builds the agent (about a minute, then cached). A step takes a few seconds on a
laptop's CPU.

Letters at the end of a name are its axes: G groups (problems), K episodes of a group, B rows,
T tokens of a row, M reasonings, N prompts. Entry t of a `_BT` array is about token t of its row.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ragen_jax
from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.algorithm.losses import aggregate, kl, policy_loss
from ragen_jax.algorithm.rewards import add_rewards
from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.configs import sokoban
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.randomness import Purpose, generator, stream_key
from ragen_jax.model.likelihood import token_statistics
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run.imitate import tiny_model

SEED = 0
STEPS = 20

# A step plays G problems K times each.
GROUPS = 8
GROUP_SIZE = 16
BUDGETS = Budgets(max_turns=5, max_actions=10, max_new_tokens=22)
TEMPERATURE = 1.0
FORMAT_PENALTY = -1.0  # added to the reward of a reply that cannot be read

KEPT_VARIANCE = 0.9  # the filter keeps the groups that hold this much of the reward variance
MINIBATCHES = 4  # optimizer steps for each step of the loop
CLIP_LOW, CLIP_HIGH, CLIP_C = 0.2, 0.28, 3.0
KL_COEF = 0.01  # of KL(policy || initial policy)
ENTROPY_COEF = 0.001

LEARNING_RATE = 1e-4
WARMUP_UPDATES = 20
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    # The step of learning rate 1; `apply` multiplies it by the current rate.
    optax.adamw(
        1.0,
        b1=0.9,
        b2=0.99,
        weight_decay=0.01,
        mask=functools.partial(
            jax.tree_util.tree_map_with_path, lambda path, _: path[-1].key not in ("scale", "bias")
        ),
    ),
)


def play(model, params, chat, environment, step):
    """Play a step's episodes: `Episode` objects, group by group, member by member.

    All episodes run in one batch on the device, turn by turn; the environment runs on the host.
    A random draw depends on the seed, the member, the turn and the token, not on the batch.
    """
    seeds_G = [(SEED << 32) + step * GROUPS + group for group in range(GROUPS)]
    states_G = [environment.reset(seed) for seed in seeds_G]
    return rollout(
        model,
        params,
        PlaySettings(
            chat, environment, budgets=BUDGETS, sampling=Sampling(temperature=TEMPERATURE)
        ),
        seeds_G,
        states_G,
        group_size=GROUP_SIZE,
        key=stream_key(Purpose.PLAY, SEED, 0),
    )


def lay_out(episodes):
    """Turn episodes into a `Batch` of token rows and the returns of the episodes.

    A turn's reward, with the format penalty, lies on the last token of its reply. return_GK is the
    undiscounted sum of an episode's rewards.
    """
    longest = max(len(t.prompt) + len(t.sampled) for episode in episodes for t in episode.turns)
    batch = make_batch(episodes, length=length_bucket(longest))
    return add_rewards(batch, episodes, format_penalty=FORMAT_PENALTY)


def measure_information(model, params, episodes):
    """Score first reasonings under their own prompt and the others: mutual information.

    A policy that reads its input writes reasonings that are likelier under the prompt they answer.
    `mi_seq` is in nats a reasoning, at most log(GROUPS); `retrieval_acc` is the fraction that is
    likeliest under its own prompt, by chance 1 / GROUPS.
    """
    turns = [(e.group, e.turns[0]) for e in sorted(episodes, key=lambda e: (e.member, e.group))]
    turns = [(g, turn) for g, turn in turns if turn.reasoning[1] > turn.reasoning[0]][:64]
    prompts = [episodes[group * GROUP_SIZE].turns[0].prompt for group in range(GROUPS)]
    reasonings = [turn.sampled[slice(*turn.reasoning)] for _, turn in turns]
    score_MN, length_M = ragen_jax.cross_score(model, params, prompts, reasonings, micro_batch=128)
    return ragen_jax.information_metrics(score_MN, length_M, np.array([g for g, _ in turns]))


def credit(batch, return_GK):
    """Choose the groups to learn from and credit their tokens: (keep_G, advantage_BT).

    A group whose members all earned the same has no variance and nothing to teach: top-p keeps the
    groups with the largest variance. Every token of an episode has the same advantage, the
    episode's return compared with its group.
    """
    score_G = ragen_jax.group_scores(return_GK, "reward_variance")
    keep_G = np.asarray(ragen_jax.select_groups(score_G, strategy="top_p", value=KEPT_VARIANCE))
    advantage_GK = np.asarray(ragen_jax.group_relative(return_GK))
    advantage_B = advantage_GK.reshape(-1)[batch.episode_B]
    return keep_G, batch.mask_BT * advantage_B[:, None]


@functools.partial(jax.jit, static_argnames="model")
def gradient(model, params, reference, rows, advantage_BT, kept_ratio):
    """Return ((loss, its parts), gradient) of a minibatch."""

    def loss(params):
        mask_BT = rows.mask_BT
        read = functools.partial(token_statistics, model, temperature=TEMPERATURE)
        logp_BT, entropy_BT = read(params, rows.tokens_BT)
        ref_logp_BT, _ = read(reference, rows.tokens_BT)
        task, metrics = policy_loss(
            logp_BT,
            rows.logp_BT,  # of the policy that sampled
            advantage_BT,
            mask_BT,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            clip_c=CLIP_C,
            aggregation="token-mean",
        )
        metrics["policy_loss"] = task
        metrics["kl"] = aggregate(kl(logp_BT, ref_logp_BT, "k3"), mask_BT, "token-mean")
        metrics["entropy"] = aggregate(entropy_BT, mask_BT, "token-mean")
        total = task + KL_COEF * metrics["kl"] - ENTROPY_COEF * metrics["entropy"]
        # The fewer groups are kept, the less the step counts (RAGEN-2, section 3.3).
        return kept_ratio * total, metrics

    return jax.value_and_grad(loss, has_aux=True)(params)


@jax.jit
def apply(params, opt_state, grads, rate):
    """Take an optimizer step."""
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    updates = jax.tree.map(lambda x: rate * x, updates)
    return optax.apply_updates(params, updates), opt_state


def update(model, params, opt_state, reference, batch, advantage_BT, keep_G, step):
    """Update the policy on the kept rows: (params, opt_state, mean metrics of the minibatches)."""
    rows_B = np.flatnonzero(keep_G[batch.group_B])
    rows_B = rows_B[generator(Purpose.POLICY_ORDER, SEED, step).permutation(len(rows_B))]
    size = GROUPS * GROUP_SIZE * BUDGETS.max_turns // MINIBATCHES  # the most rows of a minibatch
    history = []
    for number, chosen_B in enumerate(np.array_split(rows_B, MINIBATCHES)):
        if not len(chosen_B):
            continue
        rows = take_rows(batch, chosen_B, size=size)  # padded, so that one program fits all
        padded_BT = np.zeros_like(rows.mask_BT)
        padded_BT[: len(chosen_B)] = advantage_BT[chosen_B]
        earlier_updates = (step - 1) * MINIBATCHES + number
        rate = LEARNING_RATE * min((earlier_updates + 1) / WARMUP_UPDATES, 1.0)
        (loss, metrics), grads = gradient(
            model, params, reference, rows, padded_BT, jnp.float32(keep_G.mean())
        )
        params, opt_state = apply(params, opt_state, grads, jnp.float32(rate))
        history.append(metrics | {"loss": loss})
    names = history[0] if history else ()
    return params, opt_state, {n: float(np.mean([m[n] for m in history])) for n in names}


def train(model, params, tokenizer, config, steps):
    """Yield (params, metrics) after each step."""
    environment = build_environment(config.env, "train")
    chat = build_chat(config, tokenizer, environment)  # writes prompts and parses replies
    reference, opt_state = params, OPTIMIZER.init(params)
    for step in range(1, steps + 1):
        episodes = play(model, params, chat, environment, step - 1)
        batch, return_GK = lay_out(episodes)
        information = measure_information(model, params, episodes)
        keep_G, advantage_BT = credit(batch, return_GK)
        params, opt_state, metrics = update(
            model, params, opt_state, reference, batch, advantage_BT, keep_G, step
        )
        yield (
            params,
            {
                "step": step,
                "success": np.mean([episode.success for episode in episodes]),
                "return": return_GK.mean(),
                "mi_seq": information["mi_seq"],
                "retrieval_acc": information["retrieval_acc"],
                "kept_ratio": keep_G.mean(),
                **metrics,
            },
        )


def main():
    config = sokoban.get_config("tiny")
    model, params, tokenizer = ragen_jax.load_model(tiny_model(config))
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    start = time.time()
    for _, row in train(model, params, tokenizer, config, steps):
        names = ("success", "return", "mi_seq", "retrieval_acc", "kept_ratio", "loss", "entropy")
        figures = "  ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
        print(f"step {row['step']:2}  {figures}  {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
