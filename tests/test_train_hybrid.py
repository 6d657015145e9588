"""Runs of a model with linear-attention layers: exact, and resumed with the same numbers."""

import dataclasses

import jax
import pytest
from kind_runs import rows, short_run
from layer_kinds import hybrid

from ragen_jax.model import hf
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params


@pytest.fixture(scope="module")
def directory(agent, tmp_path_factory):
    """The directory of a random hybrid with the tokenizer of the agent."""
    shape = ModelConfig(len(agent.tokenizer), 32, 4, 4, 2, 8, 48, **hybrid(4))
    shape = dataclasses.replace(shape, max_positions=4096)
    found = tmp_path_factory.mktemp("hybrid")
    hf.save(found, Qwen(shape), init_params(shape, jax.random.key(0)), agent.tokenizer)
    return found


@pytest.fixture
def config(agent, directory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = short_run(agent, directory)
    config.steps = 3
    config.rollout.max_new_tokens = 12
    config.optimizer.learning_rate = 1e-3
    # The rewards of a random model hardly vary, so that the entropy moves it.
    config.algorithm.entropy_coef = 0.1
    return config


@pytest.mark.long
@pytest.mark.parametrize(
    "rank", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["whole model", "adapters"]
)
def test_sampler_and_trainer_agree_and_a_run_resumes(config, tmp_path, rank):
    changes = {
        "model__lora__rank": rank,
        "model__lora__targets": ("q", "up", "delta_qkv", "delta_o"),
        "checkpoint__every": 1,
    }
    whole = rows(config, tmp_path / "whole", **changes)
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert all(row["rollout/logp_gap"] < 1e-4 for row in whole)
    assert all(row["update/grad_norm"] > 1e-4 for row in whole)
    rows(config, tmp_path / "resumed", steps=2, **changes)
    assert rows(config, tmp_path / "resumed", **changes) == whole


@pytest.mark.long
def test_int8_keys_move_log_probs_little(config, tmp_path):
    """The full layers' keys and values are rounded, the states of the others are not."""
    exact, rounded = (
        rows(config, tmp_path / name, steps=1, rollout__cache_dtype=name)[0]
        for name in ("model", "int8")
    )
    assert exact["rollout/logp_gap"] < 1e-4 < rounded["rollout/logp_gap"] < 0.1
