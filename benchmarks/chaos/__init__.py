"""Faults at random moments of runs; the runs resume and are compared with a run without faults.

    python -m benchmarks chaos [--minutes=90] [--seed=0] [--kinds=NAME,...] [--out=FILE.json]

In each trial, a run starts with its own folder and cache, a fault of a random kind happens at a
random moment, and the same command is run again. The run survives if its rows and evaluations equal
those of a run without faults (its twin), number by number; or if it ends with the exit code and the
message that docs/recovery.md promises, leaves every file unchanged, and resumes once the fault is
repaired. Two trials run in parallel (--at-a-time). Faults of disks use small mounts and need root.

    trial     a run, its commands and the comparison with its twin
    kinds     the list of all faults; stops, damage, disks, consoles, links, clocks, environments
              and servers define them by family
    loop      the loop over trials, and the table
"""

from collections.abc import Sequence

from benchmarks.chaos import loop


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    loop.main(argv, __doc__)
