"""A whole step of the paper's setting: with slots and rows cut by length, and without.

128 episodes of five turns with full history and rules of 890 tokens; four minibatches. Replies have
planted lengths (slots.py), geometric with a mean of 0.3 of 400 tokens. Both sides play the same
episodes. The head of zeros that plants the lengths costs the device as much as any other matrix.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.llm import LEARNING_RATE, LOSS
from benchmarks.measure import Row, compare
from benchmarks.padding import pad_to_longest
from benchmarks.slots import planted_setting
from ragen_jax.algorithm.batch import make_batch
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import sampling_params
from ragen_jax.update import optimize
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.policy import init_state, plan_policy, update_policy

TURNS, MEMBERS, LIMIT = (5,) * 8, 16, 400
SLOTS, MINIBATCHES, MICRO_BATCH = 64, 4, 4


def paper_step(
    repeats,
    *,
    name,
    shape,
    turns=TURNS,
    members=MEMBERS,
    limit=LIMIT,
    slots=SLOTS,
    minibatches=MINIBATCHES,
    micro_batch=MICRO_BATCH,
):
    """Return the table rows of the rollout, of the updates, and of both.

    Args:
      name, shape: name and `ModelConfig` of the model.
    """
    shape = dataclasses.replace(shape, tied=False)  # slots.py replaces the head
    sizes = dict(turns=turns, members=members, limit=limit, shape=shape, prompt="full")
    with planted_setting(heavy=True, **sizes) as setting:
        mesh, optimizer = make_mesh(data=-1, fsdp=1, tensor=1), optax.sgd(LEARNING_RATE)
        states = [init_state(setting.params, optimizer, mesh)]
        policy = sampling_params(states[0].params, setting.model, mesh)
        if shape.dtype == "float32":  # sampling would use the parameters, which updates donate
            policy = jax.tree.map(jnp.copy, policy)
        setting = dataclasses.replace(setting, params=policy)

        def play(slots):
            return setting.play(slots=slots)

        def learn(episodes, patch):
            batch = make_batch(episodes)
            rng = np.random.default_rng(0)
            with patch():
                rows = len(episodes)
                plan = plan_policy(
                    LOSS,
                    batch,
                    rng.normal(size=(rows, 1)).astype(np.float32) * batch.mask_BT,
                    np.arange(rows),
                    MinibatchLayout(mesh, minibatches, micro_batch, rows // minibatches),
                    rng=rng,
                )
                rates = np.ones(minibatches, np.float32)
                states[0], metrics = update_policy(
                    setting.model, optimizer, LOSS, states[0], plan, rates=rates, loss_scale=1.0
                )
            if metrics["update/skipped"]:
                raise RuntimeError("an update was skipped: not finite")
            jax.block_until_ready(states[0].params)
            return metrics["update/real_share"]

        by_length, padded = (
            contextlib.nullcontext,
            lambda: mock.patch.object(optimize, "split_rows", pad_to_longest),
        )
        episodes = play(0)
        efficiencies = learn(episodes, by_length), learn(episodes, padded)
        sampled = sum(len(turn.sampled) for e in episodes for turn in e.turns)
        cases = {
            f"rollout, {slots} slots": (lambda: play(slots), lambda: play(0)),
            f"updates, token efficiency {efficiencies[0]:.2f} instead of {efficiencies[1]:.2f}": (
                lambda: learn(episodes, by_length),
                lambda: learn(episodes, padded),
            ),
            "step": (lambda: learn(play(slots), by_length), lambda: learn(play(0), padded)),
        }
        return [
            Row(
                name=f"{name} {case}",
                other_name="lock step, padded",
                work=sampled,
                unit="new tokens",
                **compare(ours, other, repeats=repeats, warmup=1),
            )
            for case, (ours, other) in cases.items()
        ]
