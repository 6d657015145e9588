"""Plays the episodes of each step; with rollout.ahead, during the updates of the previous step.

    ahead 0    rollout 1 | update 1 | rollout 2 | update 2 | rollout 3 | update 3
    ahead 1    rollout 1 | update 1   update 2   update 3        step s plays the episodes of s + 1
                         | rollout 2  rollout 3

With ahead 1, the episodes of step s are sampled by the policy after step s - 2 (in steps 1 and 2:
by the initial policy). The same policy scores them: diagnosis runs before the updates, while
nothing else runs. `AheadState.sampler` stores that policy, so a resumed run repeats the rollout
that was in progress when it stopped: random draws depend only on their purpose. The changes that a
rollout makes to the state (the problems that were played) take effect in its own step.

A second thread plays and the main thread updates. An exception in the second thread is raised in
the step that started it.
"""

import dataclasses
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax

from ragen_jax.core.types import Metrics, Params
from ragen_jax.run.stages import play
from ragen_jax.run.step import Played
from ragen_jax.run.training import Run, Stages
from ragen_jax.update.learner import Learner, sampled_next, sampler_policy
from ragen_jax.update.state import AheadState, TrainState


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The result of playing the groups of a step, with its start and end times."""

    step: int
    state: TrainState  # as `play` returns it
    played: Played
    metrics: Metrics
    start: float  # seconds of time.perf_counter
    end: float


class RolloutQueue:
    """Plays the steps of a run, one step ahead if the state is an `AheadState`."""

    def __init__(self, run: Run, learner: Learner) -> None:
        self.run, self.learner = run, learner
        self._next: Rollout | None = None  # played during the updates of the previous step

    def get_rollout(
        self, stage: Stages, policy: Params, state: TrainState, step: int
    ) -> tuple[TrainState, Params, Played, Metrics]:
        """Return the episodes of a step; call it under the sampling mesh.

        Args:
          policy: `sampling_policy` of the state.

        Returns:
          (TrainState updated with the played problems and, if ahead, the next sampler; the
          parameters that sampled the episodes; `Played`; rollout/* and collect/* metrics).
        """
        if not isinstance(state, AheadState):
            state, played, metrics = play(self.run, policy, state, step)
            return state, policy, played, metrics
        sampler, rollout = state.sampler, self._next
        sampling_params = sampler_policy(self.learner, sampler)
        if rollout is None:  # the first step of this process
            rollout = self._play(sampling_params, state, step)
        else:
            stage.prefetch_seconds["rollout"] = rollout.end - rollout.start
        if rollout.step != step:
            raise RuntimeError(f"step {step} was given the episodes of step {rollout.step}")
        self._next = None
        staleness = int(state.step) - int(sampler.step)
        state = dataclasses.replace(
            state, seed_cursor=rollout.state.seed_cursor, streak_P=rollout.state.streak_P
        )
        state = sampled_next(self.learner, policy, state)
        return (
            state,
            sampling_params,
            rollout.played,
            rollout.metrics | {"rollout/staleness": staleness},
        )

    @contextmanager
    def prefetch(self, stage: Stages, state: TrainState, step: int) -> Generator[None]:
        """Play the next step while the body runs, if the run plays ahead.

        Args:
          state: from `get_rollout`.
          step: number of the step that updates in the body.

        Raises:
          Any exception of playing, unless the body raised first.
        """
        if not isinstance(state, AheadState):
            yield
            return
        if step == self.run.schedule.steps:
            stage.overlap_seconds = 0.0
            yield
            return
        with ThreadPoolExecutor(1, "rollout") as pool:  # always waits for its thread
            policy = sampler_policy(self.learner, state.sampler)
            start = time.perf_counter()
            future = pool.submit(self._play, policy, state, step + 1)
            del policy
            yield
            end = time.perf_counter()
            with stage("wait"):
                rollout = future.result()
        stage.overlap_seconds = max(0.0, min(end, rollout.end) - max(start, rollout.start))
        self._next = rollout

    def _play(self, policy: Params, state: TrainState, step: int) -> Rollout:
        """Play a step. The mesh is set here because a mesh applies only to the current thread."""
        start = time.perf_counter()
        with jax.set_mesh(self.run.sampling_mesh):
            state, played, metrics = play(self.run, policy, state, step)
        return Rollout(step, state, played, metrics, start, time.perf_counter())
