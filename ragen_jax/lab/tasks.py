"""The page of experiment tasks: the outcome of the reasoning and the kinds of groups in each task.

These rules were fixed before the runs; the first rule that applies decides. The end is the mean of
the last two values:

    invalid replies       at the end, the fraction of valid replies is below VALID
    little information    mi_seq of the probe is below LITTLE at the start
    kept                  at the end, mi_seq is at least half of its start
    template collapse     H(Z|X) at the end is at least ENTROPY_KEPT of its start
    low-entropy collapse  H(Z|X) fell as well: the same reasoning for every question
"""

from collections import Counter
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.anatomy import CLASSES
from ragen_jax.lab.ceiling import CEILING_FRACTION
from ragen_jax.lab.curves import SUCCESS, Rows, Runs, Verdict, curve, factors
from ragen_jax.storage.writers import save_figure

MI, RETRIEVAL, CHANCE = "probe/mi_seq", "probe/retrieval_acc", "probe/retrieval_chance"
ENTROPY, VALID_RATE = "probe/h_cond", "probe/valid_rate"
VARIANCE = "filter/score_mean"
ANATOMY = tuple(f"anatomy/{name}" for name in CLASSES)
FIGURES = (MI, RETRIEVAL, CHANCE, ENTROPY, VALID_RATE, SUCCESS, VARIANCE, *ANATOMY)
LITTLE = 0.5  # nats
HALF, ENTROPY_KEPT, VALID = 0.5, 0.8, 0.8  # fractions in the rules above
LAST = 2  # number of last values averaged for the end


def ends(rows: Rows, name: str) -> tuple[float, float]:
    """Return (start, end) of a metric; NaN if it was not measured."""
    _, values = curve(rows, name)
    if not len(values):
        return float("nan"), float("nan")
    return float(values[0]), float(values[-LAST:].mean())


def fate(rows: Rows) -> str:
    """Return the outcome of a run's reasoning, by the rules above."""
    (mi, mi_end), (entropy, entropy_end) = ends(rows, MI), ends(rows, ENTROPY)
    if ends(rows, VALID_RATE)[1] < VALID:
        return "invalid replies"
    if mi < LITTLE:
        return "little information"
    if mi_end >= HALF * mi:
        return "kept"
    return "template collapse" if entropy_end >= ENTROPY_KEPT * entropy else "low-entropy collapse"


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return no verdicts: none of RAGEN-2's claims is about these tasks."""
    return []


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    tasks, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(tasks)} tasks, {len(runs)} runs of {steps} steps without filter, "
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}. The warm start of "
        "each task has the same number of updates. Outcomes:",
        "",
    ]
    for treatment in treatments:
        found = Counter(fate(rows) for (_, name, _), rows in runs.items() if name == treatment)
        lines.append(
            f"- {treatment}: " + ", ".join(f"{word} {n}" for word, n in found.most_common())
        )
    lines += ["", f"![information and entropy of every task]({picture})", ""]
    for treatment in treatments:
        lines += [
            f"## With {treatment}",
            "",
            "| task | reasoning | mi_seq, nats | H(Z\\|X), nats per token | retrieval (chance) | "
            "valid | success | reward variance | groups mixed / solved / failed / tied |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_line(task, rows) for (task, name, _), rows in runs.items() if name == treatment]
        lines.append("")
    lines += [
        "`a -> b`: first value of a run and its end (mean of the last two values). Information, "
        "entropy, retrieval and validity are those of the probe's replies; success is on "
        f"{experiment.common_fields['eval.episodes']} held-out questions; reward variance and the "
        "kinds of groups ([docs/diagnostics.md](../diagnostics.md)) are those of the groups in "
        "training.",
        "",
        "The rules, fixed before the runs; the first that applies counts. *Invalid replies*: fewer "
        f"than {100 * VALID:.0f} % of the replies are valid at the end. *Little information*: "
        f"`mi_seq` is below {LITTLE:g} nats at the start. *Kept*: at least half of it is left at "
        f"the end. *Template collapse*: H(Z|X) is at least {100 * ENTROPY_KEPT:.0f} % of its "
        "first value "
        "at the end. *Low-entropy collapse*: otherwise. (ceiling): at the end, `mi_seq` is at "
        f"least {100 * CEILING_FRACTION:.0f} % of log N, where N is the number of questions in "
        "the probe. There, "
        "every reasoning still identifies its question, and `mi_seq` cannot show smaller losses.",
    ]
    return "\n".join(lines) + "\n"


def _line(task: str, rows: Rows) -> str:
    """Return a row of the table."""

    def change(name, digits=2):
        start, end = ends(rows, name)
        return f"{start:.{digits}f} -> {end:.{digits}f}"

    highest = -np.log(ends(rows, CHANCE)[1])  # nats, of mi_seq
    capped = " (ceiling)" if ends(rows, MI)[1] >= CEILING_FRACTION * highest else ""
    groups = [ends(rows, name) for name in ANATOMY]
    kinds = " -> ".join(" / ".join(f"{x[i]:.0%}" for x in groups) for i in (0, 1))
    cells = (
        *(f"`{task}`", fate(rows), change(MI) + capped, change(ENTROPY)),
        f"{change(RETRIEVAL)} ({ends(rows, CHANCE)[1]:.2f})",
        *(change(VALID_RATE), change(SUCCESS), change(VARIANCE, 3), kinds),
    )
    return "| " + " | ".join(cells) + " |"


def draw(runs: Runs, path: Path) -> None:
    """Draw an arrow per run, from its information and entropy at the start to those at the end."""
    import matplotlib.pyplot as plt

    tasks, treatments, _ = factors(runs)
    fig, axes = plt.subplots(
        1, len(treatments), figsize=(12, 6), layout="constrained", sharey=True, squeeze=False
    )
    colors = plt.get_cmap("tab20")(np.arange(len(tasks)) % 20)
    for axis, treatment in zip(axes[0], treatments, strict=True):
        for (task, name, _), rows in runs.items():
            if name == treatment:
                color = colors[tasks.index(task)]
                (x, x_end), (y, y_end) = ends(rows, ENTROPY), ends(rows, MI)
                arrow = dict(arrowstyle="->", color=color)
                axis.annotate("", (x_end, y_end), (x, y), arrowprops=arrow)
                axis.plot([x, x_end], [y, y_end], ".", color=color, markersize=3)
                axis.annotate(task, (x_end, y_end), fontsize=7, color=color)
        axis.set_title(treatment, fontsize=10)
        axis.set_xlabel("H(Z|X) of the probe, nats a token")
    axes[0, 0].set_ylabel("mi_seq of the probe, nats")
    save_figure(fig, path, dpi=110)
    plt.close(fig)
