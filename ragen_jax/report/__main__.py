"""Write a self-contained page about a run so far: RUN/report.html.

    python -m ragen_jax.report RUN [RUN ...] [--out=FILE]

Several runs are drawn over each other; runs that differ only in their seed are averaged, with 95 %
intervals (Student's t). Only the folders are read: no model, no checkpoint, nothing compiles.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.report.page import write_report


def parse(argv: Sequence[str]) -> list[Path]:
    """Parse the command line and return the runs' folders."""
    with command.bad_input(flags.Error):
        words = command.run_folders(argv)
        if not words:
            raise ValueError("name a run folder: python -m ragen_jax.report runs/NAME")
        return list(map(Path, words))


def main(runs: list[Path]) -> None:
    with command.bad_input():
        out = write_report(runs, Path(OUT.value) if OUT.value else None)
    print(f"{out}  {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    OUT = flags.DEFINE_string("out", None, "Output file; default: report.html of the first run.")
    command.define_workdirs()
    command.run_parsed(main, parse)
