"""Runs of a mixture of experts that replay the experts of sampling: exact, resumed, ahead."""

import dataclasses

import jax
import pytest
from kind_runs import rows, short_run
from layer_kinds import mixture

from ragen_jax.model import hf
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params


@pytest.fixture(scope="module")
def mixed(agent, tmp_path_factory):
    """The directory of a random mixture of experts with the tokenizer of the agent."""
    shape = ModelConfig(len(agent.tokenizer), 16, 2, 2, 1, 8, 24, **mixture(2, count=8))
    shape = dataclasses.replace(shape, max_positions=4096)
    params = jax.tree.map(lambda x: 2.0 * x, init_params(shape, jax.random.key(0)))
    directory = tmp_path_factory.mktemp("mixture")
    hf.save(directory, Qwen(shape), params, agent.tokenizer)
    return directory


@pytest.fixture
def config(agent, mixed, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = short_run(agent, mixed)
    config.steps = 2
    config.rollout.replay_experts = True
    return config


@pytest.mark.long
def test_sampler_and_trainer_agree_and_a_run_resumes(config, tmp_path):
    changes = {"rollout__ahead": 1, "rollout__slots": 5, "rollout__chunk": 8}
    whole = rows(config, tmp_path / "whole", **changes)
    assert [row["rollout/not_replayed"] for row in whole] == [0, 0]
    assert whole[0]["rollout/logp_gap"] < 1e-4
    rows(config, tmp_path / "resumed", steps=1, checkpoint__every=1, **changes)
    assert rows(config, tmp_path / "resumed", checkpoint__every=1, **changes) == whole


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_that_routes_differently_agrees_better(config, tmp_path, rank):
    changes = {"lab__sampler_weights": "float8", "steps": 1, "model__lora__rank": rank}
    on, off = (
        rows(config, tmp_path / str(replay), rollout__replay_experts=replay, **changes)[0]
        for replay in (True, False)
    )
    assert "rollout/not_replayed" not in off
    # Both sample the same tokens. The mean over them, since the largest gap is that of one token.
    assert on["rollout/response_length"] == off["rollout/response_length"]
    assert 1e-3 < on["update/approx_kl"] < 0.95 * off["update/approx_kl"]
