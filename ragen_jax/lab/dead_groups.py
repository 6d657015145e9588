"""The page of experiment dead_groups: groups without gradient as a predictor and as a detector.

arXiv 2605.21125 calls it the advantage collapse rate and reports R2 = 0.617 with final performance
over 245 runs of different models, difficulties and group sizes. These rules were fixed before the
runs:

    rate      fraction of a step's groups whose members all have the same task reward, without
              penalties (1 - collect/informative_ratio); early and late: mean of the first and last
              EARLY steps
    final     mean success of the last two evaluations
    initial   success before any update
    predicts  Spearman's correlation of the early rate with final success over settings (means over
              seeds): reproduced if it is below 0 by the permutation test, reversed if above 0
    adds      the same after the ranks of initial success are regressed out of both
    blind     Spearman's correlation, over the settings of a seed, of the rise of the rate (late
              minus early) with the information kept (last mi_seq of the probe over its first);
              95 % interval over seeds (Student's t). The rate is blind to the loss of information
              if the interval is within WEAK of 0, and not blind if it is beyond

R2 is that of a straight line through all runs.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata, spearmanr

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab.correlations import WEAK
from ragen_jax.lab.curves import SUCCESS, Rows, Runs, Verdict, curve, end, factors, missing_seeds
from ragen_jax.lab.curves import judge_equivalence as within
from ragen_jax.lab.statistics import (
    ERROR,
    LEAST_SETTINGS,
    in_words,
    p_text,
    p_within,
    permutation_test,
)
from ragen_jax.storage.writers import save_figure

ALIVE, MI, VALID = "collect/informative_ratio", "probe/mi_seq", "probe/valid_rate"
FIGURES = (SUCCESS, ALIVE, MI, VALID)
EARLY = 4  # steps
SOURCE = "arXiv 2605.21125"
BEYOND = "the early rate predicts final success beyond the success before training"


class Reading(NamedTuple):
    """The figures of a run."""

    early: float  # rate of groups without gradient in the first steps
    late: float  # the same in the last steps
    initial: float  # success before any update
    final: float  # success at the end
    kept: float  # last mi_seq of the probe, over its first


def read(rows: Rows) -> Reading:
    """Return the figures of a run, by the rule above."""
    _, alive = curve(rows, ALIVE)
    _, success = curve(rows, SUCCESS)
    _, mi = curve(rows, MI)
    return Reading(
        early=float(1 - alive[:EARLY].mean()),
        late=float(1 - alive[-EARLY:].mean()),
        initial=float(success[0]),
        final=end(rows, SUCCESS),
        kept=float(mi[-1] / mi[0]),
    )


def by_setting(runs: Runs) -> np.ndarray:
    """Return the figures of each setting, mean over its runs, float64 [settings, 5]."""
    settings, *_ = factors(runs)
    means = [
        np.mean([read(rows) for key, rows in runs.items() if key[0] == setting], axis=0)
        for setting in settings
    ]
    return np.array(means)


def r_squared(x: np.ndarray, y: np.ndarray) -> float:
    """Return the fraction of the variance of y that a straight line in x explains."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def residuals(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the ranks of y minus the straight line through them in the ranks of x.

    They are the ranks of y, with mean 0, if x has no variation.
    """
    rank_x, rank_y = rankdata(x) - rankdata(x).mean(), rankdata(y) - rankdata(y).mean()
    slope = float(rank_x @ rank_y) / float(rank_x @ rank_x) if rank_x.any() else 0.0
    return np.round(rank_y - rank_x * slope, 9)


def follows_information(runs: Runs) -> tuple[float, float]:
    """Return (mean over seeds, half-width) of the correlation of rate and information kept."""
    _, _, seeds = factors(runs)
    found = []
    for seed in seeds:
        readings = [read(rows) for key, rows in runs.items() if key[2] == seed]
        rise, kept = [r.late - r.early for r in readings], [r.kept for r in readings]
        constant = np.ptp(rise) == 0 or np.ptp(kept) == 0
        found.append(0.0 if constant else float(spearmanr(rise, kept).statistic))
    return interval(found)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on the rate as a predictor and as a detector."""
    early, _, initial, final, _ = by_setting(runs).T
    found = []
    for claim, x, y in (
        ("the early rate of groups without gradient predicts final success", early, final),
        (BEYOND, residuals(early, initial), residuals(final, initial)),
    ):
        if claim == BEYOND and np.ptp(initial) == 0:
            same = f"success before training is {initial[0]:.2f} in all settings"
            found.append(Verdict(SOURCE, claim, "not testable", same))
            continue
        if len(x) < LEAST_SETTINGS:
            found.append(Verdict(SOURCE, claim, "too few settings", f"{len(x)} settings"))
            continue
        correlation, p = permutation_test(x.tolist(), y.tolist())
        word = "reproduced" if correlation < 0 else "reversed"
        text = f"Spearman {correlation:+.2f} over {len(x)} settings"
        found.append(Verdict(SOURCE, claim, word if p < ERROR else "undecided", text, p))
    mean, half_width = follows_information(runs)
    found.append(
        Verdict(
            "question of this page",
            "the rate of groups without gradient is blind to template collapse",
            within(mean, half_width, WEAK),
            "Spearman of its rise with information kept " + in_words(mean, half_width, digits=2),
            p_within(mean, half_width, len(factors(runs)[2]) - 1, WEAK),
        )
    )
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, _, seeds = factors(runs)
    readings = {key: read(rows) for key, rows in runs.items()}
    early, _, initial, final, _ = np.array(list(readings.values())).T
    lines = [
        f"{len(runs)} runs of {max(rows[-1]['step'] for rows in runs.values())} steps: "
        f"{len(settings)} settings, seeds {', '.join(map(str, seeds))}."
        + missing_seeds(runs, experiment.seeds),
        "",
        "| claim | result | p | verdict |",
        "| --- | --- | --- | --- |",
        *(
            f"| {v.claim} | {v.figures} | {p_text(v.p)} | **{v.verdict}** |"
            for v in verdicts(experiment, runs)
        ),
        "",
        f"Over all runs, the early rate explains R2 = {r_squared(early, final):.2f} of the "
        "variance of final success (the paper: 0.617 over 245 runs), and success before any update "
        f"{r_squared(initial, final):.2f}. Of the gain in success (final minus initial), the early "
        f"rate explains {r_squared(early, final - initial):.2f}.",
        "",
        f"![early rate and final success]({picture})",
        "",
        "## Every setting",
        "",
        "Means over seeds.",
        "",
        "| setting | rate, early | rate, late | success before | success at the end | "
        "information kept |",
        "|" + " --- |" * 6,
    ]
    for setting, means in zip(settings, by_setting(runs), strict=True):
        lines.append(f"| {setting} | " + " | ".join(f"{x:.2f}" for x in means) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: the rate is the fraction of a step's groups whose "
        "members all have the same task reward (1 - `collect/informative_ratio`), early over the "
        f"first {EARLY} steps and late over the last {EARLY}. The first two claims: Spearman's "
        "correlation over settings (means over seeds) with the permutation test; for the second, "
        "the ranks of success before training are regressed out of both. The third: Spearman's "
        "correlation over the settings of each seed, between the rise of the rate and the "
        "information kept (last `mi_seq` of the probe over its first), with a 95 % CI over seeds "
        f"(Student's t); blind if the interval is within {WEAK:g} of 0, not blind (reversed) if it "
        "is beyond.",
        "",
        "The paper varies models of 0.5B to 14B parameters, difficulty and group size, so its "
        "points also differ in their success before training. Its window of early steps is not "
        "known here.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw final success and information kept against the rate, a point per run."""
    import matplotlib.pyplot as plt

    settings, *_ = factors(runs)
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    colors = plt.get_cmap("tab20").colors  # ty: ignore[missing-attribute] a listed colormap
    for i, setting in enumerate(settings):
        readings = [read(rows) for key, rows in runs.items() if key[0] == setting]
        early, late, _, final, kept = np.array(readings).T
        color = colors[i % len(colors)]
        axes[0].plot(early, final, ".", color=color, label=setting)
        axes[1].plot(late - early, kept, ".", color=color)
    axes[0].set_xlabel("early rate of groups without gradient")
    axes[0].set_ylabel("held-out success at the end")
    axes[1].set_xlabel("rise of the rate from the first to the last steps")
    axes[1].set_ylabel("information kept")
    fig.legend(fontsize=6, loc="outside right center")
    save_figure(fig, path, dpi=110)
    plt.close(fig)
