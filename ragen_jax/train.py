"""Train an LLM agent by multi-turn reinforcement learning.

    python -m ragen_jax.train --config=configs/sokoban.py[:PRESET] [--workdir=DIR]
                              [--config.FIELD=VALUE ...]

This file shows the algorithm: one call and one timer per stage. If the folder holds an earlier run,
training resumes from its newest checkpoint.

    seeds -> play -> batch -> diagnose -> select -> credit -> update -> evaluate -> watch -> write
"""

import contextlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict

from ragen_jax.config import command_line as command
from ragen_jax.config.build import build_learner, build_meshes, resumable
from ragen_jax.config.fields import unused_fields, warning
from ragen_jax.config.load import load_config
from ragen_jax.config.stored import same_run
from ragen_jax.config.trust import sign
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process, main_process_first
from ragen_jax.programs.monitor import CompileMonitor, monitor_compilation
from ragen_jax.programs.precompile import Precompiler, start_programs
from ragen_jax.report.page import write_report
from ragen_jax.run.ahead import RolloutQueue
from ragen_jax.run.checkpoint import Checkpoints, find_damage, newest, not_finite
from ragen_jax.run.diagnose import diagnose
from ragen_jax.run.folder import RunFolder, open_folder
from ragen_jax.run.load import Policy, load_policy, save_policy
from ragen_jax.run.log import MetricsLog
from ragen_jax.run.provenance import Provenance, provenance_of, record, report_changes
from ragen_jax.run.reports import Reports
from ragen_jax.run.stages import StepContext, inform, make_batch, watch
from ragen_jax.run.training import Preemption, Run, Schedule, Stages
from ragen_jax.run.undefined_success import check_success
from ragen_jax.run.workdir import lock_workdir, new_folder, set_evaluations_aside
from ragen_jax.storage.atomic_io import (
    DiskRefused,
    atomic_write,
    disk_error_message,
    retry_disk_errors,
)
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import STALL_TIMEOUT, exit_on_stall
from ragen_jax.storage.trackers import require
from ragen_jax.update.learner import Learner, assign_credit, sampling_policy, select, update
from ragen_jax.update.state import TrainState


def train(
    config: ConfigDict | Config,
    workdir: Path,
    *,
    repair: bool = False,
    strict: bool = False,
    stall_timeout: float = STALL_TIMEOUT,
) -> int:
    """Start or resume the training run in `workdir`; return the exit code.

    Args:
      repair: whether to resume although lines of metrics.jsonl are damaged or lost.
      strict: whether to refuse to resume if versions, devices, code or files have changed.
      stall_timeout: with several processes, seconds without progress after which all exit.

    Raises:
      DiskRefused: the disk failed for longer than checkpoint.disk_retry_seconds, or the folder
        was renamed or removed.
    """
    with command.bad_input():
        config = load_config(config, workdir)
    with contextlib.ExitStack() as stack, monitor_compilation() as compiling:
        stack.enter_context(retry_disk_errors(config.checkpoint.disk_retry_seconds, console))
        folder = None
        try:
            with command.bad_input():
                stack.enter_context(lock_workdir(workdir))
            folder = stack.enter_context(open_folder(workdir))
            preemption = Preemption()
            run, learner, state = start(config, folder, compiling, preemption, repair, strict)
            exit_code = 1  # if `learn` raises
            if jax.process_count() > 1:
                exit_on_stall(workdir, stall_timeout)
            try:
                exit_code = learn(config, run, learner, state)
            finally:
                run.close(exit_code)
        except Exception as error:
            gone = folder.gone() if folder else None
            if folder and is_main_process():
                folder.remove_stray_checkpoint()
            reason = gone or disk_error_message(error)
            if reason is None:
                raise
            place = (folder.whereabouts() if folder else None) or workdir
            safe = newest(place / "checkpoints")
            saved = f"step {safe} is saved; resume with --workdir={place}"
            raise DiskRefused(f"{reason}; {saved if safe else 'no step is saved'}") from error
        return exit_code


def learn(config: Config, run: Run, learner: Learner, state: TrainState) -> int:
    """Run the iterations after `state` to the end of the run; return the exit code."""
    policy = sampling_policy(learner, state)
    run.precompiler.compile_now(start_programs(config, learner, state, policy, run.tasks))
    run.first_look(policy)
    rollouts = RolloutQueue(run, learner)
    for step in run.steps_after(state.step):
        stage, row = Stages(), {}

        with stage("rollout", run.sampling_mesh):
            state, sampler, played, metrics = rollouts.get_rollout(stage, policy, state, step)
            row |= metrics
        with stage("batch"):
            batch, outcomes, metrics = make_batch(run, played)
            row |= metrics
        with stage("diagnose"):
            seen = StepContext(run, learner, sampler, played, batch, outcomes, step)
            state, metrics = diagnose(seen, state)
            row |= metrics
        with stage("inform", run.sampling_mesh):
            outcomes, metrics = inform(seen, state)
            row |= metrics
        del policy, sampler, seen  # the update replaces their parameters

        with rollouts.prefetch(stage, state, step):
            with stage("select", run.mesh):
                selection, metrics = select(learner, state, batch, outcomes)
                row |= metrics
            with stage("credit", run.mesh):
                credit = assign_credit(learner, state, batch, selection, outcomes)
            with stage("update", run.mesh):
                state, metrics = update(learner, state, batch, selection, credit)
                row |= metrics
                policy = sampling_policy(learner, state)

        row |= stage.metrics() | run.evaluate_if_due(policy, step)
        state, fired, metrics = watch(run, state, row, played.returns_E, played.sound_E)
        row |= metrics
        exit_code = run.write_and_decide(step, row, state, fired, played, batch, selection, credit)
        if exit_code is not None:
            return exit_code

    run.checkpoints.close()
    if config.checkpoint.export:
        export(config, run, learner, state)
    run.finish()
    return 0


def start(
    config: Config,
    folder: RunFolder,
    compiling: CompileMonitor,
    preemption: Preemption,
    repair: bool,
    strict: bool,
) -> tuple[Run, Learner, TrainState]:
    """Build (`Run`, `Learner`, `TrainState`), restored from `folder` or at step 0.

    With invalid input, exit with code 2 before anything is written.
    """
    workdir = folder.path
    with command.bad_input():
        require(config.log.trackers)
        mesh, sampling_mesh = build_meshes(config)
        changed = same_run(config, workdir)
        made_with: Provenance = {}
        with main_process_first("provenance"):
            if is_main_process():
                made_with = provenance_of(config, platform.python_version())
                if newest(workdir / "checkpoints"):
                    report_changes(workdir, made_with, strict=strict)
        model, params, tokenizer, tasks = load_policy(config, workdir)
        for task in tasks:
            _ = task.first_training_plays  # raises if no problem can be played
        check_success(config, tasks)
        with main_process_first("damage"):
            for line in find_damage(workdir, repair) if is_main_process() else ():
                console(f"warning: {line}")
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    latest = checkpoints.latest_step()
    enter_phase("building the learner")
    images = tasks[0].settings.chat.images
    learner, state = build_learner(config, model, params, mesh, sampling_mesh, images)
    with command.bad_input():
        if latest is not None:
            enter_phase(f"restoring step {latest}")
            state = checkpoints.restore(latest, state)
        if broken := not_finite(state):
            raise ValueError(
                f"{broken} holds NaN or infinity in the checkpoint of step {latest}; remove "
                f"{checkpoints.directory / str(latest)} to resume from the previous checkpoint"
            )
    other = [name for name in changed if name.startswith("eval.") and name != "eval.every"]
    if is_main_process():
        if other and latest is not None:
            set_evaluations_aside(workdir, latest)
        sign(workdir, config)
        atomic_write(workdir / "config.json", json.dumps(config.to_dict(), indent=2) + "\n")
        record(workdir, made_with, latest)
    if latest is not None:
        console(f"resuming {workdir} after step {latest}")
        live = [task.name for task in tasks if not resumable(task.settings.environment)]
        if live:
            console(f"warning: {', '.join(live)} is not reproducible: resumed numbers will differ")
    run = Run(
        folder=folder,
        seed=config.seed,
        schedule=Schedule(
            steps=config.steps,
            evaluate=config.eval.every,
            save_rollouts=config.rollout.save_every,
            checkpoint=config.checkpoint.every,
        ),
        step_rows=learner.step_rows,
        diagnosis=config.diagnose,
        stopping=config.stopping,
        regimes=config.regimes,
        model=model,
        tokenizer=tokenizer,
        tasks=tasks,
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        checkpoints=checkpoints,
        log=MetricsLog(
            workdir / "metrics.jsonl",
            last_step=-1 if latest is None else latest,
            trackers=config.log.trackers,
            config=config.to_dict(),
        ),
        reports=Reports(workdir, every=config.report.every, write_page=write_report),
        compiling=compiling,
        precompiler=Precompiler(compiling),
        fresh=latest is None,
        preemption=preemption,
    )
    return run, learner, state


def export(config: Config, run: Run, learner: Learner, state: TrainState) -> None:
    """Write the trained model: policy/, and adapter/ of a LoRA run."""
    params, adapters = state.params, None
    if learner.frozen is not None and learner.frozen.params is not None:
        params, adapters = learner.frozen.params, state.params
        if config.model.dtype != "float32":  # too imprecise for the merged model
            params = load_policy(config, run.workdir).params
    policy = Policy(run.model, params, run.tokenizer, run.tasks)
    save_policy(run.workdir, config, policy, adapters, dtype="float32")


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        if jax.process_count() > 1 and not WORKDIR.value:
            raise ValueError("several processes need --workdir, the same folder for all of them")
        if "://" in (WORKDIR.value or ""):
            raise ValueError(
                f"--workdir is {WORKDIR.value}; it must be a path that all processes see, such "
                "as an NFS mount: metrics.jsonl is appended to, which a bucket cannot do"
            )
        workdir = Path(WORKDIR.value) if WORKDIR.value else None
        if workdir and workdir.exists() and not workdir.is_dir():
            raise ValueError(f"--workdir is {workdir}, a file; it must be a folder")
        config = load_config(CONFIG.value, workdir)
        if workdir is None:
            name = f"{config.env.name.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
            with retry_disk_errors(config.checkpoint.disk_retry_seconds, console):
                workdir = new_folder(Path("runs"), name)
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    console(f"{workdir}: {config.env.name}, model {config.model.path}, on {kind}")
    line = warning(unused_fields(config, command.overrides()))
    if line:
        console(line)
    enable_compilation_cache()
    sys.exit(
        train(config, workdir, repair=REPAIR.value, strict=STRICT.value, stall_timeout=STALL.value)
    )


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; an existing run is resumed.")
    REPAIR = flags.DEFINE_bool(
        "repair",
        False,
        "Resume although lines of the run's metrics.jsonl are damaged or lost; damaged lines "
        "are moved to a separate file.",
    )
    STRICT = flags.DEFINE_bool(
        "strict",
        False,
        "Refuse to resume a run if versions, devices, code or data files have changed since it "
        "last ran and numbers would differ.",
    )
    STALL = flags.DEFINE_float(
        "stall_timeout",
        STALL_TIMEOUT,
        "With several processes: seconds without progress after which all of them exit, "
        "because one hangs and the others wait for it.",
        lower_bound=1.0,
    )
    command.run_command(main)
