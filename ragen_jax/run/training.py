"""A training run without its mathematics: its parts, its schedules and the files that it writes.

workdir/  metrics.jsonl  events.jsonl  tensorboard/  trackers/  eval/  rollouts/  diagnostics/
          checkpoints/  report.html
          nonfinite_step_*.npz
"""

import dataclasses
import functools
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from ragen_jax.algorithm.rewards import turn_reward
from ragen_jax.config.per_task import is_due
from ragen_jax.configs.base import Diagnose, Regimes, Stopping
from ragen_jax.core.memory import memory_metrics
from ragen_jax.core.progress import (
    count_barrier,
    enter_phase,
    enter_phase_beside,
    note_output,
)
from ragen_jax.core.sharding import is_main_process, max_over_processes
from ragen_jax.core.task_shares import split_groups
from ragen_jax.core.types import Batch, Metrics, Params
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.model.qwen import Qwen
from ragen_jax.programs.monitor import CompileMonitor
from ragen_jax.programs.precompile import Precompiler
from ragen_jax.rollout.play import compile_ahead
from ragen_jax.rollout.task import Task
from ragen_jax.run.checkpoint import Checkpoints, not_finite
from ragen_jax.run.folder import RunFolder
from ragen_jax.run.heldout import chance_success, evaluate
from ragen_jax.run.interleave import Imitation, Learned
from ragen_jax.run.judgement import judgement_lines
from ragen_jax.run.log import (
    MetricsLog,
    eval_line,
    learning_curve,
    live_figures,
    step_line,
    write_events,
    write_outcomes,
    write_rollouts,
)
from ragen_jax.run.preemption import Preemption, exit_code
from ragen_jax.run.reports import Reports
from ragen_jax.run.samples import invalid_reply_lines, sample_lines
from ragen_jax.run.step import Played
from ragen_jax.storage.atomic_io import atomic_open
from ragen_jax.storage.console import console
from ragen_jax.storage.console_streams import take_failures
from ragen_jax.update.learner import Learner, Selection, StepCredit
from ragen_jax.update.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STOPPED = 3  # exit code after a stopping rule's "stop"
ACTIONS = {"stop": "stopped", "warn": "warning", "checkpoint": "saved", "tighten": "tightened"}
UPDATE_STAGES = ("select", "credit", "update")  # stages whose seconds add up to time/update


class Stages:
    """Seconds spent in the named stages of a step, as time/* metrics."""

    def __init__(self, *, background: bool = False) -> None:
        """Create it without any stage.

        Args:
          background: whether the stages run in parallel with the phases that the user sees.
        """
        self.background = background
        self.seconds: dict[str, float] = {}
        self.cpu = 0.0  # CPU seconds of this process and its threads, over all stages
        # Seconds of stages that ran during earlier steps.
        self.prefetch_seconds: dict[str, float] = {}
        # Seconds in which a rollout and the updates ran in parallel; None: the run never does this.
        self.overlap_seconds: float | None = None

    @contextmanager
    def __call__(self, name: str, mesh: Mesh | None = None) -> Generator[None]:
        """Time the body; run it under `mesh`, if given."""
        if self.background:
            enter_phase_beside(name)
        else:
            enter_phase(name)
            count_barrier()
        start, cpu = time.perf_counter(), time.process_time()
        if mesh is None:
            yield
        else:
            with jax.set_mesh(mesh):
                yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.cpu += time.process_time() - cpu

    def metrics(self) -> Metrics:
        """Return the time/* metrics of the step, in seconds.

        Each stage has its time/NAME. time/step is the sum of the stages; time/update is the part of
        select, credit and update, and time/diagnose_share the fraction of the diagnosis. time/cpu
        is CPU time of the process, without work on an accelerator. If rollouts run in parallel with
        updates, time/idle_share is the fraction of time/step in which they did not both run, and
        the seconds of a stage include those that ran during earlier steps.
        """
        total = sum(self.seconds.values())
        s = self.seconds | {
            name: seconds + self.seconds.get(name, 0.0)
            for name, seconds in self.prefetch_seconds.items()
        }
        idle = (
            {}
            if self.overlap_seconds is None
            else {"time/idle_share": 1.0 - self.overlap_seconds / total}
        )
        return idle | {
            **{f"time/{name}": seconds for name, seconds in s.items()},
            "time/update": sum(s[name] for name in UPDATE_STAGES),
            "time/step": total,
            "time/cpu": self.cpu,
            "time/diagnose_share": s["diagnose"] / total,
        }


HELDOUT_KEPT = 64  # number of held-out problems whose episodes are kept at each evaluation


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The number of steps of a run, and intervals in steps; 0: never."""

    steps: int  # number of the last step
    evaluate: int  # steps between evaluations
    save_rollouts: int  # steps between files in rollouts/
    checkpoint: int  # steps between checkpoints


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run that the mathematics does not need."""

    folder: RunFolder
    seed: int
    schedule: Schedule
    step_rows: int  # maximum number of rows of a step
    diagnosis: Diagnose
    stopping: Stopping  # settings of diagnostics/stopping.py
    regimes: Regimes  # settings of diagnostics/regimes.py
    model: Qwen
    tokenizer: "PreTrainedTokenizerFast"
    tasks: tuple["Task", ...]
    mesh: Mesh  # training mesh
    sampling_mesh: Mesh
    checkpoints: Checkpoints
    log: MetricsLog
    reports: Reports
    compiling: CompileMonitor
    precompiler: Precompiler
    fresh: bool  # whether the run starts at step 0, without a checkpoint
    completions: int  # replies printed in each step
    imitation: Imitation | None  # steps that imitate demonstrations; None: none
    sampler_weights: str  # a key of model/rounding.py: PRECISIONS
    preemption: Preemption

    @property
    def workdir(self) -> Path:
        """The run's folder.

        Raises:
          FolderGone: the folder is no longer at its path.
        """
        return self.folder.require_path()

    # -------------------------------------------------------------------------- schedules

    def steps_after(self, step: int | jax.Array) -> Iterator[int]:
        """Yield the numbers of the steps after `step`, with a progress bar."""
        first, last = int(step) + 1, self.schedule.steps
        self.preemption.saves = True
        bar = tqdm(
            range(first, last + 1),
            initial=first - 1,
            total=last,
            disable=None if is_main_process() else True,  # None: shown only on a terminal
            dynamic_ncols=True,
        )
        for number in bar:
            yield number
            bar.set_postfix_str(live_figures(self.log.last))

    def lesson(self, step: int, learner: Learner, state: TrainState, learned: Learned) -> Learned:
        """Return what the update of a step learns from: its episodes, or demonstrations."""
        if self.imitation is None:
            return learned
        return self.imitation.replace(step, learner, state, learned)

    def prepare_first_step(self, policy: Params) -> None:
        """Compile the rollout programs that precompile.py leaves out; evaluate a new run."""
        for task in self.tasks if jax.process_count() > 1 else ():
            if not task.settings.compact:
                continue
            with jax.set_mesh(self.sampling_mesh):
                compile_ahead(
                    self.model,
                    policy,
                    task.training_settings,
                    0,
                    rows=task.groups * task.group_size,
                    key=task.key,
                )
        if self.fresh and self.schedule.evaluate:
            metrics = self.evaluate(policy, 0) | chance_success(self.tasks) | self._row_costs(0)
            console(eval_line(0, self.log.write(0, metrics)))
            self._print_judgement()

    def evaluates_after(self, step: int) -> bool:
        """Return whether an evaluation is due after a step."""
        every = self.schedule.evaluate
        return is_due(every, step) or bool(every and step == self.schedule.steps)

    def evaluate(self, policy: Params, step: int) -> Metrics:
        """Return eval/* metrics and time/eval; write which problems were solved.

        The episodes of the first HELDOUT_KEPT problems are kept as well, unless no episodes are.
        """
        stage = Stages()
        with stage("eval", self.sampling_mesh):
            metrics, episodes_E = evaluate(self.model, policy, self.tasks)
        for task, episodes in zip(self.tasks, episodes_E, strict=True):
            folder = self.workdir / "eval" / task.label
            write_outcomes(folder, step, episodes)
            if self.schedule.save_rollouts and is_main_process():
                write_rollouts(
                    folder / "episodes" / f"step_{step:06d}.jsonl",
                    episodes[:HELDOUT_KEPT],
                    task.settings.chat,
                    functools.partial(turn_reward, format_penalty=task.penalties.format_penalty),
                    kept=None,
                )
        return metrics | {"time/eval": stage.seconds["eval"]}

    # -------------------------------------------------------------------------- writing

    def write_and_decide(
        self,
        step: int,
        metrics: Metrics,
        state: TrainState,
        fired: Iterable[Fired],
        played: "Played",
        batch: Batch,
        selection: Selection,
        credit: StepCredit,
    ) -> int | None:
        """Write the files and console lines of a step, and decide whether the run ends here.

        Args:
          metrics: the step's metrics so far.
          state: the state after the step.
          batch, credit: rows and advantages of the step, saved if its update was not finite.
          selection: which of the episodes the step learns from.

        Returns:
          The exit code if the run ends here, else None.
        """
        fired = [*played.fired, *fired, *_console_failures()]
        if self._saves_rollouts(step, bool(fired)) and is_main_process():
            kept_E = self._kept_episodes(played, selection)
            for task, episodes, kept in zip(self.tasks, played.episodes_E, kept_E, strict=True):
                write_rollouts(
                    self.workdir / "rollouts" / task.label / f"step_{step:06d}.jsonl",
                    episodes,
                    task.settings.chat,
                    functools.partial(turn_reward, format_penalty=task.penalties.format_penalty),
                    kept,
                )
        tokens = metrics.get("rollout/response_length", 0.0) * metrics["rollout/replies"]
        metrics["throughput/tokens_per_second"] = tokens / metrics["time/step"]
        episodes = sum(map(len, played.episodes_E))
        metrics |= self.log.totals.add(tokens=round(tokens), episodes=episodes)
        metrics |= self._row_costs(step)
        row = self.log.write(step, metrics)
        console(step_line(step, self.schedule.steps, row, self.log.measured))
        note_output(begun=True)
        if "eval/return" in row:
            console(eval_line(step, row))
        self._print_replies(step, played)
        if self.fresh and step == 1:
            self._print_judgement()
        for rule in fired:
            console(f"{ACTIONS[rule.action]}: {rule.reason}")
            if rule.rule == "nonfinite" and is_main_process():
                path = self.workdir / f"nonfinite_step_{step}.npz"
                arrays: Any = batch.arrays | {"advantage_BT": credit.advantage_BT}
                with atomic_open(path, "wb") as file:
                    np.savez_compressed(file, **arrays)
                console(f"its batch is in {path}")
        write_events(self.workdir / "events.jsonl", step, fired)
        self.reports.write_if_due(step)
        return self._save(step, state, {rule.action for rule in fired})

    def _saves_rollouts(self, step: int, fired: bool) -> bool:
        """Return whether a step's episodes are saved: when due, first, last, or if a rule fired."""
        every = self.schedule.save_rollouts
        return is_due(every, step) or every > 0 and (step in (1, self.schedule.steps) or fired)

    def _print_replies(self, step: int, played: "Played") -> None:
        """Print the replies that log.completions asks for, and an example if few are valid.

        The example is printed in the first step and in every step that saves its episodes.
        """
        if not is_main_process():
            return
        explain = step == 1 or self._saves_rollouts(step, fired=False)
        for task, episodes in zip(self.tasks, played.episodes_E, strict=True):
            lines = sample_lines(task, episodes, self.completions)
            if explain:
                most = task.settings.budgets.max_new_tokens
                lines += invalid_reply_lines(task, episodes, most)
            for line in lines:
                console(line)

    def _row_costs(self, step: int) -> Metrics:
        """Return the metrics of time, compilation and memory, measured when a row is written."""
        compiled = self.compiling.metrics(step)
        return compiled | self.log.totals.clock() | memory_metrics()

    def _kept_episodes(self, played: "Played", selection: Selection) -> list[set[tuple[int, int]]]:
        """Return (seed, member) of the episodes that the step learns from, by environment."""
        groups = split_groups(self.tasks, played.selected, selection.keep_GK.reshape(-1))
        return [
            {(e.seed, e.member) for e, keep in zip(episodes, keep_B, strict=True) if keep}
            for _, episodes, keep_B in groups
        ]

    def _save(self, step: int, state: TrainState, actions: set[str]) -> int | None:
        """Save the state if it is due; return the exit code if the run ends here, else None."""
        _ = self.workdir  # raises if the folder, which holds the checkpoints, is gone
        failed = self.checkpoints.failed()
        if failed:
            console(f"warning: {failed}; saving step {step} instead")
        with jax.set_mesh(self.mesh):
            stopping, again = max_over_processes(self.preemption.signal, int(failed is not None))
        last = bool(step == self.schedule.steps or stopping or "stop" in actions)
        if is_due(self.schedule.checkpoint, step) or "checkpoint" in actions or last or again:
            broken = not_finite(state)
            if broken:  # earlier checkpoints are kept, so that the run can resume from them
                console(f"warning: step {step} is not saved: {broken} holds NaN or infinity")
            else:
                self.log.sync()
                enter_phase(f"saving step {step}")
                self.checkpoints.save(step, state, wait=last or bool(again))
        if "stop" in actions:
            self.checkpoints.close()
            self._print_judgement()
            self.reports.write_last()
            return STOPPED
        if stopping:
            self.checkpoints.close()
            by = signal.Signals(stopping).name
            console(f"stopped by {by}; step {step} is saved; resume with --workdir={self.workdir}")
            self.reports.write_last()  # last: a kill here loses only the page
            return exit_code(stopping)
        return None

    def close(self, exit_code: int) -> None:
        """Stop background compilation, finish a checkpoint in progress and close the log."""
        self.precompiler.close()
        try:
            self.checkpoints.close()
        except Exception as error:
            if exit_code == 0:
                raise
            console(f"warning: the last checkpoint was not saved: {error}")  # keep the first error
        finally:
            self.log.close(exit_code)
            failures = _console_failures()
            if failures:
                step = int(self.log.last.get("step", 0))
                write_events(self.workdir / "events.jsonl", step, failures, further=True)
            self.preemption.close()

    def _print_judgement(self) -> None:
        """Print what the metrics so far say about the reasoning, and what is wrong."""
        if is_main_process():
            for line in judgement_lines(self.workdir, [task.label for task in self.tasks]):
                console(line)

    def finish(self) -> None:
        """Print the learning curve and the judgement of a complete run; write its report."""
        for task in self.tasks if self.schedule.evaluate and is_main_process() else ():
            title = f"held-out success {task.label}".rstrip()
            console(learning_curve(self.workdir / "eval" / task.label, title))
        self._print_judgement()
        self.reports.write_last()
        console(f"done: {self.workdir}")


def _console_failures() -> list[Fired]:
    """Return an event for each standard stream that has become unwritable since the last call."""
    return [Fired("console", "warn", failure) for failure in take_failures()]
