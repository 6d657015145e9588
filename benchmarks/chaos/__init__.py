"""Faults at random moments of runs, which continue after them and are compared with a twin.

    python -m benchmarks chaos [--minutes=90] [--seed=0] [--kinds=NAME,...] [--out=FILE.json]

A kind is drawn, a run starts in a folder and a cache of its own, the fault strikes at a moment that
is drawn, and the same command is given again. A run that survives has the rows and evaluations of a
run that nothing happened to, number by number; or it ends with the exit code and the line that
docs/recovery.md promises, leaves every file as it was, and resumes once the fault is mended. Two
trials run at a time (--at-a-time). Disks that refuse are small mounts: those kinds need root.

    trial     a run, its commands and the comparison with its twin
    kinds     the list of all faults; stops, damage, disks, consoles, links, clocks, environments
              and servers have them by family
    loop      trials in turn, and the table
"""

from collections.abc import Sequence

from benchmarks.chaos import loop


def main(argv: Sequence[str]) -> None:
    """The command."""
    loop.main(argv, __doc__)
