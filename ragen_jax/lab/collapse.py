"""The page of experiment collapse: when each run collapsed, and the effect of filtering.

Metrics of every step are smoothed over `WINDOW` steps, since a step has few prompts.
"""

import statistics
from itertools import cycle
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
# MI means mi_released here: mi_seq stays at log N as long as reasonings identify their prompt.
MI, MI_SEQ = "collapse/first_turn/mi_released", "collapse/first_turn/mi_seq"
RETRIEVAL = "collapse/first_turn/retrieval_acc"
GROUNDED, ZA_SWAP = "reasoning/grounded_rate", "flow/first_turn/za_swap"
FIGURES = (SUCCESS, MI, MI_SEQ, RETRIEVAL, ENTROPY, VALID, GROUNDED, ZA_SWAP)


def step_of_loss(rows: Rows, name: str) -> float | None:
    """Return the step at which a metric falls below half of its running maximum, or None.

    All metrics are read at the evaluations and interpolated linearly between them.
    """
    return falls_below(*at_evaluations(rows, name), LOST)


def share(rows: Rows, name: str, step: float, *, of_first: bool = False) -> float:
    """Return a metric at a step (`step_of_loss`) divided by its highest so far or its first."""
    steps, values = at_evaluations(rows, name)
    reference = values[0] if of_first else values[steps <= step].max()
    return float(np.interp(step, steps, values) / reference)


# ------------------------------------------------------------------------------ verdicts


def order_count(runs: Runs) -> tuple[int, int, int]:
    """Count the order of the losses in runs that lost half of their success.

    The unit is a pair of setting and seed: runs that differ only in the filter are not independent.

    Returns:
      (pairs in which MI fell before success while entropy was in its healthy range, pairs in which
      it did not, pairs whose runs disagree).
    """
    answers: dict[tuple[str, int], set[bool]] = {}
    for (setting, _, seed), rows in runs.items():
        end, first = step_of_loss(rows, SUCCESS), step_of_loss(rows, MI)
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
    """Count the pairs of setting and seed that lost success without filter.

    Pairs with identical runs are left out.

    Returns:
      (pairs in which the filter prevented the loss, pairs in which it did not, 0).
    """
    settings, (filtered, *_, plain), seeds = factors(runs)
    yes = no = 0
    for setting in settings:
        for seed in seeds:
            pair = {x: runs[setting, x, seed] for x in (filtered, plain)}
            cell = {(setting, x, seed): rows for x, rows in pair.items()}
            if step_of_loss(pair[plain], SUCCESS) is None or len(distinct(cell)) == 1:
                continue
            prevented = step_of_loss(pair[filtered], SUCCESS) is None
            yes, no = yes + prevented, no + (not prevented)
    return yes, no, 0


def order_verdict(runs: Runs) -> str:
    """Return sentences: did MI fall before success while entropy was in its healthy range?"""
    runs = distinct(runs)
    ends = [(rows, step_of_loss(rows, SUCCESS)) for rows in runs.values()]
    collapsed = [(rows, end) for rows, end in ends if end is not None]
    n = len(collapsed)
    if not n:
        return "**Not testable.** No run lost half of its success."
    first = {
        name: [
            (rows, step)
            for rows, end in collapsed
            if (step := step_of_loss(rows, name)) is not None and step < end
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
        f"**{_word(*order_count(runs))}.** {n} of {len(runs)} runs lost half of their success. "
        f"Before that, `mi_released` had lost half in {len(first[MI])} of them and `mi_seq` in "
        f"{len(first[MI_SEQ])}. In {healthy} of the runs in which `mi_released` fell first, "
        f"entropy was then between {HEALTHY[0]:g} and {HEALTHY[1]:g} times its first value. At the "
        f"step at which half of success was lost, `mi_released` was {mi} times its highest value, "
        f"`mi_seq` {mi_seq} times its highest value, and entropy {entropy} times its first value. "
        f"If MI had fallen first, it would be below {LOST:g}. One rule applies to all: the "
        "metric falls below half of its highest value so far, read at the evaluations (MI: mean of "
        f"the {WINDOW} surrounding steps) with linear interpolation between them."
    )


def filter_verdict(runs: Runs) -> str:
    """Return sentences: does filtering prevent the loss of success?"""
    settings, (filtered, *_, plain), seeds = factors(runs)
    pairs = [
        (runs[setting, filtered, seed], runs[setting, plain, seed])
        for setting in settings
        for seed in seeds
    ]
    happened = [pair for pair in pairs if step_of_loss(pair[1], SUCCESS) is not None]
    prevented = sum(step_of_loss(rows, SUCCESS) is None for rows, _ in happened)
    caused = sum(
        step_of_loss(rows, SUCCESS) is not None and step_of_loss(without, SUCCESS) is None
        for rows, without in pairs
    )
    if not happened:
        return f"**Not testable.** No run with {plain} lost half of its success."
    last = [[curve(rows, SUCCESS)[1][-1] for rows in pair] for pair in happened]
    with_filter, without = np.mean(last, axis=0)
    n = len(happened)
    return (
        f"**{_word(*filter_count(runs))}.** {n} runs with {plain} lost half of their success; "
        f"{prevented} of the runs with {filtered} and the same setting and seed kept it. The mean "
        f"success at the last evaluation of these pairs is {without:.2f} with {plain} and "
        f"{with_filter:.2f} with {filtered}. {caused} pairs lost success only with {filtered}."
    )


def alarm_verdict(runs: Runs) -> str:
    """Return sentences: is there an alarm before success is lost, and only then?"""
    pairs = [(alarm_step(rows), step_of_loss(rows, SUCCESS)) for rows in runs.values()]
    collapsed = [(alarm, end) for alarm, end in pairs if end is not None]
    n, silent = len(collapsed), sum(alarm is None for alarm, _ in collapsed)
    before = sum(alarm is not None and alarm < end for alarm, end in collapsed)
    late = n - before - silent
    false = sum(alarm is not None for alarm, end in pairs if end is None)
    return (
        f"In the {n} runs that lost half of their success, the alarm came before the loss in "
        f"{before}, later in {late}, and never in {silent}. It also came in {false} of the other "
        f"{len(runs) - n} runs."
    )


def _word(yes: int, no: int, undecided: int) -> str:
    """Return the verdict on a claim from the numbers of pairs for it, against it and undecided."""
    if not yes + no + undecided:
        return "Not testable"
    return judge_count(yes, no, undecided)[0].capitalize()


# ------------------------------------------------------------------------------ the report


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts: the exact test that each claim holds in more than half of the pairs."""
    claims = {
        "MI falls before success while entropy looks healthy": order_count(distinct(runs)),
        "filtering by reward variance prevents the loss of success": filter_count(runs),
    }
    found = []
    for claim, counts in claims.items():
        if not sum(counts):
            found.append(Verdict("section 4", claim, "not testable", "no run lost success"))
            continue
        word, p, (low, high) = judge_count(*counts)
        text = f"{counts[0]} of {sum(counts)} pairs (95 % CI {low:.2f} to {high:.2f})"
        found.append(Verdict("section 4", claim, word, text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    settings, treatments, seeds = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    lines = [
        f"{len(runs)} runs of the tiny agent, {steps} steps each, seeds "
        f"{', '.join(map(str, seeds))}; configs/experiments has the arms.",
        "",
        "## MI falls before success while entropy looks healthy",
        "",
        order_verdict(runs),
        "",
        "## Filtering by reward variance prevents the loss of success",
        "",
        filter_verdict(runs),
        "",
        "## The alarm",
        "",
        alarm_verdict(runs),
        "",
        f"![success, information, entropy and valid replies of all arms]({picture})",
        "",
        "Thick lines: mean over seeds. Thin lines: single seeds.",
        "",
        "## Every run",
        "",
        "Success: the last and the highest evaluation. Other metrics: mean of the first "
        f"{WINDOW} steps -> mean of the last {WINDOW} steps that have the metric; metrics with "
        "scopes are of first turns. `mi_released`: nats per token. `mi_seq`: nats per reasoning. "
        "Entropy: nats per token. Grounded: fraction of the stated facts that are true. `za_swap`: "
        "how far the action follows the reasoning, in nats. Half lost: the step at which the "
        "metric falls below half of its highest value so far, by the rule above. Alarm: the first "
        "step with an alarm.",
        "",
        "| setting | filter | seed | updates | success, last and highest | mi_released | mi_seq | "
        "entropy | valid | grounded | za_swap | half of success lost | half of mi_released lost | "
        "alarm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_line(*key, rows) for key, rows in runs.items()]
    lines += [
        "",
        "The rule: a claim is reproduced if the exact binomial test at 95 % says that it holds in "
        "more than half of the pairs of setting and seed, reversed if in fewer than half, and "
        "undecided otherwise. A decision needs at least six pairs. Pairs whose runs disagree are "
        "undecided. The order is judged by `mi_released`, because `mi_seq` is at its ceiling as "
        "long as reasonings identify their prompt.",
        "",
        f"## Effect of {treatments[0]}",
        "",
        f"Difference between {treatments[0]} and {treatments[-1]}, paired by seed, after equal "
        f"numbers of updates; ± is the 95 % CI over {len(seeds)} seeds (Student's t).",
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
    """Return a row of the table of runs."""
    _, success = curve(rows, SUCCESS)

    def change(name):
        steps, values = curve(rows, name)
        first, last = steps <= WINDOW, steps > max(steps, default=0) - WINDOW
        return f"{values[first].mean():.2f} -> {values[last].mean():.2f}" if first.any() else ""

    steps = (step_of_loss(rows, SUCCESS), step_of_loss(rows, MI), alarm_step(rows))
    cells = (
        *(setting, treatment, seed, updates(rows)),
        f"{success[-1]:.2f}, {success.max():.2f}",
        *(change(name) for name in (MI, MI_SEQ, ENTROPY, VALID, GROUNDED, ZA_SWAP)),
        *("" if step is None else round(step) for step in steps),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def draw(runs: Runs, path: Path) -> None:
    """Draw a row of panels per setting, with a line per filter (mean over seeds) and per seed."""
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
            for color, treatment in zip(cycle(("tab:blue", "tab:red")), treatments, strict=False):
                curves = [
                    (curve if name == SUCCESS else smoothed)(rows, name)
                    for key, rows in runs.items()
                    if key[:2] == (setting, treatment)
                ]
                for steps, values in curves:
                    axis.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
                by_step = [dict(zip(steps, values, strict=True)) for steps, values in curves]
                common = sorted(set.intersection(*map(set, by_step)))  # a step may lack a metric
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
