"""What the runs of an experiment say: when each collapsed, what filtering changed, a verdict.

Everything is read from the rows of metrics.jsonl: `runs` maps (setting, filter, seed) to a run's
rows. Figures over steps are smoothed over `WINDOW` steps, since a step has few prompts.
"""

import math
import statistics

import numpy as np
from scipy.special import stdtrit

WINDOW = 5  # steps
BASELINE = 5  # first steps, which the rest of a run is compared with
LOST = 0.5  # of success or information: the share of it that counts as lost
HEALTHY = (0.5, 2.0)  # entropy, over its baseline, that looks healthy
SUCCESS, MI, ENTROPY = "eval/success", "collapse/first_turn/mi", "update/entropy"
RETRIEVAL, VALID = "collapse/first_turn/retrieval_acc", "rollout/valid_rate"


def curve(rows, name):
    """(steps, values) of a figure, where a row has it."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], float)


def smoothed(rows, name):
    """(steps, mean of the figure over the WINDOW rows that end there)."""
    steps, values = curve(rows, name)
    means = [values[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(values))]
    return steps, np.array(means)


def success_lost(rows):
    """The first evaluation with less than half of the highest success before it, or None."""
    steps, values = curve(rows, SUCCESS)
    peak = np.maximum.accumulate(values) if len(values) else values
    lost = np.flatnonzero(values < LOST * peak)
    return int(steps[lost[0]]) if len(lost) else None


def information_lost(rows):
    """The first step at which MI is below half of its baseline (both smoothed), or None."""
    steps, values = smoothed(rows, MI)
    if len(values) <= BASELINE:
        return None
    lost = np.flatnonzero(values < LOST * values[BASELINE - 1])
    lost = lost[lost >= BASELINE]
    return int(steps[lost[0]]) if len(lost) else None


def entropy_ratio(rows, step):
    """Smoothed entropy at a step over its baseline."""
    steps, values = smoothed(rows, ENTROPY)
    return float(values[np.searchsorted(steps, step, side="right") - 1] / values[BASELINE - 1])


def at_update(rows, name, updates):
    """The last value of a smoothed figure (success: as it is) before more than so many updates.

    A filter that rejects batches updates less often, so that arms are compared after equally many.
    """
    total, last = 0, None
    find = curve if name == SUCCESS else smoothed
    values = dict(zip(*find(rows, name), strict=True))
    for row in rows:
        total += row.get("update/count", 0)
        if total > updates:
            break
        last = values.get(row["step"], last)
    return last


def updates(rows):
    """Updates of the whole run."""
    return int(sum(row.get("update/count", 0) for row in rows))


def interval(values):
    """(mean, 95 % half-width by Student's t) over runs; infinite for one run."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, float(stdtrit(len(values) - 1, 0.975)) * error


def compare(runs, name):
    """{setting: (mean, half-width)} of a figure with the first filter minus with the last one.

    Paired by seed, after equally many updates.
    """
    filters = list(dict.fromkeys(key[1] for key in runs))
    found = {}
    for setting in dict.fromkeys(key[0] for key in runs):
        differences = []
        for seed in sorted({key[2] for key in runs}):
            pair = [runs[setting, one, seed] for one in (filters[0], filters[-1])]
            common = min(map(updates, pair))
            values = [at_update(rows, name, common) for rows in pair]
            if None not in values:
                differences.append(values[0] - values[1])
        if differences:
            found[setting] = interval(differences)
    return found


# ------------------------------------------------------------------------------ verdicts


def order_verdict(runs):
    """A sentence: did MI fall before success while entropy looked healthy?"""
    collapsed = {key: rows for key, rows in runs.items() if success_lost(rows) is not None}
    first = healthy = 0
    for rows in collapsed.values():
        step = information_lost(rows)
        if step is not None and step < success_lost(rows):
            first += 1
            healthy += HEALTHY[0] <= entropy_ratio(rows, step) <= HEALTHY[1]
    n = len(collapsed)
    if not n:
        return "Not tested: no run lost half of its success."
    word = _word(healthy, n)
    return (
        f"**{word}.** {n} of {len(runs)} runs lost half of their success. In {first} of them MI "
        f"had lost half of its baseline at an earlier step; in {healthy} of these entropy was then "
        f"still within {HEALTHY[0]:g} to {HEALTHY[1]:g} times its own."
    )


def filter_verdict(runs):
    """A sentence: does filtering prevent collapse where it happens without?"""
    filters = list(dict.fromkeys(key[1] for key in runs))
    filtered, plain = filters[0], filters[-1]
    seeds = sorted({key[2] for key in runs})
    happened = prevented = 0
    for setting in dict.fromkeys(key[0] for key in runs):
        for seed in seeds:
            if success_lost(runs[setting, plain, seed]) is not None:
                happened += 1
                prevented += success_lost(runs[setting, filtered, seed]) is None
    caused = sum(
        success_lost(runs[setting, plain, seed]) is None
        and success_lost(runs[setting, filtered, seed]) is not None
        for setting in dict.fromkeys(key[0] for key in runs)
        for seed in seeds
    )
    if not happened:
        return f"Not tested: no run with {plain} lost half of its success."
    return (
        f"**{_word(prevented, happened)}.** {happened} runs with {plain} lost half of their "
        f"success; with {filtered} {prevented} of these kept it. {caused} lost it with {filtered} "
        "alone."
    )


def _word(count, of):
    """A share as a verdict."""
    if count == of:
        return "Reproduced"
    return "Reproduced in part" if 2 * count >= of else "Not reproduced at this scale"


# ------------------------------------------------------------------------------ the report


def write_report(name, runs, folder):
    """lab.md and lab_NAME.png in a folder; returns the path of lab.md."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"lab_{name}.png"
    draw(runs, picture)
    path = folder / "lab.md"
    path.write_text(markdown(name, runs, picture.name))
    return path


def markdown(name, runs, picture):
    """The text of lab.md."""
    filters = list(dict.fromkeys(key[1] for key in runs))
    seeds = sorted({key[2] for key in runs})
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"# Laboratory: {name}",
        "",
        "```bash",
        f"python -m ragen_jax.lab --experiment={name}",
        "```",
        "",
        f"{len(runs)} runs of the tiny agent, {steps} steps each, seeds "
        f"{', '.join(map(str, seeds))}; the arms are in configs/experiments.py. Written by that "
        "command.",
        "",
        "## MI falls before success while entropy looks healthy",
        "",
        order_verdict(runs),
        "",
        "## Filtering by reward variance prevents it",
        "",
        filter_verdict(runs),
        "",
        f"![success, information, entropy and valid replies of all arms]({picture})",
        "",
        "## Every run",
        "",
        "Success: the last evaluation, and the highest. MI (nats a token), entropy (nats a token) "
        f"and valid replies: mean of the first and of the last {WINDOW} steps. *Half lost*: the "
        "first evaluation with less than half of the highest success before it; the first step "
        "with less than half of the first MI.",
        "",
        "| setting | filter | seed | updates | success, highest | MI | entropy | valid | half of "
        "success lost | half of MI lost | alarm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(*key, rows) for key, rows in runs.items()]
    lines += [
        "",
        f"## What {filters[0]} changes",
        "",
        f"With {filters[0]} minus with {filters[-1]}, paired by seed, after equally many updates; "
        f"95 % intervals over {len(seeds)} seeds (Student's t).",
        "",
        "| setting | held-out success | MI, nats a token | retrieval | entropy |",
        "| --- | --- | --- | --- | --- |",
    ]
    compared = {figure: compare(runs, figure) for figure in (SUCCESS, MI, RETRIEVAL, ENTROPY)}
    for setting in dict.fromkeys(key[0] for key in runs):
        cells = [
            "{:+.3f} +- {:.3f}".format(*found[setting]) if setting in found else ""
            for found in compared.values()
        ]
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _line(setting, selection, seed, rows):
    """A row of the table of runs."""
    _, success = curve(rows, SUCCESS)

    def change(name):
        _, values = curve(rows, name)
        return f"{values[:BASELINE].mean():.2f} -> {values[-WINDOW:].mean():.2f}"

    alarms = [row["step"] for row in rows if row.get("regime/alarm")]
    cells = (
        *(setting, selection, seed, updates(rows)),
        f"{success[-1]:.2f}, {success.max():.2f}",
        *(change(name) for name in (MI, ENTROPY, VALID)),
        *("" if step is None else step for step in (success_lost(rows), information_lost(rows))),
        alarms[0] if alarms else "",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(runs, path):
    """A row of panels for each setting, a line for each filter: the seeds' mean, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = {
        "held-out success": SUCCESS,
        "MI, nats a token": MI,
        "entropy, nats a token": ENTROPY,
        "valid replies": VALID,
    }
    settings = list(dict.fromkeys(key[0] for key in runs))
    filters = list(dict.fromkeys(key[1] for key in runs))
    fig, axes = plt.subplots(
        len(settings),
        len(figures),
        figsize=(3 * len(figures), 2 * len(settings)),
        sharex=True,
        sharey="col",
        squeeze=False,
        layout="constrained",
    )
    for row, setting in enumerate(settings):
        for column, (title, name) in enumerate(figures.items()):
            axis = axes[row, column]
            for color, selection in zip(("tab:blue", "tab:red"), filters, strict=False):
                curves = [
                    (curve if name == SUCCESS else smoothed)(rows, name)
                    for key, rows in runs.items()
                    if key[:2] == (setting, selection)
                ]
                for steps, values in curves:
                    axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
                if len({len(steps) for steps, _ in curves}) == 1:
                    mean = np.mean([values for _, values in curves], axis=0)
                    axis.plot(curves[0][0], mean, color=color, linewidth=2, label=selection)
            if row == 0:
                axis.set_title(title, fontsize=10)
            if column == 0:
                axis.set_ylabel(setting, fontsize=9)
    axes[0, 0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    fig.savefig(path, dpi=110)
    plt.close(fig)
