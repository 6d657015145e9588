"""Gains of several runs of one config, over the same held-out problems.

    python -m benchmarks.gain runs/SEED0 runs/SEED1 runs/SEED2

The gain of a run is the mean of its last three evaluations minus its evaluation at step 0, in
points, with a 95 % interval over problems (paired: every evaluation plays the same problems with
the same noise). The mean gain has another interval over runs (Student's t). For a mixture, each
environment is reported separately.
"""

import sys
from pathlib import Path

import numpy as np

from ragen_jax.diagnostics.intervals import interval, paired_gain
from ragen_jax.run.run_files import read_outcomes


def environments(workdir):
    """Return {environment: folder of its evaluations}; the name of an only environment is ""."""
    folder = Path(workdir) / "eval"
    if read_outcomes(folder):
        return {"": folder}
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}


def main(workdirs):
    runs = {workdir: environments(workdir) for workdir in workdirs}
    for name in dict.fromkeys(name for folders in runs.values() for name in folders):
        if name:
            print(f"{name}:")
        report({workdir: folders[name] for workdir, folders in runs.items()})


def report(folders):
    """Print the gains in one environment.

    Args:
      folders: {run: folder of the evaluations}.
    """
    firsts, lasts, gains, halves = [], [], [], []
    for workdir, folder in folders.items():
        first, *later = read_outcomes(folder).values()
        gain, half_width = paired_gain(first, later[-3:])
        print(
            f"{workdir}: {np.nanmean(first):.3f} -> {np.nanmean(later[-3:]):.3f}, "
            f"{100 * gain:+.1f} points, 95 % {100 * (gain - half_width):.1f} to "
            f"{100 * (gain + half_width):.1f}"
        )
        firsts.append(first)
        lasts.append(np.nanmean(later[-3:], 0))
        gains.append(gain)
        halves.append(half_width)
    gain, half_width = paired_gain(np.nanmean(firsts, 0), [np.nanmean(lasts, 0)])
    low, high = 100 * (gain - half_width), 100 * (gain + half_width)
    print(f"mean: {100 * gain:+.1f} points, 95 % {low:.1f} to {high:.1f} over problems")
    if len(gains) > 1:
        _, error = interval(gains, halves=halves)
        print(f"      95 % {100 * (gain - error):.1f} to {100 * (gain + error):.1f} over runs")


if __name__ == "__main__":
    main(sys.argv[1:])
