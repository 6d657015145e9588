"""Run the program of an episode: its input, its environment variables, its output and its end."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from ragen_jax.core.clean_text import last_line
from ragen_jax.envs.types import ModelAccess

KEPT_OUTPUT = 1 << 16  # bytes kept of each output, the last ones
CHUNK = 1 << 16  # bytes read at once
LAST_READS = 256  # reads of what is left in the pipes after the program has ended
SHOWN = 300  # characters of a program's last line of errors that a message shows


def run_program(
    command: Sequence[str], problem: Any, variables: Mapping[str, str], access: ModelAccess
) -> Any:
    """Run a command to its end and return the JSON value of the last line that it prints.

    The command reads the problem as JSON from its standard input. It leads a process group of its
    own; whatever is left of the group is killed when the command ends or the episode is over. Only
    the end of its output is kept, so that it may print any amount.

    Args:
      variables: all of its environment variables, except those of `access`.

    Returns:
      The value; None if it prints nothing, or the last line is not JSON.

    Raises:
      RuntimeError: it cannot be started, or ends with a status other than 0.
    """
    given = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**variables, **given},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{command[0]} cannot be started: {error}") from error
    group = _Group(process)
    access.when_over(group.kill)
    try:
        printed, errors = _exchange(group, process, json.dumps(problem).encode() + b"\n")
    finally:
        status = group.end()
    if status:
        said = errors.decode(errors="replace").strip()  # the last line of a traceback says most
        raise RuntimeError(
            f"{command[0]} ended with status {status}: {last_line(said)[:SHOWN] or 'no message'}"
        )
    return _last_value(printed)


class _Group:
    """A process and the group that it leads. Its number stays taken until the process is reaped, so
    that no other group is ever killed."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._lock = process, threading.Lock()

    def has_ended(self) -> bool:
        """Whether the process has ended, without reaping it."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with self._lock:
            if self._process.returncode is not None:
                return True
            return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def kill(self) -> None:
        """Kill what is left of the group."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the rest of the group of an ended process and return the process's status."""
        self.kill()
        with self._lock:
            return self._process.wait()


def _exchange(
    group: _Group, process: "subprocess.Popen[bytes]", given: bytes
) -> tuple[bytes, bytes]:
    """Write to a process and read from it until it has ended.

    Returns:
      The end of its output and of its errors.
    """
    source, output, errors = process.stdin, process.stdout, process.stderr
    assert source is not None and output is not None and errors is not None
    kept = {output: b"", errors: b""}
    unsent, left = memoryview(given), LAST_READS
    with source, output, errors, selectors.DefaultSelector() as selector:
        os.set_blocking(source.fileno(), False)
        selector.register(source, selectors.EVENT_WRITE)
        selector.register(output, selectors.EVENT_READ)
        selector.register(errors, selectors.EVENT_READ)
        while left:
            over = group.has_ended()  # asked before reading, so that nothing written is missed
            ready = selector.select(0.0 if over else 0.05)
            for key, _ in ready:
                if key.fileobj is source:
                    unsent = _write(source, unsent)
                    if not unsent:
                        selector.unregister(source)
                        source.close()
                    continue
                pipe = output if key.fileobj is output else errors
                data = os.read(pipe.fileno(), CHUNK)
                kept[pipe] = (kept[pipe] + data)[-KEPT_OUTPUT:]
                if not data:
                    selector.unregister(pipe)
            if over:
                # A process that it has started may hold the pipes open, and write for ever.
                left = left - 1 if ready else 0
    return kept[output], kept[errors]


def _write(pipe: IO[bytes], data: memoryview) -> memoryview:
    """Write a part of the data; return the rest, which is empty if nobody reads."""
    try:
        return data[os.write(pipe.fileno(), data[:CHUNK]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _last_value(printed: bytes) -> Any:
    """Return the JSON value of the last line with text; None if there is none."""
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.strip()]
    try:
        return json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
