"""Run the arms of an experiment in parallel, each in a separate process."""

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import jax
from ml_collections import ConfigDict

from ragen_jax.config.auto_fields import fill_auto_fields, run_date
from ragen_jax.config.check import check
from ragen_jax.config.per_task import teacher_path
from ragen_jax.config.stored import same_run
from ragen_jax.config.trust import sign
from ragen_jax.configs.base import WARMSTART, Config
from ragen_jax.configs.experiments import Experiment
from ragen_jax.core.progress import advance, enter_phase, note_output
from ragen_jax.run.fine_tune import fine_tuned_model
from ragen_jax.run.imitate import tiny_model
from ragen_jax.run.load import warmstart_teacher
from ragen_jax.run.preemption import exit_code
from ragen_jax.storage.atomic_io import atomic_write, with_retries
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links
from ragen_jax.storage.metrics_reader import count_rows, read_metrics

LOOK = 5.0  # seconds between two looks at how far the running arms are


@dataclasses.dataclass(frozen=True)
class Arm:
    """A run of an experiment."""

    setting: str
    treatment: str
    seed: int
    config: Config

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the run's key: (setting, treatment, seed), as in `curves.Runs`."""
        return self.setting, self.treatment, self.seed

    @property
    def folder(self) -> str:
        """Return the run's folder within the experiment's folder."""
        return str(self).replace(",", "").replace(" ", "_")

    def __str__(self) -> str:
        return f"{self.setting}, {self.treatment}, {self.seed}"


def shorten(experiment: Experiment) -> Experiment:
    """Return the short form of an experiment, for --quick.

    Raises:
      ValueError: the experiment has no short form.
    """
    quick = experiment.quick
    if quick is None:
        raise ValueError("--quick: this experiment has no shorter form; omit --quick")
    steps, all_steps = (x.common_fields["steps"] for x in (quick, experiment))
    return dataclasses.replace(
        experiment,
        treatments={name: experiment.treatments[name] for name in quick.treatments},
        seeds=quick.seeds,
        common_fields=experiment.common_fields | quick.common_fields,
        minutes=experiment.minutes * steps / all_steps,
    )


def arms(experiment: Experiment, config: ConfigDict) -> list[Arm]:
    """Return the `Arm`s of an experiment, ordered by seed so that each seed has all settings.

    Args:
      config: common config of the arms; the experiment's fields replace its values.

    Raises:
      ValueError: an arm has an invalid config.
    """
    plan = []
    for seed in experiment.seeds:
        for setting, changes in experiment.settings.items():
            for name, treatment in experiment.treatments.items():
                arm_config = config.copy_and_resolve_references()
                arm_config.update_from_flattened_dict(
                    {**experiment.common_fields, **changes, **treatment, "seed": seed}
                )
                fill_auto_fields(arm_config, jax.devices())
                plan.append(Arm(setting, name, seed, check(arm_config)))
    return plan


def set_dates(plan: Sequence[Arm], root: Path, today: datetime.date) -> list[Arm]:
    """Return the arms with a common date for their chat templates.

    It is the earliest date that an arm in `root` has recorded, else `today`.

    Raises:
      ValueError: the config.json of an arm is damaged.
    """
    found = []
    for arm in plan:
        found.append(run_date(arm.config.model, root / arm.folder, today))
    first = min(found, default="")
    return [
        _set_date(arm, first if date == today.isoformat() else date)
        for arm, date in zip(plan, found, strict=True)
    ]


def _set_date(arm: Arm, date: str) -> Arm:
    model = dataclasses.replace(arm.config.model, date=date)
    return dataclasses.replace(arm, config=dataclasses.replace(arm.config, model=model))


def list_fixed_fields(name: str, experiment: Experiment) -> dict[str, str]:
    """Return {field: reason} for the fields whose values an experiment sets."""
    varied = [*experiment.settings.values(), *experiment.treatments.values()]
    fields = {
        "seed",
        *experiment.common_fields,
        *(field for changes in varied for field in changes),
    }
    return dict.fromkeys(sorted(fields), f"because experiment {name} sets its own values")


def is_finished(workdir: Path, steps: int) -> bool:
    """Return whether the metrics in a run's folder extend to step `steps`."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] >= steps


def run_arms(plan: Sequence[Arm], root: Path, *, workers: int, minutes: float) -> int:
    """Train the arms that are not finished; resume those that were started.

    Each arm is a process of the train command on separate cores (processes on shared cores would
    wait for each other). Its console output is in console.log in its folder. All arms share their
    compiled programs and the warm start, which this function builds.

    Args:
      workers: largest number of arms that run in parallel, >= 1.
      minutes: expected duration of an arm, for the printed estimate.

    Returns:
      0, or the exit code of the first arm that failed. After a failure, the other running arms save
      and stop.

    Raises:
      ValueError: an arm's folder holds another run.
      SystemExit: SIGTERM or Ctrl-C was received; the arms have saved and stopped.
    """
    for arm in plan:  # including finished arms: other experiments may share the folder
        refuse_links(root / arm.folder)
        same_run(arm.config, root / arm.folder)
    waiting = [arm for arm in plan if not is_finished(root / arm.folder, arm.config.steps)]
    for arm in waiting:
        if arm.config.model.path == "tiny":
            tiny_model(arm.config)
        elif arm.config.warmstart.fine_tune:
            fine_tuned_model(arm.config)
        if teacher_path(arm.config.algorithm) == WARMSTART:
            warmstart_teacher(arm.config)
    if waiting:
        total = minutes * -(-len(waiting) // workers)
        console(f"{len(waiting)} of {len(plan)} arms, {workers} at a time: about {total:.0f} min")
    running: dict[subprocess.Popen, tuple[Arm, int]] = {}
    free = list(range(workers))
    count = _begin_counting(waiting, root)
    start, done, code = time.perf_counter(), 0, 0
    looked = start
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        while (waiting and not code) or running:
            while waiting and not code and free:
                arm, place = waiting.pop(0), free.pop(0)
                with _cores_of(place, workers):
                    running[_begin(arm, root / arm.folder)] = arm, place
            time.sleep(0.2)
            if time.perf_counter() > looked + LOOK:
                looked = time.perf_counter()
                for arm, _ in running.values():
                    count(arm)
            for process in [process for process in running if process.poll() is not None]:
                arm, place = running.pop(process)
                count(arm)
                free.append(place)
                if process.returncode:
                    code = code or process.returncode
                    console(f"{arm}: exit code {process.returncode}; see {_log(root, arm)}")
                    _stop(running)
                    continue
                done += 1
                spent = (time.perf_counter() - start) / 60
                left = spent / done * (len(waiting) + len(running))
                console(f"{arm}: done; {spent:.0f} min, about {left:.0f} min left")
    finally:
        _stop(running)
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


def _begin_counting(plan: Sequence[Arm], root: Path) -> Callable[[Arm], None]:
    """Begin the phase of running arms; return the function that counts an arm's new steps."""

    def steps_done(arm: Arm) -> int:
        rows = count_rows(root / arm.folder / "metrics.jsonl")
        return min(max(rows - 1, 0), arm.config.steps)  # the first row is that of step 0

    counted = {arm.key: steps_done(arm) for arm in plan}
    total = sum(arm.config.steps - counted[arm.key] for arm in plan)
    enter_phase("running the arms", total=total, unit="steps")
    note_output(begun=True)  # it takes minutes or hours: heartbeats become rare

    def count(arm: Arm) -> None:
        now = steps_done(arm)
        advance(now - counted[arm.key])
        counted[arm.key] = now

    return count


def _end(signum: int, frame: object) -> NoReturn:
    """End this process with an exception, so that its arms do not outlive it."""
    sys.exit(exit_code(signum))


def _log(root: Path, arm: Arm) -> Path:
    return root / arm.folder / "console.log"


def _begin(arm: Arm, folder: Path) -> subprocess.Popen:
    """Start the process that trains an arm, from its folder's config.json."""
    sign(folder, arm.config)
    atomic_write(folder / "config.json", json.dumps(arm.config.to_dict(), indent=2) + "\n")
    path = folder / "console.log"
    with with_retries(functools.partial(path.open, "a"), path) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ragen_jax.train", f"--workdir={folder}"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@contextlib.contextmanager
def _cores_of(place: int, workers: int) -> Generator[None]:
    """Run processes started within this context on every `workers`-th core, starting at `place`.

    It has no effect on systems other than Linux or if there are fewer cores than workers.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < workers:
        yield
        return
    os.sched_setaffinity(0, cores[place::workers])  # child processes inherit it
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _stop(running: Iterable[subprocess.Popen]) -> None:
    """Ask the running processes to save and stop, and wait until they have ended."""
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        process.wait()
