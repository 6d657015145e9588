"""Rollouts in slots against the lock step, whose turns last until their longest reply ends.

How long replies are is planted: the model computes all it would, but its head is 0, so that every
token is equally likely; with as many stop ids as 1 / (0.3 x the limit) of the vocabulary, replies
have a geometric length with a mean of 0.3 of the limit (before the limit cuts it), and without any
all are equally long. Episodes of both sides are the same, as the keys of their draws are.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys

import jax.numpy as jnp

from benchmarks.episodes import tiny_setting
from benchmarks.measure import Row, compare
from ragen_jax.model.qwen import ModelConfig

LIMIT = 128  # tokens of a reply
TAIL = 0.3  # mean length, as a share of the limit
TEN_MILLION = ModelConfig(
    vocab_size=round(3 * TAIL * LIMIT),  # of which three end a reply
    width=480,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=60,
    mlp_width=1344,
    tied=False,
)


@contextlib.contextmanager
def planted(*, heavy, turns=(5,) * 8, members=16, limit=LIMIT, shape=TEN_MILLION, **prompts):
    """A `Setting` with full history whose replies are heavy-tailed, or else all of `limit`.

    prompts: of `tiny_setting`.
    """
    sizes = dict(turns=turns, members=members, new_tokens=limit, shape=shape, **prompts)
    with tiny_setting(context="full", **sizes) as (setting, _):
        params = setting.params | {"head": jnp.zeros_like(setting.params["head"])}
        stops = tuple(range(round(shape.vocab_size / (TAIL * limit)))) if heavy else ()
        chat = dataclasses.replace(setting.chat, stop_ids=stops)
        yield dataclasses.replace(setting, params=params, chat=chat)


def slots(repeats, *, served=((0, 16), (64, 16)), **sizes):
    """128 episodes of five turns, full history, 10 M parameters: replies heavy-tailed, or equal."""
    rows = []
    for heavy, name, target in ((True, "heavy-tailed", 1.6), (False, "equally long", 0.97)):
        with planted(heavy=heavy, **sizes) as setting:
            for count, chunk in served:
                episodes = setting.play(slots=count, chunk=chunk)
                _check_same(episodes, setting.play())
                rows.append(
                    Row(
                        name=f"{name} replies, {count or len(episodes)} slots, chunk {chunk}",
                        other_name="lock step",
                        target=target,
                        work=sum(len(turn.sampled) for e in episodes for turn in e.turns),
                        unit="new tokens",
                        **compare(
                            lambda c=count, k=chunk, s=setting: s.play(slots=c, chunk=k),
                            setting.play,
                            repeats=repeats,
                            warmup=1,
                        ),
                    )
                )
    return rows


def _check_same(ours, theirs):
    """Raises RuntimeError if two rollouts sampled different tokens."""
    for a, b in zip(ours, theirs, strict=True):
        if [t.sampled.tolist() for t in a.turns] != [t.sampled.tolist() for t in b.turns]:
            raise RuntimeError(f"episode {a.seed}/{a.member} differs from the lock step's")


def slots_memory(repeats, *, groups=(8, 64), members=16, slots=128):
    """Peak memory of 1,024 episodes through 128 slots against that of 128 (work, unit: MiB)."""
    del repeats
    small, large = (_peak(count, members, slots) for count in groups)
    return [
        Row(
            name=f"{groups[1] * members} episodes through {slots} slots",
            ours=large["seconds"],
            other_name=f"{groups[0] * members} episodes",
            other=small["seconds"],
            ratio=small["peak"] / large["peak"],  # of memory
            target=0.9,
            work=large["peak"] / 2**20,
            unit="MiB of peak memory",
        )
    ]


PEAK = """
import json, resource, sys, time
from benchmarks.slots import planted
groups, members, slots = map(int, sys.argv[1:])
with planted(heavy=True, turns=(5,) * groups, members=members) as setting:
    start = time.perf_counter()
    setting.play(slots=slots, chunk=16)
    seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def _peak(groups, members, slots):
    """{"seconds": of a rollout, compiling included, "peak": bytes} in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, (groups, members, slots))],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
