"""Rollouts against transformers' continuous batching (`generate_batch`), on equal work.

Both play whole rollouts, including the environment. This program plays every episode separately in
slots; one turn it plays in lock step, as by default. transformers plays turn by turn, and in each
turn finished replies free their places in the batch for others. The weights are the same, but the
random generators differ, so that the heavy-tailed replies of the two differ a little in length.
"""

import dataclasses
import os

from benchmarks.episodes import tiny_setting
from benchmarks.measure import Row, compare
from benchmarks.peers import PeerMissing, need, torch_batcher
from benchmarks.prefixes import MODEL
from benchmarks.slots import planted_setting

# SmolLM2-135M; the head is separate, because planted lengths need one of zeros.
SMOLLM2 = dataclasses.replace(MODEL, tied=False)


def generate_batch(repeats, *, groups=8, members=16, turns=5, shape=None, limit=None):
    """Five turns, full history: the tiny agent, and heavy-tailed replies of 10 M parameters."""
    sizes = dict(turns=(turns,) * groups, members=members)
    with tiny_setting(context="full", **sizes) as (setting, _):
        rows = [_against("full history, tiny agent", setting, repeats, chunk=24)]
    slot_sizes = {name: x for name, x in dict(shape=shape, limit=limit).items() if x is not None}
    with planted_setting(heavy=True, **sizes, **slot_sizes) as setting:
        return [*rows, _against("heavy-tailed replies", setting, repeats, chunk=8)]


def generate_batch_135m(repeats, *, groups=8, members=8, shape=SMOLLM2, **sizes):
    """64 heavy-tailed replies of SmolLM2-135M's shape, one turn, groups of eight, in lock step."""
    sizes = dict(turns=(1,) * groups, members=members, shape=shape, **sizes)
    with planted_setting(heavy=True, **sizes) as setting:
        return [_against("heavy-tailed replies", setting, repeats, target=2)]


def _against(name, setting, repeats, target=4, **slot_settings):
    episodes = setting.play(**slot_settings)
    ours = sum(len(turn.sampled) for e in episodes for turn in e.turns)
    fields, other = {}, None
    try:
        need("torch").set_num_threads(os.cpu_count())
        longest = max(len(turn.prompt) for e in episodes for turn in e.turns)
        tokens = len(episodes) * (longest + setting.budgets.max_new_tokens)
        generate = torch_batcher(setting.directory, setting.chat.stop_ids, tokens=2 * tokens)
        fields = {"other_name": "generate_batch", "target": target}

        def other():
            _, replies_by_turn = setting.play_with(generate)
            theirs = sum(len(reply) for replies in replies_by_turn for reply in replies)
            # The standard deviation of a geometric length is about its mean.
            tolerance = 5 / sum(map(len, replies_by_turn)) ** 0.5
            if not 1 - tolerance < theirs / ours < 1 + tolerance:
                raise RuntimeError(f"the other side sampled {theirs} tokens, this program {ours}")

    except PeerMissing as error:
        fields = {"skipped": str(error)}
    return Row(
        name=f"{name}: {len(episodes)} episodes",
        work=ours,
        unit="new tokens",
        **compare(lambda: setting.play(**slot_settings), other, repeats=repeats, warmup=0),
        **fields,
    )
