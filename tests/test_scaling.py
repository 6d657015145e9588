"""The page about larger slices: its sums by hand, and its tables on described devices."""

import types

import jax
import pytest
from jax.experimental import topologies

from benchmarks import scaling
from ragen_jax.programs.roofline import CHIPS


def test_exchange_by_hand():
    """Four chips, two to a shard: 8 rows of 10 positions, 2 minibatches of 2 micro-batches."""
    config = types.SimpleNamespace(
        mesh=types.SimpleNamespace(tensor=2),
        sampling_mesh=types.SimpleNamespace(tensor=2),
        optimizer=types.SimpleNamespace(minibatches=2, micro_batch=2),
        rollout=types.SimpleNamespace(groups=2, group_size=4, max_new_tokens=3),
        env=types.SimpleNamespace(max_turns=2),
    )
    plan = [types.SimpleNamespace(name="old_logps", calls=1)]
    shape = scaling._Shape(parameters=100, layers=3, width=5, row=10)
    found = scaling._exchange(config, shape, plan, 4, "v5e")
    # Half of the weights on a chip, half of that from the other one; 4 micro-batches of 8 bytes,
    # and 2 of the log-probs with 2. A shard has 4 rows: 40 positions, in 3 passes 2 exchanges of
    # each of 3 layers.
    weights = (4 * 8 + 2 * 2) * 100 / 2 / 2
    activations = 3 * 2 * 3 * 40 * 5 * 2 * 2 * 0.5
    assert found["update"] == pytest.approx((weights + activations) / 200e9)
    # 6 tokens of 4 rows, and the copy of the weights; a wait for each exchange.
    sampled = 2 * 3 * 6 * 4 * 5 * 2 * 2 * 0.5 + 2 * 100 / 2
    waits = 2 * 3 * 6 * scaling.LATENCY
    assert found["rollout"] == pytest.approx(sampled / 200e9 + waits)


@pytest.mark.medium
def test_tables_of_described_devices(monkeypatch):
    """One device stands for a slice; a smaller model fits where a larger one does not."""
    chips = len(jax.devices())
    monkeypatch.setattr(
        topologies,
        "get_topology_desc",
        lambda **_: types.SimpleNamespace(devices=jax.devices()),
    )
    monkeypatch.setattr(scaling, "SLICES", {"v5p": {chips: ("1x1", 1)}})
    monkeypatch.setattr(
        scaling, "MODELS", {"0.5 B": "Qwen/Qwen2.5-0.5B", "32 B": "Qwen/Qwen2.5-32B"}
    )
    monkeypatch.setattr(scaling, "LARGER", scaling.MODELS)
    monkeypatch.setattr(scaling, "GROUPS", 8)
    lines = scaling.tables().splitlines()
    rows = [line for line in lines if line.startswith(("| 0.5 B", "| 32 B"))]
    assert len(rows) == 2 and "does not fit" in rows[1]
    assert lines[-1] == f"| v5p, {chips} | 0.5 B |"
    at, plan = scaling.fastest("Qwen/Qwen2.5-0.5B", "v5p", chips)
    seconds = sum(p.calls * p.cost.seconds(CHIPS["v5p"]) for p in plan)
    assert sum(at.seconds.values()) == pytest.approx(seconds)
    assert at.step == pytest.approx(seconds + sum(at.exchange.values()))
    assert f"| {at.step:.1f} |" in rows[0]
    parameters = sum(x.size for x in scaling._leaves(plan))
    assert 0.49e9 < parameters < 0.5e9  # Qwen2.5-0.5B
