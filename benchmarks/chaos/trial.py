"""A trial: a run with a fault, its commands, and the comparison with its twin."""

import dataclasses
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from ragen_jax.run.run_files import read_outcomes
from ragen_jax.storage.metrics_reader import read_metrics

STEPS, EVERY = 8, 2  # number of steps of a run, and between two checkpoints
FIELDS: dict[str, object] = {
    **{"steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 3, "report.every": 0},
    **{"warmstart.success": 0.05, "warmstart.rooms": 1024, "warmstart.check_every": 100},
    **{"rollout.groups": 4, "rollout.group_size": 4, "rollout.save_every": 2},
    **{"eval.every": 4, "eval.episodes": 32, "diagnose.scores_every": 4, "env.max_turns": 3},
    "optimizer.micro_batch": 4,
}
# Fields for the environments of this benchmark: the agent of the plain twin, and no rule that stops
# the run when it learns little or episodes break.
LEARNER: dict[str, object] = {
    "model.path": "{root}/twin_plain/run/model",
    "env.max_error_share": 1.0,
    **{f"stopping.{rule}.action": "off" for rule in ("variance", "success", "empty")},
}
CLOCK_FIELDS = ("time/", "throughput/", "memory/")
MAX_WAIT = 600.0  # maximum seconds to wait for a process
# Variables that are removed: each trial has its own cache and console encoding.
CLEARED_VARIABLES = (
    "JAX_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE",
    "JAX_ENABLE_COMPILATION",
    "PYTHONIO",
)


class Failure(Exception):
    """A trial did not end as promised."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings that a trial has in common with its twin."""

    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)  # override FIELDS
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)  # file name -> text
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # environment variables
    processes: int = 1
    config: str = "sokoban"  # config file of the command


@dataclasses.dataclass
class Trial:
    """A run with a fault."""

    folder: Path  # contains the run, its cache and its code
    twin: Path
    rng: np.random.Generator
    setup: Setup = Setup()
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = "run"

    def __post_init__(self) -> None:
        """Write the setup's code to the folder that the run imports it from."""
        self.code.mkdir(parents=True, exist_ok=True)
        for name, text in self.setup.code.items():
            (self.code / name).write_text(text)

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "ragen_jax"

    @property
    def code(self) -> Path:
        return self.folder / "code"

    # -------------------------------------------------------------------------- its processes

    def start(
        self,
        *flags: str,
        number: int = 0,
        port: int = 0,
        wrapper: tuple[str, ...] = (),
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start process `number` of the run's command.

        Args:
          flags: further flags of the command.
          port: port of the coordinator, for several processes.
          wrapper: words before the command, such as ("prlimit", "--nofile=64").
          stdout, stderr: by default a file, which `output` reads.
        """
        words = [f"--workdir={self.run}", *flags]
        if not (self.run / "config.json").exists():
            fields = FIELDS | dict(self.setup.fields) | self.fields
            words += [f"--config={self.setup.config}"]
            words += [f"--config.{name}={value}" for name, value in fields.items()]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(CLEARED_VARIABLES)}
        path = [str(self.code), environment.get("PYTHONPATH", "")]
        environment |= {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONDONTWRITEBYTECODE": "1",  # code that changes within a second is read again
        }
        environment |= self.setup.variables | self.variables
        if self.setup.processes > 1:
            words.append("--distributed")
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(self.setup.processes),
                "JAX_PROCESS_ID": str(number),
                "NPROC": "32",
            }
        with (self.folder / f"output{number}").open("wb") as output:
            return subprocess.Popen(
                [*wrapper, sys.executable, "-m", "ragen_jax.train", *words],
                env=environment,
                stdout=output if stdout is None else stdout,
                stderr=output if stderr is None else stderr,
            )

    def start_all(self, *flags: str) -> "list[subprocess.Popen[bytes]]":
        """Start all processes of the run's command."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [self.start(*flags, number=n, port=port) for n in range(self.setup.processes)]

    def output(self, number: int = 0) -> str:
        """Return the text that a process has printed so far."""
        return (self.folder / f"output{number}").read_text(errors="replace")

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        """Wait for a process and return its exit code; raise Failure after MAX_WAIT seconds."""
        try:
            return process.wait(MAX_WAIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Failure(f"did not end within {MAX_WAIT:g} s: {self.output()[-600:]}") from None

    def expect_end(self, process: "subprocess.Popen[bytes]", *codes: int, says: str = "") -> int:
        """Wait for a process; raise Failure unless its code is in `codes` and it prints `says`."""
        code = self.wait(process)
        if code not in codes:
            raise Failure(f"exit code {code}, not {codes}: {self.output()[-1500:]}")
        if says not in self.output():
            raise Failure(f"did not print {says!r}: {self.output()[-1500:]}")
        if code in (0, 2, 4) and "Traceback" in self.output():
            raise Failure(f"exit code {code}, and a traceback: {self.output()[-1500:]}")
        return code

    def wait_until(self, process: "subprocess.Popen[bytes]", ready: Callable[[], object]) -> None:
        """Wait until `ready` is true or the process has ended."""
        end = time.monotonic() + MAX_WAIT
        while process.poll() is None and not ready() and time.monotonic() < end:
            time.sleep(0.005)

    def wait_for_step(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        """Wait for the row of a step, then for part of the next step."""
        path = self.run / "metrics.jsonl"
        mark = f'{{"step": {step},'
        self.wait_until(process, lambda: path.exists() and mark in path.read_text())
        time.sleep(self.rng.uniform(0, 0.4))

    def kill_midway(self) -> None:
        """Start the run, and kill it at a random time after its second checkpoint."""
        process = self.start()
        self.wait_for_step(process, int(self.rng.integers(2 * EVERY + 1, STEPS)))
        process.kill()
        process.wait()
        if not (self.run / "metrics.jsonl").exists():
            raise Failure(f"ended before its first step: {self.output()[-1500:]}")

    def resume(self, *flags: str, says: str = "") -> None:
        """Run the same command again; raise Failure unless it ends with the figures of the twin."""
        for process in self.start_all(*flags):
            self.expect_end(process, 0, says=says)
        self.compare()

    def rows(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """Return the rows of a run without the figures that differ between identical runs."""
        return [
            {k: v for k, v in row.items() if not k.startswith(CLOCK_FIELDS)}
            for row in read_metrics((folder or self.run) / "metrics.jsonl")
        ]

    def compare(self) -> None:
        """Compare a finished run with its twin."""
        found, expected = self.rows(), self.rows(self.twin)
        if found != expected:
            differing = [
                (a.get("step"), sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))[:3])
                for a, b in zip(found, expected, strict=False)
                if a != b
            ]
            raise Failure(
                f"{len(found)} rows, the twin has {len(expected)}; different: {differing}"
            )
        if read_outcomes(self.run / "eval") != read_outcomes(self.twin / "eval"):
            raise Failure("evaluations differ from the twin's")
        if not (self.run / "policy" / "model.safetensors").exists():
            raise Failure("the trained model was not exported")

    def expect_refusal(self, mend: Callable[[], object], says: str, *flags: str) -> None:
        """Run the same command; it must end with code 2 and the line `says`, and change no file.
        After `mend`, it must resume."""
        before = self.contents()
        self.expect_end(self.start(*flags), 2, says=says)
        if self.contents() != before:
            raise Failure("a refused start changed files")
        mend()
        self.resume()

    def contents(self) -> dict[str, str]:
        """Return {path: hash} of the files of the run."""
        files = [path for path in self.run.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def children(self, process: "subprocess.Popen[bytes]", words: str) -> list[int]:
        """Return the ids of a process's descendants whose command contains `words`."""
        found, parents = [], [process.pid]
        while parents:
            pid = parents.pop()
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    below = [int(word) for word in path.read_text().split()]
                    parents += below
                    for each in below:
                        if words in Path(f"/proc/{each}/cmdline").read_text().replace("\0", " "):
                            found.append(each)
                except OSError:  # the process has ended meanwhile
                    continue
        return found

    def kill_child(self, process: "subprocess.Popen[bytes]", words: str) -> bool:
        """Kill the processes of `children`; return whether there were any."""
        found = self.children(process, words)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return bool(found)

    # -------------------------------------------------------------------------- damage

    def saved(self) -> list[Path]:
        """Return the finished checkpoints, the newest last."""
        found = [path for path in (self.run / "checkpoints").iterdir() if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name))

    def newest(self) -> Path:
        """Return the newest finished checkpoint."""
        return self.saved()[-1]

    def one_of(self, folder: Path, pattern: str = "*") -> Path:
        """Return a random file, with probability in proportion to its size."""
        files = sorted(path for path in folder.rglob(pattern) if path.stat().st_size)
        files = [path for path in files if path.is_file() and not path.name.endswith(".lock")]
        sizes = np.array([path.stat().st_size for path in files], float)
        return files[self.rng.choice(len(files), p=sizes / sizes.sum())]

    def rewrite(self, path: Path, content: bytes) -> Callable[[], None]:
        """Replace a file and return the undo function.

        The file is written anew, since it may be hard-linked to the caches of other trials.
        """
        before = path.read_bytes()

        def write(data: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(data)

        write(content)
        return lambda: write(before)

    def flip(self, path: Path) -> Callable[[], None]:
        """Flip a random bit of a file and return the undo function."""
        content = bytearray(path.read_bytes())
        content[self.rng.integers(len(content))] ^= 1 << int(self.rng.integers(8))
        return self.rewrite(path, bytes(content))

    def lines(self) -> list[bytes]:
        """Return the lines of metrics.jsonl."""
        return (self.run / "metrics.jsonl").read_bytes().splitlines(True)
