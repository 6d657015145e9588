"""Test of figure 3 of RAGEN-2 on a run: gradients of the loss's parts by reward variance.

    python -m ragen_jax.evaluate --workdir=runs/NAME --gradients
    python -m benchmarks.gradient_buckets runs/NAME [--png=FILE]

The figure's claims are tested on the buckets of groups with variance: the norm of the task's
gradient rises with the bucket (Spearman's correlation at least 0.9), and the norm of the
regularisers' gradient varies by less than 25 % ((largest - smallest) / mean).
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

MIN_CORRELATION, MAX_SPREAD = 0.9, 0.25
COLUMNS = {  # column: figure of diagnostics/gradients.py
    "groups": "groups",
    "reward variance": "reward_variance",
    "task": "task_norm",
    "KL": "kl_norm",
    "entropy": "entropy_norm",
    "regulariser": "regulariser_norm",
    "total": "total_norm",
    "SNR": "snr",
    "dominance": "dominance",
}
FORMS = {"per token": "", "per episode": "_per_episode"}


def read_buckets(workdir):
    """Return (step, {bucket: its figures}) of a run's newest gradients/step_N.json, `zero` first.

    Raises:
      ValueError: the run has no such file.
    """
    paths = sorted((Path(workdir) / "gradients").glob("step_*.json"))
    if not paths:
        raise ValueError(f"{workdir} has no gradients: run ragen_jax.evaluate --gradients first")
    buckets = {}
    for name, value in json.loads(paths[-1].read_text()).items():
        _, bucket, figure = name.split("/")
        buckets.setdefault(bucket, {})[figure] = value
    # JSON keeps the order of the report: the lowest bucket first.
    return int(paths[-1].stem.removeprefix("step_")), buckets


def spearman(y):
    """Return the rank correlation of a sequence with its order."""
    rank = np.argsort(np.argsort(y))
    return float(np.corrcoef(rank, np.arange(len(y)))[0, 1])


def spread(y):
    """Return (largest - smallest) / mean."""
    return float((max(y) - min(y)) / np.mean(y))


def table(buckets):
    """Return the figures as a Markdown table."""
    lines = ["| bucket | " + " | ".join(COLUMNS) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for bucket, row in buckets.items():
        cells = [f"{row[figure]:.3g}" if figure in row else "" for figure in COLUMNS.values()]
        lines.append("| " + " | ".join([bucket.removeprefix("bucket_"), *cells]) + " |")
    return "\n".join(lines)


def verdict(buckets):
    """Return the results for both claims as text, for each form of the norms and for the signal."""
    rows = [row for bucket, row in buckets.items() if bucket != "zero"]
    lines = []
    for form, suffix in FORMS.items():
        task, regulariser = (
            [row[f"{x}_norm{suffix}"] for row in rows] for x in ("task", "regulariser")
        )
        correlation, variation = spearman(task), spread(regulariser)
        lines.append(
            f"mean {form}: Spearman correlation of the task norm {correlation:.2f} "
            f"({'' if correlation >= MIN_CORRELATION else 'not '}reproduced); regulariser norm "
            f"varies by {100 * variation:.0f} % "
            f"({'' if variation < MAX_SPREAD else 'not '}reproduced)"
        )
    signal = [math.sqrt(max(row["regulariser_signal_squared"], 0.0)) for row in rows]
    lines.append(
        f"the regulariser's signal (its norm without noise) varies by {100 * spread(signal):.0f} %"
    )
    return "\n".join(lines)


def plot(buckets, path):
    """Draw the norms of the parts by bucket, on a logarithmic axis, to a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ticks = [
        f"{name.removeprefix('bucket_')}\n{row['reward_variance']:.2g}"
        for name, row in buckets.items()
    ]
    for panel, (form, suffix) in zip(panels, FORMS.items(), strict=True):
        for part in ("task", "regulariser", "kl", "entropy"):
            norms = [row[f"{part}_norm{suffix}"] or np.nan for row in buckets.values()]
            panel.plot(ticks, norms, "o-" if part in ("task", "regulariser") else ".:", label=part)
        panel.set(
            yscale="log",
            xlabel="bucket, mean reward variance",
            ylabel="norm of the gradient",
            title=f"gradient of the mean {form}",
        )
    panels[0].legend()
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_buckets")
    parser.add_argument("workdir", help="folder of a run")
    parser.add_argument("--png", help="draw the norms to this file")
    options = parser.parse_args()
    try:
        step, buckets = read_buckets(options.workdir)
    except ValueError as error:
        parser.error(str(error))
    print(f"{options.workdir}, step {step}\n\n{table(buckets)}\n\n{verdict(buckets)}")
    if options.png:
        plot(buckets, options.png)


if __name__ == "__main__":
    main()
