"""The page of experiments on the claims of other papers: treatments against a reference.

These rules were fixed before the runs:

    success      mean of the last two evaluations
    kept         last mi_seq of the probe, over its first: the information kept
    difference   a treatment minus the reference of the claim, paired by seed; its 95 % interval
                 (Student's t) is over seeds
    reproduced   the interval is on the claimed side of 0; reversed: on the other side
    lost         success at the end is below QUARTER of that before any update (success lost), or
                 mi_seq below HALF of its first value (information lost)
    knee         the first treatment, from the smallest dose to the largest, whose difference in
                 success is below 0 (only in experiments whose treatments are doses)
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab.curves import (
    SUCCESS,
    Rows,
    Runs,
    Verdict,
    curve,
    end,
    factors,
    judge_difference,
    label_points,
    missing_seeds,
    updates,
)
from ragen_jax.lab.identical import SAME, is_unchanged
from ragen_jax.lab.model_organism import HALF, QUARTER
from ragen_jax.lab.statistics import in_words, p_text, p_value
from ragen_jax.storage.writers import save_figure

MI, VALID, GAP = "probe/mi_seq", "probe/valid_rate", "rollout/logp_gap"
ALIVE, ENTROPY = "collect/informative_ratio", "probe/h_cond"
FIGURES = (SUCCESS, MI, VALID, GAP, ALIVE, ENTROPY)
TEXTS = {1: "raises", -1: "lowers"}  # sign of a claim -> its text


def success(rows: Rows) -> float:
    """Return the mean success of the last two evaluations."""
    return end(rows, SUCCESS)


def kept(rows: Rows) -> float:
    """Return the last mi_seq of the probe, divided by its first."""
    _, mi = curve(rows, MI)
    return float(mi[-1] / mi[0])


MEASURES: dict[str, Callable[[Rows], float]] = {"success": success, "information kept": kept}


def difference(
    runs: Runs, measure: str, setting: str, treatment: str, reference: str
) -> tuple[float, float]:
    """Return (mean over seeds, 95 % half-width) of a difference of two treatments."""
    _, _, seeds = factors(runs)
    of = MEASURES[measure]
    return interval(
        [of(runs[setting, treatment, s]) - of(runs[setting, reference, s]) for s in seeds]
    )


def reference_of(claim: Claim, runs: Runs) -> str:
    """Return the treatment that a claim compares with: its reference, else the last treatment."""
    return claim.reference or factors(runs)[1][-1]


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on the experiment's claims, each in one setting."""
    settings, treatments, seeds = factors(runs)
    found = []
    for claim in experiment.claims:
        (setting,) = claim.settings or settings[:1]
        reference = reference_of(claim, runs)
        if not {claim.treatment, reference} <= set(treatments):
            continue  # a short form has fewer treatments
        text = (
            f"`{claim.treatment}` {TEXTS[claim.sign]} {claim.figure} (compared with `{reference}`)"
        )
        if is_unchanged(runs, claim.treatment, reference, [setting]):
            found.append(Verdict(claim.source, text, f"not testable ({SAME})", "no difference"))
            continue
        mean, half_width = difference(runs, claim.figure, setting, claim.treatment, reference)
        word = judge_difference(claim.sign * mean, half_width)
        p = p_value(mean, half_width, len(seeds) - 1)
        shown = in_words(mean, half_width)
        found.append(Verdict(claim.source, text, word, shown, p))
    return found


def lost_runs(arm: Sequence[Rows], lost: Sequence[bool], name: str, bound: float) -> str:
    """Return the number of lost runs, and when: "2 at step 7.5".

    Args:
      bound: fraction of its first value below which the metric `name` is lost. The step is the
        median over the lost runs of the first step with such a value.
    """
    steps = []
    for rows in (rows for rows, is_lost in zip(arm, lost, strict=True) if is_lost):
        at, values = curve(rows, name)
        steps.append(at[values < bound * values[0]][0])
    return f"{len(steps)} at step {np.median(steps):g}" if steps else "0"


def knee(experiment: Experiment, runs: Runs) -> str:
    """Return a sentence with the knee of each ladder of doses; "" without doses."""
    settings, treatments, _ = factors(runs)
    sentences = []
    for ladder in experiment.ladders:
        doses = [name for name in ladder if name in treatments]
        below = []
        for name in doses:
            mean, half_width = difference(runs, "success", settings[0], name, treatments[-1])
            if mean + half_width < 0:
                below.append(name)
        where = f"at `{below[0]}`" if below else "at none of them"
        sentences.append(f"From {', '.join(f'`{x}`' for x in doses)}, success falls {where}.")
    return " ".join(sentences)


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(runs)} runs of {steps} steps, config {experiment.config}, seeds "
        f"{', '.join(map(str, seeds))}." + missing_seeds(runs, experiment.seeds),
        "",
        "| claim | source | difference | p | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for v in verdicts(experiment, runs):
        lines.append(f"| {v.claim} | {v.source} | {v.figures} | {p_text(v.p)} | **{v.verdict}** |")
    if experiment.ladders:
        lines += ["", knee(experiment, runs)]
    lines += [
        "",
        f"![information kept and success]({picture})",
        "",
        "## Every arm",
        "",
        f"Means over seeds; differences to {treatments[-1]}, paired by seed (95 % CI). Groups with "
        "gradient: mean of `collect/informative_ratio`. Gap: largest difference of a log-prob "
        "between sampler and update, mean over steps, in nats. Lost: number of runs, and the "
        "median step of the first evaluation, or probe, below the bound.",
        "",
        "| setting | treatment | updates | success | difference | information kept | difference | "
        "H(Z\\|X) | valid | groups with gradient | gap | success lost | information lost |",
        "|" + " --- |" * 13,
    ]
    for setting in settings:
        for treatment in treatments:
            arm = [runs[setting, treatment, seed] for seed in seeds]
            cells = [setting, treatment, f"{np.mean([updates(rows) for rows in arm]):.0f}"]
            for measure, of in MEASURES.items():
                cells.append(f"{np.mean([of(rows) for rows in arm]):.3f}")
                found = difference(runs, measure, setting, treatment, treatments[-1])
                shown = "" if treatment == treatments[-1] else "{:+.3f} ± {:.3f}".format(*found)
                cells.append(shown)
            for name in (ENTROPY, VALID):
                cells.append(f"{np.mean([curve(rows, name)[1][-1] for rows in arm]):.2f}")
            for name in (ALIVE, GAP):
                values = np.concatenate([curve(rows, name)[1] for rows in arm])
                cells.append(f"{values.mean():.2g}" if len(values) else "")
            before = [curve(rows, SUCCESS)[1][0] for rows in arm]
            lost = [success(rows) < QUARTER * x for rows, x in zip(arm, before, strict=True)]
            cells.append(lost_runs(arm, lost, SUCCESS, QUARTER))
            cells.append(lost_runs(arm, [kept(rows) < HALF for rows in arm], MI, HALF))
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: success is the mean of the last two evaluations, the "
        "information kept the last `mi_seq` of the probe over its first. A claim is reproduced if "
        "the 95 % CI of the difference, paired by seed (Student's t), is on the claimed side of 0, "
        "and reversed if it is on the other side. Success is lost below three quarters of its "
        "value before any update, information below half of its first value. Each p-value is for "
        "its claim alone; [referee](referee.md) corrects them for all claims.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw a point per treatment and seed: information kept against success."""
    import matplotlib.pyplot as plt

    settings, treatments, seeds = factors(runs)
    fig, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    middles = {}
    for setting in settings:
        for name in treatments:
            arm = [runs[setting, name, seed] for seed in seeds]
            points = np.array([[kept(rows), success(rows)] for rows in arm])
            color = "tab:red" if name == treatments[-1] else "tab:blue"
            axis.plot(points[:, 0], points[:, 1], ".", color=color, alpha=0.3, markersize=4)
            axis.plot(*points.mean(0), "o", color=color, markersize=5)
            label = name if len(settings) == 1 else f"{setting}, {name}"
            middles[label] = tuple(points.mean(0))
    axis.set_xlabel("information kept: last mi_seq of the probe over its first")
    axis.set_ylabel("held-out success, mean of the last two evaluations")
    label_points(fig, axis, middles)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
