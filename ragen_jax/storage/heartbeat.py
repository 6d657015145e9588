"""How far each process of a command has come: signs of life, and the end of one that hangs.

Where no line has been printed for long, one says what goes on. Of several processes in which one
does not go on the others would wait for ever: it answers the coordinator, so that JAX takes it for
well.
"""

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import jax

from ragen_jax.core import progress
from ragen_jax.core.progress import enter_phase, note_output, seconds_since_output
from ragen_jax.storage.atomic_io import make_folder, with_retries
from ragen_jax.storage.console_streams import show

FOLDER = ".progress"  # in the run's: what `stalled` is given of process N, in N.json
LOOK = 0.05  # between two looks, as a share of the limit
EVERY = 9.0  # seconds without a line until one is printed, give or take a TICK; ever more behind a
# run's first step
TICK = 0.5  # seconds between two looks at the clock
STALL_TIMEOUT = 3600.0  # seconds without a step forward of any process: longer than anything takes


@contextlib.contextmanager
def heartbeat() -> Generator[None]:
    """Says on stderr what goes on, by a thread, where no line was printed for EVERY seconds."""
    ended = threading.Event()

    def watch() -> None:
        limit = EVERY
        while not ended.wait(TICK):
            limit = _write_heartbeat(limit)

    enter_phase("starting")
    note_output()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_heartbeat(limit: float) -> float:
    """Says what goes on if nothing was said for `limit` seconds; returns the next limit."""
    if seconds_since_output() < limit:
        return limit
    seconds = round(time.monotonic() - progress.NOW.since)
    lasting = f": {seconds} s so far" if seconds else ""
    show(f"{progress.NOW.place}{lasting}", error=True)
    note_output()
    return limit * 2 if progress.NOW.begun else limit


def describe_stall(found: Mapping[int, tuple[int, str]]) -> str:
    """Which of the processes do not go on, in words.

    Args:
      found: process -> (how many meetings it has come to, what it does).
    """
    fewest = min(count for count, _ in found.values())
    behind = [process for process, (count, _) in found.items() if count == fewest]
    place = found[behind[0]][1]
    if len(behind) == len(found):
        return f"no process goes on (last seen: {place})"
    listed = ", ".join(map(str, behind))
    return f"process {listed} does not go on (last seen: {place}), and all others wait for it"


def exit_on_stall(workdir: Path, limit: float) -> None:
    """Ends this process, by a thread, when no process has gone on for `limit` seconds.

    Each tells the others in a file how far it has come. For runs of several processes.

    Args:
      workdir: of the run, which all processes see.
    """
    folder, mine = workdir / FOLDER, f"{jax.process_index()}.json"
    files = [folder / f"{process}.json" for process in range(jax.process_count())]

    def watch() -> None:
        told, since, last = None, time.monotonic(), {}
        while True:
            now = progress.NOW.meetings, progress.NOW.place
            # Where the disk is full, again at the next look: what writes for the run reports it.
            with contextlib.suppress(OSError):
                if told != now:
                    aside = folder / f".{mine}"
                    aside.write_text(json.dumps(now))
                    aside.replace(folder / mine)
                    told = now
            found = {}
            for process, file in enumerate(files):
                with contextlib.suppress(FileNotFoundError):  # it has not begun
                    found[process] = json.loads(file.read_text())
            if found != last:
                last, since = found, time.monotonic()
            elif time.monotonic() - since >= limit:
                # Not by `show`, whose lock the thread that hangs may have.
                print(f"error: {describe_stall(found)}: ended after {limit:g} s", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            time.sleep(LOOK * limit)

    make_folder(folder)
    earlier = folder / mine
    with_retries(functools.partial(earlier.unlink, missing_ok=True), earlier)
    threading.Thread(target=watch, daemon=True).start()
