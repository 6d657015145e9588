"""What is said of programs that compile: a sign of life, seconds of a step, a late one's name.

Compiling takes minutes for a large model. Once its first steps are done a run should have all its
programs; one that is met later makes a step wait.
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

EVENT = "/jax/core/compile/backend_compile_duration"  # of each program, compiled or loaded
EVERY = 8.0  # seconds between two lines, at least: before a sign of life, which says less
LOWERED = "jax._src.interpreters.pxla"  # the logger that tells the shapes of what is compiled
FIRST_STEPS = 2  # whose programs are expected to compile
LATE_EVERY = 60.0  # seconds between two warnings, at least
THREAD = "precompile"  # what the names of threads begin with that compile ahead
WORTH_A_LINE = 0.1  # seconds of a late program


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled, or loaded from those that are kept (kept_programs.py)."""

    name: str  # of the jitted function
    seconds: float
    shapes: tuple[str, ...]  # of arguments, those that it did not have when last compiled

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.shapes[-4:]) or 'same shapes'}) {self.seconds:.1f} s"


class CompileMonitor:
    """What was compiled while somebody wants to know."""

    def __init__(self) -> None:
        self.programs: list[CompiledProgram] = []
        self.reported = 0  # of `programs`, those whose seconds are in a row
        self.steps = 0
        self.late: list[CompiledProgram] = []  # not warned of yet
        self.warned = -LATE_EVERY
        self.shapes = _Shapes()

    def add(self, name: str, seconds: float) -> None:
        """Counts a program, and says now and then how many there were.

        What a thread of precompile.py compiles is not counted: nothing waits for it, or `waited`
        says for how long.
        """
        if threading.current_thread().name.startswith(THREAD):
            return
        self.programs.append(CompiledProgram(name, seconds, self.shapes.new_of(name)))
        seconds = sum(program.seconds for program in self.programs)
        if seconds_since_output() >= EVERY and seconds >= EVERY:
            console(f"compiling: {len(self.programs)} programs so far, {seconds:.0f} s")

    def add_wait(self, seconds: float) -> None:
        """Counts the time for which a step waited for programs that threads compile."""
        self.programs.append(CompiledProgram("precompiled programs", seconds, ()))

    def metrics(self, step: int) -> Metrics:
        """time/compile: seconds of what was compiled since the row before, 0.0 for nothing.

        Warns of what compiles behind the first steps of this process.

        Args:
          step: of the row; 0 is before the first step.
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
    """The shapes with which programs are lowered, which JAX tells its logs alone.

    A filter reads the record and lets none through that nobody asked for. Should JAX word it
    another way, programs go without shapes.
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
        """Those of the last lowering of `name` that the one before it had not, each once."""
        extra = collections.Counter(self.now.get(name, ()))
        extra -= collections.Counter(self.before.get(name, ()))
        return tuple(extra)


def _function(name: str) -> str:
    """extend of jit(extend)."""
    return name.removeprefix("jit(").removesuffix(")")


def _shape(argument: object) -> str:
    """float32[2,3] of JAX's ShapedArray(float32[2,3])."""
    return str(argument).removeprefix("ShapedArray(").removesuffix(")")


class _Listener:
    """Hands on what JAX tells of its compiling while somebody wants to know."""

    def __init__(self) -> None:
        self.monitor: CompileMonitor | None = None

    def __call__(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == EVENT and self.monitor is not None:
            self.monitor.add(_function(str(kwargs.get("fun_name", "a program"))), duration_secs)


@functools.cache
def _listener() -> _Listener:
    """The one of this process: JAX takes listeners, but gives none back."""
    listener = _Listener()
    jax.monitoring.register_event_duration_secs_listener(listener)
    return listener


@contextlib.contextmanager
def monitor_compilation() -> Generator[CompileMonitor]:
    """Tells now and then how many programs were compiled meanwhile, and how long that took."""
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
