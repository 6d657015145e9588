"""The page of experiments with claims about differences between treatments, or since the start.

These rules were fixed before the runs:

    end         mean of a metric's last ten values; of the last two for success
    start       mean of a metric's first ten values; the first value for success
    difference  end with a treatment minus end with the last treatment, or minus the start of the
                same run; paired by setting and seed, and averaged over settings; its 95 % interval
                (Student's t) is over seeds
    reproduced  the interval is on the claimed side of 0; for a claim of no difference, it is within
                MARGIN of 0
    reversed    the interval is on the other side
    undecided   otherwise
    not testable   every run with the treatment is identical to the compared run
    cannot be judged   both sides are at the ceiling of the metric (ceiling.py), and the runs did
                not record the metric without a ceiling, which would decide the claim instead
    spread      std over mean of the groups' reward variances, averaged over the start of the runs
                without filter. RAGEN-2, table 8, says that a larger spread means a larger gain of
                the filter. In experiments with a filtered and an unfiltered arm: Spearman's
                correlation of spread and gain over settings; p-value of the exact permutation test,
                which needs six settings (statistics.py)
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import ceiling
from ragen_jax.lab.curves import (
    OTHER_VALUES,
    SUCCESS,
    Runs,
    Verdict,
    end,
    factors,
    judge_difference,
    judge_equivalence,
    start,
    updates,
)
from ragen_jax.lab.identical import SAME, is_unchanged
from ragen_jax.lab.statistics import (
    ERROR,
    LEAST_SETTINGS,
    in_words,
    p_text,
    p_value,
    p_within,
    permutation_test,
)
from ragen_jax.storage.writers import save_figure

MARGIN = 0.03  # largest difference in success that counts as none
SIGN_TEXTS = {
    1: "higher",
    -1: "lower",
    0: f"equal (within {MARGIN:g})",
}  # sign of a claim -> its text
NOT_TESTABLE = f"not testable ({SAME})"
TOO_FEW = "too few settings"
MI, ENTROPY, VALID = "collapse/first_turn/mi_seq", "update/entropy", "rollout/valid_rate"
KEPT_RATIO, VARIANCE, SPREAD = "filter/kept_ratio", "filter/score_mean", "filter/score_std"
LENGTH, TIME = "rollout/response_length", "time/cpu"
FIGURES = (
    *(SUCCESS, MI, ENTROPY, VALID, KEPT_RATIO, VARIANCE, SPREAD, LENGTH, TIME),
    *ceiling.companions((MI,)),
)
COLUMNS = {
    "success": SUCCESS,
    "mi_seq": MI,
    "entropy": ENTROPY,
    "valid": VALID,
    "groups kept": KEPT_RATIO,
    "reward variance": VARIANCE,
    "tokens per reply": LENGTH,
    "CPU s per step": TIME,
}


def differences(
    runs: Runs, treatment: str, name: str, settings: tuple[str, ...], *, since_start: bool = False
) -> list[float]:
    """Return a metric's difference to the last treatment, or since the start, for each seed.

    Args:
      settings: settings over which the difference is averaged; (): all.
      since_start: compare the end of each run with its start.
    """
    every, treatments, seeds = factors(runs)

    def difference(setting, seed):
        rows = runs[setting, treatment, seed]
        other = start(rows, name) if since_start else end(runs[setting, treatments[-1], seed], name)
        return end(rows, name) - other

    return [float(np.mean([difference(x, seed) for x in settings or every])) for seed in seeds]


class Prediction(NamedTuple):
    """Whether the spread of reward variance predicts the filter's gain."""

    points: dict[str, tuple[float, float]]  # setting -> (spread, gain)
    correlation: float  # Spearman's, over settings
    p: float | None  # p-value of the exact permutation test; None: too few settings
    verdict: str

    @property
    def figures(self) -> str:
        """Return the correlation and its p-value as text."""
        p = f"exact p = {self.p:.3f}" if self.p is not None else f"{len(self.points)} settings"
        return f"Spearman {self.correlation:+.2f} ({p})"


def predictor(runs: Runs) -> Prediction | None:
    """Return the correlation of spread and gain over settings.

    None with fewer than three settings, with other than two treatments (filtered and unfiltered),
    or if the spread or the gain is equal in all settings.
    """
    settings, treatments, seeds = factors(runs)
    if len(settings) < 3 or len(treatments) != 2:
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
    correlation, p = permutation_test(x, y)
    if len(settings) < LEAST_SETTINGS:
        return Prediction(points, correlation, None, TOO_FEW)
    word = "reproduced" if correlation > 0 else "reversed"
    return Prediction(points, correlation, p, word if p < ERROR else "undecided")


class Judgement(NamedTuple):
    """The result of the runs for a claim."""

    verdict: str
    mean: float  # difference of the metric
    half_width: float  # half-width of its 95 % interval
    p: float | None  # p-value; None: nothing was tested
    figure: str  # metric that decides the claim


def _arms(claim: Claim, runs: Runs) -> list[Runs]:
    """Return the arms that a claim compares."""
    every, treatments, _ = factors(runs)
    names = [claim.treatment] if claim.since_start else [claim.treatment, treatments[-1]]
    return [
        {
            key: rows
            for key, rows in runs.items()
            if key[1] == name and key[0] in (claim.settings or every)
        }
        for name in names
    ]


def judge(claim: Claim, runs: Runs, experiment: Experiment) -> Judgement:
    """Judge a claim by the rule above."""
    _, treatments, seeds = factors(runs)
    arms, figure = _arms(claim, runs), claim.figure
    capped = ceiling.at_ceiling(experiment, figure, arms)
    if capped and ceiling.has_margin(figure, arms):
        figure, capped = ceiling.margin_of(figure), False
    found = differences(
        runs, claim.treatment, figure, claim.settings, since_start=claim.since_start
    )
    mean, half_width = interval(found)
    idle = not claim.since_start and is_unchanged(
        runs, claim.treatment, treatments[-1], claim.settings or None
    )
    if idle or capped:
        word = NOT_TESTABLE if idle else ceiling.CANNOT_BE_JUDGED
        return Judgement(word, mean, half_width, None, figure)
    if not claim.sign:
        p = p_within(mean, half_width, len(seeds) - 1, MARGIN)
        return Judgement(judge_equivalence(mean, half_width, MARGIN), mean, half_width, p, figure)
    p = p_value(mean, half_width, len(seeds) - 1)
    return Judgement(judge_difference(claim.sign * mean, half_width), mean, half_width, p, figure)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on the experiment's claims."""
    *_, last = experiment.treatments
    found = []
    for claim in experiment.claims:
        found_here = judge(claim, runs, experiment)
        than = "than" if claim.sign else "and"
        other = f"with `{claim.treatment}` {than} with `{last}`"
        if claim.since_start:
            other = f"at the end {than} at the start with `{claim.treatment}`"
        where = f" ({', '.join(claim.settings)})" if claim.settings else ""
        text = f"`{claim.figure}` is {SIGN_TEXTS[claim.sign]} {other}{where}"
        figures = in_words(found_here.mean, found_here.half_width)
        if found_here.figure != claim.figure:
            figures += f" in `{found_here.figure}`, which has no ceiling"
        found.append(Verdict(claim.source, text, found_here.verdict, figures, found_here.p))
    prediction = predictor(runs)
    if prediction:
        text = "std(RV) / mean(RV) predicts the filter's gain"
        found.append(Verdict("table 8", text, prediction.verdict, prediction.figures, prediction.p))
    return found


def _end_cell(experiment: Experiment, name: str, arm: Runs) -> str:
    """Return the mean over seeds of a metric at the end, and whether it is at its ceiling."""
    mean = np.mean([end(rows, name) for rows in arm.values()])
    return f"{mean:.3g}" + (" (ceiling)" if ceiling.at_ceiling(experiment, name, [arm]) else "")


def _difference_cell(runs: Runs, treatment: str, setting: str, found: tuple[float, float]) -> str:
    """Return the difference in success to the last treatment, or SAME for identical runs."""
    last = factors(runs)[1][-1]
    if treatment == last:
        return ""
    return (
        SAME
        if is_unchanged(runs, treatment, last, [setting])
        else "{:+.3f} ± {:.3f}".format(*found)
    )


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    # Old rows may lack a metric.
    columns = {
        word: name
        for word, name in COLUMNS.items()
        if any(np.isfinite(end(rows, name)) for rows in runs.values())
    }
    lines = [
        f"{len(runs)} runs of {steps} steps, config {experiment.config}, seeds "
        f"{', '.join(map(str, seeds))}.",
        "",
        f"Claims of RAGEN-2, tested as differences to {treatments[-1]} unless the claim is about "
        "the start of the same runs; paired by setting and seed, with 95 % CIs over "
        f"{len(seeds)} seeds (Student's t).",
        "",
        "| claim | treatment | settings | metric | claimed | difference (95 % CI) | p | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for claim in experiment.claims:
        found_here = judge(claim, runs, experiment)
        cells = (
            *(claim.source, claim.treatment, ", ".join(claim.settings) or "all"),
            f"`{found_here.figure}`",
            SIGN_TEXTS[claim.sign] + (" than at the start" if claim.since_start else ""),
            f"{found_here.mean:+.3f} ± {found_here.half_width:.3f}",
            p_text(found_here.p),
            f"**{found_here.verdict}**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"![success at the end]({picture})",
        "",
        "## Every arm",
        "",
        "Means over seeds at the end of the runs. The difference in success is paired by seed "
        "(95 % CI).",
        "",
        f"| setting | treatment | updates | success, difference to {treatments[-1]} | "
        + " | ".join(columns)
        + " |",
        "| --- | --- | --- | --- | " + " | ".join("---" for _ in columns) + " |",
    ]
    for setting in settings:
        for treatment in treatments:
            arm = {(setting, treatment, x): runs[setting, treatment, x] for x in seeds}
            found = interval(differences(runs, treatment, SUCCESS, (setting,)))
            cells = (
                *(setting, treatment, f"{np.mean([updates(rows) for rows in arm.values()]):.0f}"),
                _difference_cell(runs, treatment, setting, found),
                *(_end_cell(experiment, name, arm) for name in columns.values()),
            )
            lines.append("| " + " | ".join(cells) + " |")
    prediction = predictor(runs)
    if prediction:
        few = (
            f" Fewer than {LEAST_SETTINGS} settings cannot decide: by chance alone, four settings "
            "are in perfect ascending or descending order in one case of twelve."
        )
        lines += [
            "",
            "## Does the spread of reward variance predict the gain?",
            "",
            "RAGEN-2, table 8: the filter gains more at a larger std(RV) / mean(RV), where RV is "
            f"the reward variance of a group. {prediction.figures}, over settings: "
            f"**{prediction.verdict}**." + (few if prediction.p is None else ""),
            "",
            "| setting | std(RV) / mean(RV) at the start, without filter | gain in success |",
            "| --- | --- | --- |",
            *(f"| {name} | {x:.2f} | {y:+.3f} |" for name, (x, y) in prediction.points.items()),
        ]
    lines += [
        "",
        "The rule, fixed before the runs: the end is the mean of the last two evaluations for "
        f"success and of the last {OTHER_VALUES} values for other metrics. A claim is reproduced "
        "if "
        "the interval is on the claimed side of 0 and reversed if it is on the other side. A claim "
        f"of no difference is reproduced if the interval is within {MARGIN:g} of 0. Metrics marked "
        f"(ceiling) are at {100 * ceiling.CEILING_FRACTION:.0f} % or more of their ceiling, the "
        "logarithm of the "
        "number of prompts; they cannot decide a claim if both sides are at the ceiling. p-values "
        "are for each claim alone; [claims](claims.md) corrects them for all claims."
        + (
            " Arms ran in parallel, so the time of a step is CPU time."
            if "CPU s per step" in columns
            else ""
        ),
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw final success: a group of points per setting, a colour per treatment, a point per seed.

    With a single setting, the axis has the names of the treatments.
    """
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
    save_figure(fig, path, dpi=110)
    plt.close(fig)
