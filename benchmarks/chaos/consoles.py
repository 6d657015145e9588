"""Faults of the console: a reader that exits, closed descriptors, full devices, encodings."""

import os
from collections.abc import Callable

from benchmarks.chaos.trial import Failure, Trial

ENCODINGS: tuple[dict[str, str], ...] = (
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C"},
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1"},
)


def close_reader(trial: Trial) -> None:
    """Close the pipe of standard output after the first lines, as `| head -3` does."""
    reading, writing = os.pipe()
    process = trial.start(stdout=writing, stderr=writing if trial.rng.integers(2) else None)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        for _ in range(3):
            pipe.readline()
    trial.expect_end(process, 0)
    trial.compare()


def close_descriptors(trial: Trial) -> None:
    """Start the run from a shell that closes standard output, error or input."""
    closed = [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"][trial.rng.integers(4)]
    wrapper = ("bash", "-c", f'exec "$@" {closed}', "bash")
    trial.expect_end(trial.start(wrapper=wrapper), 0)
    trial.compare()


def fill_device(trial: Trial) -> None:
    """Use /dev/full, which refuses every line, as standard output, error or both."""
    which = trial.rng.integers(3)
    with open("/dev/full", "wb") as full:
        process = trial.start(
            stdout=full if which != 1 else None, stderr=full if which != 0 else None
        )
    trial.expect_end(process, 0)
    trial.compare()


def close_terminal(trial: Trial) -> None:
    """Close the terminal during the run."""
    ours, theirs = os.openpty()
    try:
        process = trial.start(stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
    os.read(ours, 16)
    os.close(ours)
    trial.expect_end(process, 0)
    trial.compare()


def narrow_console_encoding(trial: Trial) -> None:
    """Use a console that cannot print the name of the run's folder, or an environment's error."""
    variables = ENCODINGS[trial.rng.integers(len(ENCODINGS))]
    trial.variables |= variables | {"CHAOS_ERROR": "chinese"}
    if "PYTHONUTF8" not in variables:  # otherwise folders cannot have such names
        trial.name = "运行_ü"
    trial.expect_end(trial.start(), 0)
    if "failed; the first" not in trial.output():
        raise Failure(f"no line names the error: {trial.output()[-1500:]}")
    trial.compare()


CONSOLES: dict[str, Callable[[Trial], None]] = {
    "| head -3": close_reader,
    "closed descriptors": close_descriptors,
    "/dev/full as console": fill_device,
    "the terminal closed": close_terminal,
}
WITH_ERRORS = {"Chinese on a console in Latin-1": narrow_console_encoding}
