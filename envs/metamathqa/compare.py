"""Judging whether an answer of any content is right.

math-verify parses it with a grammar and passes it to SymPy; both may take forever. They run in a
separate process, which is replaced if it hangs or dies.
"""

import functools
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from ragen_jax.core.active_time import INTERVAL, ActiveTime

COMPARE = ("string", "math_verify")

MAX_TEXT = 500  # characters; longer answers are not passed to math-verify
LIMIT = 5  # seconds per comparison
START_LIMIT = 120  # seconds until the process is ready; about one on an idle machine

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Verdict:
    """The judgement of an answer.

    right: whether it is right
    readable: whether there is something to compare
    error: why it could not be compared; "" if it was
    """

    right: bool
    readable: bool
    error: str = ""


def check_installed(compare: str) -> None:
    """Raise ValueError if `compare`, one of COMPARE, needs a package that is missing."""
    if compare == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ValueError("compare='math_verify' needs math-verify: pip install 'ragen_jax[math]'")


def judge_answer(right: str, answer: str, compare: str) -> Verdict:
    """Compare an answer with the right answer.

    "string" is the rule of the released RAGEN: equal in lower case, ignoring spaces.
    "math_verify" also accepts equivalent answers. Never raises because of the answer.
    """
    text = _normalize(answer)
    if not text or text == _normalize(right) or compare == "string":
        return Verdict(bool(text) and text == _normalize(right), bool(text))
    if max(len(right), len(answer)) > MAX_TEXT:
        return Verdict(False, False)
    return _judge(os.getpid()).compare(right, answer)


def _normalize(text: str) -> str:
    return "".join(text.lower().split())


@functools.lru_cache(maxsize=1)
def _judge(process: int) -> "Judge":
    """Return the judge of this process; a fork needs another."""
    return Judge()


class _WorkerError(Exception):
    """A worker no longer answers; the message says why."""


class Judge:
    """Compares answers in a worker process, one at a time."""

    def __init__(self, command: tuple[str, ...] | None = None) -> None:
        """command: command of the worker, which starts with the first comparison."""
        # -P: do not search the worker's folder for modules.
        self._command = command or (sys.executable, "-P", str(WORKER), str(LIMIT))
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end = lambda: None

    def compare(self, right: str, answer: str) -> Verdict:
        """Return math-verify's verdict; if it takes longer than LIMIT seconds, False and why.

        Raises RuntimeError if no worker starts, which no answer can cause.
        """
        with self._lock:
            worker = self._start()
            try:
                return self._ask(worker, right, answer)
            except _WorkerError as error:
                self._end()
                return Verdict(False, False, str(error))

    def _start(self) -> "subprocess.Popen[bytes]":
        """Return the worker, ready to compare."""
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._end()
        worker = self._worker = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _end, worker)  # at the latest at interpreter exit
        try:
            _read_line(worker, START_LIMIT)
        except _WorkerError as error:
            self._end()
            raise RuntimeError(f"{' '.join(self._command)} does not start: {error}") from None
        return worker

    def _ask(self, worker: "subprocess.Popen[bytes]", right: str, answer: str) -> Verdict:
        assert worker.stdin is not None
        try:
            worker.stdin.write(json.dumps([right, answer]).encode() + b"\n")
            worker.stdin.flush()
        except OSError:
            raise _WorkerError("the comparison ended its process") from None
        answer = json.loads(_read_line(worker, LIMIT))
        if "error" in answer:
            return Verdict(False, False, answer["error"])
        return Verdict(answer["equal"], answer["readable"])


def _end(worker: "subprocess.Popen[bytes]") -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unwritten data
                pass


def _read_line(worker: "subprocess.Popen[bytes]", seconds: float) -> bytes:
    """Return the next line of a worker. Raises _WorkerError if none arrives."""
    assert worker.stdout is not None
    clock, line = ActiveTime(), b""
    end = clock.seconds() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, min(end - clock.seconds(), INTERVAL))):
                if clock.seconds() >= end:
                    raise _WorkerError(f"no answer within {seconds:g} s")
                continue
            data = os.read(worker.stdout.fileno(), 4096)
            if not data:
                raise _WorkerError("the comparison ended its process")
            line += data
    return line
