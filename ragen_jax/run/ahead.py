"""The episodes of each step, which with rollout.ahead are played while the step before updates.

    ahead 0    rollout 1 | update 1 | rollout 2 | update 2 | rollout 3 | update 3
    ahead 1    rollout 1 | update 1   update 2   update 3        step s plays the episodes of s + 1
                         | rollout 2  rollout 3

Ahead, the episodes of step s are sampled by the policy behind step s - 2 (of the first step: by the
initial one), and scored by it, too: diagnosis comes before the updates, when nothing else runs.
`AheadState.sampler` is that policy, so that a run that was stopped plays what was under way again:
the draws are keyed by what they are for. Of what a rollout changes in the state, the problems that
were played, nothing is seen before its own step.

One thread plays, the main one updates. Whatever it raises is raised in its step.
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
    """What came of playing the groups of a step, and when."""

    step: int
    state: TrainState  # as `play` gives it
    played: Played
    metrics: Metrics
    start: float  # seconds of time.perf_counter
    end: float


class RolloutQueue:
    """Plays the steps of a run, one of them ahead where the state is an `AheadState`."""

    def __init__(self, run: Run, learner: Learner) -> None:
        self.run, self.learner = run, learner
        self._next: Rollout | None = None  # played while the step before it updated

    def get_rollout(
        self, stage: Stages, policy: Params, state: TrainState, step: int
    ) -> tuple[TrainState, Params, Played, Metrics]:
        """The episodes of a step; run under the mesh of sampling.

        Args:
          policy: `sampling_policy` of the state.

        Returns:
          (TrainState that knows what was played and, ahead, what samples next; the parameters that
          sampled; `Played`; rollout/* and collect/* metrics).
        """
        if not isinstance(state, AheadState):
            state, played, metrics = play(self.run, policy, state, step)
            return state, policy, played, metrics
        sampler, rollout = state.sampler, self._next
        used = sampler_policy(self.learner, sampler)
        if rollout is None:  # the first step of this process
            rollout = self._play(used, state, step)
        else:
            stage.elsewhere["rollout"] = rollout.end - rollout.start
        if rollout.step != step:
            raise RuntimeError(f"step {step} was given the episodes of step {rollout.step}")
        self._next = None
        staleness = int(state.step) - int(sampler.step)
        state = dataclasses.replace(
            state, seed_cursor=rollout.state.seed_cursor, streak_P=rollout.state.streak_P
        )
        state = sampled_next(self.learner, policy, state)
        return state, used, rollout.played, rollout.metrics | {"rollout/staleness": staleness}

    @contextmanager
    def prefetch(self, stage: Stages, state: TrainState, step: int) -> Generator[None]:
        """Plays the next step, if it is to be played ahead, beside what is done under it.

        Args:
          state: of `of_step`. step: number of the iteration that updates.

        Raises:
          what playing raised, unless what is under it raised first.
        """
        if not isinstance(state, AheadState):
            yield
            return
        if step == self.run.schedule.steps:
            stage.both = 0.0
            yield
            return
        with ThreadPoolExecutor(1, "rollout") as pool:  # waits for its thread, come what may
            policy = sampler_policy(self.learner, state.sampler)
            start = time.perf_counter()
            under_way = pool.submit(self._play, policy, state, step + 1)
            del policy
            yield
            end = time.perf_counter()
            with stage("wait"):
                rollout = under_way.result()
        stage.both = max(0.0, min(end, rollout.end) - max(start, rollout.start))
        self._next = rollout

    def _play(self, policy: Params, state: TrainState, step: int) -> Rollout:
        """A mesh is in use in the thread that asks for it alone."""
        start = time.perf_counter()
        with jax.set_mesh(self.run.sampling_mesh):
            state, played, metrics = play(self.run, policy, state, step)
        return Rollout(step, state, played, metrics, start, time.perf_counter())
