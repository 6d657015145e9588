"""The page of experiment collapse: when each run collapsed, what filtering changed, a verdict.

Figures over steps are smoothed over `WINDOW` steps, since a step has few prompts.
"""

import statistics
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab.curves import (
    SUCCESS,
    WINDOW,
    Rows,
    Runs,
    Verdict,
    alarm_step,
    at_evaluations,
    compare,
    curve,
    factors,
    falls_below,
    smoothed,
    updates,
)
from ragen_jax.lab.identical import SAME, distinct, is_unchanged
from ragen_jax.lab.statistics import judge_count
from ragen_jax.storage.writers import save_figure

LOST = 0.5  # success or information below this fraction of its highest value is lost
HEALTHY = (0.5, 2.0)  # range of healthy entropy, relative to its baseline
ENTROPY, VALID = "update/entropy", "rollout/valid_rate"
# The released form of MI comes first: mi_seq is log N while reasonings identify their prompt.
MI, MI_SEQ = "collapse/first_turn/mi_released", "collapse/first_turn/mi_seq"
RETRIEVAL = "collapse/first_turn/retrieval_acc"
GROUNDED, ZA_SWAP = "reasoning/grounded_rate", "flow/first_turn/za_swap"
FIGURES = (SUCCESS, MI, MI_SEQ, RETRIEVAL, ENTROPY, VALID, GROUNDED, ZA_SWAP)


def lost(rows: Rows, name: str) -> float | None:
    """The step at which a figure falls below half of its highest value before, or None.

    The rule is the same for every figure: its value at the evaluations, interpolated linearly
    between them, against its running maximum.
    """
    return falls_below(*at_evaluations(rows, name), LOST)


def share(rows: Rows, name: str, step: float, *, of_first: bool = False) -> float:
    """Return a figure at a step, interpolated as in `lost`, over its highest or first value."""
    steps, values = at_evaluations(rows, name)
    reference = values[0] if of_first else values[steps <= step].max()
    return float(np.interp(step, steps, values) / reference)


# ------------------------------------------------------------------------------ verdicts


def order_count(runs: Runs) -> tuple[int, int, int]:
    """(pairs of setting and seed in which MI fell before success while entropy looked healthy,
    pairs in which it did not, pairs whose runs disagree), of runs that lost half of their success.

    Runs of a pair differ in the filter alone, and are no independent observations.
    """
    answers: dict[tuple[str, int], set[bool]] = {}
    for (setting, _, seed), rows in runs.items():
        end, first = lost(rows, SUCCESS), lost(rows, MI)
        if end is None:
            continue
        before = first is not None and first < end
        if before:
            ratio = share(rows, ENTROPY, first, of_first=True)
            before = HEALTHY[0] <= ratio <= HEALTHY[1]
        answers.setdefault((setting, seed), set()).add(before)
    yes, no = (sum(x == {word} for x in answers.values()) for word in (True, False))
    return yes, no, len(answers) - yes - no


def filter_count(runs: Runs) -> tuple[int, int, int]:
    """(pairs of setting and seed in which the filter prevented the loss of success, pairs in which
    it did not, 0), of those that lost it without filter. Pairs that the filter did not change are
    left out."""
    settings, (filtered, *_, plain), seeds = factors(runs)
    yes = no = 0
    for setting in settings:
        for seed in seeds:
            pair = {x: runs[setting, x, seed] for x in (filtered, plain)}
            cell = {(setting, x, seed): rows for x, rows in pair.items()}
            if lost(pair[plain], SUCCESS) is None or len(distinct(cell)) == 1:
                continue
            prevented = lost(pair[filtered], SUCCESS) is None
            yes, no = yes + prevented, no + (not prevented)
    return yes, no, 0


def order_verdict(runs: Runs) -> str:
    """Sentences: did MI fall before success while entropy looked healthy?"""
    runs = distinct(runs)
    ends = [(rows, lost(rows, SUCCESS)) for rows in runs.values()]
    collapsed = [(rows, end) for rows, end in ends if end is not None]
    n = len(collapsed)
    if not n:
        return "**Not testable.** No run lost half of its success."
    first = {
        name: [
            (rows, step)
            for rows, end in collapsed
            if (step := lost(rows, name)) is not None and step < end
        ]
        for name in (MI, MI_SEQ)
    }
    healthy = sum(
        HEALTHY[0] <= share(rows, ENTROPY, step, of_first=True) <= HEALTHY[1]
        for rows, step in first[MI]
    )
    left = {
        name: sorted(share(rows, name, end, of_first=name == ENTROPY) for rows, end in collapsed)
        for name in (MI, MI_SEQ, ENTROPY)
    }
    mi, mi_seq, entropy = (
        f"{values[0]:.2f} to {values[-1]:.2f} (median {statistics.median(values):.2f})"
        for values in left.values()
    )
    return (
        f"**{_word(*order_count(runs))}.** {n} of {len(runs)} runs lost half of their success. In "
        f"{len(first[MI])} of them `mi_released` had lost half before, in "
        f"{len(first[MI_SEQ])} `mi_seq` had; in {healthy} of the former entropy was then still "
        f"within {HEALTHY[0]:g} to {HEALTHY[1]:g} times its start. At the step at which half of "
        f"success was lost, `mi_released` stood at {mi} of its highest, `mi_seq` at {mi_seq}, "
        f"entropy at {entropy} of its start. Where MI had fallen first it would stand below "
        f"{LOST:g}. One rule for both: read at the evaluations (MI: the mean of the {WINDOW} steps "
        "around), half of its highest value so far, on a straight line in between."
    )


def filter_verdict(runs: Runs) -> str:
    """A sentence: does filtering prevent collapse in runs that collapse without it?"""
    settings, (filtered, *_, plain), seeds = factors(runs)
    pairs = [
        (runs[setting, filtered, seed], runs[setting, plain, seed])
        for setting in settings
        for seed in seeds
    ]
    happened = [pair for pair in pairs if lost(pair[1], SUCCESS) is not None]
    prevented = sum(lost(rows, SUCCESS) is None for rows, _ in happened)
    caused = sum(
        lost(rows, SUCCESS) is not None and lost(without, SUCCESS) is None
        for rows, without in pairs
    )
    if not happened:
        return f"**Not testable.** No run with {plain} lost half of its success."
    last = [[curve(rows, SUCCESS)[1][-1] for rows in pair] for pair in happened]
    with_filter, without = np.mean(last, axis=0)
    n = len(happened)
    return (
        f"**{_word(*filter_count(runs))}.** {n} runs with {plain} lost half of their "
        f"success; with {filtered} {prevented} of these kept it. Their last evaluation, on "
        f"average: {without:.2f} with {plain}, {with_filter:.2f} with {filtered}. {caused} lost it "
        f"with {filtered} alone."
    )


def alarm_verdict(runs: Runs) -> str:
    """A sentence: does the alarm come before success is lost, and only then?"""
    pairs = [(alarm_step(rows), lost(rows, SUCCESS)) for rows in runs.values()]
    collapsed = [(alarm, end) for alarm, end in pairs if end is not None]
    n, silent = len(collapsed), sum(alarm is None for alarm, _ in collapsed)
    before = sum(alarm is not None and alarm < end for alarm, end in collapsed)
    late = n - before - silent
    false = sum(alarm is not None for alarm, end in pairs if end is None)
    return (
        f"Of the {n} runs that lost half of their success it came before in {before}, later in "
        f"{late}, never in {silent}. Of the other {len(runs) - n} it came in {false}."
    )


def _word(yes: int, no: int, undecided: int) -> str:
    """Return the verdict on a claim, from the pairs for it, against it, and undecided."""
    if not yes + no + undecided:
        return "Not testable"
    return judge_count(yes, no, undecided)[0].capitalize()


# ------------------------------------------------------------------------------ the report


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts, by the exact test that more than half of the runs do as claimed."""
    claims = {
        "MI falls before success while entropy looks healthy": order_count(distinct(runs)),
        "filtering by reward variance prevents it": filter_count(runs),
    }
    found = []
    for claim, counts in claims.items():
        if not sum(counts):
            found.append(Verdict("section 4", claim, "not testable", "no run lost its success"))
            continue
        word, p, (low, high) = judge_count(*counts)
        text = f"{counts[0]} of {sum(counts)} pairs (95 %: {low:.2f} to {high:.2f})"
        found.append(Verdict("section 4", claim, word, text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(runs)} runs of the tiny agent, {steps} steps each, seeds "
        f"{', '.join(map(str, seeds))}; the arms are in configs/experiments. Written by that "
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
        "## The alarm",
        "",
        alarm_verdict(runs),
        "",
        f"![success, information, entropy and valid replies of all arms]({picture})",
        "",
        "Thick: mean over seeds; thin: each seed.",
        "",
        "## Every run",
        "",
        "Success: the last evaluation, and the highest. The rest, first turn where there are "
        f"scopes: mean of the first {WINDOW} steps and of the last {WINDOW} up to where the figure "
        "ends. MI: `mi_released` in nats a token, `mi_seq` in nats a reasoning. Entropy: nats a "
        "token. Grounded: share of the stated facts that are so. `za_swap`: how far the action "
        "follows the reasoning, in nats. *Half lost*: the step at which the figure falls below "
        "half of its highest value so far, by the rule above.",
        "",
        "| setting | filter | seed | updates | success, highest | mi_released | mi_seq | entropy | "
        "valid | grounded | za_swap | half of success lost | half of MI lost | alarm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(*key, rows) for key, rows in runs.items()]
    lines += [
        "",
        "A claim is reproduced where the exact binomial test says at 95 % that it holds in more "
        "than half of the pairs of setting and seed, reversed where in fewer, else undecided; at "
        "least six pairs are needed. Runs of a pair that disagree count for neither side. Order is "
        "judged by `mi_released`: `mi_seq` stands at its ceiling while reasonings still name their "
        "prompt.",
        "",
        f"## What {treatments[0]} changes",
        "",
        f"With {treatments[0]} minus with {treatments[-1]}, paired by seed, after equally many "
        f"updates; 95 % intervals over {len(seeds)} seeds (Student's t).",
        "",
        "| setting | held-out success | mi_released | retrieval | entropy |",
        "| --- | --- | --- | --- | --- |",
    ]
    ends = treatments[0], treatments[-1]
    compared = {name: compare(runs, name, *ends) for name in (SUCCESS, MI, RETRIEVAL, ENTROPY)}
    for setting in settings:
        cells = [
            "{:+.3f} ± {:.3f}".format(*intervals[setting]) if setting in intervals else ""
            for intervals in compared.values()
        ]
        if is_unchanged(runs, *ends, [setting]):
            cells = [SAME] * len(compared)
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _line(setting: str, treatment: str, seed: int, rows: Rows) -> str:
    """A row of the table of runs."""
    _, success = curve(rows, SUCCESS)

    def change(name):
        steps, values = curve(rows, name)
        first, last = steps <= WINDOW, steps > max(steps, default=0) - WINDOW
        return f"{values[first].mean():.2f} -> {values[last].mean():.2f}" if first.any() else ""

    steps = (lost(rows, SUCCESS), lost(rows, MI), alarm_step(rows))
    cells = (
        *(setting, treatment, seed, updates(rows)),
        f"{success[-1]:.2f}, {success.max():.2f}",
        *(change(name) for name in (MI, MI_SEQ, ENTROPY, VALID, GROUNDED, ZA_SWAP)),
        *("" if step is None else round(step) for step in steps),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(runs: Runs, path: Path) -> None:
    """Draw a row of panels per setting and a line per filter: the seeds' mean, and each seed."""
    import matplotlib.pyplot as plt

    figures = {
        "held-out success": SUCCESS,
        "MI (released), nats a token": MI,
        "entropy, nats a token": ENTROPY,
        "valid replies": VALID,
    }
    settings, treatments, _ = factors(runs)
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
            for color, treatment in zip(("tab:blue", "tab:red"), treatments, strict=False):
                curves = [
                    (curve if name == SUCCESS else smoothed)(rows, name)
                    for key, rows in runs.items()
                    if key[:2] == (setting, treatment)
                ]
                for steps, values in curves:
                    axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
                by_step = [dict(zip(steps, values, strict=True)) for steps, values in curves]
                common = sorted(set.intersection(*map(set, by_step)))  # a step may lack a figure
                mean = [statistics.fmean(at[step] for at in by_step) for step in common]
                axis.plot(common, mean, color=color, linewidth=2, label=treatment)
            if name == ENTROPY:
                axis.set_yscale("log")
            if row == 0:
                axis.set_title(title, fontsize=10)
            if column == 0:
                axis.set_ylabel(setting, fontsize=9)
    axes[0, 0].legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    save_figure(fig, path, dpi=110)
    plt.close(fig)
