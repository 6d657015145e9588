"""Plays the episodes of each step; with rollout.ahead, some steps ahead of the updates.

    ahead 0    rollout 1 | update 1 | rollout 2 | update 2 | rollout 3 | update 3
    ahead 1    rollout 1 | update 1    update 2    update 3
                         | rollout 2 | rollout 3 | rollout 4
    ahead 2    rollout 1 | update 1    update 2    update 3
                         | rollout 2   rollout 3   rollout 4   rollout 5

With ahead N, the episodes of step s are sampled by the policy after step s - 1 - N (in the first
N + 1 steps: by the initial policy), whatever the timing. A second thread plays the steps in order,
each as soon as its policy exists; it never waits for a save, and an evaluation, which samples on
the same devices, runs between two rollouts. The same policy scores the episodes for the diagnosis,
in the same thread. `AheadState.samplers` stores the policies of the next N steps, so a resumed run
repeats the rollouts that were in progress or waiting when it stopped: random draws depend only on
their purpose. The changes that a rollout makes to the state (the problems that were played) take
effect in its own step.

All processes of a run submit the same rollouts in the same order. The two threads of a process use
different devices, so that the order of their programs, which differs between processes, does not
matter. An exception in the second thread is raised in the step that needs its episodes.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import jax

from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import max_over_processes
from ragen_jax.core.types import Metrics, Params
from ragen_jax.run.stages import StepContext
from ragen_jax.run.training import Run, Stages
from ragen_jax.update.learner import Learner, copy_sampler, sampler_policy
from ragen_jax.update.state import AheadState, PlayedProblems, Sampler, TrainState

# (policy, problems, step, stages) -> (problems after the step, the played step, its metrics)
Sample = Callable[
    [Params, PlayedProblems, int, Stages], tuple[PlayedProblems, StepContext, Metrics]
]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The result of playing the groups of a step."""

    problems: PlayedProblems  # after the step
    seen: StepContext
    metrics: Metrics
    seconds: dict[str, float]  # of its stages


class RolloutQueue:
    """Plays the steps of a run, ahead of the updates if the state is an `AheadState`.

    Use it as a context manager: at the end, it waits for the rollout in progress.
    """

    def __init__(self, run: Run, learner: Learner, sample: Sample) -> None:
        self.run, self.learner, self.sample = run, learner, sample
        self._player = Player() if learner.ahead else None
        self._problems = PlayedProblems({}, None)  # after the latest rollout
        self._newest: Sampler | None = None  # policy of the last submitted step
        self._futures: dict[int, concurrent.futures.Future[Rollout]] = {}  # step -> its rollout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._player is None:
            return
        if error is not None:
            self._player.abandon()
            return
        with jax.set_mesh(self.run.mesh):
            self._player.close(lambda begun: max_over_processes(begun)[0])

    def get(
        self, stage: Stages, policy: Params, state: TrainState, step: int
    ) -> tuple[TrainState, StepContext, Metrics]:
        """Return the episodes of a step.

        Args:
          policy: `sampling_policy` of the state.

        Returns:
          (TrainState updated with the played problems and, if ahead, with the samplers of the next
          steps; the played step; the metrics of its stages).
        """
        problems = PlayedProblems(state.seed_cursor, state.streak_P, state.tally_P)
        if not isinstance(state, AheadState):
            problems, seen, metrics = self.sample(policy, problems, step, stage)
            return dataclasses.replace(state, **vars(problems)), seen, metrics
        if self._newest is None:  # the first step of this process
            self._problems = problems
            for offset, sampler in enumerate(state.samplers):
                self._submit(step + offset, sampler)
            self.begin_next(policy, state, step - 1)
        with stage("wait"):
            enter_phase("waiting for episodes", waits=True)
            rollout = self._futures.pop(step).result()
        stage.prefetch_seconds = rollout.seconds
        staleness = {"rollout/staleness": int(state.step) - int(state.samplers[0].step)}
        state = dataclasses.replace(
            state, samplers=(*state.samplers[1:], self._newest), **vars(rollout.problems)
        )
        return state, rollout.seen, rollout.metrics | staleness

    def begin_next(self, policy: Params, state: TrainState, step: int) -> None:
        """Begin the rollout that is to use the policy after `step`, if the run plays ahead.

        Args:
          policy: `sampling_policy` of the state after `step`.
        """
        if isinstance(state, AheadState):
            self._newest = copy_sampler(self.learner, policy, state)
            self._submit(step + self.learner.ahead + 1, self._newest)

    def wait(self, stage: Stages) -> None:
        """Wait until no rollout uses the sampling devices; failed rollouts do not raise here."""
        if self._player is not None:
            with stage("wait"):
                concurrent.futures.wait(self._futures.values())

    @contextmanager
    def overlap(self, stage: Stages) -> Generator[None]:
        """Measure how long rollouts run in parallel with the body."""
        start = time.perf_counter()
        yield
        if self._player is not None:
            stage.overlap_seconds = self._player.busy_seconds(start, time.perf_counter())

    def _submit(self, step: int, sampler: Sampler) -> None:
        if self._player is not None and step <= self.run.schedule.steps:
            self._futures[step] = self._player.submit(lambda: self._play(step, sampler))

    def _play(self, step: int, sampler: Sampler) -> Rollout:
        """Play a step in the player's thread, in which this sets the mesh."""
        stage = Stages(background=True)
        with jax.set_mesh(self.run.sampling_mesh):
            policy = sampler_policy(self.learner, sampler)
            self._problems, seen, metrics = self.sample(policy, self._problems, step, stage)
        return Rollout(self._problems, seen, metrics, stage.seconds)


class Player:
    """A thread that runs jobs in the order in which they are submitted, until one fails."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below
        self._jobs: deque[tuple[Callable[[], Any], concurrent.futures.Future[Any]]] = deque()
        self._begun = 0  # number of jobs that have begun
        self._limit = float("inf")  # number of jobs that may begin
        self._closed = False
        self._error: BaseException | None = None
        self._busy: list[list[float]] = []  # [start, end] of jobs, seconds of time.perf_counter()
        # A daemon: if another process ends, this one must not wait for a job that never will.
        self._thread = threading.Thread(target=self._work, name="rollout", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Return the future result of a job; after a failed job, its error."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            if self._error is not None:
                future.set_exception(self._error)
            else:
                self._jobs.append((job, future))
                self._changed.notify_all()
        return future

    def busy_seconds(self, start: float, end: float) -> float:
        """Return how long jobs ran between two times, and forget the time before `start`."""
        with self._changed:
            self._busy = [span for span in self._busy if span[1] > start]
            return sum(max(0.0, min(last, end) - max(first, start)) for first, last in self._busy)

    def close(self, agree: Callable[[int], int]) -> None:
        """Wait for the job in progress and drop the others.

        Args:
          agree: number of jobs that this process has begun -> the most that any process has begun:
            the others must run the same jobs, which wait for each other.
        """
        with self._changed:
            self._limit = self._begun
        most = agree(self._begun)
        with self._changed:
            self._limit, self._closed = most, True
            self._changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """Drop the jobs that have not begun; with a single process, wait for the one in progress.

        Other processes may have failed, so that their part of a job never comes.
        """
        with self._changed:
            self._limit, self._closed = 0, True
            self._changed.notify_all()
        if jax.process_count() == 1:
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_begin())
                if not self._may_begin():
                    return
                job, future = self._jobs.popleft()
                self._begun += 1
                span = [time.perf_counter(), float("inf")]
                self._busy.append(span)
            try:
                result = job()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    failed, self._jobs = [future, *(other for _, other in self._jobs)], deque()
                for one in failed:
                    one.set_exception(error)
            else:
                future.set_result(result)
                del result
            del job, future  # they hold parameters
            with self._changed:
                span[1] = time.perf_counter()

    def _may_begin(self) -> bool:
        return bool(self._jobs) and self._begun < self._limit
