"""lab/lengths.py on simulated runs with known changes of length and information."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import lengths
from ragen_jax.lab.lengths import LENGTH, MI, PER_TOKEN, verdicts
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast
EXPERIMENT = EXPERIMENTS["lengths"]


def run(length, kept):
    """Ten steps; the length and mi_seq change at once after step 5."""
    rows = [{"step": 0}]
    for step in range(1, 11):
        change, share = (1.0, 1.0) if step <= 5 else (length, kept)
        row = {"step": step, LENGTH: 12.0 * change, "update/count": 4.0}
        if step in (1, 10):
            row |= {MI: 2.0 * share, PER_TOKEN: share / change / 6}
        rows.append(row)
    return rows


def world(slope):
    """Eight arms of two runs; arms whose replies get shorter keep less, or more, information."""
    rng, runs = np.random.default_rng(0), {}
    for seed in range(2):
        for i in range(8):
            length = 0.6 + 0.06 * i
            kept = 0.5 + slope * (length - 0.81) + rng.normal(0, 0.001)
            runs["s", f"t{i}", seed] = run(length, kept)
    return runs


def test_what_is_read_by_hand():
    reading = lengths.read(run(0.5, 0.25))
    assert reading == pytest.approx((0.5, 0.25, 0.5)) and reading.kind == (True, True)
    assert lengths.read(run(1.0, 0.6)).kind == (False, False)


def test_verdicts():
    lost, shorter, arms = verdicts(EXPERIMENT, world(1.0))
    assert lost.verdict == "reproduced" and lost.figures.startswith("8 of 8 runs")
    assert shorter.verdict == "undecided" and shorter.figures.startswith("8 of 12 runs")
    assert arms.verdict == "reproduced" and arms.figures == "Spearman +1.00 over 8 arms"
    assert verdicts(EXPERIMENT, world(-1.0))[2].verdict == "reversed"
    none = {("s", "t", seed): run(1.0, 0.9 + 0.01 * seed) for seed in range(3)}
    words = [v.verdict for v in verdicts(EXPERIMENT, none)]
    assert words == ["not testable (no such run)"] * 2 + ["too few settings"]


def test_identical_runs_count_once():
    runs = world(1.0)
    copies = {(s, f"{t} copy", seed): rows for (s, t, seed), rows in runs.items()}
    assert verdicts(EXPERIMENT, runs | copies) == verdicts(EXPERIMENT, runs)


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "lengths.md"
    text = write_page("lengths", path, "run lengths", EXPERIMENT, world(1.0))
    assert "The runs are those of [figures](figures.md): 16, of which 16 differ." in text
    assert "from the stored rows of figures, without runs." in text
    assert "| shorter, information lost | 8 |" in text and path.with_suffix(".png").exists()
