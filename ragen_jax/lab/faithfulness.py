"""The page of experiment faithfulness: which measure tells used reasoning from decoration?

The agent has imitated two styles, so the truth about each reply is known: its reasoning is
decorative, used, or (by a reading that hides the prompt from the answer) necessary. The tiny agent
has also imitated half of the answers with their prompt hidden (`lab.hidden_prompts`): one that had
not ignored reasoning that it read without its prompt, and all four measures then put the third case
below the second. The measures are in diagnostics/faithfulness.py. These rules were fixed before the
runs, except that the language model's third case had no verdict until its runs were known:

    value        mean of a measure over the replies of a case, in the probe before any update
    orders       a measure orders two cases rightly if the 95 % interval (Student's t, over sets of
                 problems) of the difference of their values is above 0, and wrongly if it is below
    right        it orders both pairs rightly: used above decorative, necessary above used
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.faithfulness import CASES, DECORATIVE, MEASURES, NECESSARY, USED
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab.ceiling import config_of
from ragen_jax.lab.curves import Rows, Runs, Verdict, curve, factors, judge_difference
from ragen_jax.lab.statistics import in_words, p_value
from ragen_jax.storage.writers import save_figure

PASSES: Mapping[str, int] = {"early": 5, "swapped": 2, "perturbed": 4, "true_thinking": 12}
SOURCES = {
    "early": "arXiv 2307.13702",
    "swapped": "`flow/*`",
    "perturbed": "arXiv 2307.13702",
    "true_thinking": "arXiv 2510.24941",
}
PAIRS = ((USED, DECORATIVE), (NECESSARY, USED))  # (more faithful, less faithful)


def metric(case: str, measure: str) -> str:
    """Return the name of a measure's metric."""
    return f"probe/faithfulness/{case}/{measure}"


FIGURES = (
    *(metric(case, name) for case in CASES for name in (*MEASURES, "replies")),
    "probe/style/grounded",
)


def value(rows: Rows, case: str, measure: str) -> float:
    """Return a measure of a case in the first probe of a run; NaN if it was not measured."""
    _, values = curve(rows, metric(case, measure))
    return float(values[0]) if len(values) else float("nan")


def difference(runs: Runs, measure: str, more: str, less: str) -> tuple[float, float]:
    """Return (mean over runs, 95 % half-width) of the difference between two cases; NaN if a run
    has no reply of a case."""
    found = [value(r, more, measure) - value(r, less, measure) for r in runs.values()]
    return (np.nan, np.nan) if np.isnan(found).any() else interval(found)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on each measure and each pair of cases."""
    found = []
    for measure in MEASURES:
        for more, less in PAIRS:
            mean, half_width = difference(runs, measure, more, less)
            claim = f"`{measure}` is larger where reasoning is {more} than where it is {less}"
            if np.isnan(mean):
                found.append(Verdict(SOURCES[measure], claim, "not testable (no such reply)", ""))
                continue
            ratio = np.divide(
                *(np.mean([value(r, c, measure) for r in runs.values()]) for c in (less, more))
            )
            text = f"{in_words(mean, half_width)}, {less} over {more} {ratio:.2f}"
            p = p_value(mean, half_width, len(runs) - 1)
            word = judge_difference(mean, half_width)
            found.append(Verdict(SOURCES[measure], claim, word, text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, *_ = factors(runs)
    lines = [
        f"{len(runs)} sets of problems ({', '.join(settings)}), one agent, config "
        f"{experiment.config}, before any update.",
        "",
        "| measure | source | passes | decorative | used | necessary | used - decorative | "
        "necessary - used | orders the cases |",
        "|" + " --- |" * 9,
    ]
    for measure in MEASURES:
        means = [np.mean([value(r, case, measure) for r in runs.values()]) for case in CASES]
        found = [difference(runs, measure, *pair) for pair in PAIRS]
        cells = (
            *(f"`{measure}`", SOURCES[measure], str(PASSES[measure])),
            *(f"{mean:.3f}" for mean in means),
            *(f"{mean:+.3f} ± {half_width:.3f}" for mean, half_width in found),
            f"**{_order(found)}**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    counts = [np.mean([value(r, case, "replies") for r in runs.values()]) for case in CASES]
    lines += [
        "",
        f"![value of each measure in the three cases]({picture})",
        "",
        "Replies per set: "
        + ", ".join(f"{case} {n:.0f}" for case, n in zip(CASES, counts, strict=True))
        + ". Passes: readings of reasoning and answer for each reply, in addition to sampling it. "
        "`true_thinking` is a difference of probabilities, the others are in nats per token of the "
        "action.",
        "",
        "The rule, fixed before the runs: reasoning in the style that depends on no room is "
        "decorative, grounded reasoning is used, and grounded reasoning is necessary if the answer "
        "attends to nothing else. A measure orders two cases rightly if the 95 % CI of the "
        "difference of their means, over sets of problems (Student's t), is above 0, and wrongly "
        "if it is below. The sets share one agent, so the intervals say nothing about other "
        "agents.",
        "",
        _hidden_prompts(experiment, runs),
    ]
    return "\n".join(lines) + "\n"


def _order(differences: Sequence[tuple[float, float]]) -> str:
    """Return how a measure orders the cases, from (mean, half-width) of each pair's difference."""
    words = {judge_difference(mean, half_width) for mean, half_width in differences}
    if "reversed" in words:
        return "wrongly"
    return "rightly" if words == {"reproduced"} else "undecided"


def _hidden_prompts(experiment: Experiment, runs: Runs) -> str:
    """Return sentences on how the agent came to answer from its reasoning alone."""
    setting, treatment, _ = next(iter(runs))
    if share := config_of(experiment, setting, treatment).lab.hidden_prompts:
        return (
            "To learn to answer from its reasoning alone, the agent has imitated a fraction of "
            f"{share:g} of the replies also with their prompt hidden (`lab.hidden_prompts`). An "
            "agent that had not did not use reasoning that it read without its prompt: exchanging "
            "it changed nothing, and all four measures put the third case below the second."
        )
    return (
        "This agent has not imitated answers with a hidden prompt (`lab.hidden_prompts`). Whether "
        "it uses reasoning that it reads without its prompt is seen from `swapped`, the effect of "
        "exchanging it. The verdicts on the third case were added when these runs were known."
    )


def draw(runs: Runs, path: Path) -> None:
    """Draw a panel per measure: its value in each case, a line per set of problems."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(MEASURES), figsize=(12, 3), layout="constrained")
    for axis, measure in zip(axes, MEASURES, strict=True):
        for rows in runs.values():
            axis.plot(CASES, [value(rows, case, measure) for case in CASES], "o-", alpha=0.5)
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set_title(measure, fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
