"""Rollouts in slots against transformers' continuous batching (`generate_batch`), on equal work.

Both play whole rollouts, including the environment. This program plays every episode separately;
transformers plays turn by turn, and in each turn finished replies free their places in the batch
for others. The weights are the same, but the random generators differ, so that the heavy-tailed
replies of the two differ a little in length.
"""

import os

from benchmarks.episodes import tiny_setting
from benchmarks.measure import Row, compare
from benchmarks.peers import PeerMissing, need, torch_batcher
from benchmarks.slots import planted


def generate_batch(repeats, *, groups=8, members=16, turns=5, shape=None, limit=None):
    """Five turns, full history: the tiny agent, and heavy-tailed replies of 10 M parameters."""
    sizes = dict(turns=(turns,) * groups, members=members)
    with tiny_setting(context="full", **sizes) as (setting, _):
        rows = [_against("full history, tiny agent", setting, repeats, chunk=24)]
    more = {name: x for name, x in dict(shape=shape, limit=limit).items() if x is not None}
    with planted(heavy=True, **sizes, **more) as setting:
        return [*rows, _against("heavy-tailed replies", setting, repeats, chunk=8)]


def _against(name, setting, repeats, **served):
    episodes = setting.play(**served)
    ours = sum(len(turn.sampled) for e in episodes for turn in e.turns)
    fields, other = {}, None
    try:
        need("torch").set_num_threads(os.cpu_count())
        longest = max(len(turn.prompt) for e in episodes for turn in e.turns)
        held = len(episodes) * (longest + setting.budgets.max_new_tokens)
        generate = torch_batcher(setting.directory, setting.chat.stop_ids, tokens=2 * held)
        fields = {"other_name": "generate_batch", "target": 4}

        def other():
            _, said = setting.play_with(generate)
            theirs = sum(len(reply) for replies in said for reply in replies)
            # The standard deviation of a geometric length is about its mean.
            share = 5 / sum(map(len, said)) ** 0.5
            if not 1 - share < theirs / ours < 1 + share:
                raise RuntimeError(f"the other side sampled {theirs} tokens, this program {ours}")

    except PeerMissing as error:
        fields = {"skipped": str(error)}
    return Row(
        name=f"{name}: {len(episodes)} episodes",
        work=ours,
        unit="new tokens",
        **compare(lambda: setting.play(**served), other, repeats=repeats, warmup=0),
        **fields,
    )
