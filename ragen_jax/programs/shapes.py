"""The shapes of a training run: its row lengths and the arrays that it keeps in memory.

The arrays are `jax.ShapeDtypeStruct`s with the shardings that train.py would give them. Nothing
here reads weights, a tokenizer or the network.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from ragen_jax.config.build_environment import tiny_tokenizer
from ragen_jax.config.build_learner import build_loss, build_optimizer
from ragen_jax.config.build_model import build_meshes, build_model, check_layers, tiny_shape
from ragen_jax.config.per_task import has_critic, per_task_configs, teacher_path, turns_per_prompt
from ragen_jax.configs.base import INITIAL, Config
from ragen_jax.core import sharding
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.types import Params
from ragen_jax.diagnostics import cross_scoring
from ragen_jax.model import families, hf, layout, lora, qwen
from ragen_jax.model.segments import Segment, as_segment
from ragen_jax.model.vision import images
from ragen_jax.model.vision.image_table import MIN_CAPACITY
from ragen_jax.model.vision.images import Grid
from ragen_jax.model.vision.positions import Images
from ragen_jax.model.window_cache import keep_windows
from ragen_jax.rollout.chunks import Page
from ragen_jax.rollout.tails import Tail, keep_tokens
from ragen_jax.update.optimize import AdamW
from ragen_jax.update.policy import ForwardContext, Loss, add_images
from ragen_jax.update.state import CriticState, TrainState

TILE = 28  # default side of a board's cell in pixels, if env.options gives none: one token

# A jax.ShapeDtypeStruct, used where the types expect an array.
Struct = Any


@dataclasses.dataclass(frozen=True)
class RowLengths:
    """Numbers of tokens, padded as in the run except for `last`; `shown` and `whole` are turns."""

    shown: int  # maximum number of turns in a prompt
    whole: int  # turns of an episode before the first is dropped, if replies have maximum length
    last: int  # the last turn's prompt, not padded
    first: int  # the first turn's prompt
    before: int  # the cache of the turn before the last
    prompt: int  # the last turn's prompt
    news: int  # tokens that the last turn appends
    row: int  # a whole row
    reasoning: int


def lengths(config: Config, prompt_tokens: int, observation_tokens: int) -> RowLengths:
    """Return the `RowLengths` of config.env if every reply has the maximum length.

    Raises:
      ValueError: a length below 1, or a first prompt that env.max_context does not hold.
    """
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("observation_tokens", observation_tokens),
    ):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    env, reply = config.env, config.rollout.max_new_tokens
    shown = turns_per_prompt(env)
    last = prompt_tokens + (shown - 1) * (reply + observation_tokens)
    if env.max_context:
        last = min(last, env.max_context - reply)
        if last < prompt_tokens:
            raise ValueError(
                f"--prompt_tokens is {prompt_tokens}, but config.env.max_context = "
                f"{env.max_context} leaves {last} for the prompt"
            )
    before = max(last - reply - observation_tokens, prompt_tokens)
    return RowLengths(
        shown=shown,
        whole=1 + (last - prompt_tokens) // (reply + observation_tokens),
        last=last,
        first=length_bucket(prompt_tokens),
        before=length_bucket(before),
        prompt=length_bucket(last),
        news=length_bucket(observation_tokens + 1),  # and the last sampled token
        row=length_bucket(last + reply),
        reasoning=cross_scoring.padded_reasoning(reply),
    )


def model_shape(config: Config) -> qwen.ModelConfig:
    """Return the shape of the model at config.model.path.

    Raises:
      ValueError: the path is neither a directory, a GGUF file nor a model whose shape is known.
    """
    path = config.model.path
    if path == "tiny":
        return tiny_shape(config, tiny_tokenizer(config))
    if Path(path).expanduser().exists():
        return hf.model_config(path)
    shape = families.known_shape(path)
    if shape is None:
        raise ValueError(
            f"config.model.path is {path!r}: no model directory, no GGUF file and no model whose "
            f"shape is known; known, with or without -Instruct: tiny, {', '.join(families.SHAPES)}"
        )
    return shape


# ------------------------------------------------------------------------------ arrays


def struct(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, *axes: str | None) -> Struct:
    """Return a ShapeDtypeStruct sharded by the logical names of its axes.

    An axis without a name, or with the name None, is not split.
    """
    axes = axes + (None,) * (len(shape) - len(axes))
    placed = NamedSharding(mesh, sharding.spec(axes, shape, mesh))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)


def host(shape: tuple[int, ...], dtype: DTypeLike = jnp.int32) -> Struct:
    """Return the ShapeDtypeStruct of a NumPy argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_per_chip(tree: Any) -> int:
    """Return the bytes that the arrays of a tree take on one chip, without padding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def laid_out(shapes: Params, shardings: Params) -> Params:
    """Return the shapes with the shardings of another tree."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def cache_struct(
    model: qwen.Qwen,
    params: Params,
    mesh: Mesh,
    rows: int,
    positions: int,
    *,
    windows: bool = False,
) -> Segment:
    """Return the key-value cache of `rows` rows of `positions` positions on a mesh.

    Args:
      windows: whether windowed layers hold their window only (model/window_cache.py).
    """
    tokens = jax.ShapeDtypeStruct((rows, positions), jnp.int32)
    plain = qwen.Qwen(dataclasses.replace(model.config, attention="xla"))

    def read(params, tokens):
        output: Any = plain.apply({"params": params}, tokens, keep_kv=True)
        segment = as_segment(output[1], jnp.zeros(rows, jnp.int32))
        return keep_windows(model.config, segment) if windows else segment

    shapes = jax.eval_shape(read, params, tokens)

    def lay_out(x):
        axes = (None,) * (len(x.shape) - 4) + ("rows", "kv_heads")
        return struct(mesh, x.shape, x.dtype, *axes)

    held: Any = jax.tree.map(lay_out, (shapes.k, shapes.v))
    length_N = struct(mesh, (rows,), jnp.int32, "rows")
    return Segment(
        *held,
        length_N,
        next_position_N=length_N if model.config.vision else None,
        window_N=None if shapes.window_N is None else length_N,
        state=jax.tree.map(lay_out, shapes.state),
    )


def slot_structs(
    model: qwen.Qwen, params: Params, mesh: Mesh, rows: int, positions: int
) -> tuple[Page, Tail | None]:
    """Return what slots keep of `positions` new tokens of `rows` rows: a page, and a tail."""
    keep = functools.partial(keep_tokens, model, rows=rows, positions=positions)
    shapes = jax.eval_shape(keep, params)

    def lay_out(x):
        axes = (None,) * (len(x.shape) - 4) + ("rows", "kv_heads")
        return struct(mesh, x.shape, x.dtype, *axes)

    found: Any = jax.tree.map(lay_out, shapes)
    return found


def picture_grids(config: Config) -> dict[str, Grid]:
    """Return {environment: grid of patches of one of its images} of environments that show images.

    An image has the option `size` in cells, with sides of `tile` pixels.
    """
    path = Path(config.model.path).expanduser()
    settings = images.read_config(path) if path.is_dir() else images.ImageConfig()
    found = {}
    for name, c in per_task_configs(config).items():
        options = c.env.options
        if options.get("observation") == "image":
            height, width = (cells * options.get("tile", TILE) for cells in options["size"])
            found[name] = images.image_grid(height, width, settings)
    return found


def pictures(config: Config) -> int:
    """Return the images per step of one environment's config: one per turn of every episode."""
    return config.rollout.groups * config.rollout.group_size * config.env.max_turns


def table_struct(config: Config, shape: qwen.ModelConfig, mesh: Mesh) -> Images:
    """Return the table of all images of a step, replicated, with the size of `ImageTable.table`."""
    vision = shape.vision
    assert vision is not None
    of = per_task_configs(config)
    tokens = sum(
        pictures(of[name]) * (grid[1] * grid[2] // vision.spatial_merge_size**2)
        for name, grid in picture_grids(config).items()
    )
    capacity = MIN_CAPACITY
    while capacity < tokens:
        capacity *= 2
    return Images(
        token_I=struct(mesh, (capacity,), jnp.int32),
        embed_ID=struct(mesh, (capacity, shape.width), jnp.dtype(config.model.dtype)),
        place_I2=struct(mesh, (capacity, 2), jnp.int32),
        step_I=struct(mesh, (capacity,), jnp.int32),
    )


# ------------------------------------------------------------------------------ the run


@dataclasses.dataclass(frozen=True)
class RunShapes:
    """The shapes and settings that all programs of a run share."""

    config: Config
    model: qwen.Qwen
    at: dict[str, RowLengths]  # environment -> its lengths
    mesh: Mesh
    sampling_mesh: Mesh
    optimizer: AdamW
    state: TrainState
    reference: Params | None  # the KL term's reference
    frozen: ForwardContext | None  # with LoRA: the base model
    policy: Params  # the parameters that sampling and scoring read
    base: Params  # the parameters that layout.sampling_params copies
    cast: bool  # whether frozen parameters differ in dtype from trained parameters
    copied: bool  # whether layout.sampling_params copies parameters or returns the given ones
    resident: Any  # tree of the arrays that training keeps in memory during sampling and scoring
    images: dict[Mesh, Images]  # the image table on each mesh; empty: no vision tower
    reference_model: qwen.Qwen | None = None  # that of the reference; None: the policy's

    @property
    def loss(self) -> Loss:
        """The settings of the policy loss."""
        return build_loss(self.config, self.reference_model)

    @property
    def at_rest(self) -> Params | None:
        """The part of the KL reference that is on the devices while no program reads it."""
        return None if self.config.algorithm.kl_memory == "host" else self.reference

    @property
    def with_images(self) -> Params:
        """The policy with the table of images that prompts show."""
        return add_images(self.policy, self.images.get(self.sampling_mesh))

    @property
    def forward_context(self) -> ForwardContext | None:
        """The model's inputs besides the trained parameters, as in `Learner.forward_context`."""
        images = self.images.get(self.mesh)
        if images is None:
            return self.frozen
        also = images if self.tower_trains and self.config.algorithm.kl_coef else None
        frozen = self.frozen or ForwardContext(None, host((), jnp.float32))
        return dataclasses.replace(frozen, images=images, base_images=also)

    @property
    def whole(self) -> Params:
        """The parameters that the model runs with in training.

        They are as in `ForwardContext.attach`, which itself needs arrays.
        """
        params = self.state.params
        if self.frozen is not None:
            params = unflatten_dict(flatten_dict(self.frozen.params) | flatten_dict(params))
        return add_images(params, self.images.get(self.mesh))

    @property
    def learning(self) -> Params:
        """The parameters that pieces are differentiated by, as in `expose_image_embeddings`."""
        if not self.tower_trains:
            return self.state.params
        embed_ID = self.images[self.mesh].embed_ID
        embeds = struct(self.mesh, embed_ID.shape, jnp.float32)
        return {"layers": self.state.params["layers"], "embeds": embeds}

    @property
    def tower_trains(self) -> bool:
        """Whether adapters of the vision tower are trained."""
        return "tower" in self.state.params

    @property
    def row(self) -> int:
        """Number of tokens of a row of a batch."""
        return max(at.row for at in self.at.values())

    @property
    def helps(self) -> tuple[str, ...]:
        """Config fields that reduce the memory that every program needs."""
        helps = ["mesh.fsdp", "sampling_mesh"]
        helps += ["model.dtype"] if self.config.model.dtype == "float32" else []
        helps += [] if self.frozen else ["model.lora.rank"]
        return (*helps, "a larger --topology")

    @property
    def sampler(self) -> qwen.Qwen:
        """The model that rollouts sample from."""
        rollout = self.config.rollout
        return qwen.with_cache(
            self.model,
            cache_dtype=rollout.cache_dtype,
            cache_kernel=rollout.cache_kernel,
            platform=self.sampling_mesh.devices.flat[0].platform,
            keep_experts=rollout.replay_experts,
        )


def describe(
    config: Config,
    devices: Sequence[jax.Device],
    prompt_tokens: int,
    observation_tokens: int,
) -> RunShapes:
    """Return the `RunShapes` of a config, as train.py sets the run up."""
    c = config
    for name, value in (
        ("rollout.ahead", c.rollout.ahead),
        ("sampling_mesh.devices", c.sampling_mesh.devices),
    ):
        if value:  # two programs run at a time, or devices hold different arrays
            raise ValueError(
                f"config.{name} is {value}, which preflight does not support; set {name}=0 to "
                "plan rollouts and updates in turn on all devices"
            )
    if teacher := teacher_path(c.algorithm):
        raise ValueError(
            f"config.algorithm.kl_reference is {teacher!r}; preflight does not "
            f"plan a second model; set kl_reference={INITIAL} to plan the rest, and add its weights"
        )
    shape = model_shape(c)
    check_layers(c, shape)
    mesh, sampling_mesh = build_meshes(c, devices)
    model = build_model(c.model, shape, mesh)
    at = {
        name: lengths(part, prompt_tokens, observation_tokens)
        for name, part in per_task_configs(c).items()
    }
    longest = max(at_one.last for at_one in at.values()) + c.rollout.max_new_tokens
    if longest > shape.max_positions:  # as in rollout/play.py
        raise ValueError(
            f"the last prompt with its reply needs {longest} positions, but {c.model.path} has "
            f"{shape.max_positions}"
        )
    shapes = nn.unbox(qwen.boxed_shapes(model.config))
    params = laid_out(shapes, layout.param_shardings(model, mesh))
    # Parameters that are not trained are in the model's dtype.
    copy = jax.eval_shape(layout.resharding(model, mesh), shapes)
    fixed = laid_out(copy, layout.param_shardings(model, mesh))
    policy = laid_out(copy, layout.param_shardings(model, sampling_mesh))
    cast = c.model.dtype != "float32"
    copied = cast and not c.model.lora.rank or mesh != sampling_mesh

    trained, frozen, reference = params, None, fixed if c.algorithm.kl_coef else None
    if c.model.lora.rank:
        frozen, reference = ForwardContext(fixed, host((), jnp.float32)), None
        trained = adapters(c, model, mesh)
        added = adapters(c, model, sampling_mesh)["layers"]
        layers = {name: leaf | added.get(name, {}) for name, leaf in policy["layers"].items()}
        policy = policy | {"layers": layers}

    optimizer = build_optimizer(c.optimizer)
    critic = None
    if has_critic(c.algorithm):
        backbone = trained if frozen else {k: x for k, x in trained.items() if k != "head"}
        values = struct(mesh, (shape.width,), jnp.float32)
        critic = {"backbone": backbone, "value": values}
        critic = CriticState(critic, moments(optimizer, critic, mesh))
    state = TrainState(
        params=trained,
        opt_state=moments(optimizer, trained, mesh),
        step=struct(mesh, (), jnp.int32),
        seed_cursor={name: struct(mesh, (), jnp.uint32) for name in at},
        kl_scale=struct(mesh, (), jnp.float32),
        critic=critic,
    )
    resting = None if c.algorithm.kl_memory == "host" else reference  # as in `at_rest`
    if copied:
        resident = state, resting, frozen and frozen.params
    else:  # the sampler reads the parameters of training
        resident = state if frozen else dataclasses.replace(state, params=None), resting
    return RunShapes(
        config=c,
        model=model,
        at=at,
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        optimizer=optimizer,
        state=state,
        reference=reference,
        frozen=frozen,
        policy=policy,
        base=params,
        cast=cast,
        copied=copied,
        resident=resident,
        images={on: table_struct(c, shape, on) for on in (mesh, sampling_mesh) if shape.vision},
    )


def moments(optimizer: AdamW, params: Params, mesh: Mesh) -> Any:
    """Return an optimizer's state as policy.init_state places it: moments sharded like the
    parameters, everything else replicated."""
    return optax.tree.map_params(
        optimizer,
        lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: struct(mesh, x.shape, x.dtype),
    )


def adapters(config: Config, model: qwen.Qwen, mesh: Mesh) -> Params:
    """Return LoRA's adapters as build_model.build_adapters makes them."""
    settings = config.model.lora
    shapes = jax.eval_shape(
        lambda key: lora.init_adapters(
            model.config,
            key,
            rank=settings.rank,
            targets=settings.targets,
            tower=settings.tower,
        ),
        jax.random.key(0),
    )
    return laid_out(shapes, lora.adapter_shardings(model.config, shapes, mesh))
