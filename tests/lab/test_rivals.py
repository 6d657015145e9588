"""lab/rivals.py on simulated runs with known effects."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab import rivals
from ragen_jax.lab.curves import SUCCESS, label_points
from ragen_jax.lab.pages import write_page
from ragen_jax.lab.rivals import MI, VALID, knee, verdicts

pytestmark = pytest.mark.fast
EXPERIMENT = dataclasses.replace(
    EXPERIMENTS["mismatch"],
    claims=(
        Claim("paper", "large", "success", -1),
        Claim("paper", "small", "success", -1),
        Claim("paper", "large", "information kept", -1),
        Claim("paper", "mended", "success", 1, reference="large"),
        Claim("paper", "idle", "success", 1),
        Claim("paper", "not run", "success", 1),
    ),
    ladders=(("small", "large"),),
)


def run(success, kept):
    rows = [{"step": 0, SUCCESS: 0.4}]
    for step in range(1, 21):
        row = {"step": step, "update/count": 4.0, rivals.GAP: 0.5, rivals.ALIVE: 0.75}
        if step in (1, 20):
            row |= {MI: 2.0 if step == 1 else 2.0 * kept, VALID: 0.98, rivals.ENTROPY: 1.0}
        if step % 10 == 0:
            row[SUCCESS] = success
        rows.append(row)
    return rows


def world():
    """Five seeds: a large dose costs success and information, a small dose nothing."""
    rng, runs = np.random.default_rng(1), {}
    levels = {"small": (0.45, 1.0), "large": (0.2, 0.4), "mended": (0.44, 0.9), "exact": (0.45, 1)}
    for seed in range(5):
        for name, (success, kept) in levels.items():
            noise, more = rng.normal(0, 0.005, 2)
            runs["s", name, seed] = run(success + noise, kept + more)
        runs["s", "idle", seed] = runs["s", "exact", seed]
    order = ("small", "large", "mended", "idle", "exact")
    return {("s", name, seed): runs["s", name, seed] for seed in range(5) for name in order}


def test_what_is_measured_by_hand():
    rows = run(0.5, 0.25)
    assert rivals.success(rows) == 0.5 and rivals.kept(rows) == 0.25


def test_the_step_of_a_loss_is_the_median_over_the_lost_runs():
    slow, fast, kept = run(0.2, 1.0), run(0.2, 1.0), run(0.4, 1.0)
    slow[10][SUCCESS] = 0.31  # not yet below three quarters of 0.4
    arm, lost = [slow, fast, kept], [True, True, False]
    assert rivals.lost_runs(arm, lost, SUCCESS, 0.75) == "2 at step 15"
    assert rivals.lost_runs(arm, [False] * 3, SUCCESS, 0.75) == "0"


def test_verdicts():
    found = verdicts(EXPERIMENT, world())
    words = ["reproduced", "undecided", "reproduced", "reproduced", "not testable (identical runs)"]
    assert [v.verdict for v in found] == words
    assert found[3].claim == "`mended` raises success (compared with `large`)"
    assert found[0].figures.startswith("-0.2") and found[0].p < 0.001 and found[4].p is None
    other = dataclasses.replace(EXPERIMENT, claims=(Claim("", "large", "success", 1),))
    assert verdicts(other, world())[0].verdict == "reversed"


def test_the_knee_is_the_first_dose_that_costs_success():
    assert knee(EXPERIMENT, world()) == "From `small`, `large`, success falls at `large`."
    mild = dataclasses.replace(EXPERIMENT, ladders=(("small",),))
    assert knee(mild, world()) == "From `small`, success falls at none of them."


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_page("mismatch", tmp_path / "mismatch.md", "run mismatch", EXPERIMENT, world())
    assert "25 runs of 20 steps, config organism:sokoban, seeds 0, 1, 2, 3, 4. Not run yet" in text
    planned = dataclasses.replace(EXPERIMENT, seeds=(0, 1, 2, 3, 4, 9))
    text = write_page("mismatch", tmp_path / "mismatch.md", "run mismatch", planned, world())
    assert "Not run yet: seeds 9, which `--reuse` would add to these runs." in text
    complete = dataclasses.replace(EXPERIMENT, seeds=(0, 1, 2, 3, 4))
    text = write_page("mismatch", tmp_path / "mismatch.md", "run mismatch", complete, world())
    assert "Not run yet" not in text
    row = next(line for line in text.splitlines() if line.startswith("| s | large |"))
    assert row.startswith("| s | large | 80 | 0.2") and row.endswith(
        "| 0.75 | 0.5 | 5 at step 10 | 5 at step 20 |"
    )
    assert "| s | exact | 80 | 0.4" in text and (tmp_path / "mismatch.png").exists()


@pytest.mark.parametrize("name", ["mismatch", "signals"])
def test_every_claim_names_arms_of_its_experiment(name):
    experiment = EXPERIMENTS[name]
    for claim in experiment.claims:
        assert claim.treatment in experiment.treatments and claim.figure in rivals.MEASURES
        assert claim.reference in ("", *experiment.treatments)
    assert {x for ladder in experiment.ladders for x in ladder} <= set(experiment.treatments)


def test_a_name_stays_within_the_frame():
    plt = pytest.importorskip("matplotlib.pyplot")
    fig, axis = plt.subplots()
    points = {"a treatment with a long name": (1.0, 0.5), "another": (0.0, 0.5)}
    axis.plot(*np.transpose(list(points.values())), "o")
    label_points(fig, axis, points)
    frame = axis.get_window_extent()
    for text in axis.texts:
        box = text.get_window_extent()
        assert frame.x0 < box.x0 < box.x1 < frame.x1, text.get_text()
    plt.close(fig)
