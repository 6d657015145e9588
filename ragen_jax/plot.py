"""Plot the curves of runs, as on the page of ragen_jax.report, for papers and slides.

    python -m ragen_jax.plot RUN [RUN ...] [--metric=NAME[,NAME]] [--out=curves.png]

Without --metric, the charts of the page that the runs have metrics for are drawn. Runs that differ
only in their seed form one curve: their mean with its 95 % interval (Student's t). The suffix of
--out selects the format: png, svg or pdf.
"""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.core.suggest import did_you_mean
from ragen_jax.report import sentences, timelines
from ragen_jax.report.runs import RunRecord, groups_by_seed, read_run
from ragen_jax.report.timelines import CHARTS, Chart
from ragen_jax.storage.writers import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
ACROSS = 3  # maximum number of charts in a row
SIZE = (4.6, 3.0)  # width and height of a chart, in inches


def select_charts(runs: Sequence[RunRecord], metrics: Sequence[str]) -> list[Chart]:
    """Return one chart per metric, or without `metrics`, the charts of CHARTS with any data.

    Raises:
      ValueError: one of the metrics is in no run.
    """
    names = {name for run in runs for row in run.rows for name in row}
    for name in metrics:
        if name not in names:
            near = [k for k in sorted(names) if k.endswith(f"/{name.rsplit('/', 1)[-1]}")]
            hint = f"; did you mean {', '.join(near[:4])}?" if near else did_you_mean(name, names)
            raise ValueError(f"--metric is {name!r}, which is not in any run's metrics.jsonl{hint}")
    if metrics:
        return [Chart(title=name, words="", figures=(name,), names=(name,)) for name in metrics]
    return [chart for chart in CHARTS if names & set(chart.figures)]


def draw(runs: Sequence[RunRecord], charts: Sequence[Chart], out: Path) -> None:
    """Draw the charts and write the picture to `out`."""
    save_figure(draw_figure(runs, charts), out, dpi=150)


def draw_figure(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> "Figure":
    """Return a figure with the charts. It belongs to no window, so it needs no screen."""
    from matplotlib.figure import Figure

    steps = sorted({int(row["step"]) for run in runs for row in run.rows})
    columns = [timelines.columns(run.rows, steps) for run in runs]
    across = min(ACROSS, len(charts))
    down = math.ceil(len(charts) / across)
    fig = Figure(figsize=(SIZE[0] * across, SIZE[1] * down), layout="constrained")
    axes = fig.subplots(down, across, squeeze=False)
    for axis, chart in zip(axes.flat, charts, strict=False):
        _chart(axis, chart, runs, columns, steps)
    for axis in axes.flat[len(charts) :]:
        axis.set_axis_off()
    return fig


def _chart(
    axis: "Axes",
    chart: Chart,
    runs: Sequence[RunRecord],
    columns: Sequence[dict[str, Any]],
    steps: Sequence[int],
) -> None:
    """Draw one chart.

    A single run gets one colour per metric. Several runs get one colour per run, or per group of
    runs that differ only in their seed.
    """
    names = dict(zip(chart.figures, chart.names, strict=True))
    together = groups_by_seed(list(runs))
    figures = chart.figures if len(runs) == 1 else chart.overlay or chart.figures[:2]
    for number, group in enumerate(together):
        found = columns[group[0]]
        if len(group) > 1:
            found = timelines.average([columns[i] for i in group])
        for index, figure in enumerate(figures):
            if figure not in found:
                continue
            label = names[figure]
            if len(runs) > 1:
                label = sentences.group_name(runs, group) if index == 0 else None
            shown = not chart.logarithmic and (len(runs) == 1 or index == 0)
            _line(
                axis,
                steps,
                found[figure],
                found.get(f"{figure}_ci95") if shown else None,
                color=f"C{index if len(runs) == 1 else number}",
                linestyle="-" if len(runs) == 1 or index == 0 else "--",
                label=label,
            )
    axis.set_title(chart.title, fontsize=9)
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_yscale("log" if chart.logarithmic else "linear")
    if chart.share:
        axis.set_ylim(-0.02, 1.02)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)


def _line(
    axis: "Axes",
    steps: Sequence[int],
    values: Sequence[float | None],
    halves: Sequence[float | None] | None,
    **style: Any,
) -> None:
    """Plot a line through the values that are not None, with their intervals as a band.

    Args:
      halves: half-widths of the intervals; None: no band.
    """
    at = [i for i, value in enumerate(values) if value is not None]
    x, y = np.array([steps[i] for i in at]), np.array([values[i] for i in at], float)
    axis.plot(x, y, linewidth=1.3, **style)
    if halves is not None:
        half = np.array([halves[i] if halves[i] is not None else np.nan for i in at], float)
        axis.fill_between(x, y - half, y + half, color=style["color"], alpha=0.15, linewidth=0)


def parse(argv: Sequence[str]) -> list[Path]:
    """Return the folders of the runs that the command line names."""
    with command.bad_input(flags.Error):
        words = command.run_folders(argv)
        if not words:
            raise ValueError("name a run folder: python -m ragen_jax.plot runs/NAME")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("plotting needs matplotlib: pip install ragen_jax[plot]")
        out = Path(OUT.value)
        if out.suffix not in FORMATS:
            raise ValueError(f"--out is {out}; it must end with one of {', '.join(FORMATS)}")
        if not out.parent.is_dir():
            raise ValueError(f"--out is {out}, but folder {out.parent} does not exist")
        return list(map(Path, words))


def main(paths: list[Path]) -> None:
    with command.bad_input():
        runs = [read_run(path) for path in paths]
        charts = select_charts(runs, METRIC.value)
        draw(runs, charts, Path(OUT.value))
    print(OUT.value)


if __name__ == "__main__":
    METRIC = flags.DEFINE_list(
        "metric", [], "Metrics of metrics.jsonl; default: the charts of the report."
    )
    OUT = flags.DEFINE_string("out", "curves.png", "Output file.")
    command.define_workdirs()
    command.run_parsed(main, parse)
