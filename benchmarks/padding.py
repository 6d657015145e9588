"""Cost of padding in an update: rows cut by length against rows padded to the longest row."""

import contextlib
from unittest import mock

import jax
import numpy as np
import optax

from benchmarks.llm import LEARNING_RATE, LOSS, random_params, update_flops
from benchmarks.measure import Row, compare
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.update import optimize
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.pieces import Piece, Sizes, Split, padded_row
from ragen_jax.update.policy import init_state, plan_policy, update_policy

# Rows have a quarter of the paper's tokens, and two cores update the model in seconds.
MODEL = ModelConfig(
    vocab_size=1024, width=128, layers=6, heads=2, kv_heads=1, head_dim=64, mlp_width=512
)
EPISODES, TURNS, MINIBATCHES, MICRO_BATCH = 64, 5, 2, 4
PROMPT, OBSERVATION, MEAN_REPLY, LIMIT = 75, 15, 30, 100


def row_lengths(rng):
    """Draw the tokens of rows of five turns, int [EPISODES]; replies have a mean of 0.3 limits."""
    replies = np.minimum(rng.geometric(1 / MEAN_REPLY, (EPISODES, TURNS)), LIMIT)
    return PROMPT + (TURNS - 1) * OBSERVATION + replies.sum(1)


def random_batch(length_B, rng, vocab_size):
    """Return (`Batch` of random rows whose tokens after the first prompt are trained on,
    advantages)."""
    B, T = len(length_B), length_bucket(length_B.max())
    position = np.arange(T)
    in_row = position < length_B[:, None]
    mask = (in_row & (position >= PROMPT)).astype(np.float32)
    batch = Batch(
        tokens_BT=np.where(in_row, rng.integers(0, vocab_size, (B, T)), 0).astype(np.int32),
        mask_BT=mask,
        logp_BT=(-np.log(vocab_size) * mask).astype(np.float32),
        turn_BT=np.where(mask > 0, 0, -1).astype(np.int32),
        turn_end_BT=position == length_B[:, None] - 1,
        span_BT=np.zeros((B, T), np.int8),
        reward_BT=np.zeros((B, T), np.float32),
        episode_B=np.arange(B, dtype=np.int32),
        group_B=np.zeros(B, np.int32),
        weight_B=np.ones(B, np.float32),
    )
    return batch, rng.normal(size=(B, 1)).astype(np.float32) * mask


def pad_to_longest(minibatches, rows, grouping):
    """Replace `split_rows` of micro_batches.py: pad every row to the longest row of the step."""
    longest = padded_row(int(rows.count_B.max()))
    sizes = Sizes(longest, grouping.shard_rows * longest)
    pieces = [[Piece(chosen, sizes)] for chosen in minibatches]
    positions = sum(piece.positions(grouping) for (piece,) in pieces)
    real = sum(int(rows.count_B[chosen].sum()) for chosen in minibatches)
    return Split(pieces, positions, real, real)


def padded_update(repeats):
    """Updates of a step on rows with the paper's length distribution, cut by length or padded.

    64 episodes of five turns with full history, in two minibatches with micro-batches of four rows.
    """
    rng = np.random.default_rng(0)
    length_B = row_lengths(rng)
    batch, advantage_BT = random_batch(length_B, rng, MODEL.vocab_size)
    model, mesh = Qwen(MODEL), make_mesh(data=-1, fsdp=1, tensor=1)
    optimizer = optax.sgd(LEARNING_RATE)
    efficiencies = {}

    def updater(name, patch):
        states = [init_state(random_params(MODEL), optimizer, mesh)]

        def run():
            with patch():
                layout = MinibatchLayout(mesh, MINIBATCHES, MICRO_BATCH, EPISODES // MINIBATCHES)
                rows, rng = np.arange(EPISODES), np.random.default_rng(1)
                plan = plan_policy(LOSS, batch, advantage_BT, rows, layout, rng=rng)
                rates = np.ones(MINIBATCHES, np.float32)
                states[0], metrics = update_policy(
                    model, optimizer, LOSS, states[0], plan, rates=rates, loss_scale=1.0
                )
            jax.block_until_ready(states[0].params)
            efficiencies[name] = metrics["update/real_share"]

        return run

    ours = updater("cut", contextlib.nullcontext)
    other = updater("padded", lambda: mock.patch.object(optimize, "split_rows", pad_to_longest))
    found = compare(ours, other, repeats=repeats)
    return [
        Row(
            name=f"updates of a step, token efficiency {efficiencies['cut']:.2f}",
            other_name=f"padded to the longest, token efficiency {efficiencies['padded']:.2f}",
            target=1.4,
            work=int(length_B.sum()),
            flops=sum(update_flops(MODEL, rows=1, length=int(n)) for n in length_B),
            **found,
        )
    ]
