"""examples/minimal.py computes the same metrics as the real loop."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.storage.metrics_reader import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples/minimal.py"
SAME = {  # name in the example -> name in metrics.jsonl
    "success": "rollout/success",
    "return": "rollout/return",
    "mi_seq": "collapse/first_turn/mi_seq",
    "retrieval_acc": "collapse/first_turn/retrieval_acc",
    "kept_ratio": "filter/kept_ratio",
    "loss": "update/loss",
    "policy_loss": "update/policy_loss",
    "kl": "update/kl",
    "entropy": "update/entropy",
}


@pytest.mark.long
def test_the_example_trains_as_the_real_loop_does(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 2
    config.algorithm.kl_coef = 0.01
    config.eval.every = config.diagnose.flow_every = 0
    config.checkpoint.export = False
    assert train.train(config, tmp_path / "run") == 0
    real = read_metrics(tmp_path / "run/metrics.jsonl")

    assert len(EXAMPLE.read_text().splitlines()) < 250
    spec = importlib.util.spec_from_file_location("minimal", EXAMPLE)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    rows = list(minimal.train(agent.model, agent.params, agent.tokenizer, config, steps=2))
    assert [row["step"] for _, row in rows] == [row["step"] for row in real] == [1, 2]
    for (_, row), expected in zip(rows, real, strict=True):
        for name, same in SAME.items():
            np.testing.assert_allclose(
                row[name], expected[same], rtol=1e-3, atol=1e-5, err_msg=name
            )
    first, second = (jax.tree.leaves(params) for params, _ in rows)
    assert all(not np.array_equal(x, y) for x, y in zip(first, second, strict=True))
