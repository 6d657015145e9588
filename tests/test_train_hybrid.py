"""The whole command with a model that has linear-attention layers: it trains, and resumes."""

import jax
import pytest
from layer_kinds import hybrid

from ragen_jax import train
from ragen_jax.model import hf
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.storage.metrics_reader import read_metrics


def timeless(rows):
    """Return rows without the values that may differ between identical runs."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows
    ]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2], ids=["whole model", "adapters"])
def test_resuming_gives_the_numbers_of_an_uninterrupted_run(agent, tmp_path, monkeypatch, rank):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    *_, tokenizer = hf.load(agent.directory)
    shape = ModelConfig(len(tokenizer), 32, 4, 4, 2, 8, 48, **hybrid(4))
    hf.save(tmp_path / "model", Qwen(shape), init_params(shape, jax.random.key(0)), tokenizer)
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(tmp_path / "model")
    config.model.lora.update(rank=rank, targets=("q", "up", "delta_qkv", "delta_o"))
    config.env.update(max_turns=3, max_actions=6, context="full")
    config.rollout.update(groups=4, group_size=4, max_new_tokens=12)
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.algorithm.kl_coef = 0.1
    config.diagnose.update(first_turn_samples=8, trajectory_samples=8)
    config.eval.update(episodes=8, every=2)
    config.checkpoint.every = 1
    for name, ends in {"whole": [3], "resumed": [2, 3]}.items():
        for config.steps in ends:
            assert train.train(config, tmp_path / name) == 0
    whole, resumed = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed")
    )
    assert timeless(resumed) == timeless(whole)
    assert max(row["rollout/logp_gap"] for row in whole[1:]) < 1e-4
    assert {row["update/shared"] for row in whole[1:] if "update/shared" in row} == {0.0}
