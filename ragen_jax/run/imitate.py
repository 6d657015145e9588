"""Trains a small model with the Qwen2.5 architecture to imitate the environment's solver.

The result is a Hugging Face directory in the cache, named by a hash of its settings. With
`warmstart.tower_layers`, the model has a vision tower, which is trained with it on images of the
solver's observations.

Axes: B rows, T tokens, N images, P patches, C values per patch.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from tqdm import tqdm

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.config.build_environment import (
    build_budgets,
    build_chat,
    build_limits,
    environment_settings,
    tiny_tokenizer,
)
from ragen_jax.config.build_model import tiny_images, tiny_shape
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config, Warmstart
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.types import Array, Episode, Params
from ragen_jax.envs.types import Environment, State
from ragen_jax.model import hf
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.tiny_kinds import DENSE
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource, ImageTable, NoImages
from ragen_jax.model.vision.images import Grid, preprocess
from ragen_jax.model.vision.positions import Images, table
from ragen_jax.model.vision.tower import Tower, VisionTower
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run import datasets
from ragen_jax.run.demonstrations import (
    FEW_PROBLEMS,
    as_episodes,
    describe_few_problems,
    expert_arguments,
    hold_back,
    imitation_config,
    imitation_environment,
    imitation_settings,
    style_fractions,
    without_prompts,
)
from ragen_jax.storage.cache import cache_directory, lock_path
from ragen_jax.storage.console import console
from ragen_jax.storage.datasets import settings_hash
from ragen_jax.storage.heartbeat import heartbeat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECIPE = 2  # raise it when a change of this file changes the result
# Fields of config.warmstart that only language models read.
ONLY_FINE_TUNING = ("fine_tune", "demonstrations", "schedule", "warmup_updates")
# Fields of config.warmstart that the hashed settings contain in another form, if they are used.
_NOT_LISTED = ("styles", "options", "kind", "tower_layers", "tower_width", *ONLY_FINE_TUNING)


def tiny_model(config: Config | ConfigDict, cache: str | Path | None = None) -> Path:
    """Return the directory of the config's tiny agent; build it on first use.

    Args:
      config: a run's config (env, warmstart and the rollout's budgets determine the result).
      cache: folder of generated models and data sets.

    Raises:
      ValueError: an environment cannot be imitated (`tiny_words`, `imitation_config`).
    """
    config = imitation_config(load_config(config))
    cache = cache_directory() if cache is None else Path(cache)
    task_configs, w = per_task_configs(config), config.warmstart
    settings = {
        "recipe": RECIPE,
        **imitation_settings(config),
        **{
            f"warmstart.{name}": x
            for name, x in config.warmstart.to_dict().items()
            if name not in _NOT_LISTED
        },
        **({"warmstart.styles": style_fractions(config)} if style_fractions(config) else {}),
        **({"hidden_prompts": hidden} if (hidden := config.lab.hidden_prompts) else {}),
        **({"kind": w.kind} if w.kind != DENSE else {}),
        **({"tower": [w.tower_layers, w.tower_width]} if w.tower_layers else {}),
        "max_new_tokens": config.rollout.max_new_tokens,
        **{name: imitation_settings(c) for name, c in list(task_configs.items())[1:]},
    }
    directory = cache / "models" / f"tiny_{settings_hash(settings)}"
    if directory.exists():  # without a lock: the cache may be read-only
        return directory
    with heartbeat(), lock_path(directory):
        if not directory.exists():  # no other process has built it meanwhile
            console(f"warm start: imitating the solver (once; cached in {directory})")
            model, params, tokenizer, tower = imitate(config, cache)
            hf.save(directory, model, params, tokenizer, tower=tower)
    return directory


def imitate(
    config: Config, cache: Path
) -> tuple[Qwen, Params, "PreTrainedTokenizerFast", Tower | None]:
    """Train the tiny agent until it solves a fraction `warmstart.success` of new problems.

    The problems are imitation problems that are not in the demonstrations. With several
    environments, the agent must reach this success rate in each of them.

    Returns:
      (model, parameters, tokenizer, vision tower or None).

    Raises:
      ValueError: an environment is unusable, or the success rate is not reached within
        `warmstart.max_updates` updates.
    """
    w = config.warmstart
    tokenizer = tiny_tokenizer(config)
    shape = tiny_shape(config, tokenizer)
    model = Qwen(shape)
    params = init_params(shape, stream_key(Purpose.WARMSTART_PARAMETERS, w.seed))
    trained: dict[str, Params] = {"model": params}
    vision_tower, images = None, NO_IMAGES
    if shape.vision is not None and shape.image_tokens is not None:
        vision_tower = VisionTower(shape.vision)
        trained["tower"] = vision.init_params(
            shape.vision, stream_key(Purpose.WARMSTART_PARAMETERS, w.seed, 1)
        )
        images = _image_table(vision_tower, trained, shape)
    episodes: list[Episode] = []
    distinct: dict[str, int] = {}  # environment -> number of distinct problems to imitate
    checks: dict[str, Callable[[Qwen, Params, ImageSource], float]] = {}
    for name, c in per_task_configs(config).items():
        environment = imitation_environment(c)
        chat = build_chat(c, tokenizer, environment, images=images)
        examples = datasets.demonstrations(
            environment,
            rooms=w.rooms,
            settings=environment_settings(c.env),
            directory=cache / "datasets",
            **expert_arguments(c),
        )
        examples, *problems = hold_back(environment, examples, c)
        distinct[name] = len({example["identity"] for example in examples})
        if distinct[name] < FEW_PROBLEMS:
            console(f"warning: {describe_few_problems(w, name, distinct[name])}")
        checks[name] = functools.partial(_success, c, chat, environment, *problems)
        enter_phase("reading the demonstrations")
        shown = as_episodes(examples, chat, shape.max_positions)
        episodes += shown + without_prompts(shown, chat, config.lab.hidden_prompts)
    batch = make_batch(episodes)
    if len(batch.tokens_BT) < w.batch:
        raise ValueError(
            f"only {len(batch.tokens_BT)} rows can be imitated, fewer than "
            f"config.warmstart.batch={w.batch}; lower it, or raise "
            f"config.warmstart.rooms={w.rooms}"
        )
    length = length_bucket(batch.tokens_BT.shape[1])
    tokens_BT = np.pad(batch.tokens_BT, ((0, 0), (0, length - batch.tokens_BT.shape[1])))
    mask_BT = np.pad(batch.mask_BT, ((0, 0), (0, length - batch.mask_BT.shape[1])))

    get_images = (
        None if isinstance(images, NoImages) else _images_of_rows(images, tokens_BT, w.batch)
    )
    optimizer = optax.adam(optax.linear_schedule(0.0, w.learning_rate, 50), b2=0.99)
    opt_state = optimizer.init(trained)

    start, history = time.monotonic(), []
    with tqdm(total=1.0, desc="warm start", disable=None, bar_format=_BAR) as bar:
        for update in range(w.max_updates):
            reached = f", success {history[-1]:.2f} of {w.success:.2f}" if history else ""
            place = f"imitating the solver, update {update + 1} of at most {w.max_updates}{reached}"
            enter_phase(place, since=start)
            epoch, place = divmod(update, len(tokens_BT) // w.batch)
            if place == 0:
                key = stream_key(Purpose.WARMSTART_ORDER, w.seed, epoch)
                order = np.asarray(jax.random.permutation(key, len(tokens_BT)))
            rows = order[place * w.batch : (place + 1) * w.batch]
            row_images = None if get_images is None else get_images(rows)
            trained, opt_state, loss = _imitation_step(
                model,
                vision_tower,
                optimizer,
                trained,
                opt_state,
                tokens_BT[rows],
                mask_BT[rows],
                row_images,
            )
            if (update + 1) % w.check_every == 0:
                current_images = NO_IMAGES
                if vision_tower is not None:
                    current_images = _image_table(vision_tower, trained, shape)
                successes = {
                    name: solved(model, trained["model"], current_images)
                    for name, solved in checks.items()
                }
                success = min(successes.values())
                history.append(success)
                bar.n = 1.0 if success >= w.success else success / w.success
                bar.set_postfix_str(f"success {success:.2f} of {w.success:.2f}")
                if success >= w.success:
                    seconds = time.monotonic() - start
                    console(
                        f"warm start: success {_format_rates(successes)} (temperature 1) after "
                        f"{update + 1} updates, {seconds:.0f} s, loss {float(loss):.3f}"
                    )
                    return model, trained["model"], tokenizer, current_images.tower
    raise ValueError(_failure_message(w, max(history, default=0.0), distinct))


def _failure_message(warmstart: Warmstart, success: float, distinct: dict[str, int]) -> str:
    """Return the message about an imitation that did not reach warmstart.success.

    Args:
      success: highest success rate.
      distinct: environment -> number of distinct problems that were imitated.
    """
    w, (name, fewest) = warmstart, min(distinct.items(), key=lambda item: item[1])
    reached = (
        f"imitation reached success {success:.2f} in {w.max_updates} updates, not "
        f"warmstart.success={w.success}"
    )
    if fewest >= FEW_PROBLEMS:
        return f"{reached}; raise warmstart.max_updates or lower the target"
    return f"{reached}; {describe_few_problems(w, name, fewest)}"


def _success(
    config: Config,
    chat: Chat,
    environment: Environment,
    seeds: Sequence[int],
    states: Sequence[State],
    model: Qwen,
    params: Params,
    images: ImageSource,
) -> float:
    """Return the success rate at temperature 1 over the problems whose environment did not break.

    Return 0 if all broke.
    """
    episodes = rollout(
        model,
        params,
        PlaySettings(
            dataclasses.replace(chat, images=images),
            environment,
            budgets=build_budgets(config),
            sampling=Sampling(temperature=1.0),
            limits=build_limits(config.env),
        ),
        seeds,
        states,
        group_size=1,
        rows=config.rollout.groups * config.rollout.group_size,
        key=stream_key(Purpose.WARMSTART_CHECK, config.warmstart.seed),
    )
    solved = [episode.success for episode in episodes if not episode.error]
    return float(np.mean(solved)) if solved else 0.0


def _format_rates(successes: dict[str, float]) -> str:
    """Return success rates as text: "0.41", or "sokoban 0.41, frozen_lake 0.56"."""
    if len(successes) == 1:
        return f"{min(successes.values()):.2f}"
    return ", ".join(f"{name} {value:.2f}" for name, value in successes.items())


_BAR = "{desc} {bar} {elapsed} {postfix}"


@flax.struct.dataclass
class RowImages:
    """The images that rows show, to train the tower with."""

    pixels_NPC: Array  # float32, by rising number of the images, padded
    images: Images  # without the tower's embeddings
    grid: Grid = flax.struct.field(pytree_node=False)  # size of every image in patches


@functools.partial(
    jax.jit,
    static_argnames=("model", "vision_tower", "optimizer"),
    donate_argnames=("trained", "opt_state"),
)
def _imitation_step(
    model: Qwen,
    vision_tower: VisionTower | None,
    optimizer: optax.GradientTransformation,
    trained: dict[str, Params],
    opt_state: Any,
    tokens_BT: jax.Array,
    mask_BT: jax.Array,
    row_images: RowImages | None,
) -> tuple[dict[str, Params], Any, jax.Array]:
    """Take an Adam step on the mean negative log-likelihood of the expert's tokens.

    Args:
      trained: parameters of the model and of its vision tower, if any.

    Returns:
      (trained parameters, optimizer state, loss).
    """

    def objective(trained):
        params = trained["model"]
        if vision_tower is not None and row_images is not None:
            pixels_NPC = jnp.asarray(row_images.pixels_NPC)
            embed: Any = vision_tower.apply(
                {"params": trained["tower"]}, pixels_NPC, row_images.grid
            )
            embed_ID = embed.reshape(-1, embed.shape[-1])
            params = {**params, "images": dataclasses.replace(row_images.images, embed_ID=embed_ID)}
        logp_BT = token_logps(model, params, tokens_BT)
        return -(mask_BT * logp_BT).sum() / jnp.maximum(mask_BT.sum(), 1.0)

    loss, grads = jax.value_and_grad(objective)(trained)
    updates, opt_state = optimizer.update(grads, opt_state, trained)
    updated: Any = optax.apply_updates(trained, updates)
    return updated, opt_state, loss


def _image_table(
    vision_tower: VisionTower, trained: dict[str, Params], shape: ModelConfig
) -> ImageTable:
    """Return an empty image table with a copy of the tower.

    It needs a copy because the next update donates the tower's arrays.
    """
    tower_params = jax.tree.map(jnp.copy, trained["tower"])
    pad = None if shape.image_tokens is None else shape.image_tokens.pad
    return ImageTable(Tower(vision_tower, tower_params, tiny_images()), shape.vocab_size, pad)


def _images_of_rows(
    images: ImageTable, tokens_BT: np.ndarray, rows: int
) -> Callable[[np.ndarray], RowImages]:
    """Return a function that maps the indices of `rows` rows to the images that they show.

    Raises:
      ValueError: there are no images, or images of several sizes.
    """
    registered = images.images_of(tokens_BT)
    if not registered:
        raise ValueError(
            "config.warmstart.tower_layers gives the agent a vision tower, but no environment "
            "shows images; set it to 0, or set config.env.options.observation='image'"
        )
    grids = {image.grid for image in registered}
    if len(grids) != 1:
        raise ValueError(
            f"the demonstrations have images of {len(grids)} sizes, but the tiny agent "
            "supports one; give its environments the same config.env.options.size and tile"
        )
    (grid,), tokens = grids, registered[0].tokens
    most = max(len(np.unique(row[row >= images.vocab_size])) for row in tokens_BT) // tokens
    capacity = rows * most

    def get_images(rows: np.ndarray) -> RowImages:
        registered = images.images_of(tokens_BT[rows])
        patches = [preprocess(x.pixels, images.tower.images)[0] for x in registered]
        pixels_NPC = np.zeros((capacity, *patches[0].shape), np.float32)
        pixels_NPC[: len(registered)] = patches
        entries = [(x.first, *images.grid_size(x)) for x in registered]
        without_embeddings = table(entries, np.zeros((0, 1), np.float32), capacity * tokens)
        return RowImages(pixels_NPC, without_embeddings, grid)

    return get_images
