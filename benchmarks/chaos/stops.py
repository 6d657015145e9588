"""Faults of processes: signals, kills at chosen moments, limits, and a folder that moves."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.trial import EVERY, MAX_WAIT, STEPS, Failure, Trial


def signal_run(number: int, code: int) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        process = trial.start()
        trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
        process.send_signal(number)
        trial.expect_end(process, code, 0)  # 0: the run ended before the signal
        trial.resume()

    return strike


def kill_while(pattern: str) -> Callable[[Trial], None]:
    """Return a fault: the run is killed as soon as a file or folder exists."""

    def strike(trial: Trial) -> None:
        process = trial.start()
        trial.wait_until(process, lambda: any(trial.run.glob(pattern)))
        time.sleep(trial.rng.uniform(0, 0.03))
        process.kill()
        process.wait()
        trial.resume()

    return strike


def kill_at_start(trial: Trial) -> None:
    process = trial.start()
    time.sleep(trial.rng.uniform(0.5, 12))
    process.kill()
    process.wait()
    trial.resume()


def stop_at_start(trial: Trial) -> None:
    process = trial.start()
    trial.wait_until(process, lambda: "compiled" in trial.output() or "compiling" in trial.output())
    process.terminate()
    trial.expect_end(process, 143, 0)
    trial.resume()


def stop_then_kill(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
    process.terminate()
    time.sleep(trial.rng.uniform(0, 0.6))
    process.kill()
    process.wait()
    trial.resume()


def kill_repeatedly(trial: Trial) -> None:
    for _ in range(3):
        process = trial.start()
        trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
        process.kill()
        process.wait()
    trial.resume()


def freeze(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, STEPS)))
    process.send_signal(signal.SIGSTOP)
    time.sleep(trial.rng.uniform(1, 5))
    process.send_signal(signal.SIGCONT)
    trial.expect_end(process, 0)
    trial.compare()


def start_second_run(trial: Trial) -> None:
    process = trial.start()
    trial.wait_for_step(process, int(trial.rng.integers(0, 3)))
    second = trial.start(number=1)
    code = second.wait(MAX_WAIT)
    if process.poll() is None and (code != 2 or "a run is active" not in trial.output(1)):
        raise Failure(f"a second run was not refused: exit code {code}, {trial.output(1)[-600:]}")
    trial.expect_end(process, 0)
    trial.compare()


def signal_one_process(number: int, code: int) -> Callable[[Trial], None]:
    """Return a fault: one of two processes gets a signal; both end, and resume together."""

    def strike(trial: Trial) -> None:
        processes = trial.start_all()
        trial.wait_for_step(processes[0], int(trial.rng.integers(0, STEPS)))
        struck = int(trial.rng.integers(2))
        processes[struck].send_signal(number)
        for process in processes:
            try:
                found = process.wait(MAX_WAIT)
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                raise Failure("the other process did not end") from None
            if number == signal.SIGTERM and found not in (0, code):
                raise Failure(f"exit code {found}, not {code}")
        trial.resume()

    return strike


def kill_when(says: str, spread: float, *, empty_cache: bool = False) -> Callable[[Trial], None]:
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
            raise Failure("the run ended before it was killed")
        trial.resume()

    return strike


def kill_in_report(trial: Trial) -> None:
    """Kill the run while it writes the last report, which comes after the trained model."""
    process = trial.start()
    trial.wait_until(process, (trial.run / "policy").exists)
    time.sleep(trial.rng.uniform(0, 1.0))
    process.kill()
    process.wait()
    trial.resume()
    if not (trial.run / "report.html").exists():
        raise Failure("no report")


def kill_report_process(trial: Trial) -> None:
    """Kill the process that writes reports in parallel: the run does not need it."""
    trial.fields["report.every"] = 1
    process = trial.start()
    killed = 0
    while process.poll() is None:
        killed += trial.kill_child(process, "ragen_jax.report")
        time.sleep(0.2)
    if not killed:
        raise Failure("no report process was found")
    trial.expect_end(process, 0)
    trial.compare()


def kill_worker(trial: Trial) -> None:
    """Kill the process that compares the environment's answers, several times.

    A comparison whose process died counts as wrong, which may change rewards. So only the number of
    rows and the exit code are compared, and a new process must have started each time.
    """
    process = trial.start()
    killed = 0
    end = time.monotonic() + MAX_WAIT
    while process.poll() is None and time.monotonic() < end:
        killed += trial.kill_child(process, "worker.py")
        time.sleep(float(trial.rng.uniform(0.1, 0.5)))
    trial.expect_end(process, 0)
    if killed < 2:
        raise Failure(f"{killed} workers were killed: no new worker was started")
    if len(trial.rows()) != STEPS + 1:
        raise Failure(f"{len(trial.rows())} rows")


def limit_resources(limit: str) -> Callable[[Trial], None]:
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
            raise Failure(f"exit code {code}, not 4: {trial.output()[-1500:]}")
        trial.resume()

    return strike


def rename_folder(trial: Trial) -> None:
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
        raise Failure(f"no line has the folder's new path: {trial.output()[-1500:]}")
    if before.exists():
        raise Failure(f"files at the old path: {sorted(map(str, before.rglob('*')))[:9]}")
    trial.name = after.name
    trial.resume()


STOPS: dict[str, Callable[[Trial], None]] = {
    "kill -9 at a step": signal_run(signal.SIGKILL, -9),
    "kill -9 in a start": kill_at_start,
    "kill -9 in the warm start": kill_when("imitating the solver", 5.0, empty_cache=True),
    "kill -9 in an evaluation": kill_when("step 3/8", 2.0),
    "kill -9 in a save": kill_while("checkpoints/*orbax-checkpoint-tmp"),
    "kill -9 in an evaluation's write": kill_while("eval/.*writing*"),
    "kill -9 in the export": kill_while(".policy.saving-*"),
    "kill -9 in the last report": kill_in_report,
    "kill -9 of the report's process": kill_report_process,
    "kill -9 three times": kill_repeatedly,
    "SIGTERM": signal_run(signal.SIGTERM, 143),
    "SIGINT": signal_run(signal.SIGINT, 130),
    "SIGHUP": signal_run(signal.SIGHUP, 129),
    "SIGTERM in a start": stop_at_start,
    "SIGTERM then kill -9": stop_then_kill,
    "SIGSTOP and later SIGCONT": freeze,
    "a second run in the folder": start_second_run,
    "the folder renamed while it runs": rename_folder,
    "a memory limit": limit_resources("as"),
    "too many open files": limit_resources("nofile"),
}
WITH_WORKER = {"kill -9 of an environment's worker": kill_worker}
TWO_PROCESS_STOPS = {
    "kill -9 of one of two processes": signal_one_process(signal.SIGKILL, -9),
    "SIGTERM to one of two processes": signal_one_process(signal.SIGTERM, 143),
}
