"""lab/mechanism.py on simulated runs with known pulls."""

import re

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import mechanism
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.interim_analyses import analysis_seed_counts, certain
from ragen_jax.lab.mechanism import ALL, LOWER, UPPER
from ragen_jax.lab.model_organism import GROUNDED, MI
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast


def run(mi, pull=None):
    """Rows with a probe every 4th step and gradients every 8th; `pull` has a value per quarter."""
    rows = [{"step": 0, SUCCESS: 0.4}]
    for step in range(1, 4 * len(mi) + 1):
        row = {"step": step, "update/count": 4.0}
        if step % 4 == 0:
            row |= {MI: mi[step // 4 - 1], GROUNDED: 0.2}
        if step % 8 == 0 and pull is not None:
            late = step > 16  # after the loss, where nothing counts
            for quarter in range(4):
                row[f"gradient/bucket_{quarter}/entropy_pull"] = 99.0 if late else pull[quarter]
                row[f"gradient/bucket_{quarter}/task_pull"] = 0.01 * (quarter + 1)
                row[f"gradient/bucket_{quarter}/task_norm"] = 0.1 * (quarter + 1 if late else 1)
                row[f"gradient/bucket_{quarter}/entropy_norm"] = 2.0 - (
                    0.5 * quarter if late else 0
                )
                row[f"gradient/bucket_{quarter}/reward_variance"] = 10.0 * quarter + step / 8
        rows.append(row)
    rows[-1][SUCCESS] = 0.5
    return rows


def world(lower, upper, kept_upper, kept_lower):
    rng = np.random.default_rng(0)

    def falling(share):
        return [2.0, 2.0, 1.5, *[2.0 * share + rng.normal(0, 0.01)] * 5]

    runs = {}
    for seed in range(5):
        pull = np.array([lower, lower, upper, upper]) + rng.normal(0, 0.002, 4)
        runs["s", UPPER, seed] = run(falling(kept_upper))
        runs["s", LOWER, seed] = run(falling(kept_lower))
        runs["s", ALL, seed] = run(falling(0.3), pull)
    return runs


def test_only_what_is_before_the_loss_counts():
    rows = run([2.0, 2.0, 1.5, 0.5, 0.5, 0.5], [-1.0, -2.0, -3.0, -4.0])
    # Half is lost at step 14; only the gradients of step 8 come before it.
    assert mechanism.until_half(rows, "gradient/bucket_2/entropy_pull") == -3.0
    assert mechanism.until_half(rows, "gradient/bucket_2/reward_variance") == 21.0
    early = run([2.0, 0.5, 0.5, 0.5], [-1.0, -2.0, -3.0, -4.0])
    assert mechanism.until_half(early, "gradient/bucket_0/entropy_pull") == -1.0  # at least one


@pytest.mark.parametrize(
    ("lower", "upper", "kept", "words"),
    [
        (-0.10, -0.02, (0.9, 0.4), ("as predicted", "as predicted")),
        (-0.02, -0.10, (0.4, 0.9), ("reversed", "reversed")),
        (-0.05, -0.05, (0.6, 0.6), ("no significant difference", "no significant difference")),
    ],
)
def test_both_predictions(lower, upper, kept, words):
    text = mechanism.verdict(EXPERIMENTS["mechanism"], world(lower, upper, *kept))
    assert text.split("**")[1::2] == list(words)


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    runs = world(-0.10, -0.02, 0.9, 0.4)
    text = write_page(
        "mechanism", tmp_path / "m.md", "run mechanism", EXPERIMENTS["mechanism"], runs
    )
    lower, upper = (
        float(x) for x in re.search(r"templates by ([\d.]+) on .* by ([\d.]+) on", text).groups()
    )
    assert lower == pytest.approx(0.2, abs=0.01) and upper == pytest.approx(0.04, abs=0.01)
    assert "| 3 | 21 | +0.03 ± 0 | -0.0207 ± 0.0021 |" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {UPPER} |"))
    assert "> 32 | 0.20 | 0.50 |" in row
    # Norms 0.1, 0.2, 0.3, 0.4 rise by 0.2 with mean 0.25; 2, 1.5, 1, 0.5 fall by 1 with mean 1.25.
    assert (
        "| before collapse, the norm of the task gradient grows with reward variance | **undec"
        in text
    )
    assert (
        "the norm of the entropy gradient does not grow with reward variance | **reproduced**"
        in text
    )
    assert (
        "after collapse, the norm of the task gradient grows with reward variance | **repro" in text
    )
    assert "**reversed** | upper minus lower half, over the mean: -0.80 ± 0.00" in text
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def noisy(rng):
    """Arms that keep equal information up to noise, with equal pulls."""
    runs = {}
    for seed in EXPERIMENTS["mechanism"].seeds:
        for name in (UPPER, LOWER, ALL):
            end = 1.0 + rng.normal(0, 0.2)
            runs["s", name, seed] = run([2.0, end], [-0.05, -0.05, -0.05, -0.05 + 0.01 * end])
    return runs


@pytest.mark.medium
def test_the_page_after_the_looks_errs_as_rarely_as_it_says():
    """Interim analyses after three, four and five seeds, then the page's verdict: 5 % in all."""
    rng, experiment, decided = np.random.default_rng(0), EXPERIMENTS["mechanism"], []
    for _ in range(500):
        runs = noisy(rng)
        for count in analysis_seed_counts(experiment):
            seeds = experiment.seeds[:count]
            part = {key: rows for key, rows in runs.items() if key[2] in seeds}
            if certain(mechanism.primary(part), experiment):
                break
        found = mechanism.verdicts(experiment, part)[1]
        assert (found.p < 0.05) == (found.verdict != "undecided")
        decided.append(found.verdict != "undecided")
    assert 0.01 <= np.mean(decided) <= 0.06


def test_the_page_uses_the_confidence_of_the_look_at_which_it_ended():
    runs, experiment = noisy(np.random.default_rng(1)), EXPERIMENTS["mechanism"]
    for count, spent in ((3, 0.05 / 21), (4, 0.2 / 21), (5, 0.8 / 21)):
        part = {key: rows for key, rows in runs.items() if key[2] in experiment.seeds[:count]}
        mean, half_width = interval(mechanism.primary(part), confidence=1 - spent)
        of_bonus = mechanism.verdicts(experiment, part)[1]
        level = f"{100 * (1 - spent):.3g} % CI"
        assert of_bonus.figures == f"{mean:+.3f} ± {half_width:.3f} ({level})"
