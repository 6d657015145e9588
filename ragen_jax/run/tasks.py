"""The environments of a run, each with all that playing it needs.

Most runs have one. Where several train together, each has its own groups, filter and figures, and
one update learns from all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

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
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import main_process_first
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.episode import PlaySettings
from ragen_jax.rollout.task import Task
from ragen_jax.run import datasets
from ragen_jax.storage.cache import cache_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def build_tasks(
    config: ConfigDict,
    tokenizer: "PreTrainedTokenizerFast",
    stop_ids: Sequence[int],
    *,
    images: ImageSource = NO_IMAGES,
    positions: int = 0,
    heldout: bool = False,
) -> tuple[Task, ...]:
    """The `Task`s of a config, in the order of sizes.of_environments.

    Args:
      stop_ids: token ids at which the model's replies end.
      images: the run's images.
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
                *(tokenizer, stop_ids, images, needed),
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
    images: ImageSource,
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
        settings=PlaySettings(
            build_chat(config, tokenizer, environment, stop_ids, images),
            environment,
            budgets=build_budgets(config),
            sampling=build_sampling(config),
            limits=limits,
            compact=config.rollout.compact,
            slots=config.rollout.slots,
            chunk=config.rollout.chunk,
        ),
        heldout_environment=heldout_environment,
        heldout=heldout,
        # Environments count their seeds alike, so that each needs noise of its own.
        key=stream_key(Purpose.PLAY, config.seed, index),
        eval_seed=config.eval.seed,
        collecting=collecting,
        group_size=config.rollout.group_size,
        group_rows=step_rows(config) // config.rollout.groups,
        max_error_share=config.env.max_error_share,
        eval_sampling=build_eval_sampling(config),
        penalties=build_penalties(config),
        styles=build_styles(config, environment),
    )
