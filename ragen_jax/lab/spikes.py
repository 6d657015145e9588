"""The page of experiment spikes: misplaced tags before a loss of success; interleaved imitation.

These rules were fixed before the runs. All metrics are of the episodes that training plays, as
means over the WINDOW steps that end at a step:

    lost     the first step at which success (rollout/success) is below half of its running maximum
    spike    the first step at which the tags that are not in place (tags/misplaced) are more than
             RISE per reply above their mean over the first WINDOW steps
    first    a run in which success is lost has its spike first if there is one before `lost`
    broken   the replies of a run are broken after its loss if less than half of them are healthy
             (tags/healthy) WINDOW steps after `lost`, or at the end of the run

Over the runs of RL alone that lose their success, the exact binomial test says whether most have
the spike first, and whether most are broken. Whether interleaved imitation raises success (mean of
the last two evaluations) is decided in each setting by the 95 % interval of its difference to RL
alone, paired by seed (Student's t). Other metrics that rise before the loss are listed for
comparison: a metric that only says that something changes would rise as well.
"""

from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.diagnostics.tags import STATES
from ragen_jax.lab.curves import (
    SUCCESS,
    WINDOW,
    Rows,
    Runs,
    Verdict,
    end,
    factors,
    falls_below,
    judge_difference,
    missing_seeds,
    smoothed,
    updates,
)
from ragen_jax.lab.model_organism import HALF
from ragen_jax.lab.statistics import in_words, judge_count, p_text, p_value
from ragen_jax.storage.writers import save_figure

PLAYED, MISPLACED, HEALTHY = "rollout/success", "tags/misplaced", "tags/healthy"
LOGP, OTHER_LOGP, ENTROPY, LENGTH = (
    "tags/logp",
    "tags/other_logp",
    "update/entropy",
    "rollout/response_length",
)
STATE_FIGURES = tuple(f"tags/{state}" for state in STATES)
FIGURES = (SUCCESS, PLAYED, MISPLACED, LOGP, OTHER_LOGP, ENTROPY, LENGTH, *STATE_FIGURES)
RISE = 0.1  # misplaced tags per reply
SOURCE = "arXiv 2606.26027"


class Loss(NamedTuple):
    """When and how a run lost its success."""

    step: float  # interpolated linearly between steps
    spike: int | None  # the step of the spike; None: there is none in the run
    healthy: float  # fraction of healthy replies after the loss, by the rule above

    @property
    def spike_first(self) -> bool:
        """Whether the spike came before the loss."""
        return self.spike is not None and self.spike < self.step

    @property
    def broken(self) -> bool:
        """Whether less than half of the replies were healthy after the loss."""
        return self.healthy < HALF


def spike(rows: Rows) -> int | None:
    """Return the step of the spike, by the rule above; None without any."""
    steps, values = smoothed(rows, MISPLACED)
    if len(values) < WINDOW:
        return None
    above = np.flatnonzero(values > values[WINDOW - 1] + RISE)
    above = above[above >= WINDOW]
    return int(steps[above[0]]) if len(above) else None


def loss(rows: Rows) -> Loss | None:
    """Return the run's loss of success, by the rule above; None without any."""
    lost = falls_below(*smoothed(rows, PLAYED), HALF)
    if lost is None:
        return None
    return Loss(lost, spike(rows), float(np.interp(lost + WINDOW, *smoothed(rows, HEALTHY))))


def losses(runs: Runs, treatment: str) -> dict[tuple[str, str, int], Loss]:
    """Return {run: loss} of a treatment's runs that lose their success."""
    found = {key: loss(rows) for key, rows in runs.items() if key[1] == treatment}
    return {key: x for key, x in found.items() if x is not None}


def gain(runs: Runs, setting: str) -> tuple[float, float]:
    """Return (mean, half-width) of the first treatment's success minus that of the last."""
    _, (first, *_, last), seeds = factors(runs)
    return interval(
        [
            end(runs[setting, first, seed], SUCCESS) - end(runs[setting, last, seed], SUCCESS)
            for seed in seeds
        ]
    )


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on spikes, broken replies and interleaved imitation."""
    settings, (first, *_, last), seeds = factors(runs)
    lost = list(losses(runs, last).values())
    found = []
    for claim, count in (
        (
            "in most runs that lose success, misplaced tags rise before",
            sum(x.spike_first for x in lost),
        ),
        (
            "in most runs that lose success, most replies are broken after that",
            sum(x.broken for x in lost),
        ),
    ):
        word, p, (low, high) = judge_count(count, len(lost) - count)
        text = f"{count} of {len(lost)} runs (95 % CI {low:.2f} to {high:.2f})"
        found.append(Verdict(SOURCE, claim, word, text, p))
    for setting in settings:
        mean, half_width = gain(runs, setting)
        claim = f"`{first}` raises success (compared with `{last}`), {setting}"
        p = p_value(mean, half_width, len(seeds) - 1)
        text = in_words(mean, half_width)
        found.append(Verdict(SOURCE, claim, judge_difference(mean, half_width), text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    _, treatments, seeds = factors(runs)
    lines = [
        f"{len(runs)} runs of {max(rows[-1]['step'] for rows in runs.values())} steps, config "
        f"{experiment.config}, seeds {', '.join(map(str, seeds))}."
        + missing_seeds(runs, experiment.seeds),
        "",
        "| claim | result | p | verdict |",
        "| --- | --- | --- | --- |",
        *(
            f"| {v.claim} | {v.figures} | {p_text(v.p)} | **{v.verdict}** |"
            for v in verdicts(experiment, runs)
        ),
        "",
        f"![success, misplaced tags and healthy replies]({picture})",
        "",
        "## Every run",
        "",
        f"`a -> b`: means of the first and last {WINDOW} steps. Success: first evaluation, and "
        "mean of the last two. Log-probs in nats: of a tag in its place, and of a token of no tag. "
        "States of the replies at the end: healthy, no action, polluted, collapsed.",
        "",
        "| setting | treatment | seed | updates | success | misplaced tags | log-prob of a tag | "
        "of another token | entropy | length | states | spike at step | success lost at step | "
        "healthy after that |",
        "|" + " --- |" * 14,
    ]
    lines += [_line(key, rows) for key, rows in runs.items()]
    lines += ["", _before(runs, treatments[-1]), ""]
    lines += [
        "The rule, fixed before the runs: success of the training episodes and the tags are means "
        f"over the {WINDOW} steps that end at a step. Success is lost below half of its running "
        f"maximum. A spike is a rise of the misplaced tags by more than {RISE:g} per reply above "
        f"their mean over the first {WINDOW} steps. Replies are broken if less than half are "
        f"healthy {WINDOW} steps after the loss, or at the end of the run. The first two claims "
        "are decided by the exact binomial test over the runs of RL alone that lose success, the "
        "others by the 95 % CI over seeds. `diagnostics/tags.py` defines the tags and states.",
    ]
    return "\n".join(lines) + "\n"


def _line(key: tuple[str, str, int], rows: Rows) -> str:
    """Return a row of the table of runs."""

    def change(name):
        _, values = smoothed(rows, name)
        return f"{values[WINDOW - 1]:.2f} -> {values[-1]:.2f}" if len(values) >= WINDOW else ""

    lost, when = loss(rows), spike(rows)
    first = next(row[SUCCESS] for row in rows if SUCCESS in row)
    states = [smoothed(rows, name)[1][-1] for name in STATE_FIGURES]
    cells = (
        *(*key, updates(rows), f"{first:.2f} -> {end(rows, SUCCESS):.2f}"),
        *(change(name) for name in (MISPLACED, LOGP, OTHER_LOGP, ENTROPY, LENGTH)),
        ", ".join(f"{x:.2f}" for x in states),
        "" if when is None else when,
        *(("", "") if lost is None else (round(lost.step), f"{lost.healthy:.2f}")),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _before(runs: Runs, treatment: str) -> str:
    """Return sentences about the metrics at the loss, relative to the start."""
    lost = losses(runs, treatment)
    if not lost:
        return f"No run of {treatment} lost its success."
    leads = [x.step - x.spike for x in lost.values() if x.spike is not None]
    parts = []
    for name, what in (
        (MISPLACED, "misplaced tags per reply"),
        (LOGP, "the log-prob of a tag"),
        (OTHER_LOGP, "that of another token"),
        (ENTROPY, "entropy"),
        (HEALTHY, "healthy replies"),
    ):
        values = []
        for key, x in lost.items():
            steps, smooth = smoothed(runs[key], name)
            values.append((smooth[WINDOW - 1], np.interp(x.step, steps, smooth)))
        start, then = np.median(values, axis=0)
        parts.append(f"{what} {start:.2f} -> {then:.2f}")
    lead = ""
    if leads:
        steps = np.median(leads)
        side = "before" if steps >= 0 else "after"
        lead = f" Spikes came {abs(steps):.1f} steps {side} the loss (median)."
    return (
        f"{len(lost)} runs of {treatment} lost their success. From the first {WINDOW} steps to the "
        f"loss (medians): {', '.join(parts)}.{lead}"
    )


def draw(runs: Runs, path: Path) -> None:
    """Draw success, misplaced tags, log-probs and healthy replies, a line per run."""
    import matplotlib.pyplot as plt

    settings, treatments, _ = factors(runs)
    figures = {
        "success of training episodes": PLAYED,
        "misplaced tags per reply": MISPLACED,
        "log-prob of a tag, nats": LOGP,
        "healthy replies": HEALTHY,
    }
    colors = ("tab:blue", "tab:red")
    fig, axes = plt.subplots(
        len(settings), 4, figsize=(13, 2.6 * len(settings)), layout="constrained", squeeze=False
    )
    for line, setting in zip(axes, settings, strict=True):
        for axis, (title, name) in zip(line, figures.items(), strict=True):
            for color, treatment in zip(cycle(colors), treatments, strict=False):
                for key, rows in runs.items():
                    if key[:2] == (setting, treatment):
                        label = treatment if key[2] == factors(runs)[2][0] else None
                        axis.plot(*smoothed(rows, name), color=color, linewidth=0.9, label=label)
            axis.set_title(f"{title}\n{setting}", fontsize=9)
            axis.set_xlabel("step")
    axes[0, 0].legend(fontsize=7)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
