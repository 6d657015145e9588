"""Heartbeat lines on stderr, and a watchdog that ends a run in which a process hangs.

The heartbeat prints the current phase when nothing has been printed for a while. The watchdog is
for runs of several processes: if one hangs the others would wait forever, because it still answers
the coordinator and JAX considers it healthy.
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
from ragen_jax.core.active_time import ActiveTime
from ragen_jax.core.progress import duration, enter_phase, note_output, seconds_since_output
from ragen_jax.storage.atomic_io import make_folder, with_retries
from ragen_jax.storage.console_streams import show

FOLDER = ".progress"  # in the run's folder; N.json has the barriers and the phase of process N
LOOK = 0.05  # interval between two checks of the watchdog, as a fraction of its limit
# Seconds without output until a heartbeat; doubled after each heartbeat once the run has finished a
# step.
EVERY = 9.0
TICK = 0.5  # seconds between two checks of the clock
STALL_TIMEOUT = 3600.0  # seconds without progress of any process; longer than any phase takes


_active = threading.Lock()  # held while the heartbeat of this process runs


@contextlib.contextmanager
def heartbeat() -> Generator[None]:
    """Print the phase on stderr, from a thread, when nothing was printed for EVERY seconds.

    Within another heartbeat, do nothing.
    """
    if not _active.acquire(blocking=False):
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        limit = EVERY
        while not ended.wait(TICK):
            limit = _write_heartbeat(limit)

    progress.NOW.begun = False
    enter_phase("starting")
    note_output()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _active.release()


def _write_heartbeat(limit: float) -> float:
    """Print the phase if nothing was printed for `limit` seconds; return the next limit."""
    if seconds_since_output() < limit or not progress.NOW.place:
        return limit
    show(describe_phase(), error=True)
    note_output()
    return limit * 2 if progress.NOW.begun else limit


def describe_phase() -> str:
    """Return the phase with its finished units and an estimate of the remaining time, if known."""
    now, place = progress.NOW, progress.NOW.place
    if now.waits and progress.BESIDE.total:
        now = progress.BESIDE
        place = f"{place} ({now.place})"
    seconds = time.monotonic() - now.since
    parts = [f"{now.done} of {now.total} {now.unit}".rstrip()] if now.total else []
    if 0 < now.done < now.total:
        parts.append(f"about {duration(seconds / now.done * (now.total - now.done))} left")
    elif round(seconds):
        parts.append(f"{duration(seconds)} so far")
    return ": ".join([place, *([", ".join(parts)] if parts else [])])


def describe_stall(found: Mapping[int, tuple[int, str]]) -> str:
    """Return a sentence that names the processes that hang.

    Args:
      found: process -> (barriers passed, phase).
    """
    fewest = min(count for count, _ in found.values())
    slowest = [process for process, (count, _) in found.items() if count == fewest]
    place = found[slowest[0]][1]
    if len(slowest) == len(found):
        return f'no process makes progress (last phase: "{place}")'
    listed = ", ".join(map(str, slowest))
    return f'process {listed} is stuck in "{place}"; the others are waiting for it'


def exit_on_stall(workdir: Path, limit: float) -> None:
    """End this process, from a thread, if no process makes progress for `limit` seconds.

    Each process writes its progress to a file that the others read.

    Args:
      workdir: folder of the run, which all processes see.
    """
    folder, own_file = workdir / FOLDER, f"{jax.process_index()}.json"
    files = [folder / f"{process}.json" for process in range(jax.process_count())]

    def watch() -> None:
        clock = ActiveTime(LOOK * limit)
        written, since, last = None, clock.seconds(), {}
        while True:
            now = progress.NOW.meetings, progress.NOW.place
            # If the disk is full, retry at the next check; the run's other writes report it.
            with contextlib.suppress(OSError):
                if written != now:
                    aside = folder / f".{own_file}"
                    aside.write_text(json.dumps(now))
                    aside.replace(folder / own_file)
                    written = now
            found = {}
            for process, file in enumerate(files):
                with contextlib.suppress(FileNotFoundError):  # that process has not started
                    found[process] = json.loads(file.read_text())
            if found != last:
                last, since = found, clock.seconds()
            elif clock.seconds() - since >= limit:
                # Not with `show`: the hanging thread may hold its lock.
                print(f"error: {describe_stall(found)}: stopped after {limit:g} s", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            time.sleep(LOOK * limit)

    make_folder(folder)
    earlier = folder / own_file
    with_retries(functools.partial(earlier.unlink, missing_ok=True), earlier)
    threading.Thread(target=watch, daemon=True).start()
