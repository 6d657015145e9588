"""A trial: a run that a fault strikes, its commands, and the comparison with its twin."""

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

STEPS, EVERY = 8, 2  # of a run; between two checkpoints
FIELDS: dict[str, object] = {
    **{"steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 3, "report.every": 0},
    **{"warmstart.success": 0.05, "warmstart.rooms": 1024, "warmstart.check_every": 100},
    **{"rollout.groups": 4, "rollout.group_size": 4, "rollout.save_every": 2},
    **{"eval.every": 4, "eval.episodes": 32, "diagnose.scores_every": 4, "env.max_turns": 3},
    "optimizer.micro_batch": 4,
}
# Of environments of our own: the agent of the plain twin, and no rule that stops it when it learns
# little or episodes break.
LEARNER: dict[str, object] = {
    "model.path": "{root}/twin_plain/run/model",
    "env.max_error_share": 1.0,
    **{f"stopping.{rule}.action": "off" for rule in ("variance", "success", "empty")},
}
CLOCK_FIELDS = ("time/", "throughput/", "memory/")
PATIENCE = 600.0  # seconds for a process to do what it should
# Each trial has its own cache and console encoding, whatever the shell sets.
CLEARED = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_ENABLE_COMPILATION", "PYTHONIO")


class Wrong(Exception):
    """A trial did not end as promised."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a trial has in common with its twin."""

    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)  # over FIELDS
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)  # file name -> its text
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the environment
    processes: int = 1
    config: str = "sokoban"  # of the command


@dataclasses.dataclass
class Trial:
    """A run that a fault strikes."""

    folder: Path  # of the run, its cache and its code
    twin: Path
    rng: np.random.Generator
    setup: Setup = Setup()
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = "run"

    def __post_init__(self) -> None:
        """Writes the setup's code where the run imports it from."""
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
        """Starts process `number` of the run's command.

        Args:
          flags: further flags of the command.
          port: of the coordinator, for several processes.
          wrapper: words before the command, such as ("prlimit", "--nofile=64").
          stdout, stderr: by default a file, which `output` reads.
        """
        words = [f"--workdir={self.run}", *flags]
        if not (self.run / "config.json").exists():
            fields = FIELDS | dict(self.setup.fields) | self.fields
            words += [f"--config={self.setup.config}"]
            words += [f"--config.{name}={value}" for name, value in fields.items()]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(CLEARED)}
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
        """Starts all processes of the run's command."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [self.start(*flags, number=n, port=port) for n in range(self.setup.processes)]

    def output(self, number: int = 0) -> str:
        """The text that a process has printed so far."""
        return (self.folder / f"output{number}").read_text(errors="replace")

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        """The exit code of a process, which must end in time."""
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Wrong(f"did not end within {PATIENCE:g} s: {self.output()[-600:]}") from None

    def expect_end(self, process: "subprocess.Popen[bytes]", *codes: int, says: str = "") -> int:
        """Waits for a process that should end with one of the codes and print `says`."""
        code = self.wait(process)
        if code not in codes:
            raise Wrong(f"exit code {code}, not {codes}: {self.output()[-1500:]}")
        if says not in self.output():
            raise Wrong(f"did not say {says!r}: {self.output()[-1500:]}")
        if code in (0, 2, 4) and "Traceback" in self.output():
            raise Wrong(f"exit code {code}, and a traceback: {self.output()[-1500:]}")
        return code

    def wait_until(self, process: "subprocess.Popen[bytes]", ready: Callable[[], object]) -> None:
        """Waits until something is true, or the process has ended."""
        end = time.monotonic() + PATIENCE
        while process.poll() is None and not ready() and time.monotonic() < end:
            time.sleep(0.005)

    def wait_for_step(self, process: "subprocess.Popen[bytes]", step: int) -> None:
        """Waits for the row of a step, then for part of the next one."""
        path = self.run / "metrics.jsonl"
        mark = f'{{"step": {step},'
        self.wait_until(process, lambda: path.exists() and mark in path.read_text())
        time.sleep(self.rng.uniform(0, 0.4))

    def kill_midway(self) -> None:
        """Runs it until some time after its second checkpoint, then kills it."""
        process = self.start()
        self.wait_for_step(process, int(self.rng.integers(2 * EVERY + 1, STEPS)))
        process.kill()
        process.wait()
        if not (self.run / "metrics.jsonl").exists():
            raise Wrong(f"ended before its first step: {self.output()[-1500:]}")

    def resume(self, *flags: str, says: str = "") -> None:
        """The same command ends well, with the figures of the twin."""
        for process in self.start_all(*flags):
            self.expect_end(process, 0, says=says)
        self.compare()

    def rows(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """The rows of a run without those figures that differ between identical runs."""
        return [
            {k: v for k, v in row.items() if not k.startswith(CLOCK_FIELDS)}
            for row in read_metrics((folder or self.run) / "metrics.jsonl")
        ]

    def compare(self) -> None:
        """Compares a run that has ended with its twin."""
        found, expected = self.rows(), self.rows(self.twin)
        if found != expected:
            differing = [
                (a.get("step"), sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))[:3])
                for a, b in zip(found, expected, strict=False)
                if a != b
            ]
            raise Wrong(f"{len(found)} rows, {len(expected)} of the twin; different: {differing}")
        if read_outcomes(self.run / "eval") != read_outcomes(self.twin / "eval"):
            raise Wrong("evaluations differ from the twin's")
        if not (self.run / "policy" / "model.safetensors").exists():
            raise Wrong("the trained model was not exported")

    def expect_refusal(self, mend: Callable[[], object], says: str, *flags: str) -> None:
        """The same command ends with code 2 and a line, and changes nothing; after the mend it
        resumes."""
        before = self.contents()
        self.expect_end(self.start(*flags), 2, says=says)
        if self.contents() != before:
            raise Wrong("files were changed by a start that was refused")
        mend()
        self.resume()

    def contents(self) -> dict[str, str]:
        """A hash of each file of the run."""
        files = [path for path in self.run.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def children(self, process: "subprocess.Popen[bytes]", words: str) -> list[int]:
        """The processes below one whose command holds some words."""
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
                except OSError:  # it has ended meanwhile
                    continue
        return found

    def kill_child(self, process: "subprocess.Popen[bytes]", words: str) -> bool:
        """Kills the processes of `children`; whether there were any."""
        found = self.children(process, words)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return bool(found)

    # -------------------------------------------------------------------------- damage

    def saved(self) -> list[Path]:
        """The finished checkpoints, the newest last."""
        found = [path for path in (self.run / "checkpoints").iterdir() if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name))

    def newest(self) -> Path:
        """The newest finished checkpoint."""
        return self.saved()[-1]

    def one_of(self, folder: Path, pattern: str = "*") -> Path:
        """A file drawn at random, the larger the likelier."""
        files = sorted(path for path in folder.rglob(pattern) if path.stat().st_size)
        files = [path for path in files if path.is_file() and not path.name.endswith(".lock")]
        sizes = np.array([path.stat().st_size for path in files], float)
        return files[self.rng.choice(len(files), p=sizes / sizes.sum())]

    def rewrite(self, path: Path, content: bytes) -> Callable[[], None]:
        """Replaces a file, which is hard-linked to other trials' caches; returns the undo."""
        before = path.read_bytes()

        def write(data: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(data)

        write(content)
        return lambda: write(before)

    def flip(self, path: Path) -> Callable[[], None]:
        """Flips a bit of a file; returns the undo."""
        content = bytearray(path.read_bytes())
        content[self.rng.integers(len(content))] ^= 1 << int(self.rng.integers(8))
        return self.rewrite(path, bytes(content))

    def lines(self) -> list[bytes]:
        """The lines of metrics.jsonl."""
        return (self.run / "metrics.jsonl").read_bytes().splitlines(True)
