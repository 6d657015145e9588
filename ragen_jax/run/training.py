"""A training run besides its mathematics: its parts, its schedules, and what it writes.

workdir/  metrics.jsonl  eval/  rollouts/  checkpoints/  nonfinite_step_*.npz
"""

import dataclasses
import functools
import signal
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.model.qwen import Qwen
from ragen_jax.rewards import turn_reward
from ragen_jax.rollout.play import Sampling, compile_ahead
from ragen_jax.run.build import build_budgets
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.log import (
    MetricsLog,
    console,
    eval_line,
    learning_curve,
    step_line,
    write_outcomes,
    write_rollouts,
)
from ragen_jax.run.sizes import due
from ragen_jax.sharding import agree, is_first
from ragen_jax.types import Batch, Metrics, Params, TrainState
from ragen_jax.update.learner import StepCredit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ragen_jax.run.stages import Played
    from ragen_jax.run.tasks import Task

PREEMPTED = 143  # exit code after a SIGTERM whose checkpoint was saved
STOPPED = 3  # exit code after a stopping rule's "stop"
ACTIONS = {"stop": "stopped", "warn": "warning", "checkpoint": "saved", "tighten": "tightened"}
OF_UPDATE = ("select", "credit", "update")  # whose seconds time/update is the sum of


class Stages:
    """Seconds spent in the named stages of a step, as time/* metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, mesh: Mesh | None = None) -> Generator[None]:
        """Times what is done under it, with a mesh in use if one is given."""
        start = time.perf_counter()
        if mesh is None:
            yield
        else:
            with jax.set_mesh(mesh):
                yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """time/* of each stage; time/step of all, and of it time/update and the diagnosis."""
        s = self.seconds
        total = sum(s.values())
        return {
            **{f"time/{name}": seconds for name, seconds in s.items()},
            "time/update": sum(s[name] for name in OF_UPDATE),
            "time/step": total,
            "time/diagnose_share": s["diagnose"] / total,
        }


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a training run that no mathematics receives."""

    config: ConfigDict
    workdir: Path
    model: Qwen
    tokenizer: "PreTrainedTokenizerFast"
    tasks: tuple["Task", ...]
    mesh: Mesh  # of training
    sampling_mesh: Mesh
    checkpoints: Checkpoints
    log: MetricsLog
    fresh: bool  # whether nothing of it was there before
    preemption: "Preemption"

    # -------------------------------------------------------------------------- schedules

    def steps_after(self, step: int | jax.Array) -> Iterable[int]:
        """The numbers of the iterations behind a step, with a progress bar."""
        first, last = int(step) + 1, self.config.steps
        bar = None if is_first() else True  # None: on a terminal
        return tqdm(range(first, last + 1), initial=first - 1, total=last, disable=bar)

    def first_look(self, policy: Params) -> None:
        """Compiles the programs of rollouts ahead, and evaluates a policy before any update."""
        c = self.config
        for task in self.tasks if c.rollout.compact else ():
            with jax.set_mesh(self.sampling_mesh):
                compile_ahead(
                    self.model,
                    policy,
                    task.chat,
                    task.environment,
                    0,
                    task.environment.reset(0),
                    rows=task.groups * c.rollout.group_size,
                    key=task.key,
                    budgets=build_budgets(task.config),
                    sampling=Sampling(temperature=c.rollout.temperature),
                )
        if self.fresh and c.eval.every:
            console(eval_line(0, self.log.write(0, self.evaluate(policy, 0))))

    def evaluate_if_due(self, policy: Params, step: int) -> Metrics:
        """eval/* metrics of the held-out problems; {} where none is due."""
        every = self.config.eval.every
        if due(every, step) or every and step == self.config.steps:
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
        credit: StepCredit,
    ) -> int | None:
        """Writes what a step has to say.

        Args:
          metrics: its row. state: behind it.
          batch, credit: what it learnt from, kept where its update was not finite.

        Returns:
          The exit code of a run that ends here, else None.
        """
        c = self.config
        if due(c.rollout.save_every, step) and is_first():
            for task, episodes in zip(self.tasks, played.episodes_E, strict=True):
                write_rollouts(
                    self.workdir / "rollouts" / task.label / f"step_{step:06d}.jsonl",
                    episodes,
                    task.chat,
                    functools.partial(turn_reward, format_penalty=task.config.env.format_penalty),
                )
        tokens = metrics["rollout/response_length"] * metrics["rollout/replies"]
        metrics["throughput/tokens_per_second"] = tokens / metrics["time/step"]
        row = self.log.write(step, metrics)
        console(step_line(step, c.steps, row))
        if "eval/success" in row:
            console(eval_line(step, row))
        for rule in fired:
            console(f"{ACTIONS[rule.action]}: {rule.reason}")
            if rule.rule == "nonfinite" and is_first():
                path = self.workdir / f"nonfinite_step_{step}.npz"
                np.savez_compressed(path, advantage_BT=credit.advantage_BT, **vars(batch))
                console(f"its batch is in {path}")
        return self._save(step, state, {rule.action for rule in fired})

    def _save(self, step: int, state: TrainState, actions: set[str]) -> int | None:
        """Saves the state if it is due; returns the exit code of a run that ends here."""
        c = self.config
        with jax.set_mesh(self.mesh):
            (stopping,) = agree(int(self.preemption.requested))
        last = step == c.steps or stopping or "stop" in actions
        if due(c.checkpoint.every, step) or "checkpoint" in actions or last:
            self.checkpoints.save(step, state)
        if "stop" in actions:
            self.checkpoints.close()
            return STOPPED
        if stopping:
            self.checkpoints.close()
            console(f"stopped by SIGTERM; step {step} is saved in {self.workdir}")
            return PREEMPTED
        return None

    def finish(self) -> None:
        """Closes what a whole run has written, and shows its learning curve."""
        self.log.close()
        for task in self.tasks if self.config.eval.every and is_first() else ():
            title = f"held-out success {task.label}".rstrip()
            console(learning_curve(self.workdir / "eval" / task.label, title))
        console(f"done: {self.workdir}")


class Preemption:
    """Whether SIGTERM has asked the run to save and stop."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
