"""How far each process of a run has come, and the end of a run in which one does not go on.

The others would wait for it for ever: it answers the coordinator, so that JAX takes it for well.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import jax

FOLDER = ".progress"  # in the run's: how many places process N has reached, and the last, in N.json
LOOK = 0.05  # between two looks, as a share of the limit

_count, _place = 0, "the start"


def reached(place: str) -> None:
    """Counts one more place at which this process may have to wait for others."""
    global _count, _place
    _count, _place = _count + 1, place


def stalled(found: Mapping[int, tuple[int, str]]) -> str:
    """Which of the processes do not go on, in words.

    Args:
      found: process -> (how many places it has reached, the last one).
    """
    fewest = min(count for count, _ in found.values())
    behind = [process for process, (count, _) in found.items() if count == fewest]
    place = found[behind[0]][1]
    if len(behind) == len(found):
        return f"no process goes on (last seen: {place})"
    listed = ", ".join(map(str, behind))
    return f"process {listed} does not go on (last seen: {place}), and all others wait for it"


def end_when_stalled(workdir: Path, limit: float) -> None:
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
            if told != (_count, _place):
                told = _count, _place
                aside = folder / f".{mine}"
                aside.write_text(json.dumps(told))
                aside.replace(folder / mine)
            found = {}
            for process, file in enumerate(files):
                with contextlib.suppress(FileNotFoundError):  # it has not begun
                    found[process] = json.loads(file.read_text())
            if found != last:
                last, since = found, time.monotonic()
            elif time.monotonic() - since >= limit:
                print(f"error: {stalled(found)}: ended after {limit:g} s", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)
            time.sleep(LOOK * limit)

    folder.mkdir(exist_ok=True)
    (folder / mine).unlink(missing_ok=True)  # of an earlier start
    threading.Thread(target=watch, daemon=True).start()
