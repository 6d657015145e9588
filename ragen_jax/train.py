"""Train an LLM agent by multi-turn reinforcement learning.

    python -m ragen_jax.train --config=configs/sokoban.py[:PRESET] [--workdir=DIR]
                              [--config.FIELD=VALUE ...]

This file shows the algorithm: one call and one timer per stage. If the folder holds an earlier run,
training resumes from its newest checkpoint.

    seeds -> play -> batch -> diagnose -> inform          (`sample`)
          -> select -> credit -> update -> evaluate -> watch -> write
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict

from ragen_jax.config import command_line as command
from ragen_jax.config.fields import unused_fields, warning
from ragen_jax.config.load import load_config
from ragen_jax.configs.base import Config
from ragen_jax.core.callable_module import make_callable
from ragen_jax.core.types import Metrics, Params
from ragen_jax.programs.monitor import monitor_compilation
from ragen_jax.programs.precompile import start_programs
from ragen_jax.run.ahead import RolloutQueue
from ragen_jax.run.diagnose import diagnose, diagnose_state, needs_sampling_devices
from ragen_jax.run.stages import (
    StepContext,
    add_entropy_gate,
    inform,
    make_batch,
    play,
    watch,
)
from ragen_jax.run.start import export_policy, open_run, start
from ragen_jax.run.training import Run, Stages
from ragen_jax.run.workdir import new_folder
from ragen_jax.storage.atomic_io import retry_disk_errors
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import STALL_TIMEOUT, exit_on_stall, heartbeat
from ragen_jax.storage.program_store import enable_program_store
from ragen_jax.update.learner import Learner, assign_credit, sampling_policy, select, update
from ragen_jax.update.state import PlayedProblems, TrainState


def train(
    config: ConfigDict | Config,
    workdir: Path,
    *,
    repair: bool = False,
    strict: bool = False,
    stall_timeout: float = STALL_TIMEOUT,
    on_step: Callable[[Metrics], None] | None = None,
) -> int:
    """Start or resume the training run in `workdir`; return the exit code.

    Args:
      repair: whether to resume even if lines of metrics.jsonl are damaged or lost.
      strict: whether to refuse to resume if versions, devices, code or files have changed.
      stall_timeout: with several processes, seconds without progress after which all exit.
      on_step: called with each row of metrics when it is written.

    Raises:
      DiskRefused: the disk failed for longer than checkpoint.disk_retry_seconds, or the folder
        was renamed or removed.
    """
    with command.bad_input():
        config = load_config(config, workdir)
    with heartbeat(), open_run(config, workdir) as folder, monitor_compilation() as compiling:
        run, learner, state = start(
            config,
            folder,
            compiling,
            write_report,
            repair=repair,
            strict=strict,
            on_step=on_step,
        )
        exit_code = 1  # if `learn` raises
        if jax.process_count() > 1:
            exit_on_stall(workdir, stall_timeout)
        try:
            exit_code = learn(config, run, learner, state)
        finally:
            run.close(exit_code)
        return exit_code


def learn(config: Config, run: Run, learner: Learner, state: TrainState) -> int:
    """Train from `state` to the end of the run; return the exit code."""
    policy = sampling_policy(learner, state)
    run.precompiler.compile_now(start_programs(config, learner, state, policy, run.tasks))
    run.prepare_first_step(policy)
    with RolloutQueue(run, learner, functools.partial(sample, run, learner)) as rollouts:
        for step in run.steps_after(state.step):
            stage = Stages()

            state, seen, row = rollouts.get(stage, policy, state, step)
            if needs_sampling_devices(run.diagnosis, step):
                rollouts.wait(stage)
            with stage("diagnose"):
                state, metrics = diagnose_state(seen, state, row)
                row |= metrics
            played, batch = seen.played, seen.batch
            outcomes = add_entropy_gate(learner, state, seen.outcomes)
            del policy, seen  # the update replaces their parameters

            with rollouts.overlap(stage):
                with stage("select", run.mesh):
                    selection, metrics = select(learner, state, batch, outcomes)
                    row |= metrics
                with stage("credit", run.mesh):
                    credit = assign_credit(learner, state, batch, selection, outcomes)
                with stage("update", run.mesh):
                    learned = run.lesson(step, learner, state, (batch, selection, credit))
                    state, metrics = update(learner, state, *learned)
                    row |= metrics
                    policy = sampling_policy(learner, state)

            evaluates = run.evaluates_after(step)
            if evaluates:  # on the sampling devices
                rollouts.wait(stage)
            row |= stage.metrics() | (run.evaluate(policy, step) if evaluates else {})
            rollouts.begin_next(policy, state, step)
            state, fired, metrics = watch(run, state, row, played.returns_E, played.sound_E)
            row |= metrics
            code = run.write_and_decide(step, row, state, fired, played, batch, selection, credit)
            if code is not None:
                return code

    run.checkpoints.close()
    if config.checkpoint.export:
        export_policy(config, run, learner, state)
    run.finish()
    return 0


def sample(
    run: Run,
    learner: Learner,
    policy: Params,
    problems: PlayedProblems,
    step: int,
    stage: Stages,
) -> tuple[PlayedProblems, StepContext, Metrics]:
    """Play a step; return (problems after it, its episodes with their context, metrics)."""
    with stage("rollout", run.sampling_mesh):
        problems, played, row = play(run, policy, problems, step)
    with stage("batch"):
        batch, outcomes, metrics = make_batch(run, played)
        row |= metrics
    seen = StepContext(run, learner, policy, played, batch, outcomes, step)
    with stage("diagnose"):
        row |= diagnose(seen)
    with stage("inform", run.sampling_mesh):
        outcomes, metrics = inform(seen)
        row |= metrics
    return problems, dataclasses.replace(seen, outcomes=outcomes), row


def write_report(workdirs: list[Path]) -> Path:
    """Write the report page of runs; return its path."""
    from ragen_jax.report.page import write_report  # imported here because a start does not need it

    return write_report(workdirs)


def default_workdir(config: ConfigDict | Config) -> Path:
    """Make and return a new folder in runs/, named by the environment and the time."""
    name = f"{config.env.name.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    with retry_disk_errors(config.checkpoint.disk_retry_seconds, console):
        return new_folder(Path("runs"), name)


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        if jax.process_count() > 1 and not WORKDIR.value:
            raise ValueError("several processes need --workdir, the same folder for all of them")
        if "://" in (WORKDIR.value or ""):
            raise ValueError(
                f"--workdir is {WORKDIR.value}; it must be a path that all processes see, such "
                "as an NFS mount: training appends to metrics.jsonl, which buckets do not support"
            )
        workdir = Path(WORKDIR.value) if WORKDIR.value else None
        if workdir and workdir.exists() and not workdir.is_dir():
            raise ValueError(f"--workdir is {workdir}, a file; it must be a folder")
        config = load_config(CONFIG.value, workdir)
        if workdir is None:
            workdir = default_workdir(config)
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    console(f"{workdir}: {config.env.name}, model {config.model.path}, on {kind}")
    line = warning(unused_fields(config, command.overrides()))
    if line:
        console(line)
    enable_compilation_cache()
    enable_program_store(command.config_files())
    sys.exit(
        train(config, workdir, repair=REPAIR.value, strict=STRICT.value, stall_timeout=STALL.value)
    )


make_callable(__name__, "train")

if __name__ == "__main__":
    CONFIG = command.define_config(
        f"that of the run in --workdir, or {command.DEFAULT_CONFIG}; to start a run in a new "
        "--workdir, give --config or a --config.FIELD",
        reads_run=True,
    )
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; an existing run is resumed.")
    REPAIR = flags.DEFINE_bool(
        "repair",
        False,
        "Resume even if lines of the run's metrics.jsonl are damaged or lost; damaged lines "
        "are moved to a separate file.",
    )
    STRICT = flags.DEFINE_bool(
        "strict",
        False,
        "Refuse to resume a run if versions, devices, code or data files have changed since it "
        "last ran, so that numbers would differ.",
    )
    STALL = flags.DEFINE_float(
        "stall_timeout",
        STALL_TIMEOUT,
        "With several processes: seconds without progress after which all of them exit, "
        "because one hangs and the others wait for it.",
        lower_bound=1.0,
    )
    command.run_command(main, starts_run=True)
