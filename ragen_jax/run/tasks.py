"""Builds the tasks of a run: each environment with everything that is needed to play it.

Most runs have a single environment. If several train together, each has its own groups, filter and
metrics, and one update learns from all of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from ragen_jax.config.build_environment import (
    build_budgets,
    build_chat,
    build_environment,
    build_limits,
    build_styles,
    environment_settings,
)
from ragen_jax.config.build_learner import (
    build_collecting,
    build_eval_sampling,
    build_penalties,
    build_sampling,
)
from ragen_jax.config.fields import plays_heldout
from ragen_jax.config.per_task import per_task_configs, step_rows
from ragen_jax.configs.base import Config
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import main_process_first
from ragen_jax.envs import ENVS
from ragen_jax.envs.types import HarnessEnvironment
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.counted import PART
from ragen_jax.rollout.env_calls import EnvFailure, begin, identify
from ragen_jax.rollout.episode import PlaySettings
from ragen_jax.rollout.lanes import cores
from ragen_jax.rollout.task import Task
from ragen_jax.run import datasets
from ragen_jax.serving.loopback import require_uvicorn
from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.console import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

COMPARED = 64  # training problems that are compared with those held out


def build_tasks(
    config: Config,
    tokenizer: "PreTrainedTokenizerFast",
    stop_ids: Sequence[int],
    *,
    images: ImageSource = NO_IMAGES,
    positions: int = 0,
    heldout: bool = False,
) -> tuple[Task, ...]:
    """Return the `Task`s of a config, in the order of per_task.per_task_configs.

    Args:
      stop_ids: token ids that end the model's replies.
      images: the run's images.
      positions: number of positions of the model, the maximum length of a prompt and its reply;
        0: not known.
      heldout: whether to build the held-out problems even if `plays_heldout` is False.

    Raises:
      ValueError: an environment cannot be built, shows images to a model without a vision tower, or
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
        _ = task.first_plays  # raises if no problem can be played
    return tasks


def _build(
    name: str,
    label: str,
    index: int,
    config: Config,
    tokenizer: "PreTrainedTokenizerFast",
    stop_ids: Sequence[int],
    images: ImageSource,
    needs_heldout: bool,
) -> Task:
    environment = build_environment(config.env, "train")
    collecting = build_collecting(config)
    limits = build_limits(config.env)
    if isinstance(environment, HarnessEnvironment):
        require_uvicorn()
        if jax.process_count() > 1:
            raise ValueError(f"environment {name!r} plays in one process, not in several")
    heldout_environment = heldout = None
    if needs_heldout:
        heldout_environment = build_environment(config.env, "eval")
        with main_process_first("heldout"):
            heldout = datasets.heldout_problems(
                heldout_environment,
                count=config.eval.episodes,
                seed=config.eval.seed,
                settings=environment_settings(config.env),
                directory=cache_directory() / "datasets",
                limits=limits,
            )
        if config.env.name not in ENVS:
            seeds = range(config.seed << 32, (config.seed << 32) + COMPARED)
            first = begin(environment, list(seeds), limits)
            _warn_of_overlap(
                name,
                identify(environment, first, limits),
                identify(heldout_environment, heldout[1], limits),
            )
    return Task(
        name=name,
        label=label,
        settings=PlaySettings(
            build_chat(config, tokenizer, environment, stop_ids, images),
            environment,
            budgets=build_budgets(config),
            sampling=build_sampling(config.rollout),
            limits=limits,
            compact=config.rollout.compact,
            slots=config.rollout.slots,
            chunk=config.rollout.chunk,
            cache_dtype=config.rollout.cache_dtype,
            cache_kernel=config.rollout.cache_kernel,
            replay_experts=config.rollout.replay_experts,
            lanes=cores(),
            # With several turns, the episodes that end with each turn are counted.
            counted=config.env.max_turns == 1 and config.rollout.max_new_tokens > PART,
        ),
        heldout_environment=heldout_environment,
        heldout=heldout,
        # The environments use the same seeds, so each needs a separate key.
        key=stream_key(Purpose.PLAY, config.seed, index),
        eval_seed=config.eval.seed,
        collecting=collecting,
        group_size=config.rollout.group_size,
        group_rows=step_rows(config) // config.rollout.groups,
        max_error_share=config.env.max_error_share,
        eval_sampling=build_eval_sampling(config.eval),
        penalties=build_penalties(config),
        styles=build_styles(config, environment),
    )


def _warn_of_overlap(
    name: str, training: Sequence[str | EnvFailure], heldout: Sequence[str | EnvFailure]
) -> None:
    """Warn if held-out problems are among the first training problems."""
    theirs = {each for each in heldout if isinstance(each, str)}
    both = len(theirs.intersection(each for each in training if isinstance(each, str)))
    if both:
        console(
            f"warning: {both} of {len(theirs)} held-out problems of {name} are among the first "
            f"{len(training)} training problems, so that success on them is not held-out; give "
            "other problems for split='eval'"
        )
