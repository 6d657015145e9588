"""The environments of a run, each with all that playing it needs.

Most runs have one. Where several train together, each has its own groups, filter and figures, and
one update learns from all of them.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from ml_collections import ConfigDict

from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.config.build import (
    build_budgets,
    build_chat,
    build_collecting,
    build_environment,
    build_eval_sampling,
    build_limits,
    build_penalties,
    build_sampling,
    build_styles,
    environment_settings,
)
from ragen_jax.config.fields import plays_heldout
from ragen_jax.config.per_task import per_task_configs, step_rows
from ragen_jax.core.clean_text import last_line
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import main_process_first
from ragen_jax.core.types import Episode, Params
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import Environment, State
from ragen_jax.model.vision.image_table import ImageTable
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.collect import CollectSettings
from ragen_jax.rollout.env_calls import EnvFailure, Limits, begin, observe
from ragen_jax.rollout.episode import (
    Play,
    Room,
    begin_turns,
    is_prompt_error,
    start_plays,
)
from ragen_jax.rollout.play import Budgets, Sampling
from ragen_jax.rollout.pool import draw_seeds
from ragen_jax.run import datasets
from ragen_jax.storage.cache import cache_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


def build_tasks(
    config: ConfigDict,
    tokenizer: "PreTrainedTokenizerFast",
    stop_ids: Sequence[int],
    *,
    image_pad: int | None = None,
    album: ImageTable | None = None,
    positions: int = 0,
    heldout: bool = False,
) -> tuple[Task, ...]:
    """The `Task`s of a config, in the order of sizes.of_environments.

    Args:
      stop_ids: token ids at which the model's replies end.
      image_pad, album: of a model that sees: of `make_chat`, and the run's album.
      positions: of the model, which a prompt and its reply share; 0: not known.
      heldout: build the held-out problems even where `plays_heldout` is False.

    Raises:
      ValueError: an environment that cannot be built, shows images that the model cannot see, or
        has no problem that can be played.
    """
    alone = per_task_configs(config)
    needed = heldout or plays_heldout(config)
    tasks = tuple(
        dataclasses.replace(
            _build(
                *(name, name if len(alone) > 1 else "", index, c),
                *(tokenizer, stop_ids, image_pad, album, needed),
            ),
            positions=positions,
        )
        for index, (name, c) in enumerate(alone.items())
    )
    for task in tasks:
        _ = task.first_plays  # refuses problems none of which can be played
    return tasks


def _build(
    name: str,
    label: str,
    index: int,
    config: ConfigDict,
    tokenizer: "PreTrainedTokenizerFast",
    stop_ids: Sequence[int],
    image_pad: int | None,
    album: ImageTable | None,
    needs_heldout: bool,
) -> Task:
    environment = build_environment(config, "train")
    collecting = build_collecting(config)
    limits = build_limits(config)
    heldout_environment = heldout = None
    if needs_heldout:
        heldout_environment = build_environment(config, "eval")
        with main_process_first("heldout"):
            heldout = datasets.heldout_problems(
                heldout_environment,
                count=config.eval.episodes,
                seed=config.eval.seed,
                settings=environment_settings(config),
                directory=cache_directory() / "datasets",
                limits=limits,
            )
    return Task(
        name=name,
        label=label,
        chat=build_chat(config, tokenizer, environment, stop_ids, image_pad),
        environment=environment,
        heldout_environment=heldout_environment,
        heldout=heldout,
        # Environments count their seeds alike, so that each needs noise of its own.
        key=stream_key(Purpose.PLAY, config.seed, index),
        eval_seed=config.eval.seed,
        collecting=collecting,
        group_size=config.rollout.group_size,
        group_rows=step_rows(config) // config.rollout.groups,
        budgets=build_budgets(config),
        limits=limits,
        max_error_share=config.env.max_error_share,
        sampling=build_sampling(config),
        eval_sampling=build_eval_sampling(config),
        compact=config.rollout.compact,
        slots=config.rollout.slots,
        chunk=config.rollout.chunk,
        penalties=build_penalties(config),
        styles=build_styles(config, environment),
        album=album,
    )
