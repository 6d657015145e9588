"""Build the objects that a config describes."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ragen_jax.algorithm.algorithms import Credit
from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.algorithm.schedules import learning_rates
from ragen_jax.config.per_task import (
    has_critic,
    minibatch_rows,
    per_task_configs,
    per_task_groups,
    row_tokens,
    step_rows,
    teacher_path,
)
from ragen_jax.configs.base import (
    Algorithm,
    Config,
    Env,
    Eval,
    Model,
    Optimizer,
    Reward,
    Rollout,
)
from ragen_jax.core.domains import plain
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import (
    EXPERT,
    MEMORIES,
    MESH_AXES,
    ROWS,
    data_shards,
    in_memory,
    make_mesh,
    present,
    split_devices,
)
from ragen_jax.core.task_shares import Part
from ragen_jax.core.types import Params
from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.scopes import SCOPES
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.diagnostics.zscores import init_zscores
from ragen_jax.envs import IncompleteEnvironment, code_hash, find_env, make_env
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import (
    Environment,
    HarnessEnvironment,
    LiveEnvironment,
    SentenceEnvironment,
    SolvableEnvironment,
    StyledEnvironment,
)
from ragen_jax.model import lora
from ragen_jax.model.dates import day_of
from ragen_jax.model.experts import best_form
from ragen_jax.model.kernels import best_kernel
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.tiny_kinds import DENSE, kind_fields
from ragen_jax.model.tokenizer import OF_IMAGES, build_tokenizer
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource, NoImages
from ragen_jax.model.vision.images import ImageConfig
from ragen_jax.rollout import chat
from ragen_jax.rollout.env_calls import Limits
from ragen_jax.rollout.episode import Budgets, Sampling
from ragen_jax.rollout.pool import init_streaks, init_tallies
from ragen_jax.rollout.task import CollectSettings
from ragen_jax.serving.conversation import make_conversation
from ragen_jax.serving.harness_chat import harness_chat
from ragen_jax.storage.cache import content_hash
from ragen_jax.update import critic
from ragen_jax.update.learner import Learner, copy_sampler, sampling_policy
from ragen_jax.update.optimize import make_optimizer
from ragen_jax.update.policy import ForwardContext, Loss, init_state
from ragen_jax.update.state import AheadState, TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def environment_settings(env: Env) -> dict[str, Any]:
    """Return the JSON-like settings that determine the problems of an environment, for cache names.

    Files of problems (the options `path`, `..._path` and `problems`) and the sources of a user's
    environment count by their content, not by their location.

    Raises:
      ValueError: a file cannot be read.
    """
    options = plain(env.options) | hash_option_files(env)
    code = code_hash(env.name)
    return {"env": env.name if code is None else f"{env.name} {code}", **options}


def hash_option_files(env: Env) -> dict[str, str]:
    """Return {option: content hash} of the files and folders that an environment's options name.

    Raises:
      ValueError: a file or folder cannot be read.
    """
    found = {}
    for name, value in env.options.items():
        # Problems that are no file are a data set of the Hub.
        is_file = name == "problems" and os.path.exists(str(value))
        if (is_file or name == "path" or name.endswith("_path")) and value is not None:
            try:
                found[name] = content_hash(value)
            except OSError as error:
                raise ValueError(f"config.env.options.{name} cannot be read: {error}") from error
    return found


TINY_NEEDS = ("words", "solve", "explain")  # methods of envs.types.SolvableEnvironment


def tiny_words(config: Config) -> tuple[str, ...]:
    """Return the distinct words that the tiny agent's tokenizer does not split.

    Raises:
      ValueError: an environment is unusable or lacks TINY_NEEDS.
    """
    words = {}
    for name, c in per_task_configs(config).items():
        environment = build_environment(c.env, "train")
        missing = [member for member in TINY_NEEDS if not hasattr(environment, member)]
        if missing:
            how = getattr(environment, "solvable_by", "implement them")
            raise ValueError(
                f"config.model.path is {config.model.path!r}, an agent that imitates a solver, "
                f"but environment {name!r} has no {', '.join(missing)} (envs/types.py, "
                f"SolvableEnvironment); {how}, or train a language model: preset llm and "
                "--config.model.path=DIR_OR_HUB_ID"
            )
        words |= dict.fromkeys(cast(SolvableEnvironment, environment).words)
        for style in build_styles(c, environment).values():
            words |= dict.fromkeys(style.words)
    return tuple(words)


def tiny_tokenizer(config: Config) -> "PreTrainedTokenizerFast":
    """Build the tiny agent's tokenizer.

    Raises:
      ValueError: see `tiny_words`.
    """
    return build_tokenizer(tiny_words(config), sees=bool(config.warmstart.tower_layers))


def build_styles(config: Config, environment: Environment) -> dict[str, Style]:
    """Return the styles that config.warmstart.styles mixes, in the environment's order.

    An agent that reads terse prompts writes the words of `styles`; a language model writes
    `sentence_styles`. {} if there is no mixture.

    Raises:
      ValueError: the environment lacks a style, or the fractions are unusable.
    """
    fractions = config.warmstart.styles
    if not fractions:
        return {}
    member, known = "sentence_styles", {}
    if config.env.prompt == "terse":
        member = "styles"
        known = environment.styles if isinstance(environment, StyledEnvironment) else {}
    elif isinstance(environment, SentenceEnvironment):
        known = environment.sentence_styles
    unknown = [name for name in fractions if name not in known]
    if unknown:
        raise ValueError(
            f"config.warmstart.styles has {', '.join(unknown)}, but environment "
            f"{config.env.name!r} has {', '.join(known) or f'no {member} (envs/types.py)'}"
        )
    return {name: style for name, style in known.items() if fractions.get(name)}


def build_environment(env: Env, split: str) -> Environment:
    """Build an environment, which draws its problems from `split`.

    Raises:
      ValueError: the class cannot be found, options or values are unknown, env.actions_per_turn
        is above 1 for actions that are free text, a harness has no env.max_context, or a pool has
        problems that do not recur.
    """
    try:
        find_env(env.name)
    except ValueError as error:
        raise ValueError(f"config.env.name: {error}") from error
    try:
        environment = make_env(env.name, **plain(env.options), split=split)
    except IncompleteEnvironment as error:
        raise ValueError(f"config.env.name: {error}") from error
    except ValueError as error:
        raise ValueError(f"config.env.options of {env.name!r}: {error}") from error
    if not environment.actions and env.actions_per_turn != 1:
        raise ValueError(
            f"config.env.actions_per_turn is {env.actions_per_turn}; accepted: 1, "
            f"because in environment {env.name!r} the whole answer is one action"
        )
    if isinstance(environment, HarnessEnvironment) and not env.max_context:
        raise ValueError(
            "config.env.max_context is 0; a harness writes prompts of any length, so give the "
            "maximum number of tokens of a prompt and its reply, such as 4096"
        )
    if env.pool and not resumable(environment):
        raise ValueError(
            f"config.env.pool is {env.pool}; accepted: 0, because environment "
            f"{env.name!r} cannot repeat a problem"
        )
    return environment


def resumable(environment: Environment) -> bool:
    """Return whether equal seeds and actions give equal episodes (envs.types.LiveEnvironment)."""
    return not isinstance(environment, LiveEnvironment) or environment.resumable


def build_chat(
    config: Config,
    tokenizer: "PreTrainedTokenizerFast",
    environment: Environment,
    extra_stop_ids: Sequence[int] = (),
    images: ImageSource = NO_IMAGES,
) -> chat.Chat:
    """Build the config's `Chat`; the other arguments are those of `make_chat`."""
    limit = config.env.max_context
    date = day_of(config.model.date)
    found = chat.make_chat(
        tokenizer,
        environment,
        chat.ChatFormat(
            context=config.env.context,
            window=config.env.window,
            max_prompt=limit - config.rollout.max_new_tokens if limit else 0,
            prompt=config.env.prompt,
            actions_per_turn=config.env.actions_per_turn,
            max_actions=config.env.max_actions,
            stop=config.rollout.stop,
            strict=config.env.strict_format,
        ),
        extra_stop_ids=extra_stop_ids,
        images=images,
        date=date,
    )
    if not isinstance(environment, HarnessEnvironment):
        return found
    return harness_chat(found, make_conversation(tokenizer, thinks=environment.thinks, date=date))


def has_reference(config: Config) -> bool:
    """Return whether a run holds a separate KL reference.

    With LoRA it is the base model, unless a config names another.
    """
    own = config.algorithm.kl_coef and not config.model.lora.rank
    return bool(own or teacher_path(config.algorithm))


def check_host_memory(config: Config, device: jax.Device) -> None:
    """Refuse a KL reference in host memory if the devices cannot copy from it.

    Raises:
      ValueError: the reference is refused.
    """
    if not has_reference(config) or config.algorithm.kl_memory != "host":
        return
    kinds = [memory.kind for memory in device.addressable_memories()]
    if MEMORIES["host"] not in kinds:
        raise ValueError(
            f"config.algorithm.kl_memory is 'host', but {device.device_kind} has no pinned "
            f"host memory, only {', '.join(kinds)}; set algorithm.kl_memory=device"
        )


def build_meshes(config: Config, devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, Mesh]:
    """Return (training mesh, sampling and scoring mesh) over the devices (None: all devices).

    Raises:
      ValueError: the sizes do not fit the devices, rows do not split over them, or rollouts ahead
        share several devices with training.
    """
    apart = config.sampling_mesh.devices
    training, sampled = split_devices(jax.devices() if devices is None else devices, apart)
    trained_on = config.mesh.to_dict()
    mesh = sampling = make_mesh(**trained_on, devices=training)
    sizes = {name: getattr(config.sampling_mesh, name) for name in MESH_AXES}
    separate = any(sizes.values())
    sizes[EXPERT] = config.sampling_mesh.expert
    if apart or separate:
        try:
            sampling = make_mesh(**(sizes if separate else trained_on), devices=sampled)
        except ValueError as error:
            raise ValueError(f"config.sampling_{error}") from error
    if config.optimizer.micro_batch % data_shards(mesh):
        raise ValueError(
            f"config.optimizer.micro_batch is {config.optimizer.micro_batch}; it must be a "
            f"multiple of {' x '.join(f'mesh.{name}' for name in present(ROWS, mesh))} = "
            f"{data_shards(mesh)}"
        )
    check_host_memory(config, mesh.devices.flat[0])
    sampler = sampling.devices.flat[0]
    if config.rollout.cache_kernel == "pages" and sampler.platform == "cpu":
        raise ValueError(
            f"config.rollout.cache_kernel is 'pages', a kernel for TPUs and GPUs, but sampling "
            f"runs on {sampler.platform}; set it to xla"
        )
    processes = len({device.process_index for device in mesh.devices.flat})
    most = max(mesh.size, sampling.size)
    if config.rollout.ahead and most > processes > 1 and sampler.platform == "cpu":
        # XLA starts programs of several CPU devices one after the other, whatever their thread. Two
        # processes with other orders would wait for each other.
        raise ValueError(
            f"config.rollout.ahead is {config.rollout.ahead}, but on CPUs a process of several "
            f"plays ahead with 2 devices, one to train and one to sample; set rollout.ahead=0, or "
            f"sampling_mesh.devices={processes} and {processes} devices to train"
        )
    if config.rollout.ahead and not apart and mesh.size > 1:
        half = processes * (mesh.size // processes // 2)
        advice = f"set sampling_mesh.devices, for example to {half}, or rollout.ahead=0"
        if not half:
            advice = "give each process at least 2 devices, or set rollout.ahead=0"
        raise ValueError(
            f"config.rollout.ahead is {config.rollout.ahead}, but training and sampling share "
            f"{mesh.size} devices, where two concurrent programs can deadlock; {advice}"
        )
    return mesh, sampling


def check_images_ahead(config: Config, images: ImageSource) -> None:
    """Refuse rollouts ahead of a vision model in several processes.

    The threads of rollout and updates share a table of images, and fill it with programs that all
    processes run; two processes could wait for each other.

    Raises:
      ValueError: the run is refused.
    """
    processes = jax.process_count()
    if config.rollout.ahead and processes > 1 and not isinstance(images, NoImages):
        raise ValueError(
            f"config.rollout.ahead is {config.rollout.ahead}, but a model that reads images plays "
            f"ahead only in a single process, not in {processes}; set rollout.ahead=0"
        )


TOWER_HEADS = 4  # attention heads of the tiny agent's vision tower
PATCH = 8  # side of a patch in pixels; a patch is a token and shows one cell of a board
WINDOW = 24  # side of a window in pixels: 3 x 3 tokens, which divide boards of 6 x 6
LARGEST_IMAGE = 1024  # maximum number of tokens of an image


def tiny_images() -> ImageConfig:
    """Return the image preprocessing of the tiny agent."""
    return ImageConfig(
        patch_size=PATCH,
        merge_size=1,
        min_pixels=PATCH**2,
        max_pixels=LARGEST_IMAGE * PATCH**2,
    )


def tiny_shape(config: Config, tokenizer: "PreTrainedTokenizerFast") -> ModelConfig:
    """Return the `ModelConfig` of the tiny agent that imitation learning trains.

    Raises:
      ValueError: the tower's heads are too narrow for rotary embeddings, its model has another
        kind of layers than dense ones, a hybrid has one layer, or what `check_layers` refuses.
    """
    w = config.warmstart
    features: dict[str, Any] = kind_fields(
        w.kind, w.layers, w.mlp_width, w.heads, w.width // w.heads
    )
    if w.tower_layers:
        if w.kind != DENSE:
            raise ValueError(
                f"config.warmstart.kind is {w.kind!r}, but a tiny agent with a vision tower "
                f"(warmstart.tower_layers={w.tower_layers}) has dense layers; set it to dense"
            )
        if w.tower_width % (4 * TOWER_HEADS):
            raise ValueError(
                f"config.warmstart.tower_width is {w.tower_width}; it must be a multiple of "
                f"{4 * TOWER_HEADS} ({TOWER_HEADS} heads)"
            )
        turning = w.width // w.heads // 2  # rotary frequencies per head
        third = turning // 3
        ids = tokenizer.get_vocab()
        start, pad, end = (ids[word] for word in OF_IMAGES)
        features = {
            "family": "qwen2_5_vl",
            "mrope_section": (turning - 2 * third, third, third),
            "vision": VisionConfig(
                depth=w.tower_layers,
                hidden_size=w.tower_width,
                intermediate_size=2 * w.tower_width,
                num_heads=TOWER_HEADS,
                out_hidden_size=w.width,
                fullatt_block_indexes=(w.tower_layers - 1,),
                window_size=WINDOW,
                patch_size=PATCH,
                spatial_merge_size=1,
            ),
            "image_tokens": ImageTokens(start=start, pad=pad, end=end, video=pad),
        }
    shape = ModelConfig(
        vocab_size=len(tokenizer),
        width=w.width,
        layers=w.layers,
        heads=w.heads,
        kv_heads=w.kv_heads,
        head_dim=w.width // w.heads,
        mlp_width=w.mlp_width,
        **features,
    )
    check_layers(config, shape)  # before an agent is trained that the run cannot use
    return shape


def build_model(settings: Model, shape: ModelConfig, mesh: Mesh) -> Qwen:
    """Build the `Qwen` of a `ModelConfig` with the dtype, kernel and remat of config.model.

    Raises:
      ValueError: the kernel does not run on the mesh's devices, or the mesh splits experts that the
        model does not have.
    """
    parts, count = mesh.shape.get(EXPERT, 1), shape.experts.count if shape.experts else 1
    if count % parts:
        raise ValueError(
            f"config.mesh.expert is {parts}, which must divide the "
            f"model's number of experts, {count}; set it to 1 for a model without experts"
        )
    m, platform = settings, mesh.devices.flat[0].platform
    kernel = best_kernel(platform, m.dtype, shape.head_dim)
    if m.attention not in ("auto", "xla", kernel):
        raise ValueError(
            f"config.model.attention is {m.attention!r}, which does not run on {platform} with "
            f"{m.dtype} and head size {shape.head_dim}; accepted: auto, xla"
            + (f", {kernel}" if kernel != "xla" else "")
        )
    kernel = kernel if m.attention == "auto" else m.attention
    changed = dict(dtype=m.dtype, attention=kernel, remat=m.remat, expert_form=best_form(platform))
    return Qwen(dataclasses.replace(shape, **changed))


def check_layers(config: Config, shape: ModelConfig) -> None:
    """Refuse settings that the model's layers do not support.

    Raises:
      ValueError: a setting for experts that the model lacks, or one that linear-attention layers do
        not support.
    """
    for name, value, off in (
        ("algorithm.balance_coef", config.algorithm.balance_coef, 0),
        ("rollout.replay_experts", config.rollout.replay_experts, False),
    ):
        if value and shape.experts is None:
            raise ValueError(
                f"config.{name} is {value}, but the model has no experts; set it to {off}"
            )
    if not shape.has_state:
        return
    layer = next(i for i, kind in enumerate(shape.kinds) if kind.attention == "linear")
    if config.diagnose.probe_mediation:
        raise ValueError(
            f"config.diagnose.probe_mediation is True, but layer {layer} of the model is a "
            "linear-attention layer, whose state after the reasoning holds the prompt too; set it "
            "to false"
        )


def build_optimizer(settings: Optimizer) -> optax.GradientTransformationExtraArgs:
    """Build the optimizer of policy and critic, with learning rate 1."""
    o = settings
    return make_optimizer(
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
    )


def step_rates(config: Config, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (policy's, critic's) float32 learning rates of a step's minibatches.

    They depend only on the step number, not on dropped groups or skipped updates. The policy's
    schedule begins after the steps in which only the critic is trained.
    """
    o, first = config.optimizer, config.critic.warmup_steps if has_critic(config.algorithm) else 0

    def rates(largest, start):
        schedule = learning_rates(
            learning_rate=largest,
            schedule=o.schedule,
            warmup_updates=o.warmup_updates,
            total_updates=(config.steps - start) * o.minibatches,
        )
        updates = (step - 1 - start) * o.minibatches + np.arange(o.minibatches)
        rates_of_updates = np.asarray(schedule(np.maximum(updates, 0)), np.float32)
        return np.broadcast_to(rates_of_updates, updates.shape)

    return rates(o.learning_rate, first), rates(config.critic.learning_rate, 0)


def build_loss(config: Config, reference_model: Qwen | None = None) -> Loss:
    """Build the config's `policy.Loss`; reference_model: that of algorithm.kl_reference, if any."""
    a = config.algorithm
    return Loss(
        temperature=config.rollout.temperature,
        objective=a.objective,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        clip_c=a.clip_c or None,
        aggregation=a.aggregation,
        norm_length=row_tokens(config),
        kl_kind=a.kl_kind,
        kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
        entropy_coef=a.entropy_coef,
        balance_coef=a.balance_coef,
        reference_model=reference_model,
    )


def build_credit(algorithm: Algorithm, reward: Reward) -> Credit:
    """Build the config's `algorithms.Credit`."""
    a, r = algorithm, reward
    return Credit(
        name=a.name,
        gamma=a.gamma,
        lam=a.lam,
        bi_level=a.bi_level,
        turn_gamma=a.turn_gamma,
        soft_weights=a.soft_weights,
        level=r.level,
        normalize=r.normalize,
        grouping=r.grouping,
    )


def build_value_loss(config: Config) -> critic.ValueLoss:
    """Build the config's `critic.ValueLoss`."""
    return critic.ValueLoss(
        clip=config.critic.clip,
        aggregation=config.algorithm.aggregation,
        norm_length=row_tokens(config),
    )


def build_adapters(config: Config, model: Qwen, mesh: Mesh) -> Params:
    """Build the config's LoRA adapters, newly initialized, on the mesh."""
    settings = config.model.lora
    key = stream_key(Purpose.ADAPTERS, config.seed)
    adapters = lora.init_adapters(
        model.config, key, rank=settings.rank, targets=settings.targets, tower=settings.tower
    )
    return lora.place_adapters(adapters, model, mesh)


def build_budgets(config: Config) -> Budgets:
    """Build the config's `Budgets`."""
    return Budgets(
        max_turns=config.env.max_turns,
        max_actions=config.env.max_actions,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def build_limits(env: Env) -> Limits:
    """Build the config's time `Limits` for environments."""
    return Limits(time_limit=env.time_limit, workers=env.workers)


def build_collecting(config: Config) -> CollectSettings:
    """Build the config's `CollectSettings`."""
    groups, pool = config.rollout.groups, config.env.pool
    return CollectSettings(groups=groups, pool=pool, seed=config.seed, **config.collect.to_dict())


def build_penalties(config: Config) -> Penalties:
    """Build the config's `Penalties`."""
    return Penalties(
        format_penalty=config.env.format_penalty,
        max_length=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer,
    )


def build_sampling(rollout: Rollout) -> Sampling:
    """Build the `Sampling` of training."""
    return Sampling(temperature=rollout.temperature)


def build_eval_sampling(settings: Eval) -> Sampling:
    """Build the `Sampling` of evaluation."""
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def needs_statistics(config: Config) -> bool:
    """Return whether a step recomputes its rows with the policy before the update."""
    a = config.algorithm
    kl_in_reward = a.kl_coef > 0 and a.kl_in == "reward"
    by_entropy = "entropy" in config.filter.metric
    return by_entropy or kl_in_reward or a.mismatch_cap > 0 or a.zvp_coef > 0


def build_learner(
    config: Config,
    model: Qwen,
    params: Params,
    mesh: Mesh,
    sampling_mesh: Mesh | None = None,
    images: ImageSource = NO_IMAGES,
    teacher: tuple[Qwen, Params] | None = None,
) -> tuple[Learner, TrainState]:
    """Return (`Learner`, `TrainState` at step 0) for a config.

    Args:
      params: the initial policy on the mesh; the state takes ownership (updates donate them).
      sampling_mesh: None for the training mesh.
      images: the images that rows show.
      teacher: the model of algorithm.kl_reference, if the config names one.
    """
    c, a, o = config, config.algorithm, config.optimizer
    frozen = reference = critic_state = None
    optimizer = build_optimizer(c.optimizer)
    trained = params
    if c.model.lora.rank:
        # Frozen parameters keep the precision in which they are read.
        base = sampling_params(params, model, mesh)
        frozen = ForwardContext(base, np.float32(c.model.lora.alpha / c.model.lora.rank))
        trained = build_adapters(c, model, mesh)
    if teacher is not None:
        reference = sampling_params(teacher[1], teacher[0], mesh)
    elif has_reference(c):
        # A copy of every array, because the update donates the policy's parameters.
        reference = jax.tree.map(
            lambda x, own: jnp.copy(x) if x is own else x,
            sampling_params(params, model, mesh),
            params,
        )
    if reference is not None and a.kl_memory == "host":
        reference = in_memory(reference, "host")
    if has_critic(c.algorithm):
        backbone = critic.backbone_of(trained)
        critic_state = critic.init_critic(backbone, model.config.width, optimizer, mesh)
    environments = per_task_configs(c)
    labels = environments if len(environments) > 1 else ("",)
    learner = Learner(
        model=model,
        mesh=mesh,
        sampling_mesh=sampling_mesh or mesh,
        parts=tuple(map(Part, labels, per_task_groups(c))),
        filter=c.filter,
        reads_policy=needs_statistics(c),
        credit=build_credit(c.algorithm, c.reward),
        kl_in_reward=(a.kl_coef, a.kl_kind) if a.kl_coef and a.kl_in == "reward" else None,
        kl_control=(a.kl_target, a.kl_gain) if a.kl_target else None,
        kl_coef=a.kl_coef,
        zvp_coef=a.zvp_coef,
        virtual_rewards=a.virtual_rewards,
        mi_coef=a.mi_coef,
        ahead=c.rollout.ahead,
        entropy_on=a.entropy_on,
        entropy_gate=a.entropy_gate,
        mismatch=(a.mismatch_cap, a.mismatch_level) if a.mismatch_cap else None,
        sampler_noise=c.lab.sampler_noise,
        optimizer=optimizer,
        loss=build_loss(c, teacher[0] if teacher else None),
        value_loss=build_value_loss(c),
        rates=functools.partial(step_rates, c),
        critic_alone=c.critic.warmup_steps,
        seed=c.seed,
        minibatches=o.minibatches,
        micro_batch=o.micro_batch,
        step_rows=step_rows(c),
        minibatch_rows=minibatch_rows(c),
        reference=reference,
        frozen=frozen,
        images=images,
    )
    scopes = [f"{label}/{scope}" for label in labels if label for scope in SCOPES]
    state = init_state(
        trained,
        optimizer,
        mesh,
        environments=environments,
        critic=critic_state,
        stopping=init_stopping(len(environments)),
        regimes=init_regimes(len(environments)),
        zscores=init_zscores([*SCOPES, *scopes]),
        streak_P={name: init_streaks(c.env.pool) for name, c in environments.items() if c.env.pool},
        tally_P=(
            {name: init_tallies(c.env.pool) for name, c in environments.items()}
            if c.collect.allocate
            else None
        ),
    )
    if c.rollout.ahead:
        sampler = copy_sampler(learner, sampling_policy(learner, state), state)
        state = AheadState(**vars(state), samplers=(sampler,) * c.rollout.ahead)
    return learner, state
