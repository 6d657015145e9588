"""An untrusted process: writing to it, reading from it, and limiting its time and output.

Its first line is the sandbox's (`inside`); the program's time starts there.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.core.active_time import INTERVAL, ActiveTime

START_LIMIT = 60.0  # seconds until the program begins; 0.03 on an idle machine
MAX_EXTENSION = 4.0  # maximum extension, in time limits, for time given to other processes
CHUNK = 1 << 16  # bytes read or written at once
KILL_STATUSES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # statuses; bubblewrap returns the second
TIME_STATUSES = (-signal.SIGXCPU, 128 + signal.SIGXCPU)


class SandboxFault(RuntimeError):
    """The machine failed, not the program: no program can cause this error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a run.

    time_s: seconds of wall time, and of processor time
    memory, output: bytes
    """

    time_s: float
    memory: int
    output: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    end: "exit" (with status 0), "error" (another status, or a signal), "time" or "output" (limit
        exceeded)
    output: bytes, at most the limit
    """

    end: str
    output: bytes


def run(command: Sequence[str], data: bytes, limits: Limits) -> RunResult:
    """Run a command that reads `data`; none of its processes remains afterwards.

    Raises SandboxFault if it cannot be started, does not print "held" or "bare", or is killed from
    outside.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONHASHSEED": "0"},  # reproducible order of sets
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxFault(f"no process starts: {error}") from error
    try:
        return _Session(process, data, limits).end()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # input that was not read
                pipe.close()


class _Session:
    """Communication with a process until it ends or exceeds a limit."""

    def __init__(self, process: "subprocess.Popen[bytes]", data: bytes, limits: Limits) -> None:
        self._process, self._limits = process, limits
        self._unsent, self._output = memoryview(data), bytearray()
        self._clock = ActiveTime()
        self._start = self._clock.seconds()
        self._begin_time: float | None = None  # time at which the program began
        self._pid = process.pid  # of the program, which bubblewrap starts as its child
        self._start_delay = 0.0  # seconds before it began in which the machine ran others
        self._has_filter = False

    def end(self) -> RunResult:
        """Return the result once the process has ended."""
        found = self._read()
        if self._begin_time is None:
            raise SandboxFault(f"the sandbox did not begin within {START_LIMIT:g} s ({found})")
        if found == "exit":
            found = self._status()
        return RunResult(found, bytes(self._output[: self._limits.output]))

    def _read(self) -> str:
        """Write and read until the output is closed ("exit") or a limit is exceeded."""
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        os.set_blocking(sink.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            selector.register(sink, selectors.EVENT_WRITE)
            while True:
                ready = {key.fileobj for key, _ in selector.select(self._wait())}
                if sink in ready and not self._write(sink):
                    selector.unregister(sink)
                    with contextlib.suppress(OSError):
                        sink.close()
                if source in ready:
                    data = os.read(source.fileno(), CHUNK)
                    self._add_output(data)
                    if not data:
                        return "exit"
                    if len(self._output) > self._limits.output:
                        return "output"
                # Check each time: a process that never stops writing must not outlive its limit.
                if self._clock.seconds() >= self._deadline():
                    return "time"

    def _write(self, sink: Any) -> bool:
        """Write as much as the pipe takes; return whether there is more to write."""
        try:
            self._unsent = self._unsent[os.write(sink.fileno(), self._unsent[:CHUNK]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(self._unsent)

    def _add_output(self, data: bytes) -> None:
        """Add output; its first line is the sandbox's, not the program's."""
        self._output += data
        if self._begin_time is not None:
            return
        if b"\n" in self._output:
            line, _, rest = bytes(self._output).partition(b"\n")
            if line not in (b"held", b"bare"):
                raise SandboxFault(line.decode(errors="replace")[:500])
            self._has_filter = line == b"held"
            self._pid = _last_descendant(self._process.pid)
            self._begin_time, self._start_delay = self._clock.seconds(), self._delay()
            self._output[:] = rest
        elif not data:
            status = self._process.wait(START_LIMIT)
            raise SandboxFault(f"the sandbox ended before the program, with status {status}")

    def _status(self) -> str:
        """Wait, within the time limit, for a process that closed its output; return its end."""
        used = self._reap()
        while used is None:
            if self._clock.seconds() >= self._deadline():
                return "time"
            time.sleep(min(self._wait(), 0.001))
            used = self._reap()
        status = self._process.returncode
        if status in TIME_STATUSES:
            return "time"
        if status in KILL_STATUSES and self._has_filter:
            if used >= self._limits.time_s:
                return "time"  # it ignored the first signal of its time limit
            # It cannot kill itself: the system ran out of memory, or somebody killed it.
            raise SandboxFault("the program's process was killed from outside")
        return "exit" if status == 0 else "error"

    def _reap(self) -> float | None:
        """Return seconds of processor time of the ended process; None while it runs."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        if pid == 0:
            return None
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime

    def _wait(self) -> float:
        """Return seconds until the next check."""
        return max(0.0, min(self._deadline() - self._clock.seconds(), INTERVAL))

    def _deadline(self) -> float:
        """Return the time, on this session's clock, until which the process may run."""
        if self._begin_time is None:
            return self._start + START_LIMIT
        end = self._begin_time + self._limits.time_s
        if self._clock.seconds() >= end:  # the delay matters only then
            end += min(self._delay() - self._start_delay, MAX_EXTENSION * self._limits.time_s)
        return end

    def _delay(self) -> float:
        """Return seconds in which the program was ready to run while the machine ran others."""
        try:
            return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # another system, or the process just ended
            return self._start_delay


def _last_descendant(pid: int) -> int:
    """Return the last process in a chain of only children; `pid` if the system does not report."""
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return pid
        if len(children) != 1:
            return pid
        pid = int(children[0])
