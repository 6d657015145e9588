"""A sign of life while programs compile, which takes minutes for a large model."""

import functools
import time

import jax

from ragen_jax.run.log import console

EVENT = "/jax/core/compile/backend_compile_duration"  # of each program, when it is compiled
EVERY = 10.0  # seconds between two lines, at least


@functools.cache
def report_compiling() -> None:
    """From now on tells how many programs were compiled, and how long that took. Once a process."""
    seconds, told = [], [time.monotonic()]

    def compiled(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != EVENT:
            return
        del kwargs
        seconds.append(duration_secs)
        if time.monotonic() - told[0] >= EVERY and sum(seconds) >= EVERY:
            told[0] = time.monotonic()
            console(f"compiling: {len(seconds)} programs so far, {sum(seconds):.0f} s")

    jax.monitoring.register_event_duration_secs_listener(compiled)
