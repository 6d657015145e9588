"""Curves of metrics from the rows of metrics.jsonl, and comparisons between runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.storage.writers import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[Metrics]  # rows of a run's metrics.jsonl
Runs = dict[tuple[str, str, int], Rows]  # (setting, treatment, seed) -> rows


class Verdict(NamedTuple):
    """An experiment's verdict on a claim of RAGEN-2."""

    source: str  # where RAGEN-2 makes the claim
    claim: str
    verdict: str  # reproduced, reversed or undecided, or why the claim cannot be judged
    figures: str  # the numbers that decide it
    p: float | None = None  # p-value, below 0.05 if decided; None: nothing was tested


WINDOW = 5  # steps over which metrics are smoothed, since a step has few prompts
SUCCESS = "eval/success"
LAST, FIRST = {SUCCESS: 2}, {SUCCESS: 1}  # values averaged at the end and start; other metrics:
OTHER_VALUES = 10


def factors(runs: Runs) -> tuple[list[str], list[str], list[int]]:
    """Return (settings, treatments, seeds) of runs, each in order of appearance."""
    settings, treatments, seeds = (list(dict.fromkeys(x)) for x in zip(*runs, strict=True))
    return settings, treatments, seeds


def missing_seeds(runs: Runs, seeds: Sequence[int]) -> str:
    """Return a sentence about the experiment's seeds that have not been run; "" without any."""
    found = factors(runs)[2]
    left = [str(seed) for seed in seeds if seed not in found]
    if not left:
        return ""
    return f" Not run yet: seeds {', '.join(left)}, which `--reuse` would add to these runs."


def curve(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a metric in the rows that have it."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], float)


def end(rows: Rows, name: str) -> float:
    """Return a metric at the end of a run; NaN if it was not measured."""
    _, values = curve(rows, name)
    return float(values[-LAST.get(name, OTHER_VALUES) :].mean()) if len(values) else float("nan")


def start(rows: Rows, name: str) -> float:
    """Return a metric at the start of a run; NaN if it was not measured."""
    _, values = curve(rows, name)
    return float(values[: FIRST.get(name, OTHER_VALUES)].mean()) if len(values) else float("nan")


def smoothed(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, mean of the metric over the WINDOW rows that end at the step)."""
    steps, values = curve(rows, name)
    means = [values[max(0, i + 1 - WINDOW) : i + 1].mean() for i in range(len(values))]
    return steps, np.array(means)


def at_evaluations(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps of the evaluations, values of a metric at these steps).

    Success is not smoothed; other metrics are means over the WINDOW steps around the step after the
    evaluation, which samples with the same policy.
    """
    steps, values = curve(rows, name)
    if name == SUCCESS:
        return steps, values
    evaluations, _ = curve(rows, SUCCESS)
    windows = [(s, values[np.abs(steps - (s + 1)) <= WINDOW // 2]) for s in evaluations]
    means = [(s, near.mean()) for s, near in windows if len(near)]
    return np.array([s for s, _ in means], int), np.array([x for _, x in means], float)


def falls_below(steps: np.ndarray, values: np.ndarray, share: float) -> float | None:
    """Return the step at which a curve falls below a fraction of its running maximum, or None.

    The curve is interpolated linearly between its points.

    Args:
      share: the fraction, from 0 to 1.
    """
    peak = np.maximum.accumulate(values) if len(values) else values
    below = np.flatnonzero(values < share * peak)
    if not len(below):
        return None
    after = below[0]  # >= 1; the point before it is above the limit
    high, low = values[after - 1 : after + 1] - share * peak[after]
    return float(steps[after - 1] + (steps[after] - steps[after - 1]) * high / (high - low))


def alarm_step(rows: Rows) -> float | None:
    """Return the first step of the alarm, or None."""
    return next((row["step"] for row in rows if row.get("regime/alarm")), None)


def at_update(rows: Rows, name: str, updates: float) -> float | None:
    """Return the last value of a metric within a number of updates; smoothed, except success.

    A filter that rejects batches makes fewer updates, so arms are compared after equal numbers of
    updates.
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


def updates(rows: Rows) -> int:
    """Return the number of updates in a run."""
    return int(sum(row.get("update/count", 0) for row in rows))


def judge_difference(mean: float, half_width: float) -> str:
    """Return the verdict of an interval on the claim that a value is above 0."""
    if abs(mean) <= half_width:
        return "undecided"
    return "reproduced" if mean > 0 else "reversed"


def judge_equivalence(mean: float, half_width: float, margin: float) -> str:
    """Return the verdict of an interval on the claim that a value is within a margin of 0."""
    if abs(mean) + half_width <= margin:
        return "reproduced"
    return "reversed" if abs(mean) - half_width > margin else "undecided"


def compare(
    runs: Runs, name: str, first: str, last: str, *, share: float = 1.0
) -> dict[str, tuple[float, float]]:
    """Return {setting: (mean, half-width)} of a metric's difference between two treatments.

    Runs are paired by seed and compared after equal numbers of updates.

    Args:
      share: fraction of the updates that both runs of a pair have made, from 0 to 1.
    """
    settings, _, seeds = factors(runs)
    intervals = {}
    for setting in settings:
        differences = []
        for seed in seeds:
            pair = [runs[setting, treatment, seed] for treatment in (first, last)]
            common = share * min(map(updates, pair))
            with_first, with_last = (at_update(rows, name, common) for rows in pair)
            if with_first is not None and with_last is not None:
                differences.append(with_first - with_last)
        if differences:
            intervals[setting] = interval(differences)
    return intervals


def draw_ranking(
    found: Mapping[str, tuple[float, float, float]],
    path: Path,
    label: str,
    limits: tuple[float, float],
) -> None:
    """Draw a row per metric, highest value first: the value and its interval.

    A grey line marks the middle of the axis.

    Args:
      found: metric -> (value, lower end, upper end).
      label, limits: label and limits of the axis.
    """
    import matplotlib.pyplot as plt

    names = sorted(found, key=lambda name: found[name][0])
    fig, axis = plt.subplots(figsize=(8, 0.26 * len(names) + 1), layout="constrained")
    for i, name in enumerate(names):
        value, low, high = found[name]
        axis.plot([low, high], [i, i], color="tab:blue", linewidth=1)
        axis.plot(value, i, "o", color="tab:blue", markersize=4)
    axis.axvline(sum(limits) / 2, color="gray", linewidth=0.8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlim(*limits)
    axis.set_xlabel(label)
    save_figure(fig, path, dpi=110)
    plt.close(fig)


def label_points(fig: "Figure", axis: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Write each name next to its point, if possible within the frame and over no other name or
    point."""
    size, gap = 7, 4  # height of a letter, distance of a name from its point; in points (1/72 inch)
    fig.draw_without_rendering()  # fixes the scales
    to_points = axis.transData + fig.dpi_scale_trans.inverted()
    at = {name: to_points.transform(xy) * 72 for name, xy in points.items()}
    frame = axis.get_window_extent().transformed(fig.dpi_scale_trans.inverted())
    left, right = 72 * frame.x0, 72 * frame.x1
    taken = [
        (x - 2, y - 2, x + 2, y + 2) for x, y in at.values()
    ]  # boxes: left, bottom, right, top
    for name, (x, y) in at.items():
        width = 0.56 * size * len(name)
        places = [
            (dx, dy - size / 2)
            for dy in (0, size, -size, 2 * size, -2 * size, 3 * size, -3 * size)
            for dx in (gap, -gap - width)
        ]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + size) for dx, dy in places]
        within = [box for box in boxes if box[0] > left and box[2] < right] or boxes
        free = [box for box in within if not any(_overlap(box, other) for other in taken)]
        box = (free or within)[0]
        taken.append(box)
        axis.annotate(
            name,
            points[name],
            xytext=(box[0] - x, box[1] - y),
            textcoords="offset points",
            fontsize=size,
        )


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Return whether two boxes (left, bottom, right, top) overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
