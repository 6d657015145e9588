"""The page of an experiment whose claims say that a treatment does better than its last one, or
than it did at the start.

What counts was fixed before the runs:

    end         of a figure, the mean of its last two values for success, else of its last ten
    start       of a figure, the mean of its first value for success, else of its first ten
    difference  end with a treatment minus end with the last one, or minus its own start, paired
                by setting and seed; its interval (95 %, Student's t) over seeds of the mean over
                settings
    reproduced  the interval is on the side that the claim names; or, where the claim says that
                there is no difference, within MARGIN of 0 on both sides
    reversed    it is on the other side
    undecided   else
    spread      std over mean of the groups' reward variances, the mean over a run's start without
                filter. RAGEN-2, table 8, says that the filter gains more where it is larger: over
                settings, Spearman's correlation of spread and gain, where the experiment has a
                filtered and an unfiltered arm of four settings or more; interval: the jackknife
                over settings (correlations.py)
"""

from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from ragen_jax.configs.experiments import Experiment
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab.correlations import with_interval
from ragen_jax.lab.curves import (
    OF_OTHERS,
    SUCCESS,
    Runs,
    Verdict,
    end,
    factors,
    interval,
    judged,
    judged_within,
    start,
    updates,
)

MARGIN = 0.03  # of success, that counts as no difference
SIDES = {1: "higher", -1: "lower", 0: f"no other (within {MARGIN:g})"}  # claimed
LEAST_SETTINGS = 4  # that say whether spread predicts the gain
MI, ENTROPY, VALID = "collapse/first_turn/mi_seq", "update/entropy", "rollout/valid_rate"
KEPT, VARIANCE, SPREAD = "filter/kept_ratio", "filter/score_mean", "filter/score_std"
LENGTH, TIME = "rollout/response_length", "time/cpu"
FIGURES = (SUCCESS, MI, ENTROPY, VALID, KEPT, VARIANCE, SPREAD, LENGTH, TIME)
SHOWN = {
    "success": SUCCESS,
    "mi_seq": MI,
    "entropy": ENTROPY,
    "valid": VALID,
    "groups kept": KEPT,
    "reward variance": VARIANCE,
    "tokens a reply": LENGTH,
    "CPU s a step": TIME,
}


def differences(
    runs: Runs, treatment: str, name: str, settings: tuple[str, ...], *, since_start: bool = False
) -> list[float]:
    """The difference of a figure's end to the last treatment's, or to its own start, by seed: the
    mean over settings."""
    every, treatments, seeds = factors(runs)

    def difference(setting, seed):
        rows = runs[setting, treatment, seed]
        other = start(rows, name) if since_start else end(runs[setting, treatments[-1], seed], name)
        return end(rows, name) - other

    return [float(np.mean([difference(x, seed) for x in settings or every])) for seed in seeds]


def predictor(runs: Runs) -> tuple[dict[str, tuple[float, float]], float, float, float] | None:
    """({setting: (spread, gain)}, Spearman's correlation of both and its interval); None where the
    experiment does not tell."""
    settings, treatments, seeds = factors(runs)
    if len(settings) < LEAST_SETTINGS or len(treatments) != 2:
        return None

    def spread(rows):
        return start(rows, SPREAD) / start(rows, VARIANCE)

    points = {
        setting: (
            float(np.mean([spread(runs[setting, treatments[-1], seed]) for seed in seeds])),
            float(np.mean(differences(runs, treatments[0], SUCCESS, (setting,)))),
        )
        for setting in settings
    }
    x, y = np.array(list(points.values())).T
    if np.isnan(x).any() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return points, *with_interval(
        lambda kept: float(spearmanr(x[kept], y[kept]).statistic), settings
    )


def judge(claim: Claim, runs: Runs) -> tuple[str, float, float]:
    """(reproduced, reversed or undecided, difference, half-width of its interval)."""
    found = differences(
        runs, claim.treatment, claim.figure, claim.settings, since_start=claim.since_start
    )
    mean, half_width = interval(found)
    if not claim.sign:
        return judged_within(mean, half_width, MARGIN), mean, half_width
    return judged(claim.sign * mean, half_width), mean, half_width


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """What the runs say of the experiment's claims."""
    *_, last = experiment.treatments
    found = []
    for claim in experiment.claims:
        word, mean, half_width = judge(claim, runs)
        other = "its start" if claim.since_start else last
        where = f", {', '.join(claim.settings)}" if claim.settings else ""
        text = f"{claim.treatment} {SIDES[claim.sign]} than {other} in `{claim.figure}`{where}"
        found.append(Verdict(claim.source, text, word, f"{mean:+.3f} +- {half_width:.3f}"))
    told = predictor(runs)
    if told:
        _, value, low, high = told
        text = "std(RV) / mean(RV) predicts the filter's gain"
        figures = f"Spearman {value:+.2f} ({low:+.2f} to {high:+.2f})"
        found.append(Verdict("table 8", text, predicted(low, high), figures))
    return found


def predicted(low: float, high: float) -> str:
    """What an interval of the correlation of spread and gain says of table 8."""
    return judged((low + high) / 2, (high - low) / 2)


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """The text of the page, behind its question and command."""
    settings, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    # Rows may be of before a figure was measured.
    shown = {
        word: name
        for word, name in SHOWN.items()
        if any(np.isfinite(end(rows, name)) for rows in runs.values())
    }
    lines = [
        f"{len(runs)} runs of {steps} steps ({experiment.config}), seeds "
        f"{', '.join(map(str, seeds))}. Written by that command.",
        "",
        f"Claims of RAGEN-2, as differences to {treatments[-1]} where the claim does not say "
        f"otherwise, paired by setting and seed; 95 % intervals over {len(seeds)} seeds "
        "(Student's t).",
        "",
        "| claim | treatment | settings | figure | claimed | difference | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for claim in experiment.claims:
        verdict, mean, half_width = judge(claim, runs)
        cells = (
            *(claim.source, claim.treatment, ", ".join(claim.settings) or "all"),
            f"`{claim.figure}`",
            SIDES[claim.sign] + (" than at the start" if claim.since_start else ""),
            f"{mean:+.3f} +- {half_width:.3f}",
            f"**{verdict}**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"![success at the end]({picture})",
        "",
        "## Every arm",
        "",
        "Means over seeds of the end of each run; success with its difference to "
        f"{treatments[-1]}, by seed.",
        "",
        "| setting | treatment | updates | to the last | " + " | ".join(shown) + " |",
        "| --- | --- | --- | --- | " + " | ".join("---" for _ in shown) + " |",
    ]
    for setting in settings:
        for treatment in treatments:
            of_arm = [runs[setting, treatment, seed] for seed in seeds]
            found = interval(differences(runs, treatment, SUCCESS, (setting,)))
            cells = (
                *(setting, treatment, f"{np.mean([updates(rows) for rows in of_arm]):.0f}"),
                "" if treatment == treatments[-1] else "{:+.3f} +- {:.3f}".format(*found),
                *(
                    f"{np.mean([end(rows, name) for rows in of_arm]):.3g}"
                    for name in shown.values()
                ),
            )
            lines.append("| " + " | ".join(cells) + " |")
    told = predictor(runs)
    if told:
        points, value, low, high = told
        lines += [
            "",
            "## Does the spread of reward variance predict the gain?",
            "",
            f"RAGEN-2, table 8: where std(RV) / mean(RV) is larger the filter gains more. "
            f"Spearman's correlation over settings: {value:+.2f} ({low:+.2f} to {high:+.2f}): "
            f"**{predicted(low, high)}**.",
            "",
            "| setting | std(RV) / mean(RV) at the start, without filter | gain in success |",
            "| --- | --- | --- |",
            *(f"| {name} | {x:.2f} | {y:+.3f} |" for name, (x, y) in points.items()),
        ]
    lines += [
        "",
        "The rule, fixed before the runs: of success the mean of the last two evaluations, of "
        f"other figures that of their last {OF_OTHERS} values; reproduced where the interval "
        "lies on the side that is claimed, reversed on the other; where no difference is claimed, "
        f"reproduced where it lies within {MARGIN:g} of 0."
        + (
            " Arms run side by side: seconds are the processor's."
            if "CPU s a step" in shown
            else ""
        ),
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Success at the end: a group of points a setting, a colour a treatment, a point a seed. Of one
    setting alone the treatments are named where they stand."""
    import matplotlib.pyplot as plt

    settings, treatments, seeds = factors(runs)
    alone = len(settings) == 1
    width = 0.5 * len(treatments) if alone else 1.6 * len(settings)
    fig, axis = plt.subplots(figsize=(max(6.0, width), 3.4), layout="constrained")
    colors = plt.get_cmap("tab20").colors  # ty: ignore[missing-attribute] a listed colormap
    for j, treatment in enumerate(treatments):
        at = np.arange(len(settings)) + 0.7 * (j + 0.5) / len(treatments) - 0.35
        if alone:
            at = np.array([j])
        ends = np.array(
            [[end(runs[s, treatment, seed], SUCCESS) for s in settings] for seed in seeds]
        )
        color = colors[j % len(colors)]
        for values in ends:
            axis.plot(at, values, ".", color=color, alpha=0.4)
        axis.plot(at, ends.mean(0), "_", color=color, markersize=14, label=treatment)
    if alone:
        axis.set_xticks(range(len(treatments)), treatments, fontsize=8, rotation=60, ha="right")
    else:
        axis.set_xticks(range(len(settings)), settings, fontsize=8)
        axis.legend(fontsize=7, ncols=2)
    axis.set_ylabel("held-out success")
    fig.savefig(path, dpi=110)
    plt.close(fig)
