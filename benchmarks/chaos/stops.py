"""Faults of processes: signals, kills at chosen moments, limits, and a folder that moves."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.trial import EVERY, PATIENCE, STEPS, Trial, Wrong


def signalled(number: int, code: int) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        process = trial.start()
        trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
        process.send_signal(number)
        trial.expect_end(process, code, 0)  # 0: the run ended before the signal
        trial.resume()

    return strike


def killed_while(pattern: str) -> Callable[[Trial], None]:
    """Return a fault: the run is killed as soon as a file or folder exists."""

    def strike(trial: Trial) -> None:
        process = trial.start()
        trial.wait_until(process, lambda: any(trial.run.glob(pattern)))
        time.sleep(trial.rng.uniform(0, 0.03))
        process.kill()
        process.wait()
        trial.resume()

    return strike


def killed_at_start(trial: Trial) -> None:
    process = trial.start()
    time.sleep(trial.rng.uniform(0.5, 12))
    process.kill()
    process.wait()
    trial.resume()


def stopped_at_start(trial: Trial) -> None:
    process = trial.start()
    trial.wait_until(process, lambda: "compiled" in trial.output() or "compiling" in trial.output())
    process.terminate()
    trial.expect_end(process, 143, 0)
    trial.resume()


def stopped_then_killed(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
    process.terminate()
    time.sleep(trial.rng.uniform(0, 0.6))
    process.kill()
    process.wait()
    trial.resume()


def killed_again_and_again(trial: Trial) -> None:
    for _ in range(3):
        process = trial.start()
        trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
        process.kill()
        process.wait()
    trial.resume()


def frozen(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
    process.send_signal(signal.SIGSTOP)
    time.sleep(trial.rng.uniform(1, 5))
    process.send_signal(signal.SIGCONT)
    trial.expect_end(process, 0)
    trial.compare()


def second_run(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, 3)))
    second = trial.start(number=1)
    code = second.wait(PATIENCE)
    if process.poll() is None and (code != 2 or "a run is active" not in trial.output(1)):
        raise Wrong(f"a second run was not refused: exit code {code}, {trial.output(1)[-600:]}")
    trial.expect_end(process, 0)
    trial.compare()


def one_of_two(number: int, code: int) -> Callable[[Trial], None]:
    """Return a fault: one of two processes gets a signal; both end, and resume together."""

    def strike(trial: Trial) -> None:
        processes = trial.start_all()
        trial.wait_for_step(processes[0], int(trial.rng.integers(0, STEPS)))
        struck = int(trial.rng.integers(2))
        processes[struck].send_signal(number)
        for process in processes:
            try:
                found = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                raise Wrong("the other process did not end") from None
            if number == signal.SIGTERM and found not in (0, code):
                raise Wrong(f"exit code {found}, not {code}")
        trial.resume()

    return strike


def killed_when(says: str, spread: float, *, empty_cache: bool = False) -> Callable[[Trial], None]:
    """Return a fault: the run is killed up to `spread` seconds after it has printed a text."""

    def strike(trial: Trial) -> None:
        if empty_cache:
            shutil.rmtree(trial.cache / "models")
            shutil.rmtree(trial.cache / "datasets")
        process = trial.start()
        trial.wait_until(process, lambda: says in trial.output())
        time.sleep(trial.rng.uniform(0, spread))
        process.kill()
        if process.wait() == 0 and empty_cache:
            raise Wrong("the run ended before it was killed")
        trial.resume()

    return strike


def killed_in_report(trial: Trial) -> None:
    """Kill the run while it writes the last report, which comes after the trained model."""
    process = trial.start()
    trial.wait_until(process, (trial.run / "policy").exists)
    time.sleep(trial.rng.uniform(0, 1.0))
    process.kill()
    process.wait()
    trial.resume()
    if not (trial.run / "report.html").exists():
        raise Wrong("no report")


def report_process_killed(trial: Trial) -> None:
    """Kill the process that writes reports in parallel: the run does not need it."""
    trial.fields["report.every"] = 1
    process = trial.start()
    killed = 0
    while process.poll() is None:
        killed += trial.kill_child(process, "ragen_jax.report")
        time.sleep(0.2)
    if not killed:
        raise Wrong("no report process was found")
    trial.expect_end(process, 0)
    trial.compare()


def worker_killed(trial: Trial) -> None:
    """Kill the process that compares the environment's answers, several times.

    A comparison whose process died counts as wrong, which may change rewards. So only the number of
    rows and the exit code are compared, and a new process must have started each time.
    """
    process = trial.start()
    killed = 0
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        killed += trial.kill_child(process, "worker.py")
        time.sleep(float(trial.rng.uniform(0.1, 0.5)))
    trial.expect_end(process, 0)
    if killed < 2:
        raise Wrong(f"{killed} workers were killed: no new worker was started")
    if len(trial.rows()) != STEPS + 1:
        raise Wrong(f"{len(trial.rows())} rows")


def limited(limit: str) -> Callable[[Trial], None]:
    """Return a fault: a limit is lowered during the run, which ends and resumes without the limit.

    Args:
      limit: "as", the address space, or "nofile", the number of open files.
    """

    def strike(trial: Trial) -> None:
        trial.fields["checkpoint.disk_retry_seconds"] = 1.0
        process = trial.start()
        trial.wait_for_step(process, int(trial.rng.integers(1, STEPS - 1)))
        try:
            if limit == "as":
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
                most = pages * os.sysconf("SC_PAGE_SIZE") + int(trial.rng.integers(1 << 22))
            else:
                most = len(os.listdir(f"/proc/{process.pid}/fd")) + int(trial.rng.integers(3))
            command = ["prlimit", f"--pid={process.pid}", f"--{limit}={most}:{most}"]
            subprocess.run(command, check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            if process.poll() is None:
                raise
        code = trial.wait(process)
        # C++ code may end in any way without memory; without files, code 4 and a line are promised.
        if limit == "nofile" and code not in (0, 4):
            raise Wrong(f"exit code {code}, not 4: {trial.output()[-1500:]}")
        trial.resume()

    return strike


def folder_renamed(trial: Trial) -> None:
    """Rename the run's folder during the run.

    The run ends with code 4 and a line with the new path, and writes nothing at the old path. It
    resumes under its new name.
    """
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(2 * EVERY + 1, STEPS)))
    before, after = trial.run, trial.folder / "renamed"
    before.rename(after)
    code = trial.expect_end(process, 4, 0)  # 0: the run ended before
    if code == 4 and f"{before} was renamed to {after} while" not in trial.output():
        raise Wrong(f"no line has the folder's new path: {trial.output()[-1500:]}")
    if before.exists():
        raise Wrong(f"files at the old path: {sorted(map(str, before.rglob('*')))[:9]}")
    trial.name = after.name
    trial.resume()


STOPS: dict[str, Callable[[Trial], None]] = {
    "kill -9 at a step": signalled(signal.SIGKILL, -9),
    "kill -9 in a start": killed_at_start,
    "kill -9 in the warm start": killed_when("to be imitated", 20.0, empty_cache=True),
    "kill -9 in an evaluation": killed_when("step 3/8", 2.0),
    "kill -9 in a save": killed_while("checkpoints/*orbax-checkpoint-tmp"),
    "kill -9 in an evaluation's write": killed_while("eval/.*writing*"),
    "kill -9 in the export": killed_while(".policy.saving-*"),
    "kill -9 in the last report": killed_in_report,
    "kill -9 of the report's process": report_process_killed,
    "kill -9 three times": killed_again_and_again,
    "SIGTERM": signalled(signal.SIGTERM, 143),
    "SIGINT": signalled(signal.SIGINT, 130),
    "SIGHUP": signalled(signal.SIGHUP, 129),
    "SIGTERM in a start": stopped_at_start,
    "SIGTERM then kill -9": stopped_then_killed,
    "SIGSTOP and later SIGCONT": frozen,
    "a second run in the folder": second_run,
    "the folder renamed while it runs": folder_renamed,
    "a memory limit": limited("as"),
    "too many open files": limited("nofile"),
}
WITH_WORKER = {"kill -9 of an environment's worker": worker_killed}
OF_TWO = {
    "kill -9 of one of two processes": one_of_two(signal.SIGKILL, -9),
    "SIGTERM to one of two processes": one_of_two(signal.SIGTERM, 143),
}
