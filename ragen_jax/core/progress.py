"""How far this process has come: its phase, its barriers and when it last printed a line."""

import dataclasses
import time


@dataclasses.dataclass
class Progress:
    meetings: int = 0  # that this process has come to
    place: str = "starting"  # what it does
    since: float = 0.0  # since when
    last_output: float = 0.0  # when the last line was printed
    begun: bool = False  # whether a run's first step is behind it


NOW = Progress()


def enter_phase(place: str) -> None:
    """Says what this process does from now on, which may take long."""
    NOW.place, NOW.since = place, time.monotonic()


def count_barrier() -> None:
    """Counts one more meeting: a place that all processes come to, where they may have to wait."""
    NOW.meetings += 1


def note_output(*, begun: bool = False) -> None:
    """Says that a line has been printed.

    Args:
      begun: of a step: who reads it knows how long one takes.
    """
    NOW.last_output = time.monotonic()
    NOW.begun = NOW.begun or begun


def seconds_since_output() -> float:
    """Seconds since the last line."""
    return time.monotonic() - NOW.last_output
