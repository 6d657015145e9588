"""Rollouts in slots against the lock step, whose turns last until their longest reply ends.

The lengths of replies are planted. The model does all its computations, but its head is 0, so that
every token is equally likely. If the fraction of stop ids in the vocabulary is 1 / (0.3 x limit),
replies have a geometric length with a mean of 0.3 of the limit (before the limit cuts it). Without
stop ids, all replies are equally long. Both sides draw with the same keys, so they play the same
episodes.
"""

import contextlib
import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
from transformers import AutoTokenizer

from benchmarks.episodes import tiny_setting
from benchmarks.measure import Row, compare, summarise
from ragen_jax import train
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.storage.metrics_reader import read_metrics

LIMIT = 64  # tokens of a reply
TAIL = 0.3  # mean length, as a fraction of the limit
TEN_MILLION = ModelConfig(
    vocab_size=320,  # more than the tokenizer's
    width=480,
    layers=4,
    heads=8,
    kv_heads=2,
    head_dim=60,
    mlp_width=1344,
    tied=False,
)


@contextlib.contextmanager
def planted_setting(
    *, heavy, turns=(5,) * 8, members=16, limit=LIMIT, shape=TEN_MILLION, **prompts
):
    """Yield a `Setting` with full history and replies of planted lengths.

    Args:
      heavy: True: heavy-tailed lengths; False: all replies have `limit` tokens.
      prompts: further arguments of `tiny_setting`.
    """
    sizes = dict(turns=turns, members=members, new_tokens=limit, shape=shape, **prompts)
    with tiny_setting(context="full", **sizes) as (setting, _):
        params = setting.params | {"head": jnp.zeros_like(setting.params["head"])}
        tokenizer = AutoTokenizer.from_pretrained(setting.directory, trust_remote_code=False)
        hf.save(setting.directory, setting.model, params, tokenizer)  # for peers
        stops = tuple(range(round(shape.vocab_size / (TAIL * limit)))) if heavy else ()
        chat = dataclasses.replace(setting.chat, stop_ids=stops)
        yield dataclasses.replace(setting, params=params, chat=chat)


def slots(repeats, *, slots_and_chunk=(0, 8), **sizes):
    """Heavy-tailed replies of 128 episodes of five turns, all at once; 10 M parameters."""
    return [_against_lock_step(True, repeats, slots_and_chunk, 1.6, sizes)]


def slots_equal(repeats, *, slots_and_chunk=(0, 8), **sizes):
    """The same with equally long replies, so that no episode waits in lock step either."""
    return [_against_lock_step(False, repeats, slots_and_chunk, 0.97, sizes)]


def slots_64(repeats, *, slots_and_chunk=(64, 8), **sizes):
    """Heavy-tailed replies, 64 episodes at a time: half of the cache."""
    return [_against_lock_step(True, repeats, slots_and_chunk, 1.6, sizes)]


def _against_lock_step(heavy, repeats, slots_and_chunk, target, sizes):
    """Return the `Row` of heavy-tailed or equally long replies.

    Args:
      served: (slots, chunk).
    """
    count, chunk = slots_and_chunk
    with planted_setting(heavy=heavy, **sizes) as setting:
        episodes = setting.play(slots=count, chunk=chunk)
        _check_same(episodes, setting.play())
        kind = "heavy-tailed" if heavy else "equally long"
        return Row(
            name=f"{kind} replies, {count or len(episodes)} slots, chunk {chunk}",
            other_name="lock step",
            target=target,
            work=sum(len(turn.sampled) for e in episodes for turn in e.turns),
            unit="new tokens",
            **compare(
                lambda: setting.play(slots=count, chunk=chunk),
                setting.play,
                repeats=repeats,
                warmup=0,  # both sides have just been played
            ),
        )


def tiny_step(repeats, *, steps=8, **changes):
    """A step of the default run with slots, after the steps that compile, against lock step."""
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            paths = {slots: Path(folder) / f"{repeat}-{slots}" for slots in (128, 0)}
            seconds.append([_step(path, slots, steps, changes) for slots, path in paths.items()])
    return [
        Row(
            name="a step of the default run, slots on",
            other_name="lock step",
            target=0.97,
            **summarise(seconds[1:]),
        )
    ]


def _step(workdir, slots, steps, changes):
    """Return the median seconds of a step, without the first two: updates have other lengths."""
    config = sokoban.get_config()
    config.steps, config.rollout.slots, config.log.trackers = steps, slots, ()
    config.eval.every = config.report.every = 0
    config.checkpoint.export = False
    config.update_from_flattened_dict(changes)
    with contextlib.redirect_stdout(io.StringIO()):
        train.train(config, workdir)
    return statistics.median(
        row["time/step"] for row in read_metrics(workdir / "metrics.jsonl")[2:]
    )


def _check_same(ours, theirs):
    """Raise RuntimeError if two rollouts sampled different tokens."""
    for a, b in zip(ours, theirs, strict=True):
        if [t.sampled.tolist() for t in a.turns] != [t.sampled.tolist() for t in b.turns]:
            raise RuntimeError(f"episode {a.seed}/{a.member} differs from the lock step's")


def slots_memory(repeats, *, groups=(8, 64), members=16, slots=128):
    """Peak memory (work, unit: MiB) of 1,024 episodes in 128 slots, against 128 episodes."""
    del repeats
    small, large = (_peak(count, members, slots) for count in groups)
    return [
        Row(
            name=f"{groups[1] * members} episodes through {slots} slots",
            ours=large["seconds"],
            other_name=f"{groups[0] * members} episodes",
            other=small["seconds"],
            ratio=small["peak"] / large["peak"],  # ratio of memory
            target=0.9,
            work=large["peak"] / 2**20,
            unit="MiB of peak memory",
        )
    ]


PEAK = """
import json, resource, sys, time
from benchmarks.slots import planted_setting
groups, members, slots = map(int, sys.argv[1:])
with planted_setting(heavy=True, turns=(5,) * groups, members=members) as setting:
    start = time.perf_counter()
    setting.play(slots=slots, chunk=8)
    seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def _peak(groups, members, slots):
    """Run a rollout in a separate process; return its "seconds" with compiling and "peak" bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, (groups, members, slots))],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
