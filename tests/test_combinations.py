"""Every pair of algorithm, filter, context and environment trains for two steps (slow)."""

import itertools

import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.algorithm import batch
from ragen_jax.algorithm.algorithms import token_advantages
from ragen_jax.configs import countdown, frozen_lake, recipes, sokoban
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update import buckets
from ragen_jax.update.critic import critic_gradient
from ragen_jax.update.policy import policy_gradient

AXES = {
    "algorithm": (
        *("ppo", "bi_level_ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus"),
        *("reinforce_plus_plus_baseline", "dapo", "ppo_released", "gspo", "cispo"),
    ),
    "filter": ("filter", "no_filter", "min_p-0.2", "top_k-0.5", "by_entropy", "members"),
    "context": ("full", "window", "single_turn"),
    "environment": (sokoban, frozen_lake, countdown),
}


def pairwise_cover(axes):
    """Choose a small set of combinations in which any two values of two axes occur together
    (greedy)."""
    names = list(axes)
    wanted = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(axes[a])), range(len(axes[b])))
    }
    every = [
        list(zip(names, choice, strict=True))
        for choice in itertools.product(*(range(len(axes[name])) for name in names))
    ]
    cover = []
    while wanted:
        best = max(every, key=lambda row: len(wanted & _pairs(row)))
        wanted -= _pairs(best)
        cover.append({name: axes[name][index] for name, index in best})
    return cover


def _pairs(row):
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


def test_cover_is_pairwise():
    axes = {"a": "xyz", "b": "12", "c": "pq"}
    cover = pairwise_cover(axes)
    for one, other in itertools.combinations(axes, 2):
        met = {(row[one], row[other]) for row in cover}
        assert met == set(itertools.product(axes[one], axes[other]))
    assert len(cover) < 12


COVER = pairwise_cover(AXES)
LEARNING = {"update": policy_gradient, "critic": critic_gradient, "credit": token_advantages}


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(COVER)))
def test_two_steps(index, tmp_path_factory, tmp_path, monkeypatch):
    # All combinations share a cache: the tiny agents are built once per context and environment.
    cache = tmp_path_factory.getbasetemp() / "combinations"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    choice = COVER[index]
    config = choice["environment"].get_config("tiny")
    config.env.context, config.env.window = choice["context"], 2
    config.rollout.update(groups=4, group_size=4)
    recipes.apply(config, [choice["algorithm"], choice["filter"]])
    config.steps = 2
    config.optimizer.update(minibatches=2, micro_batch=4, learning_rate=1e-3, warmup_updates=0)
    config.warmstart.update(
        success=0.0, rooms=512, check_every=100, check_episodes=16, width=32, mlp_width=64
    )
    config.eval.update(episodes=16, every=2)
    lengths, plain = (
        {"update": set(), "credit": set()},
        (buckets.choose_bucket_lengths, batch.make_batch),
    )

    def few_lengths(*args):
        found = plain[0](*args)
        lengths["update"].update(found.tolist())
        return found

    def make_batch(episodes, *, length):
        lengths["credit"].add(length)
        return plain[1](episodes, length=length)

    monkeypatch.setattr(buckets, "choose_bucket_lengths", few_lengths)
    monkeypatch.setattr(batch, "make_batch", make_batch)
    before = {name: jitted._cache_size() for name, jitted in LEARNING.items()}
    assert train.train(config, tmp_path / "run") == 0
    lengths["critic"] = lengths["update"]
    for name, jitted in LEARNING.items():
        # One program per padded length, for any selection of rows.
        assert jitted._cache_size() - before[name] <= len(lengths[name]), name
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert sum(row.get("update/count", 0) for row in rows) > 0
    for row in rows[1:]:
        assert row.get("update/skipped", 0) == 0
        assert row.get("rollout/logp_gap", 0) <= 1e-4
        assert np.isfinite(row["rollout/return"])
