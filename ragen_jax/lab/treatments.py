"""The page of treatments, including ours: how much information each keeps, and at what cost.

These rules were fixed before the runs. For a run, over its probes and evaluations:

    kept      mean of mi_seq divided by its first value: 1 if nothing is lost
    half      step at which mi_seq falls below half of its running maximum, interpolated linearly
              between probes; infinite if it never does
    success   the last evaluation, and the mean of all evaluations

Each is compared with no filter, paired by seed (95 % interval over seeds, Student's t). A treatment
*helps* if the interval of the difference in `kept` is above 0. It helps *at no cost* if the
interval of the difference in mean success does not extend below -PRICE.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import ceiling
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab.curves import (
    SUCCESS,
    Rows,
    Runs,
    Verdict,
    curve,
    factors,
    judge_difference,
    label_points,
    updates,
)
from ragen_jax.lab.identical import SAME, is_unchanged
from ragen_jax.lab.model_organism import ENTROPY, GROUNDED, MI, OTHER, VALID_RATE
from ragen_jax.lab.statistics import ERROR, holm, in_words, p_value
from ragen_jax.storage.writers import save_figure

PLAIN, PAPER_BEST = "no filter", "top-p 0.9"
NOT_TESTABLE = f"not testable ({SAME})"
PRICE = 0.05  # largest accepted decrease in mean success
KEPT_GROUPS = "filter/kept_ratio"
FIGURES = (*organism.FIGURES, KEPT_GROUPS, "rollout/replies")
# RAGEN-2, table 9 (Sokoban, 3B): success, MI, entropy.
PAPER = {
    "top-p 1.0": (0.17, 0.54, 2.76),
    "top-p 0.9": (0.38, 0.84, 1.64),
    "top-p 0.5": (0.29, 0.83, 1.88),
    "min-p 0.05": (0.42, 0.67, 1.64),
    "min-p 0.2": (0.45, 0.36, 3.01),
    "top-k 0.25": (0.22, 0.86, 1.28),
    "top-k 0.5": (0.44, 0.89, 1.47),
    "top-p 0.9 by sum": (0.24, None, None),
    "top-p 0.9 by entropy": (0.20, None, None),
    "top-p 0.9 by length": (0.16, None, None),
    "smallest variance": (0.29, 0.47, 5.31),
}


# Filters that are worse than top-p 0.9 by reward variance in table 9 -> whether the paper reports
# MI for the filter as well as success.
WORSE_IN_PAPER = {
    "top-p 1.0": True,
    "top-p 0.9 by sum": False,
    "top-p 0.9 by entropy": False,
    "top-p 0.9 by length": False,
    "smallest variance": True,
}


def kept_figure(rows: Rows) -> float:
    """Return the mean of mi_seq divided by its first value."""
    _, values = curve(rows, MI)
    return float(values.mean() / values[0])


def half(rows: Rows) -> float:
    """Return the step at which half of mi_seq is lost; infinite if it is not."""
    step = organism.information_lost(rows)
    return np.inf if step is None else step


def last(rows: Rows, name: str) -> float:
    """Return the last value of a metric."""
    return float(curve(rows, name)[1][-1])


def last_success(rows: Rows) -> float:
    """Return the success of the last evaluation."""
    return last(rows, SUCCESS)


def success(rows: Rows) -> float:
    """Return the mean success of all evaluations."""
    return float(curve(rows, SUCCESS)[1].mean())


def difference(
    runs: Runs, measure: Callable[[Rows], float], treatment: str, reference: str
) -> tuple[float, float]:
    """Return (mean, 95 % half-width) of the difference of measure(rows) between two treatments."""
    ((setting,), _, seeds) = factors(runs)
    return interval(
        [
            measure(runs[setting, treatment, seed]) - measure(runs[setting, reference, seed])
            for seed in seeds
        ]
    )


def helps(runs: Runs, treatment: str, reference: str = PLAIN) -> str:
    """Return "at no cost", "at a cost", "no" or "worse", by the rule above."""
    gain, half_width = difference(runs, kept_figure, treatment, reference)
    if abs(gain) <= half_width:
        return "no"
    if gain < 0:
        return "worse"
    change, half_width = difference(runs, success, treatment, reference)
    return "at no cost" if change - half_width >= -PRICE else "at a cost"


def format_difference(
    runs: Runs, treatment: str, reference: str, found: tuple[float, float]
) -> str:
    """Return a difference with its interval as text, or SAME for identical runs."""
    if is_unchanged(runs, treatment, reference):
        return SAME
    return "{:+.2f} ± {:.2f}".format(*found)


def outcomes(runs: Runs) -> dict[str, str]:
    """Return {treatment: result of `helps`, or SAME} for all treatments except no filter."""
    _, treatments, _ = factors(runs)
    return {
        name: SAME if is_unchanged(runs, name, PLAIN) else helps(runs, name)
        for name in treatments
        if name != PLAIN
    }


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Test whether top-p 0.9 by reward variance beats the filters that are worse in table 9.

    A filter with runs identical to those of another filter is judged once.
    """
    _, treatments, seeds = factors(runs)
    found: list[Verdict] = []
    judged_already: dict[tuple[str, str], str] = {}
    for name in (x for x in WORSE_IN_PAPER if x in treatments):
        measures = {"success at the end": last_success}
        if WORSE_IN_PAPER[name]:
            measures["information kept"] = kept_figure
        for what, measure in measures.items():
            mean, half_width = difference(runs, measure, PAPER_BEST, name)
            claim = f"{what} is higher with `{PAPER_BEST}` than with `{name}`"
            figures = in_words(mean, half_width, digits=2)
            word, p = judge_difference(mean, half_width), p_value(mean, half_width, len(seeds) - 1)
            arms = [{k: x for k, x in runs.items() if k[1] == t} for t in (PAPER_BEST, name)]
            counterpart = judged_already.setdefault((what, _class_of(runs, name)), name)
            if is_unchanged(runs, PAPER_BEST, name):
                word, p, figures = NOT_TESTABLE, None, f"{name} changed nothing"
            elif counterpart != name:
                word, p, figures = NOT_TESTABLE, None, f"identical to `{counterpart}`, counted once"
            elif measure is kept_figure and ceiling.at_ceiling(experiment, MI, arms):
                word, p = ceiling.CANNOT_BE_JUDGED, None
            found.append(Verdict("table 9", claim, word, figures, p))
    return found


def _class_of(runs: Runs, name: str) -> str:
    """Return the first treatment, in order of appearance, with runs identical to a treatment's."""
    return next(x for x in factors(runs)[1] if x == name or is_unchanged(runs, name, x))


def correct_p_values(runs: Runs, outcome: dict[str, str]) -> dict[str, float]:
    """Return {treatment: p-value of its difference to no filter in `kept`, with Holm's correction}.

    Treatments with identical runs count once, under the name of the first.
    """
    df = len(factors(runs)[2]) - 1
    names = [x for x in outcome if outcome[x] != SAME and _class_of(runs, x) == x]
    p = {i: p_value(*difference(runs, kept_figure, x, PLAIN), df) for i, x in enumerate(names)}
    return {names[i]: value for i, value in holm(p).items()}


def verdict(runs: Runs, outcome: dict[str, str]) -> str:
    """Return lines: which treatments helped, and which kept more than the paper's filter."""
    _, _, seeds = factors(runs)

    def listed(names):
        return ", ".join(f"`{name}`" for name in names) or "none"

    def named(kind):
        return listed(name for name in outcome if outcome[name] == kind)

    lines = [
        f"Compared with no filter over {len(seeds)} seeds, each treatment at 95 %:",
        "",
        f"- more information kept, at no cost in success: {named('at no cost')}",
        f"- more information kept, at a cost in success: {named('at a cost')}",
        f"- less information kept: {named('worse')}",
        f"- no significant difference: {named('no')}",
    ]
    if SAME in outcome.values():
        lines.append(f"- runs identical to those with no filter: {named(SAME)}")
    adjusted = correct_p_values(runs, outcome)
    survive = [name for name in outcome if adjusted.get(name, 1.0) < ERROR]
    lines.append(
        f"- still significant with Holm's correction for {len(adjusted)} treatments with different "
        f"runs: {listed(survive)}"
    )
    if PAPER_BEST in outcome:
        better = [
            name
            for name in outcome
            if name != PAPER_BEST and helps(runs, name, PAPER_BEST).startswith("at")
        ]
        lines.append(f"- more information kept than with {PAPER_BEST}: {listed(better)}")
    return "\n".join(lines)


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    ((setting,), treatments, seeds) = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    outcome = outcomes(runs)
    lines = [
        f"{len(runs)} runs of {steps} steps, seeds {', '.join(map(str, seeds))}, setting "
        f"{setting}. The treatments are in configs/experiments.",
        "",
        verdict(runs, outcome),
        "",
        f"![kept information and success]({picture})",
        "",
        "## Every treatment",
        "",
        "Means over seeds. Differences are in information kept, paired by seed; ± is the 95 % CI "
        "(Student's t). Half lost: median step at which half of `mi_seq` was lost. H(Z\\|X), "
        "grounded, neither style, valid and success are last values.",
        "",
        "| treatment | updates | groups kept | information kept | difference to no filter | "
        "difference to top-p 0.9 | half lost at step | H(Z\\|X) | grounded | neither style | valid "
        "| success | mean success, difference to no filter | helps | p (Holm) |",
        "|" + " --- |" * 15,
    ]

    def mean(measure, name):
        return float(np.mean([measure(runs[setting, name, seed]) for seed in seeds]))

    def to(measure, name, reference):
        if name == reference or reference not in treatments:
            return ""
        return format_difference(runs, name, reference, difference(runs, measure, name, reference))

    def at_end(figure):
        return lambda rows: last(rows, figure)

    def mean_groups(rows):
        return float(curve(rows, KEPT_GROUPS)[1].mean())

    adjusted = correct_p_values(runs, outcome)
    for name in sorted(treatments, key=lambda name: -mean(kept_figure, name)):
        middle = float(np.median([half(runs[setting, name, seed]) for seed in seeds]))
        cells = (
            *(name, f"{mean(updates, name):.0f}", f"{mean(mean_groups, name):.2f}"),
            f"{mean(kept_figure, name):.2f}",
            *(to(kept_figure, name, reference) for reference in (PLAIN, PAPER_BEST)),
            f"> {steps}" if np.isinf(middle) else f"{middle:.0f}",
            *(f"{mean(at_end(x), name):.2f}" for x in (ENTROPY, GROUNDED, OTHER, VALID_RATE)),
            *(f"{mean(at_end(SUCCESS), name):.2f}", to(success, name, PLAIN)),
            outcome.get(name, ""),
            f"{adjusted[name]:.3f}" if name in adjusted else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: *information kept* is the mean of `mi_seq` over all "
        "probes, divided by its first value. A treatment helps if the interval of its difference "
        "in information kept is above 0. It helps at no cost if the interval of its difference in "
        f"mean success does not extend below -{PRICE:g}. Each comparison is at 95 %, so about one "
        "of twenty treatments without any effect would seem to have one. The last column is the "
        "p-value of the difference in information kept, corrected for all treatments of the page "
        "(Holm).",
    ]
    if set(WORSE_IN_PAPER).intersection(treatments):
        lines += _table_9(runs)
    return "\n".join(lines) + "\n"


def _table_9(runs: Runs) -> list[str]:
    """Return lines with the paper's results for each filter next to those of these runs."""
    ((setting,), treatments, seeds) = factors(runs)
    lines = [
        "",
        "## Comparison with the paper's table 9",
        "",
        "RAGEN-2: Sokoban, Qwen2.5-3B, PPO, with MI and entropy as reported in the paper. Here: "
        "information kept, and H(Z\\|X) at the end.",
        "",
        "| filter | success, paper | success, here | MI, paper | information kept, here | entropy, "
        "paper | H(Z\\|X), here |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, paper_values in PAPER.items():
        if name in treatments:
            shown = ["" if x is None else f"{x:.2f}" for x in paper_values]
            measures = (last_success, kept_figure, lambda rows: last(rows, ENTROPY))
            own_values = [
                np.mean([f(runs[setting, name, seed]) for seed in seeds]) for f in measures
            ]
            pairs = [f"{a} | {b:.2f}" for a, b in zip(shown, own_values, strict=True)]
            lines.append(f"| {name} | " + " | ".join(pairs) + " |")
    return lines


def draw(runs: Runs, path: Path) -> None:
    """Draw a point per treatment and seed: information kept against mean success.

    Treatments that change nothing are left out.
    """
    import matplotlib.pyplot as plt

    ((setting,), _, seeds) = factors(runs)
    fig, axis = plt.subplots(figsize=(10, 7), layout="constrained")
    middles = {}
    for name in (PLAIN, *(name for name, found in outcomes(runs).items() if found != SAME)):
        points = np.array(
            [[f(runs[setting, name, seed]) for f in (kept_figure, success)] for seed in seeds]
        )
        x, y = points.mean(0)
        color = "tab:red" if name in (PLAIN, PAPER_BEST) else "tab:blue"
        axis.plot(points[:, 0], points[:, 1], ".", color=color, alpha=0.3, markersize=4)
        axis.plot(x, y, "o", color=color, markersize=5)
        middles[name] = (x, y)
    axis.set_xlabel("information kept: mean of mi_seq over its first value")
    axis.set_ylabel("held-out success, mean of all evaluations")
    label_points(fig, axis, middles)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
