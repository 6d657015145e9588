"""A task: one environment of a run with everything that playing it needs."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import jax

from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.core.clean_text import last_line
from ragen_jax.core.types import Episode, Params
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import Environment, State
from ragen_jax.model.vision.image_table import ImageTable
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.env_calls import EnvFailure, Limits, begin, observe
from ragen_jax.rollout.episode import (
    Budgets,
    Play,
    PlaySettings,
    Room,
    Sampling,
    begin_turns,
    is_prompt_error,
    start_plays,
)
from ragen_jax.rollout.pool import draw_seeds


@dataclasses.dataclass(frozen=True)
class CollectSettings:
    """How many groups a step has, and of which problems."""

    groups: int
    max_rounds: int  # of play, to find so many informative ones
    pool: int  # problems, which come again and again; 0: new ones every time
    seed: int  # of the order in which they come
    explore: float  # `pool.play_chances`
    explore_least: float


SHOWN = 16  # problems whose prompts stand for the length of all


LOOKED_AT = 256  # training problems of which one at least must be playable


@dataclasses.dataclass(frozen=True)
class Task:
    """One environment of a run."""

    name: str
    label: str  # its name where several train together, "" where it is alone: for metrics, folders
    chat: Chat
    environment: Environment  # problems of the training split
    heldout_environment: Environment | None  # of the evaluation split; None: nothing plays it
    heldout: tuple[list[int], list[State | EnvFailure]] | None  # (seeds, states) of its problems
    key: jax.Array  # of the policy's draws and the environment's noise while training
    eval_seed: int  # of the same while its held-out problems are played
    collecting: CollectSettings
    group_size: int  # episodes of a group
    group_rows: int  # the most rows of a group
    budgets: Budgets
    limits: Limits  # of the environment's time
    max_error_share: float  # of a step's episodes, whose environment may break
    sampling: Sampling  # while training
    eval_sampling: Sampling
    compact: bool  # whether a rollout drops the rows of episodes that are over
    slots: int  # this and the next: see configs/base.py
    chunk: int
    penalties: Penalties
    styles: Mapping[str, Style]  # that its agent was taught to think in; {}: one alone
    album: ImageTable | None  # of the images that it shows, the run's; None: the model does not see
    positions: int = 0  # of the model; 0: not known

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return self.collecting.groups

    def seen(self, params: Params, episodes: Sequence[Episode]) -> Params:
        """Parameters with the images that its episodes show, on the mesh in use."""
        if self.album is None:
            return params
        return self.album.attach(params, *(turn.prompt for e in episodes for turn in e.turns))

    @functools.cached_property
    def first_plays(self) -> list[Play]:
        """Up to `SHOWN` held-out problems, or of training without them, whose prompts can be used,
        first turns begun.

        Raises:
          ValueError: none of the problems can be played.
        """
        if self.heldout_environment is None or self.heldout is None:
            return self.first_training_plays
        seeds, states = self.heldout
        chunks = (
            (seeds[start : start + SHOWN], states[start : start + SHOWN])
            for start in range(0, len(seeds), SHOWN)
        )
        return self._first_usable(self.heldout_environment, chunks, "held-out")

    @functools.cached_property
    def first_training_plays(self) -> list[Play]:
        """Up to `SHOWN` training problems whose prompts can be used, first turns begun.

        Raises:
          ValueError: none of the first `LOOKED_AT` problems can be played.
        """
        seeds = first_seeds(self.collecting, LOOKED_AT)
        chunks = (
            (part, begin(self.environment, part, self.limits))
            for part in (seeds[start : start + SHOWN] for start in range(0, len(seeds), SHOWN))
        )
        return self._first_usable(self.environment, chunks, "first training")

    def _first_usable(
        self,
        environment: Environment,
        chunks: Iterable[tuple[list[int], Sequence[State | EnvFailure]]],
        which: str,
    ) -> list[Play]:
        """The plays of the first chunk of (seeds, states) in which a problem can be played.

        Raises:
          ValueError: no chunk has any.
        """
        room = Room(self.positions, self.budgets.max_new_tokens)
        looked_at, first = 0, ""
        for seeds, states in chunks:
            shown = observe(environment, states, self.limits)
            plays = start_plays(seeds, states, shown, 1, self.key)
            begin_turns(plays, self.chat, self.album, room)
            if not all(play.error for play in plays):
                # A problem whose environment broke still shows how long the rules are.
                return [play for play in plays if not is_prompt_error(play.error)]
            looked_at += len(plays)
            first = first or last_line(plays[0].error)
        raise ValueError(
            f"none of the {looked_at} {which} problems of {self.name} can be played; "
            f"first error: {first}"
        )

    @functools.cached_property
    def first_prompts(self) -> tuple[int, ...]:
        """Tokens of their prompts, which others are about as long as; rising."""
        return tuple(sorted(len(play.prompt) for play in self.first_plays))


def first_seeds(collecting: CollectSettings, count: int) -> list[int]:
    """Seeds of the first problems that a run trains on, at most `count`."""
    count = min(count, collecting.pool) if collecting.pool else count
    seeds, _ = draw_seeds(0, count, pool=collecting.pool, seed=collecting.seed)
    return seeds


def play_settings(task: Task, environment: Environment, sampling: Sampling) -> PlaySettings:
    """How a task's episodes are played in its training or held-out environment."""
    return PlaySettings(
        task.chat,
        environment,
        budgets=task.budgets,
        sampling=sampling,
        limits=task.limits,
        compact=task.compact,
        slots=task.slots,
        chunk=task.chunk,
        first_prompt=task.first_prompts[-1],
        album=task.album,
    )
