"""Interleaved imitation: every n-th step, the updates imitate the solver instead of the episodes.

"Why Multi-Step Tool-Use Reinforcement Learning Collapses" (arXiv 2606.26027) reports that
supervised steps between those of RL keep the format of replies. An imitating step plays its
episodes as any other, so that its metrics are comparable, and makes the same number of updates.
"""

import dataclasses

import numpy as np

from ragen_jax.algorithm import batch as rows
from ragen_jax.config.build_environment import environment_settings
from ragen_jax.configs.base import Config
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.types import Batch, Episode
from ragen_jax.rollout.task import Task
from ragen_jax.run import datasets
from ragen_jax.run.demonstrations import (
    as_episodes,
    expert_arguments,
    imitation_config,
    imitation_environment,
)
from ragen_jax.storage.cache import cache_directory
from ragen_jax.update.learner import Learner, Selection, StepCredit, assign_imitation
from ragen_jax.update.state import TrainState

Learned = tuple[Batch, Selection, StepCredit]  # arguments of `update`


@dataclasses.dataclass(frozen=True)
class Imitation:
    """The demonstrations that steps imitate."""

    every: int  # steps between two steps that imitate
    seed: int  # of the run
    episodes: list[Episode]

    def replace(self, step: int, learner: Learner, state: TrainState, learned: Learned) -> Learned:
        """Return what the update of a step learns from: demonstrations, if they are due.

        It must run under the training mesh.

        Args:
          learned: the step's own episodes.
        """
        if step % self.every:
            return learned
        groups, members = learned[1].keep_GK.shape
        rng = generator(Purpose.IMITATED, self.seed, step)
        chosen = rng.choice(len(self.episodes), groups * members, replace=False)
        episodes = [
            dataclasses.replace(self.episodes[number], group=i // members, member=i % members)
            for i, number in enumerate(chosen)
        ]
        demonstrated = rows.make_batch(episodes)
        every_row = np.arange(len(demonstrated.weight_B))
        batch = rows.take_rows(demonstrated, every_row, size=learner.step_rows)
        return batch, *assign_imitation(learner, state, batch, members)


def build_imitation(config: Config, task: Task, positions: int) -> Imitation | None:
    """Return the imitation of algorithm.imitate_every; None if there is none.

    Args:
      task: the run's only environment.
      positions: number of positions of the model.

    Raises:
      ValueError: there are fewer demonstrations than episodes in a step.
    """
    every = config.algorithm.imitate_every
    if not every:
        return None
    shown = imitation_config(config)
    examples = datasets.demonstrations(
        imitation_environment(shown),
        rooms=shown.warmstart.rooms,
        settings=environment_settings(shown.env),
        directory=cache_directory() / "datasets",
        **expert_arguments(shown),
    )
    episodes = as_episodes(examples, task.settings.chat, positions)
    needed = config.rollout.groups * config.rollout.group_size
    if len(episodes) < needed:
        raise ValueError(
            f"config.algorithm.imitate_every is {every}, but there are only {len(episodes)} "
            f"demonstrations for the {needed} episodes of a step; raise warmstart.rooms"
        )
    return Imitation(every, config.seed, episodes)
