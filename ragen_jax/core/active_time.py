"""Time limits that leave out the time in which this process was suspended.

Ctrl-Z, `kill -STOP`, a debugger or a scheduler that suspends jobs stop a process while the clocks
go on. Afterwards, whatever this process was waiting for would seem to have exceeded its limit.
"""

import threading
import time

INTERVAL = 1.0  # default for the longest time between two readings, in seconds
SLACK = 1.0  # seconds by which a reading may be late on a busy machine and still count


class ActiveTime:
    """A clock for loops that wait with a limit and read it at regular intervals.

    If much more time than expected has passed since the last reading, the rest is left out.
    """

    def __init__(self, interval: float = INTERVAL) -> None:
        """Start the clock.

        Args:
          interval: longest time in seconds between two readings of a process that is not suspended.
        """
        self._interval, self._lock = interval, threading.Lock()
        self._last, self._left_out = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Return the time in seconds; only differences have a meaning."""
        with self._lock:
            now = time.monotonic()
            passed, self._last = now - self._last, now
            if passed > self._interval + SLACK:
                self._left_out += passed - self._interval
            return now - self._left_out
