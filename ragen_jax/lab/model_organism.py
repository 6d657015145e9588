"""The page of experiment organism: when each run lost information and success, and a verdict.

These rules were fixed before the runs:

    information lost   step at which mi_seq of the probe falls below half of its running maximum,
                       interpolated linearly between probes
    success lost       step at which the mean of two successive evaluations falls below three
                       quarters of its running maximum
    template collapse  information is lost; success is not lost within the next LEAD steps; up to
                       then, the fraction of valid probe replies is at least VALID and their H(Z|X)
                       is not below its first value; undecided if the run ends before that

Arms are compared by seed, after equal numbers of updates.
"""

from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab.ceiling import CANNOT_BE_JUDGED, at_ceiling
from ragen_jax.lab.curves import (
    SUCCESS,
    Rows,
    Runs,
    Verdict,
    alarm_step,
    compare,
    curve,
    factors,
    falls_below,
    judge_difference,
    updates,
)
from ragen_jax.lab.identical import SAME, distinct, is_unchanged
from ragen_jax.lab.statistics import in_words, judge_count, p_value
from ragen_jax.storage.writers import save_figure

MI, RELEASED, RETRIEVAL = "probe/mi_seq", "probe/mi_released", "probe/retrieval_acc"
ENTROPY, VALID_RATE = "probe/h_cond", "probe/valid_rate"
GROUNDED, OTHER = "probe/style/grounded", "probe/style/other"
FIGURES = (MI, RELEASED, RETRIEVAL, GROUNDED, OTHER, VALID_RATE, ENTROPY, SUCCESS)
HALF, QUARTER = 0.5, 0.75  # fractions of the maximum below which information, success is lost
LEAD = 20  # steps for which success must hold after information is lost
VALID = 0.95  # smallest fraction of valid replies
SHARES = (0.25, 0.5, 1.0)  # fractions of a run's updates after which arms are compared


class Fall(NamedTuple):
    """The outcome of a run."""

    information: float | None  # the step at which information was lost
    success: float | None  # the step at which success was lost
    collapsed: bool | None  # template collapse, by the rule above; None: undecided
    entropy: float  # H(Z|X) at the end of the lead, divided by its first value
    valid: float  # fraction of valid replies, mean of the probes up to the end of the lead


def information_lost(rows: Rows) -> float | None:
    """Return the step at which information was lost, by the rule above; None: never."""
    return falls_below(*curve(rows, MI), HALF)


def success_lost(rows: Rows) -> float | None:
    """Return the step at which success was lost, by the rule above; None: never."""
    steps, values = curve(rows, SUCCESS)
    return falls_below(steps[1:], (values[1:] + values[:-1]) / 2, QUARTER)


def fall(rows: Rows) -> Fall:
    """Return the outcome of a run, by the rule above."""
    information = information_lost(rows)
    success = success_lost(rows)
    last = rows[-1]["step"]
    end_of_lead = last if information is None else information + LEAD
    end = min(end_of_lead, last)
    probes, valid = curve(rows, VALID_RATE)
    valid = float(valid[probes <= end].mean())
    probes, entropy = curve(rows, ENTROPY)
    risen = float(np.interp(end, probes, entropy) / entropy[0])
    collapsed: bool | None = information is not None and valid >= VALID and risen >= 1
    if information is not None and success is not None and success < information + LEAD:
        collapsed = False
    elif collapsed and last < end_of_lead:
        collapsed = None
    return Fall(information, success, collapsed, risen, valid)


def verdict(runs: Runs) -> str:
    """Return sentences with the number of collapsed runs of each treatment."""
    _, treatments, _ = factors(runs)
    sentences = []
    for name in reversed(treatments):
        falls = [fall(rows) for (_, treatment, _), rows in runs.items() if treatment == name]
        collapsed = sum(f.collapsed is True for f in falls)
        undecided = sum(f.collapsed is None for f in falls)
        when = sorted(f.information for f in falls if f.information is not None)
        at = f" (at steps {', '.join(f'{x:.0f}' for x in when)})" if when else ""
        gone = sum(f.success is not None for f in falls)
        sentences.append(
            f"With {name}, {len(when)} of {len(falls)} runs lost half of their information{at}; "
            f"{collapsed} of them are template collapses by the rule below"
            + (f" and {undecided} undecided" if undecided else "")
            + f". Success fell by a quarter in {gone} runs."
        )
    return " ".join(sentences)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on collapse without filter and on the effects of filtering.

    The effects are those of the first treatment on information after half of the updates, and on
    success at the end.
    """
    _, (filtered, *_, plain), seeds = factors(runs)
    plain_runs = distinct({key: rows for key, rows in runs.items() if key[1] == plain})
    falls = [fall(rows) for rows in plain_runs.values()]
    count, no, undecided = (sum(f.collapsed is x for f in falls) for x in (True, False, None))
    word, p, (low, high) = judge_count(count, no, undecided)
    more = f", {undecided} undecided" if undecided else ""
    found = [
        Verdict(
            "section 4",
            "without filter, reasoning loses its input dependence while H(Z\\|X), validity and "
            "success hold",
            word,
            f"{count} of {len(falls)} runs{more} (95 % CI {low:.2f} to {high:.2f})",
            p,
        )
    ]
    for claim, figure, share in (
        ("filtering slows the loss of `mi_seq`", MI, 0.5),
        ("filtering raises success", SUCCESS, 1.0),
    ):
        if is_unchanged(runs, filtered, plain):
            idle = f"not testable ({SAME})"
            found.append(Verdict("section 5", claim, idle, f"{filtered} changed nothing"))
            continue
        for mean, half_width in compare(runs, figure, filtered, plain, share=share).values():
            text = f"{in_words(mean, half_width)} after {100 * share:.0f} % of the updates"
            p = p_value(mean, half_width, len(seeds) - 1)
            word = judge_difference(mean, half_width)
            arms = [{k: r for k, r in runs.items() if k[1] == x} for x in (filtered, plain)]
            if at_ceiling(experiment, figure, arms):
                word, p = CANNOT_BE_JUDGED, None
            found.append(Verdict("section 5", claim, word, text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    _, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(runs)} runs of {steps} steps, seeds {', '.join(map(str, seeds))} "
        "(configs/organism.py, configs/experiments).",
        "",
        verdict(runs),
        "",
        f"![probe metrics and success of all arms]({picture})",
        "",
        "Thick lines: mean over seeds. Thin lines: single seeds.",
        "",
        "The rule, fixed before the runs: information is lost when `mi_seq` of the probe falls "
        "below half of its highest value so far. Success is lost when the mean of two successive "
        "evaluations falls below three quarters of its highest value so far. A run is a template "
        f"collapse if it lost information, kept success for {LEAD} more steps, and up to then at "
        f"least {100 * VALID:.0f} % of the probe's replies were valid and their H(Z|X) was not "
        "below its first value. A run that ends before that is undecided. The claim is reproduced "
        "if the exact binomial test says that more than half of the runs are template collapses, "
        "and reversed if it says that fewer are. A decision needs at least six runs.",
        "",
        "## Every run",
        "",
        "`a -> b`: first and last probe or evaluation.",
        "",
        "| treatment | seed | updates | mi_seq | H(Z\\|X) | grounded | neither style | valid | "
        "success | information lost | success lost | alarm | template collapse |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(treatment, seed, rows) for (_, treatment, seed), rows in runs.items()]
    lines += [
        "",
        "## Effect of the choice of groups",
        "",
        f"Difference to {treatments[-1]}, paired by seed, after equal numbers of updates (probe "
        f"metrics: mean of the last five probes); ± is the 95 % CI over {len(seeds)} seeds "
        "(Student's t).",
        "",
        "| treatment | fraction of the updates | "
        + " | ".join(f"`{name}`" for name in FIGURES)
        + " |",
        "| --- | --- | " + " | ".join("---" for _ in FIGURES) + " |",
    ]
    *others, plain = treatments
    for name in others:
        for share in SHARES:
            found = [compare(runs, figure, name, plain, share=share) for figure in FIGURES]
            shown = ["{:+.3f} ± {:.3f}".format(*next(iter(x.values()))) if x else "" for x in found]
            if is_unchanged(runs, name, plain):
                shown = [SAME] * len(FIGURES)
            lines.append(f"| {name} | {share:.0%} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _line(treatment: str, seed: int, rows: Rows) -> str:
    """Return a row of the table of runs."""
    found = fall(rows)

    def change(name):
        _, values = curve(rows, name)
        return f"{values[0]:.2f} -> {values[-1]:.2f}" if len(values) else ""

    steps = (found.information, found.success, alarm_step(rows))
    cells = (
        *(treatment, seed, updates(rows)),
        *(change(name) for name in (MI, ENTROPY, GROUNDED, OTHER, VALID_RATE, SUCCESS)),
        *("" if step is None else round(step) for step in steps),
        {True: "yes", False: "no", None: "undecided"}[found.collapsed],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(runs: Runs, path: Path) -> None:
    """Draw a panel per metric, with a line per filter (mean over seeds) and per seed."""
    import matplotlib.pyplot as plt

    figures = {
        "mi_seq of the probe, nats": MI,
        "H(Z|X) of the probe, nats a token": ENTROPY,
        "share grounded": GROUNDED,
        "valid replies": VALID_RATE,
        "held-out success": SUCCESS,
    }
    _, treatments, _ = factors(runs)
    fig, axes = plt.subplots(1, len(figures), figsize=(15, 3), layout="constrained")
    for axis, (title, name) in zip(axes, figures.items(), strict=True):
        for color, treatment in zip(
            cycle(("tab:blue", "tab:green", "tab:red")), treatments, strict=False
        ):
            curves = [curve(rows, name) for key, rows in runs.items() if key[1] == treatment]
            for steps, values in curves:
                axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
            steps = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in curves)))
            means = np.mean([np.interp(steps, *points) for points in curves], axis=0)
            axis.plot(steps, means, color=color, linewidth=2, label=treatment)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
