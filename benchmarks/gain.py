"""Gains of several runs of one config, over the same held-out problems.

    python -m benchmarks.gain runs/SEED0 runs/SEED1 runs/SEED2

The gain of a run is the mean of its last three evaluations minus its evaluation at step 0, in
points, with a 95 % interval over problems (paired: every evaluation plays the same problems with
the same noise). The mean gain has another interval over runs (Student's t). For a mixture, each
environment is reported separately.
"""

import argparse
from pathlib import Path

import numpy as np

from ragen_jax.diagnostics.intervals import interval, paired_gain
from ragen_jax.run.run_files import read_outcomes


def environments(workdir):
    """Return {environment: folder of its evaluations}; the name of an only environment is "".

    Raises:
      ValueError: the folder is that of no run with two evaluations.
    """
    folder = Path(workdir) / "eval"
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    found = {path.name: path for path in inside if path.is_dir()}
    if read_outcomes(folder):
        found = {"": folder}
    if not found or any(len(read_outcomes(path)) < 2 for path in found.values()):
        raise ValueError(
            f"{folder} has no two evaluations; expected the folder of a run that was evaluated "
            "before its first step and later (config.eval.every)"
        )
    return found


def main(words=None):
    about, _, more = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gain",
        description=about,
        epilog=more.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workdirs", nargs="+", metavar="RUN", help="folder of a run")
    try:
        compare(parser.parse_args(words).workdirs)
    except ValueError as error:
        parser.error(str(error))


def compare(workdirs):
    """Print the gains of runs in each environment.

    Raises:
      ValueError: as in `environments`, or the runs have different environments.
    """
    runs = {workdir: environments(workdir) for workdir in workdirs}
    if len({tuple(folders) for folders in runs.values()}) > 1:
        raise ValueError(f"the runs {', '.join(map(str, workdirs))} have different environments")
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
    main()
