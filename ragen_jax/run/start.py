"""The start and the end of a run: its folder, the parts of its loop, the exported policy."""

import contextlib
import json
import platform
from collections.abc import Callable, Generator
from pathlib import Path

from ragen_jax.config import command_line as command
from ragen_jax.config.build_environment import resumable
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes, check_images_ahead, check_layers
from ragen_jax.config.stored import same_run
from ragen_jax.config.trust import sign
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process, main_process_first
from ragen_jax.core.types import Metrics
from ragen_jax.model.vision.image_table import ImageTable
from ragen_jax.programs.monitor import CompileMonitor
from ragen_jax.programs.precompile import Precompiler
from ragen_jax.run.checkpoint import Checkpoints, find_damage, newest, not_finite
from ragen_jax.run.folder import RunFolder, open_folder
from ragen_jax.run.interleave import build_imitation
from ragen_jax.run.load import Policy, load_policy, load_reference, save_policy
from ragen_jax.run.log import MetricsLog
from ragen_jax.run.model_card import card_of_run
from ragen_jax.run.preemption import Preemption
from ragen_jax.run.provenance import Provenance, provenance_of, record, report_changes
from ragen_jax.run.reports import Reports
from ragen_jax.run.training import Run, Schedule
from ragen_jax.run.undefined_success import check_success
from ragen_jax.run.workdir import lock_workdir, set_evaluations_aside
from ragen_jax.storage.atomic_io import (
    DiskRefused,
    atomic_write,
    disk_error_message,
    retry_disk_errors,
)
from ragen_jax.storage.console import console
from ragen_jax.storage.trackers import require
from ragen_jax.update.learner import Learner
from ragen_jax.update.state import TrainState


@contextlib.contextmanager
def open_run(config: Config, workdir: Path) -> Generator[RunFolder]:
    """Lock a run's folder, and retry disk errors within this context.

    Raises:
      DiskRefused: the disk failed for longer than checkpoint.disk_retry_seconds, or the folder
        was renamed or removed; the message names the newest saved step.
    """
    folder = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(retry_disk_errors(config.checkpoint.disk_retry_seconds, console))
        try:
            with command.bad_input():
                stack.enter_context(lock_workdir(workdir))
            folder = stack.enter_context(open_folder(workdir))
            yield folder
        except Exception as error:
            gone = folder.explain_absence() if folder else None
            if folder and is_main_process():
                folder.remove_stray_checkpoint()
            reason = gone or disk_error_message(error)
            if reason is None:
                raise
            place = (folder.whereabouts() if folder else None) or workdir
            safe = newest(place / "checkpoints")
            saved = f"step {safe} is saved; resume with --workdir={place}"
            raise DiskRefused(f"{reason}; {saved if safe else 'no step is saved'}") from error


def start(
    config: Config,
    folder: RunFolder,
    compiling: CompileMonitor,
    write_page: Callable[[list[Path]], Path],
    *,
    repair: bool,
    strict: bool,
    on_step: Callable[[Metrics], None] | None = None,
) -> tuple[Run, Learner, TrainState]:
    """Build (`Run`, `Learner`, `TrainState`), restored from `folder` or at step 0.

    With invalid input, exit with code 2 before anything is written.

    Args:
      write_page: as in `Reports`.
      repair, strict, on_step: as in `ragen_jax.train.train`.
    """
    workdir = folder.path
    preemption = Preemption(workdir)
    with command.bad_input():
        require(config.log.trackers)
        mesh, sampling_mesh = build_meshes(config)
        changed = same_run(config, workdir)
        check_steps(config, workdir)
        made_with: Provenance = {}
        with main_process_first("provenance"):
            if is_main_process():
                made_with = provenance_of(config, platform.python_version())
                if newest(workdir / "checkpoints"):
                    report_changes(workdir, made_with, strict=strict)
        policy = load_policy(config, workdir)
        model, params, tokenizer, tasks = policy
        check_layers(config, model.config)
        for task in tasks:
            _ = task.first_training_plays  # raises if no problem can be played
        teacher = load_reference(config, policy)
        check_success(config, tasks)
        check_images_ahead(config, tasks[0].settings.chat.images)
        imitation = build_imitation(config, tasks[0], model.config.max_positions)
        with main_process_first("damage"):
            for line in find_damage(workdir, repair) if is_main_process() else ():
                console(f"warning: {line}")
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    latest = checkpoints.latest_step()
    enter_phase("building the learner")
    images = tasks[0].settings.chat.images
    if isinstance(images, ImageTable):
        images.earlier_epochs = max(1, config.rollout.ahead)
    learner, state = build_learner(config, model, params, mesh, sampling_mesh, images, teacher)
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
        console(_resume_line(config, workdir, latest))
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
        imitation=imitation,
        sampler_weights=config.lab.sampler_weights,
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
            on_row=on_step,
        ),
        reports=Reports(workdir, every=config.report.every, write_page=write_page),
        compiling=compiling,
        precompiler=Precompiler(compiling),
        fresh=latest is None,
        completions=config.log.completions,
        preemption=preemption,
    )
    return run, learner, state


def check_steps(config: Config, workdir: Path) -> None:
    """Refuse a number of steps that the run has already passed.

    The number that it has reached is accepted: the run ends there, with its report and policy.

    Raises:
      ValueError: config.steps is below the newest checkpoint's step.
    """
    done = newest(workdir / "checkpoints")
    if config.steps < done:
        raise ValueError(
            f"config.steps is {config.steps}, but step {done} of the run in {workdir} is saved; "
            f"give --config.steps={done} to end the run there, or a larger number to continue it"
        )


def _resume_line(config: Config, workdir: Path, latest: int) -> str:
    """Return the line about a run that resumes after step `latest`, or that has no step left."""
    if latest < config.steps:
        return f"resuming {workdir} after step {latest}"
    how = f"to continue, give --config.steps=M with M above {latest}"
    if config.optimizer.schedule != "constant":  # same_run refuses another number of steps
        how = f"its learning rate ends there (optimizer.schedule={config.optimizer.schedule})"
    return f"all {latest} steps of {workdir} are done; {how}"


def export_policy(config: Config, run: Run, learner: Learner, state: TrainState) -> None:
    """Write the trained model: policy/, and adapter/ of a LoRA run."""
    enter_phase("writing the policy")
    params, adapters = state.params, None
    if learner.frozen is not None and learner.frozen.params is not None:
        params, adapters = learner.frozen.params, state.params
        if config.model.dtype != "float32":  # too imprecise for the merged model
            params = load_policy(config, run.workdir).params
    policy = Policy(run.model, params, run.tokenizer, run.tasks)
    card = card_of_run(config, run.workdir, int(state.step))
    save_policy(run.workdir, config, policy, adapters, dtype="float32", card=card)
