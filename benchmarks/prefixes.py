"""Gradients of rows that share their beginnings: prefix trees against plain rows.

The other form computes every position of every row and reads the vocabulary at each, as programs
without prefix trees do.
"""

import contextlib
import dataclasses
import sys
import time
from unittest import mock

import jax
import numpy as np

from benchmarks.llm import LOSS, random_params
from benchmarks.measure import Row, compare, give_back_freed_memory
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.update import micro_batches, policy
from ragen_jax.update.optimize import MinibatchLayout, needs_start, no_gradient
from ragen_jax.update.pieces import TokenRows, token_rows

# SmolLM2-135M; the weights are random.
MODEL = ModelConfig(
    vocab_size=49_152,
    width=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    mlp_width=1536,
    rope_theta=1e5,
    family="llama",
    qkv_bias=False,
)
MICRO_BATCH = 4  # rows per micro-batch
FEWER = {"a conversation with 10 forks": 2}  # rows of 1,024 tokens: 4 need more than 24 GiB


def groups(rng, prompts, members, prompt, reply):
    """Return [(ids, trained)] of `members` replies to each of `prompts` prompts."""
    rows = []
    for _ in range(prompts):
        begin = draw(rng, prompt)
        for _ in range(members):
            rows.append(join((begin, False), (draw(rng, reply), True)))
    return rows


def full_history(rng, prompts, members, prompt, reply, observation, turns):
    """Return rows of whole episodes that share their first prompts."""
    rows = []
    for _ in range(prompts):
        begin = draw(rng, prompt)
        for _ in range(members):
            parts = [(begin, False), (draw(rng, reply), True)]
            for _ in range(turns - 1):
                parts += [(draw(rng, observation), False), (draw(rng, reply), True)]
            rows.append(join(*parts))
    return rows


def window(rng, prompts, members, rules, reply, observation, turns):
    """Return rows of the turns of episodes, of which each shows the rules and the turn before."""
    system, rows = draw(rng, rules), []
    for _ in range(prompts):
        first = draw(rng, observation)
        for _ in range(members):
            shown = [(first, False), (draw(rng, reply), True)]
            for _ in range(turns):
                rows.append(join((system, False), *shown[-3:]))
                shown = [(x, False) for x, _ in shown]
                shown += [(draw(rng, observation), False), (draw(rng, reply), True)]
    return rows


def forks(rng, conversations, turns, message, reply):
    """Return rows of conversations with a fork at each turn: its reply, and another one."""
    rows = []
    for _ in range(conversations):
        history = np.zeros(0, np.int32)
        for _ in range(turns):
            history = np.concatenate([history, draw(rng, message)])
            rows.append(join((history, False), (draw(rng, reply), True)))
            history = np.concatenate([history, draw(rng, reply)])
        rows.append(join((history, False), (draw(rng, reply), True)))
    return rows


def draw(rng, count):
    return rng.integers(0, MODEL.vocab_size, count).astype(np.int32)


def join(*parts):
    """Return (ids, whether each is trained) of parts (ids, whether they are)."""
    ids = np.concatenate([ids for ids, _ in parts])
    return ids, np.concatenate([np.full(len(ids), trained) for ids, trained in parts])


CASES = {  # name: (rows, arguments)
    "8 x (160 + 64), 4 prompts": (groups, (4, 8, 160, 64)),
    "16 x (512 + 128), 1 prompt": (groups, (1, 16, 512, 128)),
    "5 turns, window of 2": (window, (2, 4, 120, 48, 40, 5)),
    "5 turns, full history": (full_history, (2, 8, 200, 48, 40, 5)),
    "a conversation with 10 forks": (forks, (2, 10, 40, 48)),
    "nothing shared": (groups, (16, 1, 160, 64)),
}
TARGETS = {  # minimum ratios; others: 0.8 of the ratio of the positions
    "8 x (160 + 64), 4 prompts": 2.5,
    "nothing shared": 0.97,
}


def batch_of(rows):
    """Return a `Batch` of rows (ids, trained)."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for b, (ids, trained) in enumerate(rows):
        tokens[b, : len(ids)], mask[b, : len(ids)] = ids, trained
    return Batch(
        tokens_BT=tokens,
        mask_BT=mask,
        logp_BT=(-np.log(MODEL.vocab_size) * mask).astype(np.float32),
        turn_BT=np.where(mask > 0, 0, -1).astype(np.int32),
        turn_end_BT=np.zeros(shape, bool),
        span_BT=np.zeros(shape, np.int8),
        reward_BT=np.zeros(shape, np.float32),
        episode_B=np.arange(len(rows), dtype=np.int32),
        group_B=np.zeros(len(rows), np.int32),
        weight_B=np.ones(len(rows), np.float32),
    )


def every_token(batch, *, replay=False):
    """Return the rows of a batch with the vocabulary read at each position."""
    inside_BT = np.arange(batch.mask_BT.shape[1]) <= token_rows(batch).count_B[:, None]
    inside_BT[:, 0] = False
    return TokenRows(batch.tokens_BT, inside_BT)


def gradient_of(model, params, batch, *, trees, micro_batch):
    """Return (function that computes the gradient of all rows, split, bytes of temporaries).

    Args:
      trees: whether rows share positions where that is worth it; False: the other form.
      micro_batch: rows, or the positions of that many, that are computed at a time.
    """
    mesh = make_mesh(data=-1, fsdp=1, tensor=1)
    rows, rng = len(batch.weight_B), np.random.default_rng(0)
    advantage_BT = rng.normal(size=(rows, 1)).astype(np.float32) * batch.mask_BT
    layout = MinibatchLayout(mesh, 1, micro_batch, rows)
    with contextlib.ExitStack() as patches:
        if not trees:
            patches.enter_context(mock.patch.object(micro_batches, "WORTH_OF_TREES", 1.0))
            patches.enter_context(mock.patch.object(policy, "token_rows", every_token))
        plan = policy.plan_policy(LOSS, batch, advantage_BT, np.arange(rows), layout, rng=rng)
    pieces = [piece for pieces in plan.minibatches() for piece in pieces]
    scales = np.float32(1.0), np.float32(1.0)
    start = needs_start(layout.grouping.micro_batches, mesh)

    def add(grads, arrays, count):
        return policy.policy_gradient(model, LOSS, params, None, grads, arrays, count, scales)[0]

    def run():
        grads = no_gradient(params) if start else None
        for arrays, count in pieces:
            grads = jax.block_until_ready(add(grads, arrays, count))
        return grads

    memory = 0
    for arrays, count in pieces:
        lowered = policy.policy_gradient.lower(
            *(model, LOSS, params, None, params if start else None, arrays, count, scales)
        )
        memory = max(memory, lowered.compile().memory_analysis().temp_size_in_bytes)
    return run, plan.split, memory


def shared_prefixes(repeats, layers=MODEL.layers):
    """Gradients of rows that share prompts, rules or conversations: trees against plain rows.

    SmolLM2-135M with random weights, float32, micro-batches of 4 rows (2 of forks). The name of a
    line has the ratio of the positions and those of the temporary memory: with all rows at once,
    where the two forms hold the same rows, and with the micro-batches, where they hold about the
    same number of positions.
    """
    config = dataclasses.replace(MODEL, layers=layers)
    model, params, found, start = Qwen(config), random_params(config), [], time.monotonic()
    for name, (function, sizes) in CASES.items():
        give_back_freed_memory()  # of the case before
        batch = batch_of(function(np.random.default_rng(0), *sizes))
        (ours, split, memory), (other, plain, plain_memory) = (
            gradient_of(model, params, batch, trees=trees, micro_batch=FEWER.get(name, MICRO_BATCH))
            for trees in (True, False)
        )
        rows = len(batch.weight_B)
        whole, plain_whole = (
            gradient_of(model, params, batch, trees=trees, micro_batch=rows)[2]
            for trees in (True, False)
        )
        positions = split.row_positions / split.distinct
        found.append(
            Row(
                name=f"{name}: positions {positions:.2f}, memory {plain_whole / whole:.2f} "
                f"({whole / 2**30:.1f} GiB), of micro-batches {plain_memory / memory:.2f} "
                f"({memory / 2**30:.1f} GiB), difference {apart(ours(), other()):.0e}",
                other_name="plain rows",
                work=plain.row_positions,
                target=TARGETS.get(name, 0.8 * positions),
                **compare(ours, other, repeats=repeats, warmup=0),
            )
        )
        done, row, seconds = len(found), found[-1], time.monotonic() - start
        print(
            f"{done} of {len(CASES)} cases, about {seconds / done * (len(CASES) - done):.0f} s "
            f"left; {row.name}: ratio {row.ratio:.2f}",
            file=sys.stderr,
        )
    return found


def apart(a, b):
    """Return the relative difference of two gradients."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    difference = sum(float(((x - y) ** 2).sum()) for x, y in pairs)
    return (difference / sum(float((y**2).sum()) for _, y in pairs)) ** 0.5
