"""A sign of life while programs compile, which takes minutes for a large model."""

import contextlib
import functools
import time
from collections.abc import Generator

import jax

from ragen_jax.run.log import console

EVENT = "/jax/core/compile/backend_compile_duration"  # of each program, when it is compiled
EVERY = 10.0  # seconds between two lines, at least


class _Told:
    """What was compiled while somebody wants to know."""

    def __init__(self) -> None:
        self.wanted = False
        self.seconds: list[float] = []
        self.last = 0.0  # when a line was printed, or the telling began

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event != EVENT or not self.wanted:
            return
        self.seconds.append(duration_secs)
        if time.monotonic() - self.last >= EVERY and sum(self.seconds) >= EVERY:
            self.last = time.monotonic()
            console(f"compiling: {len(self.seconds)} programs so far, {sum(self.seconds):.0f} s")


@functools.cache
def _listener() -> _Told:
    """The one of this process: JAX takes listeners, but gives none back."""
    told = _Told()
    jax.monitoring.register_event_duration_secs_listener(told)
    return told


@contextlib.contextmanager
def told_of_compiling() -> Generator[None]:
    """Tells now and then how many programs were compiled meanwhile, and how long that took."""
    told = _listener()
    told.wanted, told.seconds, told.last = True, [], time.monotonic()
    try:
        yield
    finally:
        told.wanted = False
