"""Decoding in parts: the same tokens as in one program, and a count of the ended replies."""

import dataclasses

import jax
import numpy as np
import pytest
from test_slots import played_by

from ragen_jax.core import progress
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.rollout import counted, play
from ragen_jax.rollout.counted import decode_counted
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys, prefill

TINY = ModelConfig(vocab_size=50, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=24)


@pytest.mark.medium
@pytest.mark.parametrize("stop_ids", [(), (3, 7)])
def test_the_parts_are_the_whole(stop_ids, monkeypatch):
    monkeypatch.setattr(counted, "PART", 8)
    model, params = Qwen(TINY), init_params(TINY, jax.random.key(1))
    tokens_NP = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
    segment, logits = prefill(model, params, tokens_NP, np.array([9, 6], np.int32))
    keys = episode_keys(jax.random.key(0), [1, 1, 2, 2], [0, 1, 0, 1], 0)
    budget = np.array([21, 21, 5, 0], np.int32)  # the last row is padding
    arguments = (model, params, segment, logits, keys, budget, np.float32(1))
    settings = DecodeSettings(max_tokens=21, stop_ids=stop_ids)
    whole, seen = decode(*arguments, settings=settings), []
    parts = decode_counted(*arguments, settings=settings, count=seen.append)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    ends = [max(n - 1, 0) // 8 for n in np.asarray(whole.count_B)]  # part of the last token
    assert seen == [sum(end <= part for end in ends) for part in range(max(ends) + 1)]
    assert seen[-1] == 4 and (stop_ids or seen == [2, 2, 4])


@pytest.mark.medium
def test_a_single_turn_counts_episodes_before_it_ends(monkeypatch):
    """The episodes are those of one program, and some are counted while others are decoded."""
    monkeypatch.setattr(counted, "PART", 4)
    model, params, task = played_by("frozen_lake", "full")
    budgets = dataclasses.replace(task.settings.budgets, max_turns=1)
    settings = dataclasses.replace(task.settings, budgets=budgets, compact=False)
    seeds = [0, 1, 2]
    states = [settings.environment.reset(seed) for seed in seeds]

    def episodes(**fields):
        progress.enter_phase("rollout")
        served = dataclasses.replace(settings, **fields)
        key = jax.random.key(0)
        return play.rollout(model, params, served, seeds, states, group_size=2, key=key)

    seen, resume = [], counted.resume

    def noted(*args, **keywords):
        seen.append(progress.NOW.done)
        return resume(*args, **keywords)

    monkeypatch.setattr(counted, "resume", noted)
    plain = episodes()
    assert not seen
    for a, b in zip(plain, episodes(counted=True), strict=True):
        np.testing.assert_array_equal(a.turns[0].sampled, b.turns[0].sampled)
        np.testing.assert_array_equal(a.turns[0].logp, b.turns[0].logp)
    lengths = [len(episode.turns[0].sampled) for episode in plain]
    assert seen == [sum(n <= 4 * part for n in lengths) for part in range(len(seen))]
    assert len(seen) == -(-max(lengths) // 4) > 1
    assert progress.NOW.done == progress.NOW.total == 6
