"""The page of experiment mechanism: which prompts and which part of the loss cause the drift.

48 held-out groups are divided into quarters by reward variance. These rules were fixed before the
runs:

    pull        of a part of the loss on a quarter: change of the log-odds of the grounded style by
                a plain gradient step on this part per unit of learning rate (diagnostics/drift.py),
                mean over the steps until half of mi_seq is lost. Below 0: towards templates
    theory      RAGEN-2's, as two predictions: the entropy part of the two lower quarters pulls more
                strongly towards templates than that of the two upper quarters; and a bonus on only
                the upper half of a step's groups keeps more information than a bonus on only the
                lower half (`treatments.kept_figure`)
    figure 3    of RAGEN-2, before and after collapse (first and last measurement of a run): the
                norm of the task gradient is larger on the two upper quarters than on the two lower
                ones; that of the entropy gradient is equal within FLAT. Differences are divided by
                the mean over the quarters

Each claim is decided by an interval over seeds (Student's t) on one side of 0. Its confidence is
that of the interim analysis at which the experiment ended (interim_analyses.py), 95 % without
interim analyses.
"""

from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab import treatments as comparisons
from ragen_jax.lab.curves import (
    SUCCESS,
    Rows,
    Runs,
    Verdict,
    curve,
    factors,
    judge_difference,
    judge_equivalence,
)
from ragen_jax.lab.identical import SAME, is_unchanged
from ragen_jax.lab.interim_analyses import analysis_seed_counts, confidence
from ragen_jax.lab.model_organism import GROUNDED, MI
from ragen_jax.lab.statistics import ERROR, p_value, p_within
from ragen_jax.storage.writers import save_figure

ALL, UPPER, LOWER = "bonus on all", "bonus on the upper half", "bonus on the lower half"
QUARTERS = 4
PARTS = ("task", "entropy")
PULLS = tuple(
    f"gradient/bucket_{quarter}/{part}_pull" for quarter in range(QUARTERS) for part in PARTS
)
NORMS = tuple(
    f"gradient/bucket_{quarter}/{part}_norm" for quarter in range(QUARTERS) for part in PARTS
)
FLAT = 0.25  # largest relative difference of norms that counts as none
CLAIMS = {
    "task": "grows with reward variance",
    "entropy": "does not grow with reward variance",
}
MOMENTS = {"before collapse": 0, "after collapse": -1}  # index of a run's measurement
VARIANCES = tuple(f"gradient/bucket_{quarter}/reward_variance" for quarter in range(QUARTERS))
FIGURES = (*organism.FIGURES, *PULLS, *NORMS, *VARIANCES)


def until_half(rows: Rows, name: str) -> float:
    """Return the mean of a metric over the steps until half of mi_seq is lost, at least a step."""
    steps, values = curve(rows, name)
    return float(values[steps <= max(comparisons.half(rows), steps[0])].mean())


def pulls(runs: Runs) -> np.ndarray:
    """Return the pulls in the arm with a bonus on all groups, float64 [seeds, quarters, parts]."""
    ((setting,), _, seeds) = factors(runs)
    found = [[until_half(runs[setting, ALL, seed], name) for name in PULLS] for seed in seeds]
    return np.reshape(found, (len(seeds), QUARTERS, len(PARTS)))


def slope_of_norms(runs: Runs, part: str, measurement: int, level: float) -> tuple[float, float]:
    """Return the difference of norms between the upper and the lower quarters, over the mean norm.

    Returns:
      (mean over seeds, half-width of its interval at confidence `level`).
    """
    ((setting,), _, seeds) = factors(runs)
    found = []
    for seed in seeds:
        rows = runs[setting, ALL, seed]
        norm_Q = np.array(
            [
                curve(rows, f"gradient/bucket_{quarter}/{part}_norm")[1][measurement]
                for quarter in range(QUARTERS)
            ]
        )
        found.append(float((norm_Q[2:].mean() - norm_Q[:2].mean()) / norm_Q.mean()))
    return interval(found, confidence=level)


def level_of(experiment: Experiment, runs: Runs) -> float:
    """Return the confidence of the page's verdicts."""
    return confidence(experiment, len(factors(runs)[2]))


def _ci(level: float) -> str:
    """Return the label of an interval, such as "95 % CI"."""
    return f"{100 * level:.3g} % CI"


def rescale_p(p: float, level: float) -> float:
    """Rescale a p-value to a single look: below 0.05 if the interval at `level` decides."""
    return min(1.0, p * ERROR / (1 - level))


def figure_3(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on figure 3, for each moment and part of the loss."""
    found = []
    level, df = level_of(experiment, runs), len(factors(runs)[2]) - 1
    for when, measurement in MOMENTS.items():
        for part, claim in CLAIMS.items():
            mean, half_width = slope_of_norms(runs, part, measurement, level)
            if part == "task":
                word = judge_difference(mean, half_width)
                p = p_value(mean, half_width, df, confidence=level)
            else:
                word = judge_equivalence(mean, half_width, FLAT)
                p = p_within(mean, half_width, df, FLAT, confidence=level)
            text = f"{when}, the norm of the {part} gradient {claim}"
            figures = (
                f"upper minus lower half, over the mean: {mean:+.2f} ± {half_width:.2f} "
                f"({_ci(level)})"
            )
            found.append(Verdict("figure 3", text, word, figures, rescale_p(p, level)))
    return found


def primary(runs: Runs) -> list[float]:
    """Return the kept information with a bonus on the upper half minus the lower half, per seed."""
    ((setting,), _, seeds) = factors(runs)
    return [
        comparisons.kept_figure(runs[setting, UPPER, seed])
        - comparisons.kept_figure(runs[setting, LOWER, seed])
        for seed in seeds
    ]


def pull_of_entropy(runs: Runs) -> tuple[list[float], list[float]]:
    """Return the entropy part's pull on the two lower and on the two upper quarters, per seed."""
    entropy_SQ = pulls(runs)[:, :, PARTS.index("entropy")]
    return entropy_SQ[:, :2].sum(1).tolist(), entropy_SQ[:, 2:].sum(1).tolist()


def predictions(
    experiment: Experiment, runs: Runs
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (mean, half-width at the page's confidence) of the two predicted differences.

    The first is how much more strongly the entropy part of the lower half pulls towards templates,
    the second how much more information a bonus on the upper half keeps.
    """
    lower_S, upper_S = pull_of_entropy(runs)
    harder = [upper - lower for lower, upper in zip(lower_S, upper_S, strict=True)]
    level = level_of(experiment, runs)
    return interval(harder, confidence=level), interval(primary(runs), confidence=level)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on both predictions of the theory and on figure 3."""
    pull_estimate, bonus_estimate = predictions(experiment, runs)
    level, df = level_of(experiment, runs), len(factors(runs)[2]) - 1

    def p_value_of(estimate):
        return rescale_p(p_value(*estimate, df, confidence=level), level)

    idle = is_unchanged(runs, UPPER, LOWER)
    return [
        Verdict(
            "section 5",
            "the entropy bonus pulls more strongly towards templates on prompts with low reward "
            "variance",
            judge_difference(*pull_estimate),
            "lower minus upper half {:+.3g} ± {:.2g} ".format(*pull_estimate) + f"({_ci(level)})",
            p_value_of(pull_estimate),
        ),
        Verdict(
            "section 5",
            "a bonus on only the upper half keeps more information than on only the lower half",
            f"not testable ({SAME})" if idle else judge_difference(*bonus_estimate),
            "{:+.3f} ± {:.3f} ".format(*bonus_estimate) + f"({_ci(level)})",
            None if idle else p_value_of(bonus_estimate),
        ),
        *figure_3(experiment, runs),
    ]


def verdict(experiment: Experiment, runs: Runs) -> str:
    """Return sentences about both predictions of the theory."""
    lower_S, upper_S = pull_of_entropy(runs)
    pull_estimate, bonus_estimate = predictions(experiment, runs)
    words = {
        "reproduced": "as predicted",
        "undecided": "no significant difference",
        "reversed": "reversed",
    }
    level = _ci(level_of(experiment, runs))
    return (
        "The entropy part pulls towards templates by "
        f"{-np.mean(lower_S):.3g} on the lower half of the groups and by {-np.mean(upper_S):.3g} "
        f"on the upper half: a difference of {pull_estimate[0]:+.3g} ± {pull_estimate[1]:.3g} "
        f"({level}): "
        f"**{words[judge_difference(*pull_estimate)]}**. Information kept with a bonus on only "
        "the upper half "
        "minus information kept with a bonus on only the lower half is "
        f"{bonus_estimate[0]:+.3f} ± {bonus_estimate[1]:.3f} ({level}): "
        f"**{words[judge_difference(*bonus_estimate)]}**."
    )


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    ((setting,), treatments, seeds) = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    pull_SQP = pulls(runs)
    lines = [
        f"{len(runs)} runs of {steps} steps without filter, seeds {', '.join(map(str, seeds))}; "
        f"setting {setting}.",
        "",
        verdict(experiment, runs),
        "",
        f"![pull by quarter, and information]({picture})",
        "",
        "## Pull of each part of the loss, by reward variance",
        "",
        "The pull is the change of the log-odds of the grounded style after a gradient step on "
        "held-out groups, per unit of learning rate; below 0, it is towards templates. The values "
        "are means until half of `mi_seq` was lost, in runs with a bonus on all groups; ± is the "
        f"95 % CI over {len(seeds)} seeds (Student's t). The task's advantages are deviations from "
        "the group's mean.",
        "",
        "| quarter (1: lowest variance) | reward variance | " + " | ".join(PARTS) + " |",
        "| --- | --- | " + " | ".join("---" for _ in PARTS) + " |",
    ]
    for quarter in range(QUARTERS):
        variance = np.mean([until_half(runs[setting, ALL, s], VARIANCES[quarter]) for s in seeds])
        cells = [
            "{:+.3g} ± {:.2g}".format(*interval(pull_SQP[:, quarter, part].tolist()))
            for part in range(len(PARTS))
        ]
        lines.append(f"| {quarter + 1} | {variance:.3g} | " + " | ".join(cells) + " |")
    lines += ["", "## Figure 3 of RAGEN-2, before and after collapse", ""]
    lines += ["| claim | verdict | result |", "| --- | --- | --- |"]
    lines += [f"| {v.claim} | **{v.verdict}** | {v.figures} |" for v in figure_3(experiment, runs)]
    lines += [
        "",
        "## Effect of the groups that receive the bonus",
        "",
        "| arm | information kept | difference to a bonus on all (95 % CI) | half lost at step | "
        "grounded at the end | success at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]

    def mean(measure, name):
        return float(np.mean([measure(runs[setting, name, seed]) for seed in seeds]))

    for name in treatments:
        middle = float(np.median([comparisons.half(runs[setting, name, seed]) for seed in seeds]))
        compared = comparisons.difference(runs, comparisons.kept_figure, name, ALL)
        cells = (
            *(name, f"{mean(comparisons.kept_figure, name):.2f}"),
            "" if name == ALL else comparisons.format_difference(runs, name, ALL, compared),
            f"> {steps}" if np.isinf(middle) else f"{middle:.0f}",
            *(
                f"{mean(lambda rows, x=x: comparisons.last(rows, x), name):.2f}"
                for x in (GROUNDED, SUCCESS)
            ),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: the paper's theory predicts that the entropy part of "
        "the two lower quarters pulls more strongly towards templates than that of the two upper "
        "quarters, and that a bonus on only the upper half of a step's groups keeps more "
        "information than a bonus on only the lower half. A prediction is decided if its interval "
        f"over seeds excludes 0 at a confidence of {100 * level_of(experiment, runs):.1f} %; the "
        "rest of the error of 5 % is spent on interim analyses with fewer seeds "
        f"({len(analysis_seed_counts(experiment))} analyses in total). Before and after collapse "
        "are the first "
        "and the last measurement of a run with a bonus on all groups. The norm of the entropy "
        f"gradient counts as equal if the interval is within {FLAT:g} of 0. Half lost: median step "
        "at which half of `mi_seq` was lost.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw the pull of each part of the loss by quarter, and mi_seq of every arm."""
    import matplotlib.pyplot as plt

    ((setting,), treatments, seeds) = factors(runs)
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    pull_SQP = pulls(runs)
    for part, name in enumerate(PARTS):
        at = np.arange(QUARTERS) + 0.4 * part
        means, halves = zip(*(interval(x.tolist()) for x in pull_SQP[:, :, part].T), strict=True)
        left.bar(at, means, 0.38, yerr=halves if len(seeds) > 1 else None, label=name)
    left.set_xticks(np.arange(QUARTERS) + 0.2, [f"{q + 1}" for q in range(QUARTERS)])
    left.set_xlabel("quarter by reward variance")
    left.set_title("pull on the log-odds of the grounded style", fontsize=10)
    left.legend(fontsize=8)
    for color, name in zip(("tab:green", "tab:red", "tab:gray"), treatments, strict=True):
        for seed in seeds:
            right.plot(*curve(runs[setting, name, seed], MI), color=color, alpha=0.3, linewidth=0.8)
        steps = curve(runs[setting, name, seeds[0]], MI)[0]
        means = np.mean([curve(runs[setting, name, seed], MI)[1] for seed in seeds], axis=0)
        right.plot(steps, means, color=color, linewidth=2, label=name)
    right.set_title("mi_seq of the probe, nats", fontsize=10)
    right.set_xlabel("step")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
