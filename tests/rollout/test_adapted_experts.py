"""Sampling from experts with adapters: by the caches of lock step and slots, and by the trainer."""

import dataclasses

import jax
import numpy as np
import pytest
from test_slots import BUDGETS, MIXTURE, collected, played_by

from ragen_jax.model import lora
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import Qwen


@pytest.mark.long
@pytest.mark.parametrize(
    "served",
    [pytest.param({}, marks=pytest.mark.slow), {"slots": 20, "chunk": 5}],
    ids=["lock step", "slots"],
)
def test_sampler_and_trainer_agree_with_adapters_on_experts(monkeypatch, served):
    """Log-probs of sampled tokens over five turns, by a pass that computes chosen experts only."""
    monkeypatch.setattr("ragen_jax.model.experts.SAVING", 0)
    model, base, task = played_by("frozen_lake", "full", **dict(MIXTURE))
    rng = np.random.default_rng(0)
    targets = ("q", "gate", "up", "down")
    adapters = lora.init_adapters(model.config, jax.random.key(1), rank=2, targets=targets)
    adapters = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), adapters
    )
    params = lora.attach(base, adapters, scale=0.5)
    budgets = dataclasses.replace(BUDGETS, max_turns=5, max_actions=20)
    episodes = collected(model, params, task, budgets=budgets, **served)
    rows = [np.concatenate([e.turns[-1].prompt, e.turns[-1].sampled]) for e in episodes]
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens_T in zip(rows, tokens_BT, strict=True):
        tokens_T[: len(row)] = row
    trainer = Qwen(dataclasses.replace(model.config, expert_form="blocks"))
    found, plain = (np.asarray(token_logps(trainer, p, tokens_BT)) for p in (params, base))
    compared = 0
    for one, logp_T in zip(episodes, found, strict=True):
        for turn in one.turns:
            at = len(turn.prompt) + np.arange(len(turn.sampled))
            np.testing.assert_allclose(turn.logp, logp_T[at], atol=1e-4)
            compared += len(at)
    assert compared > 500 and np.abs(found - plain).max() > 0.1  # the adapters matter
