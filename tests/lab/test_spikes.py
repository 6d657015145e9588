"""lab/spikes.py on simulated runs with known effects."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import spikes
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast
EXPERIMENT = EXPERIMENTS["spikes"]


def run(*, lost=None, spike=None, healthy=0.9, final=0.3):
    """Thirty steps: success falls from 0.4 to 0 at step `lost`, tags spike at step `spike`."""
    rows = [{"step": 0, SUCCESS: 0.4}]
    for step in range(1, 31):
        failed = lost is not None and step >= lost
        row = {"step": step, "update/count": 4.0, spikes.PLAYED: 0.0 if failed else 0.4}
        row |= {spikes.MISPLACED: 1.0 if spike is not None and step >= spike else 0.05}
        row |= dict.fromkeys(spikes.STATE_FIGURES, 0.0)
        row |= {spikes.HEALTHY: healthy if failed else 1.0, spikes.LOGP: -0.1}
        row |= {spikes.OTHER_LOGP: -0.2, spikes.ENTROPY: 0.3, spikes.LENGTH: 20.0}
        if step % 10 == 0:
            row[SUCCESS] = final
        rows.append(row)
    return rows


def world(spike=8, healthy=0.1):
    rng, runs = np.random.default_rng(0), {}
    for seed in range(5):
        for setting in ("entropy 0.05", "entropy 0.1"):
            final = 0.3 + rng.normal(0, 0.01)
            runs[setting, "interleaved imitation", seed] = run(final=final)
            fails = dict(lost=15, spike=spike, healthy=healthy, final=0.05)
            runs[setting, "RL alone", seed] = run(**fails)
    return runs


def test_a_loss_by_hand():
    """Means over 5 steps: after n failed steps success is 0.4 (5 - n) / 5, below 0.2 for n = 3."""
    lost = spikes.loss(run(lost=15, spike=8, healthy=0.0))
    assert lost.step == pytest.approx(16.5)  # between 0.24 at 16 and 0.16 at 17
    assert lost.spike == 8  # 1 of 5 values rises by 0.95 / 5 = 0.19
    assert lost.healthy == 0.0  # five steps later
    assert lost.spike_first and lost.broken
    assert spikes.loss(run(lost=28, healthy=0.0)).healthy == pytest.approx(0.4)  # at the end
    assert spikes.loss(run()) is None and spikes.spike(run()) is None
    assert not spikes.loss(run(lost=10, spike=20)).spike_first


def test_verdicts():
    found = spikes.verdicts(EXPERIMENT, world())
    assert [v.verdict for v in found] == ["reproduced"] * 4
    assert found[0].figures.startswith("10 of 10 runs")
    late = spikes.verdicts(EXPERIMENT, world(spike=None, healthy=0.9))
    assert [v.verdict for v in late] == ["reversed", "reversed", "reproduced", "reproduced"]
    few = {k: rows for k, rows in world().items() if k[0] == "entropy 0.1"}
    assert [v.verdict for v in spikes.verdicts(EXPERIMENT, few)[:2]] == ["undecided"] * 2


def test_the_page_shows_every_run(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_page("spikes", tmp_path / "spikes.md", "run spikes", EXPERIMENT, world())
    assert "10 runs of RL alone lost their success." in text
    assert "misplaced tags per reply 0.05 -> 1.00" in text
    assert "Spikes came 8.5 steps before the loss (median)." in text
    assert text.count("| entropy 0.1 |") == 10
    assert (tmp_path / "spikes.png").stat().st_size > 5000
    fine = {k: rows for k, rows in world().items() if k[1] == "interleaved imitation"}
    fine |= {(s, "RL alone", i): rows for (s, _, i), rows in fine.items()}
    text = write_page("spikes", tmp_path / "fine.md", "run spikes", EXPERIMENT, fine)
    assert "No run of RL alone lost its success." in text and "0 of 0 runs" in text
    late = world(spike=18)
    text = write_page("spikes", tmp_path / "late.md", "run spikes", EXPERIMENT, late)
    assert "Spikes came 1.5 steps after the loss (median)." in text
