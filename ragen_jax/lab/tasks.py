"""The page of experiment tasks: the outcome of the reasoning and of the groups in each task.

These rules were fixed before the runs; the end is the mean of the last two values:

    little to lose   mi_seq of the probe is below LITTLE at the start
    kept             at the end, mi_seq is at least half of its start
    into templates   it is not, and H(Z|X) at the end is at least HELD of its start
    with its words   it is not, and H(Z|X) fell as well: the same reasoning for every question
    form lost        before any of these: at the end less than VALID of the replies are valid
"""

from collections import Counter
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.anatomy import CLASSES
from ragen_jax.lab.ceiling import AT
from ragen_jax.lab.curves import SUCCESS, Rows, Runs, Verdict, curve, factors
from ragen_jax.storage.writers import save_figure

MI, RETRIEVAL, CHANCE = "probe/mi_seq", "probe/retrieval_acc", "probe/retrieval_chance"
ENTROPY, VALID_RATE = "probe/h_cond", "probe/valid_rate"
VARIANCE = "filter/score_mean"
ANATOMY = tuple(f"anatomy/{name}" for name in CLASSES)
FIGURES = (MI, RETRIEVAL, CHANCE, ENTROPY, VALID_RATE, SUCCESS, VARIANCE, *ANATOMY)
LITTLE = 0.5  # nats
HALF, HELD, VALID = 0.5, 0.8, 0.8
LAST = 2  # number of last values averaged for a figure's end


def ends(rows: Rows, name: str) -> tuple[float, float]:
    """(start, end) of a figure; NaN where it has not been measured."""
    _, values = curve(rows, name)
    if not len(values):
        return float("nan"), float("nan")
    return float(values[0]), float(values[-LAST:].mean())


def fate(rows: Rows) -> str:
    """Return the outcome of a run's reasoning, by the rule above."""
    (mi, mi_end), (entropy, entropy_end) = ends(rows, MI), ends(rows, ENTROPY)
    if ends(rows, VALID_RATE)[1] < VALID:
        return "form lost"
    if mi < LITTLE:
        return "little to lose"
    if mi_end >= HALF * mi:
        return "kept"
    return "into templates" if entropy_end >= HELD * entropy else "with its words"


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return no verdicts: none of RAGEN-2's claims is about these tasks."""
    return []


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    tasks, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(tasks)} tasks, {len(runs)} runs of {steps} steps without filter, seeds: "
        f"{', '.join(map(str, seeds))}; each task's agent has imitated its answers for equally "
        "many updates. Written by that command.",
        "",
    ]
    for treatment in treatments:
        found = Counter(fate(rows) for (_, name, _), rows in runs.items() if name == treatment)
        lines.append(
            f"- {treatment}: " + ", ".join(f"{n} {word}" for word, n in found.most_common())
        )
    lines += ["", f"![information and entropy of every task]({picture})", ""]
    for treatment in treatments:
        lines += [
            f"## With {treatment}",
            "",
            "| task | reasoning | mi_seq, nats | H(Z\\|X), nats a token | retrieval (chance) | "
            "valid | success | reward variance | groups mixed / solved / failed / tied |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_line(task, rows) for (task, name, _), rows in runs.items() if name == treatment]
        lines.append("")
    lines += [
        "From the first value of a run to its end (mean of the last two): "
        "information, entropy and retrieval of the probe's replies; success on "
        f"{experiment.always['eval.episodes']} held-out questions; of the groups played in "
        "training, the mean variance of their rewards and their kinds "
        "([docs/diagnostics.md](../diagnostics.md)).",
        "",
        f"The rule, fixed before the runs: little to lose, below {LITTLE:g} nats at the start; "
        "kept, at least half of it at the end; else lost, into templates where H(Z|X) is still at "
        f"least {HELD:.0%} of what it was, with its words where that fell, too; form lost, where "
        f"fewer than {VALID:.0%} of the replies are valid at the end. (ceiling): at the end at "
        f"least {AT:.0%} of log N, N the probe's questions; that information was kept there means "
        "that every question is still named, and a loss that leaves that so cannot be seen.",
    ]
    return "\n".join(lines) + "\n"


def _line(task: str, rows: Rows) -> str:
    """A row of the table."""

    def change(name, digits=2):
        start, end = ends(rows, name)
        return f"{start:.{digits}f} -> {end:.{digits}f}"

    highest = -np.log(ends(rows, CHANCE)[1])  # nats, of mi_seq
    capped = " (ceiling)" if ends(rows, MI)[1] >= AT * highest else ""
    groups = [ends(rows, name) for name in ANATOMY]
    kinds = " -> ".join(" / ".join(f"{x[i]:.0%}" for x in groups) for i in (0, 1))
    cells = (
        *(f"`{task}`", fate(rows), change(MI) + capped, change(ENTROPY)),
        f"{change(RETRIEVAL)} ({ends(rows, CHANCE)[1]:.2f})",
        *(change(VALID_RATE), change(SUCCESS), change(VARIANCE, 3), kinds),
    )
    return "| " + " | ".join(cells) + " |"


def draw(runs: Runs, path: Path) -> None:
    """Draw a line per run, from its information and entropy at the start to those at the end."""
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
