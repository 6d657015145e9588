"""The process that plays tasks of `verifiers`, in the Python that has the package."""

import collections
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ragen_jax.core.clean_text import last_line, one_line
from ragen_jax.envs.types import ModelAccess

WORKER = Path(__file__).with_name("worker.py")
PATIENCE = 30.0  # seconds until a process that does not give up an episode is killed
KEPT_LINES = 40  # of what the process writes as errors
SHOWN = 500  # characters of an error
MISSING = "No module named 'verifiers'"
HINT = "; pip install 'ragen_jax[verifiers]', or name a Python that has it in env.options.python"


class Player:
    """A process that plays tasks of a taskset, many at a time.

    tasks: (text of the first prompt, hash of the content) of each task
    """

    def __init__(self, python: str, taskset: Mapping[str, Any]) -> None:
        """Start the process and list the tasks.

        Args:
          python: an interpreter with the package; "": this one.
          taskset: the first line that the process reads (worker.py).

        Raises:
          ValueError: it cannot be started, or it cannot load the taskset.
        """
        # -P: do not search the worker's folder for modules. Tool servers, which run elsewhere, find
        # the modules of this folder as well.
        paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [python or sys.executable, "-P", str(WORKER)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C ends the step, not its episodes
            )
        except OSError as error:
            raise ValueError(f"python {command[0]!r} cannot be started: {error}") from error
        self._link = _Link(process)
        self._end = weakref.finalize(self, self._link.close)  # at the latest at interpreter exit
        first = self._link.begin(taskset)
        if "error" in first:
            self._end()
            hint = HINT if MISSING in first["error"] else ""
            raise ValueError(
                f"taskset {taskset['taskset']!r} cannot be loaded by {command[0]}: "
                f"{one_line(first['error'], SHOWN)}{hint}"
            )
        self.tasks: list[tuple[str, str]] = [(text, content) for text, content in first["tasks"]]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._link.ended

    def play(self, task: int, access: ModelAccess) -> dict[str, Any]:
        """Play a task and return its `reward` and `info`.

        Raises:
          RuntimeError: the episode failed, or the process has ended.
        """
        request = {"task": task, "base_url": access.base_url, "api_key": access.api_key}
        number, future = self._link.send(request)
        access.when_over(lambda: self._link.cancel(number))
        answer = future.result()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


class _Link:
    """The pipes of a process. Its threads do not keep a `Player` alive."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process, self._lock, self._writing = process, threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._said: collections.deque[bytes] = collections.deque(maxlen=KEPT_LINES)
        self.ended = False
        self._listener = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        self._listener.start()

    def begin(self, taskset: Mapping[str, Any]) -> dict[str, Any]:
        """Send the taskset and return the first answer; the further ones are read in a thread."""
        assert self._process.stdout is not None
        self._write(taskset)
        line = self._process.stdout.readline()
        if not line:
            return {"error": self._end()}
        threading.Thread(target=self._answer, args=(self._process.stdout,), daemon=True).start()
        return json.loads(line)

    def send(self, request: dict[str, Any]) -> tuple[int, "Future[dict[str, Any]]"]:
        """Send a request; return its number and its answer."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.ended:
                raise RuntimeError(self._why())
            number = next(self._numbers)
            self._pending[number] = future
        self._write({"id": number, **request})
        return number, future

    def cancel(self, number: int) -> None:
        """Give up a request that has no answer yet."""
        with self._lock:
            if number not in self._pending:
                return
        self._write({"cancel": number})
        timer = threading.Timer(PATIENCE, self._kill_if_pending, [number])
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        """Write a line, unless the process is ending, which the thread of the answers notices."""
        assert self._process.stdin is not None
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _kill_if_pending(self, number: int) -> None:
        with self._lock:
            if number in self._pending and not self.ended:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self, errors: Any) -> None:
        for line in errors:
            self._said.append(line[:SHOWN])

    def _answer(self, answers: Any) -> None:
        """Pass answers on until the process ends."""
        for line in answers:
            answer = json.loads(line)
            with self._lock:
                future = self._pending.pop(answer.pop("id"))
            future.set_result(answer)
        why = self._end()
        for future in self._pending.values():
            future.set_result({"error": why})

    def _end(self) -> str:
        """Reap the process and return how it ended."""
        self._process.wait()
        self._listener.join(1.0)
        with self._lock:
            self.ended = True
        return self._why()

    def _why(self) -> str:
        said = last_line(b"".join(self._said).decode(errors="replace"))
        status = self._process.returncode
        return f"the process of verifiers ended with status {status}: {said or 'no message'}"
