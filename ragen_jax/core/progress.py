"""Progress of this process: its phase, its barriers and when it last printed a line."""

import dataclasses
import threading
import time
from collections.abc import Callable


@dataclasses.dataclass
class Progress:
    meetings: int = 0  # barriers passed so far
    place: str = "starting"  # name of the phase
    since: float = 0.0  # time.monotonic() when the phase began
    done: int = 0  # units of the phase that are finished
    total: int = 0  # units of the phase; 0 if they are not counted
    unit: str = ""  # plural noun, such as "episodes"
    last_output: float = 0.0  # time.monotonic() of the last printed line
    begun: bool = False  # whether the run has finished a step
    waits: bool = False  # whether the phase waits for that of BESIDE


NOW = Progress()
BESIDE = Progress()  # of the thread that plays ahead (run/ahead.py), in parallel with NOW
_OF_THREAD = threading.local()  # progress: BESIDE in that thread


def enter_phase(
    place: str,
    *,
    total: int = 0,
    unit: str = "",
    since: float | None = None,
    waits: bool = False,
) -> None:
    """Enter a phase that may take long.

    Args:
      place: name of the phase, as the heartbeat prints it; "": it prints nothing.
      total, unit: the number of units to finish, which `advance` counts, and their plural noun;
        0 if they are not counted.
      since: time.monotonic() when the phase began, if only its name changes; None: now.
      waits: whether it waits for the thread of `enter_phase_beside`, whose units are then shown.
    """
    NOW.place, NOW.since = place, time.monotonic() if since is None else since
    NOW.done, NOW.total, NOW.unit, NOW.waits = 0, total, unit, waits


def enter_phase_beside(place: str) -> None:
    """Enter a phase of the calling thread, which works beside the main one; only one may do so."""
    _OF_THREAD.progress = BESIDE
    BESIDE.place, BESIDE.since = place, time.monotonic()
    BESIDE.done, BESIDE.total, BESIDE.unit = 0, 0, ""


def duration(seconds: float) -> str:
    """Return a duration in words: "43 s", "12 min", "2.5 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 99.5 * 60 else f"{seconds / 3600:.1f} h"


def begin_count(total: int, unit: str) -> Callable[[int], None]:
    """Begin to count units of the phase; return the function that counts them.

    It takes the number of newly finished units. If the phase counts the same unit already, it adds
    to that count. It does nothing while other units are counted, and in a thread other than the
    main one and that of `enter_phase_beside`.

    Args:
      total: number of units to finish.
      unit: their plural noun.
    """
    main = threading.current_thread() is threading.main_thread()
    now = NOW if main else getattr(_OF_THREAD, "progress", None)
    if now is None:
        return _count_nothing

    def count(units: int) -> None:
        now.done += units

    if now.done < now.total:
        return count if unit == now.unit else _count_nothing
    if now.total:  # a further part of the phase
        now.since = time.monotonic()
    now.done, now.total, now.unit = 0, total, unit
    return count


def advance(units: int = 1) -> None:
    """Count finished units of the main thread's phase."""
    NOW.done += units


def _count_nothing(units: int) -> None:
    del units


def count_barrier() -> None:
    """Count a barrier, at which all processes meet and may have to wait."""
    NOW.meetings += 1


def note_output(*, begun: bool = False) -> None:
    """Record that a line was printed.

    Args:
      begun: whether it is the line of a step, after which the user knows how long a step takes.
    """
    NOW.last_output = time.monotonic()
    NOW.begun = NOW.begun or begun


def seconds_since_output() -> float:
    """Seconds since the last printed line."""
    return time.monotonic() - NOW.last_output
