"""Build what a config says about models: meshes, the model, the tiny agent's shape."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ragen_jax.config.per_task import teacher_path
from ragen_jax.configs.base import Config, Model
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import (
    EXPERT,
    MEMORIES,
    MESH_AXES,
    ROWS,
    data_shards,
    make_mesh,
    present,
    split_devices,
)
from ragen_jax.core.types import Params
from ragen_jax.model import lora
from ragen_jax.model.experts import best_form
from ragen_jax.model.kernels import best_kernel
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.tiny_kinds import DENSE, kind_fields
from ragen_jax.model.tokenizer import OF_IMAGES
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.model.vision.image_table import ImageSource, NoImages
from ragen_jax.model.vision.images import ImageConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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


def build_adapters(config: Config, model: Qwen, mesh: Mesh) -> Params:
    """Build the config's LoRA adapters, newly initialized, on the mesh."""
    settings = config.model.lora
    key = stream_key(Purpose.ADAPTERS, config.seed)
    adapters = lora.init_adapters(
        model.config, key, rank=settings.rank, targets=settings.targets, tower=settings.tower
    )
    return lora.place_adapters(adapters, model, mesh)
