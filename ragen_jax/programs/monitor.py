"""Report compilation: a progress line, the seconds per step, and the names of late programs.

Compiling takes minutes for a large model. After its first steps a run has compiled most of its
programs. A program that compiles later delays a step: usually rows have become longer or shorter,
which gives them a new padded length (core/padding.py). There are few such lengths, so a line only
reports it; steps that keep compiling are a fault and give a warning.
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

from ragen_jax.core.progress import duration, seconds_since_output
from ragen_jax.core.types import Metrics
from ragen_jax.storage.console import console

EVENT = "/jax/core/compile/backend_compile_duration"  # one per program, compiled or loaded
# Minimum seconds between two lines; below the heartbeat's interval, whose line has less detail.
EVERY = 8.0
LOWERED = "jax._src.interpreters.pxla"  # the logger that reports the shapes of compiled programs
FIRST_STEPS = 2  # steps in which programs are expected to compile
LATE_EVERY = 60.0  # minimum seconds between two lines about late programs
RECENT, OFTEN = 20, 15  # of the last RECENT steps, OFTEN that compiled give a warning
PRECOMPILED = "precompiled programs"  # name of the wait for programs that threads compiled
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
        self.late: list[CompiledProgram] = []  # without a line so far
        self.printed = -LATE_EVERY  # time.monotonic() of the last line about late programs
        self.recent = collections.deque[bool](maxlen=RECENT)  # whether the last steps compiled
        self.shapes = _Shapes()

    def add(self, name: str, seconds: float) -> None:
        """Count a program, and print the number of those compiled when they were called.

        Programs compiled by a thread of precompile.py are not counted: either nothing waits for
        them, or `add_wait` counts the wait.
        """
        if threading.current_thread().name.startswith(THREAD):
            return
        self.programs.append(CompiledProgram(name, seconds, self.shapes.new_of(name)))
        called = [program.seconds for program in self.programs if program.name != PRECOMPILED]
        if seconds_since_output() >= EVERY and sum(called) >= EVERY:
            console(f"compiling as needed: {len(called)} programs so far, {duration(sum(called))}")

    def add_wait(self, seconds: float) -> None:
        """Count the time that a step waited for programs compiled by threads."""
        self.programs.append(CompiledProgram(PRECOMPILED, seconds, ()))

    def metrics(self, step: int) -> Metrics:
        """Return time/compile: the seconds of compilation since the previous row, 0.0 if none.

        Report programs that compile after the first steps of this process.

        Args:
          step: step number of the row; 0: before the first step.
        """
        programs = self.programs[self.reported :]
        self.reported += len(programs)
        self.steps += step > 0
        if self.steps > FIRST_STEPS:
            late = [p for p in programs if p.name != PRECOMPILED and p.seconds >= WORTH_A_LINE]
            self.late += late
            self.recent.append(bool(late))
        if self.late and time.monotonic() - self.printed >= LATE_EVERY:
            console(self._late_line())
            self.late, self.printed = [], time.monotonic()
        return {"time/compile": sum(program.seconds for program in programs)}

    def _late_line(self) -> str:
        """Return the line about the late programs; a warning if the steps keep compiling."""
        slowest, others = max(self.late, key=lambda program: program.seconds), len(self.late) - 1
        listed = f"{slowest}" + (f" and {others} other{'s' * (others > 1)}" if others else "")
        count = sum(self.recent)
        if count < OFTEN:
            return (
                f"compiled {listed}: rows of a new padded length; expected a few times per run, "
                "nothing to do"
            )
        line = (
            f"warning: {count} of the last {len(self.recent)} steps compiled programs, which makes "
            f"them slow (time/compile): {listed}; with rollout.slots, all are compiled at the start"
        )
        self.recent.clear()
        return line


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
