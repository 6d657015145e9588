"""A table of one GPU or TPU chip, measured unattended in pieces: docs/results/accelerator.md.

    python -m benchmarks accelerator [--seconds=N] [--only=NAME,...] [--list] [--page]
    python -m benchmarks accelerator --tiny --out=FOLDER

Each piece is a process with its own time limit, and its result is a line of accelerator.jsonl. A
piece that fails is recorded, and the next one starts. The command can be repeated: pieces that this
device has finished are not measured again, and those that failed come last. With --seconds, no
piece starts that is not expected to end in time. Cases that the device's memory cannot hold are
refused before they run. At the end, the page is written from all stored lines; --page does only
that. Weights are random: nothing is downloaded. --tiny runs every piece at toy size, on a CPU too.

    pieces    the list of pieces, their cases, and the memory that a case needs at least
    measures  the measurement of a piece, run in its process
    loop      the loop over pieces
    page      the page
"""

from collections.abc import Sequence

from benchmarks.accelerator import loop


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    loop.main(argv, __doc__)
