"""Report compilation: a progress line, the seconds per step, and the names of late programs.

Compiling takes minutes for a large model. After its first steps a run should have compiled all its
programs; a program that compiles later delays a step.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Generator, Sequence

import jax

from ragen_jax.core.progress import seconds_since_output
from ragen_jax.core.types import Metrics
from ragen_jax.storage.console import console

EVENT = "/jax/core/compile/backend_compile_duration"  # one per program, compiled or loaded
# Minimum seconds between two lines; below the heartbeat's interval, whose line has less detail.
EVERY = 8.0
LOWERED = "jax._src.interpreters.pxla"  # the logger that reports the shapes of compiled programs
FIRST_STEPS = 2  # steps in which programs are expected to compile
LATE_EVERY = 60.0  # minimum seconds between two warnings
THREAD = "precompile"  # prefix of the names of threads that compile ahead
WORTH_A_LINE = 0.1  # minimum compile time of a reported late program, in seconds


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled, or loaded from the cache (storage/compilation_cache.py)."""

    name: str  # the jitted function's name
    seconds: float
    shapes: tuple[str, ...]  # argument shapes that its previous compilation did not have

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.shapes[-4:]) or 'same shapes'}) {self.seconds:.1f} s"


class CompileMonitor:
    """The programs that were compiled while `monitor_compilation` was active."""

    def __init__(self) -> None:
        self.programs: list[CompiledProgram] = []
        self.reported = 0  # number of `programs` whose seconds are in a metrics row
        self.steps = 0
        self.late: list[CompiledProgram] = []  # without a warning so far
        self.warned = -LATE_EVERY
        self.shapes = _Shapes()

    def add(self, name: str, seconds: float) -> None:
        """Count a program, and print the total from time to time.

        Programs compiled by a thread of precompile.py are not counted: either nothing waits for
        them, or `add_wait` counts the wait.
        """
        if threading.current_thread().name.startswith(THREAD):
            return
        self.programs.append(CompiledProgram(name, seconds, self.shapes.new_of(name)))
        seconds = sum(program.seconds for program in self.programs)
        if seconds_since_output() >= EVERY and seconds >= EVERY:
            console(f"compiling: {len(self.programs)} programs so far, {seconds:.0f} s")

    def add_wait(self, seconds: float) -> None:
        """Count the time that a step waited for programs compiled by threads."""
        self.programs.append(CompiledProgram("precompiled programs", seconds, ()))

    def metrics(self, step: int) -> Metrics:
        """Return time/compile: the seconds of compilation since the previous row, 0.0 if none.

        Warn about programs that compile after the first steps of this process.

        Args:
          step: step number of the row; 0: before the first step.
        """
        programs = self.programs[self.reported :]
        self.reported += len(programs)
        self.steps += step > 0
        if self.steps > FIRST_STEPS:
            self.late += [program for program in programs if program.seconds >= WORTH_A_LINE]
        if self.late and time.monotonic() - self.warned >= LATE_EVERY:
            slowest = max(self.late, key=lambda program: program.seconds)
            others = len(self.late) - 1
            console(
                f"warning: recompiled after warm-up: {slowest}"
                + (f", and {others} other{'s' * (others > 1)}" if others else "")
            )
            self.late, self.warned = [], time.monotonic()
        return {"time/compile": sum(program.seconds for program in programs)}


class _Shapes(logging.Filter):
    """The argument shapes with which programs are lowered, which JAX reports only in its log.

    This log filter reads JAX's debug records and drops them. If JAX changes the wording of the
    record, programs are reported without shapes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, tuple[str, ...]] = {}
        self.before: dict[str, tuple[str, ...]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if record.msg.startswith("Compiling %s with global shapes") and isinstance(args, tuple):
            name, arguments = _function(str(args[0])), args[1]
            self.before[name] = self.now.get(name, ())
            self.now[name] = (
                tuple(map(_shape, arguments)) if isinstance(arguments, Sequence) else ()
            )
        return record.levelno >= logging.WARNING

    def new_of(self, name: str) -> tuple[str, ...]:
        """Return the distinct shapes that are new in the last lowering of `name`."""
        extra = collections.Counter(self.now.get(name, ()))
        extra -= collections.Counter(self.before.get(name, ()))
        return tuple(extra)


def _function(name: str) -> str:
    """Return "extend" for "jit(extend)"."""
    return name.removeprefix("jit(").removesuffix(")")


def _shape(argument: object) -> str:
    """Return "float32[2,3]" for JAX's ShapedArray(float32[2,3])."""
    return str(argument).removeprefix("ShapedArray(").removesuffix(")")


class _Listener:
    """Pass JAX's compilation events to the active `CompileMonitor`, if any."""

    def __init__(self) -> None:
        self.monitor: CompileMonitor | None = None

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == EVENT and self.monitor is not None:
            self.monitor.add(_function(str(kwargs.get("fun_name", "a program"))), duration_secs)


@functools.cache
def _listener() -> _Listener:
    """Return the listener of this process. There is only one: JAX cannot unregister a listener."""
    listener = _Listener()
    jax.monitoring.register_event_duration_secs_listener(listener)
    return listener


@contextlib.contextmanager
def monitor_compilation() -> Generator[CompileMonitor]:
    """Monitor compilation within this context, and print its progress from time to time."""
    monitor, listener, logger = CompileMonitor(), _listener(), logging.getLogger(LOWERED)
    level = logger.level
    listener.monitor = monitor
    logger.addFilter(monitor.shapes)
    logger.setLevel(logging.DEBUG)
    try:
        yield monitor
    finally:
        logger.removeFilter(monitor.shapes)
        logger.setLevel(level)
        listener.monitor = None
