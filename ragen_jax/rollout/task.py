"""A task: one environment of a run with all settings needed to play it."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence

import jax

from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.core.clean_text import last_line
from ragen_jax.core.types import Episode, Params
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import Environment, State
from ragen_jax.rollout.env_calls import EnvFailure, begin, observe
from ragen_jax.rollout.episode import (
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
    """Number of groups per step, and the choice of their problems."""

    groups: int  # per step
    max_rounds: int  # maximum rounds of play to find `groups` informative groups
    pool: int  # number of problems, which are repeated; 0: new problems every time
    seed: int  # decides the order of the problems
    explore: float  # see `pool.play_chances`
    explore_least: float  # see `pool.play_chances`
    allocate: bool  # whether problems are chosen by `pool.allocation_chances` instead


SHOWN = 16  # number of problems from which the prompt length of all problems is estimated


LOOKED_AT = 256  # number of first training problems, at least one of which must be playable


@dataclasses.dataclass(frozen=True)
class Task:
    """One environment of a run."""

    name: str
    label: str  # name in metrics and folders if the run has several environments, else ""
    settings: PlaySettings  # to play the problems of the training split
    heldout_environment: Environment | None  # problems of the evaluation split; None: not played
    heldout: tuple[list[int], list[State | EnvFailure]] | None  # (seeds, states) of its problems
    key: jax.Array  # random key of the policy's draws and the environment's noise in training
    eval_seed: int  # random seed of the same draws and noise in evaluation
    collecting: CollectSettings
    group_size: int  # episodes per group
    group_rows: int  # maximum number of rows per group
    max_error_share: float  # fraction of a step's episodes whose environment may break
    eval_sampling: Sampling
    penalties: Penalties
    styles: Mapping[str, Style]  # reasoning styles that its agent imitated; {}: a single style
    positions: int = 0  # positions of the model; 0: not known

    @property
    def groups(self) -> int:
        """Number of groups per step."""
        return self.collecting.groups

    @property
    def training_settings(self) -> PlaySettings:
        """Settings to play the training problems, with the length of their first prompts."""
        return dataclasses.replace(self.settings, first_prompt=self.first_prompts[-1])

    def heldout_settings(self, sampling: Sampling) -> PlaySettings:
        """Return the settings to play the held-out problems.

        Raises:
          ValueError: the held-out problems were not built.
        """
        if self.heldout_environment is None:
            raise ValueError(
                f"the held-out problems of {self.name} were not built, because the config disables "
                "evaluation; set config.eval.every above 0, or pass heldout=True to load_policy"
            )
        return dataclasses.replace(
            self.training_settings, environment=self.heldout_environment, sampling=sampling
        )

    def seen(self, params: Params, episodes: Sequence[Episode]) -> Params:
        """Return the parameters with the images that the episodes show, on the mesh in use."""
        prompts = (turn.prompt for episode in episodes for turn in episode.turns)
        return self.settings.chat.images.attach(params, *prompts)

    @functools.cached_property
    def first_plays(self) -> list[Play]:
        """Up to `SHOWN` problems with usable prompts, with their first turns begun.

        They are held-out problems or, in a run without these, training problems.

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
        """Up to `SHOWN` training problems with usable prompts, with their first turns begun.

        Raises:
          ValueError: none of the first `LOOKED_AT` problems can be played.
        """
        seeds = first_seeds(self.collecting, LOOKED_AT)
        chunks = (
            (part, begin(self.settings.environment, part, self.settings.limits))
            for part in (seeds[start : start + SHOWN] for start in range(0, len(seeds), SHOWN))
        )
        return self._first_usable(self.settings.environment, chunks, "first training")

    def _first_usable(
        self,
        environment: Environment,
        chunks: Iterable[tuple[list[int], Sequence[State | EnvFailure]]],
        which: str,
    ) -> list[Play]:
        """Return the plays of the first chunk of (seeds, states) with a playable problem.

        Raises:
          ValueError: no chunk has a playable problem.
        """
        s = self.settings
        room = Room(self.positions, s.budgets.max_new_tokens)
        looked_at, first = 0, ""
        for seeds, states in chunks:
            shown = observe(environment, states, s.limits)
            plays = start_plays(seeds, states, shown, 1, self.key)
            begin_turns(plays, s.chat, room)
            if not all(play.error for play in plays):
                # If a problem's environment broke, its prompt still shows the length of the rules.
                return [play for play in plays if not is_prompt_error(play.error)]
            looked_at += len(plays)
            first = first or last_line(plays[0].error)
        raise ValueError(
            f"none of the {looked_at} {which} problems of {self.name} can be played; "
            f"first error: {first}"
        )

    @functools.cached_property
    def first_prompts(self) -> tuple[int, ...]:
        """Numbers of tokens of the prompts of `first_plays`, ascending.

        The prompts of other problems are about as long.
        """
        return tuple(sorted(len(play.prompt) for play in self.first_plays))

    @functools.cached_property
    def common_tokens(self) -> int:
        """Number of tokens that the prompts of `first_plays` begin with; of one: its system's."""
        prompts = [play.prompt.tolist() for play in self.first_plays]
        if len(prompts) == 1:
            return len(self.settings.chat.prefix_ids)
        return len(os.path.commonprefix(prompts))


def first_seeds(collecting: CollectSettings, count: int) -> list[int]:
    """Return the seeds of the first problems that a run trains on, at most `count`."""
    count = min(count, collecting.pool) if collecting.pool else count
    seeds, _ = draw_seeds(0, count, pool=collecting.pool, seed=collecting.seed)
    return seeds
