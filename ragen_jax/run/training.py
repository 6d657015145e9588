"""A training run besides its mathematics: its parts, its schedules, and what it writes.

workdir/  metrics.jsonl  events.jsonl  tensorboard/  trackers/  eval/  rollouts/  diagnostics/
          checkpoints/  report.html
          nonfinite_step_*.npz
"""

import dataclasses
import functools
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from ragen_jax.algorithm.rewards import turn_reward
from ragen_jax.config.per_task import is_due
from ragen_jax.core.memory import memory_metrics
from ragen_jax.core.progress import count_barrier, enter_phase, note_output
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
from ragen_jax.run.heldout import evaluate
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
from ragen_jax.run.reports import Reports
from ragen_jax.run.step import Diagnosis, Played
from ragen_jax.storage.atomic_io import atomic_open
from ragen_jax.storage.console import console
from ragen_jax.storage.console_streams import take_failures
from ragen_jax.update.learner import Selection, StepCredit
from ragen_jax.update.state import TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STOPPED = 3  # exit code after a stopping rule's "stop"
ACTIONS = {"stop": "stopped", "warn": "warning", "checkpoint": "saved", "tighten": "tightened"}
OF_UPDATE = ("select", "credit", "update")  # whose seconds time/update is the sum of


class Stages:
    """Seconds spent in the named stages of a step, as time/* metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu = 0.0  # of this process, its threads together, in any stage
        self.elsewhere: dict[str, float] = {}  # of stages that ran beside those of another step
        self.both: float | None = None  # in which a rollout ran beside updates; None: it never does

    @contextmanager
    def __call__(self, name: str, mesh: Mesh | None = None) -> Generator[None]:
        """Times what is done under it, with a mesh in use if one is given."""
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
        """time/* of each stage; time/step of all, of it time/update and the diagnosis; time/cpu.

        time/cpu is what the step took of the processors, whatever ran beside it; work on an
        accelerator is not in it. Where rollouts run beside updates, time/idle_share is the share of
        time/step in which one of them waited: in which they did not both run.
        """
        s = self.seconds
        total = sum(s.values())
        idle = {} if self.both is None else {"time/idle_share": 1.0 - self.both / total}
        return idle | {
            **{f"time/{name}": seconds for name, seconds in (s | self.elsewhere).items()},
            "time/update": sum(s[name] for name in OF_UPDATE),
            "time/step": total,
            "time/cpu": self.cpu,
            "time/diagnose_share": s["diagnose"] / total,
        }


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The last step, and the steps between two of what is not done in each; 0: never."""

    steps: int
    evaluate: int
    save_rollouts: int
    checkpoint: int


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run that no mathematics receives."""

    folder: RunFolder
    seed: int
    schedule: Schedule
    step_rows: int  # the most rows of a step
    diagnosis: "Diagnosis"
    stopping: Mapping[str, Any]  # settings of diagnostics/stopping.py
    regimes: Mapping[str, Any]  # and of diagnostics/regimes.py
    model: Qwen
    tokenizer: "PreTrainedTokenizerFast"
    tasks: tuple["Task", ...]
    mesh: Mesh  # of training
    sampling_mesh: Mesh
    checkpoints: Checkpoints
    log: MetricsLog
    reports: Reports
    compiling: CompileMonitor
    precompiler: Precompiler
    fresh: bool  # whether nothing of it was there before
    preemption: "Preemption"

    @property
    def workdir(self) -> Path:
        """The run's folder.

        Raises:
          FolderGone: it is no longer at its path.
        """
        return self.folder.here()

    # -------------------------------------------------------------------------- schedules

    def steps_after(self, step: int | jax.Array) -> Iterator[int]:
        """The numbers of the iterations behind a step, with a progress bar."""
        first, last = int(step) + 1, self.schedule.steps
        self.preemption.saves = True
        bar = tqdm(
            range(first, last + 1),
            initial=first - 1,
            total=last,
            disable=None if is_main_process() else True,  # None: on a terminal
            dynamic_ncols=True,
        )
        for number in bar:
            yield number
            bar.set_postfix_str(live_figures(self.log.last))

    def first_look(self, policy: Params) -> None:
        """Compiles what precompile.py leaves out of rollouts; evaluates before any update."""
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
            metrics = self.evaluate(policy, 0) | self._behind_row(0)
            console(eval_line(0, self.log.write(0, metrics)))

    def evaluate_if_due(self, policy: Params, step: int) -> Metrics:
        """eval/* metrics of the held-out problems; {} where none is due."""
        every = self.schedule.evaluate
        if is_due(every, step) or every and step == self.schedule.steps:
            return self.evaluate(policy, step)
        return {}

    def evaluate(self, policy: Params, step: int) -> Metrics:
        """eval/* metrics and time/eval; writes which problems were solved."""
        stage = Stages()
        with stage("eval", self.sampling_mesh):
            metrics, episodes_E = evaluate(self.model, policy, self.tasks)
        for task, episodes in zip(self.tasks, episodes_E, strict=True):
            write_outcomes(self.workdir / "eval" / task.label, step, episodes)
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
        """Writes what a step has to say.

        Args:
          metrics: its row. state: behind it.
          batch, credit: what it learnt from, saved where its update was not finite.
          selection: which of the episodes that was.

        Returns:
          The exit code of a run that ends here, else None.
        """
        if is_due(self.schedule.save_rollouts, step) and is_main_process():
            kept_E = self._kept(played, selection)
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
        metrics |= self._behind_row(step)
        row = self.log.write(step, metrics)
        console(step_line(step, self.schedule.steps, row))
        note_output(begun=True)
        if "eval/return" in row:
            console(eval_line(step, row))
        fired = [*played.fired, *fired, *_console_failures()]
        for rule in fired:
            console(f"{ACTIONS[rule.action]}: {rule.reason}")
            if rule.rule == "nonfinite" and is_main_process():
                path = self.workdir / f"nonfinite_step_{step}.npz"
                with atomic_open(path, "wb") as file:
                    np.savez_compressed(file, advantage_BT=credit.advantage_BT, **vars(batch))
                console(f"its batch is in {path}")
        write_events(self.workdir / "events.jsonl", step, fired)
        self.reports.write_if_due(step)
        return self._save(step, state, {rule.action for rule in fired})

    def _behind_row(self, step: int) -> Metrics:
        """The clock, what compiled and the memory in use, as a row is written."""
        compiled = self.compiling.metrics(step)
        return compiled | self.log.totals.clock() | memory_metrics()

    def _kept(self, played: "Played", selection: Selection) -> list[set[tuple[int, int]]]:
        """(seed, member) of each environment's episodes that the step learns from."""
        groups = split_groups(self.tasks, played.selected, selection.keep_GK.reshape(-1))
        return [
            {(e.seed, e.member) for e, keep in zip(episodes, keep_B, strict=True) if keep}
            for _, episodes, keep_B in groups
        ]

    def _save(self, step: int, state: TrainState, actions: set[str]) -> int | None:
        """Saves the state if it is due; returns the exit code of a run that ends here."""
        _ = self.workdir  # a checkpoint is written there too
        failed = self.checkpoints.failed()
        if failed:
            console(f"warning: {failed}; saving step {step} instead")
        with jax.set_mesh(self.mesh):
            stopping, again = max_over_processes(self.preemption.signal, int(failed is not None))
        last = bool(step == self.schedule.steps or stopping or "stop" in actions)
        if is_due(self.schedule.checkpoint, step) or "checkpoint" in actions or last or again:
            broken = not_finite(state)
            if broken:  # those that are kept stay: a run can go on from them
                console(f"warning: step {step} is not saved: {broken} holds NaN or infinity")
            else:
                self.log.sync()
                self.checkpoints.save(step, state, wait=last or bool(again))
        if "stop" in actions:
            self.checkpoints.close()
            self.reports.write_last()
            return STOPPED
        if stopping:
            self.checkpoints.close()
            by = signal.Signals(stopping).name
            console(f"stopped by {by}; step {step} is saved; resume with --workdir={self.workdir}")
            self.reports.write_last()  # all is saved: what ends the process now loses the page
            return exit_code(stopping)
        return None

    def close(self, exit_code: int) -> None:
        """Ends what goes on beside the run; a checkpoint that is being saved is finished."""
        self.precompiler.close()
        try:
            self.checkpoints.close()
        except Exception as error:
            if exit_code == 0:
                raise
            console(f"warning: the last checkpoint was not saved: {error}")  # what ended it is told
        finally:
            self.log.close(exit_code)
            failures = _console_failures()
            if failures:
                step = int(self.log.last.get("step", 0))
                write_events(self.workdir / "events.jsonl", step, failures, further=True)

    def finish(self) -> None:
        """Shows the learning curve of a whole run."""
        for task in self.tasks if self.schedule.evaluate and is_main_process() else ():
            title = f"held-out success {task.label}".rstrip()
            console(learning_curve(self.workdir / "eval" / task.label, title))
        self.reports.write_last()
        console(f"done: {self.workdir}")


class Stopped(KeyboardInterrupt):
    """A signal that ends the run at once. No SystemExit: one that an environment raises breaks its
    episode alone."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Preemption:
    """Whether SIGTERM, SIGHUP or Ctrl-C has asked the run to save behind its step and stop.

    signal: the number of the one that has; 0: none
    saves: whether the run has come to its steps; until then a signal ends it at once
    """

    def __init__(self) -> None:
        self.signal = 0
        self.saves = False
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and & set it
                signal.signal(number, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if not self.saves:
            console("stopped before the first step since this start; nothing to save")
            raise Stopped(exit_code(signum))
        self.signal = signum
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends the process at once
            console(
                "stopping after this step (it will be saved); press Ctrl-C again to quit "
                "without saving"
            )


def _console_failures() -> list[Fired]:
    """An event for each standard stream that cannot be written since the last call."""
    return [Fired("console", "warn", failure) for failure in take_failures()]


def exit_code(signum: int) -> int:
    """Of a process that a signal has ended: 143 of SIGTERM, 129 of SIGHUP, 130 of Ctrl-C."""
    return 128 + signum
