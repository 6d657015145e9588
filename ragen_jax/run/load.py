"""Loads and saves policies: a model with its tasks, from a config or from a run's checkpoint."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict

from ragen_jax.config.build_environment import build_environment, tiny_words
from ragen_jax.config.build_model import build_adapters, build_meshes, build_model
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import per_task_configs, teacher_path
from ragen_jax.config.stored import read_run_config
from ragen_jax.config.trust import require_trust
from ragen_jax.configs.base import INITIAL, WARMSTART, Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import main_process_first
from ragen_jax.core.types import Params
from ragen_jax.model import hf, lora
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource, ImageTable
from ragen_jax.rollout.task import Task
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.fine_tune import fine_tuned_model
from ragen_jax.run.imitate import tiny_model
from ragen_jax.run.run_files import policy_directory
from ragen_jax.run.tasks import build_tasks
from ragen_jax.storage.atomic_io import with_retries
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Policy(NamedTuple):
    """A model and the tasks that it plays."""

    model: Qwen
    params: Params
    tokenizer: "PreTrainedTokenizerFast"
    tasks: tuple[Task, ...]


def load_policy(config: Config, workdir: Path | None, *, heldout: bool = False) -> Policy:
    """Return the `Policy` of a config's model.

    A tiny agent or a fine-tuned model is copied into the run's folder, so that the run can be
    resumed and evaluated on a machine with another cache.

    Args:
      heldout: as in `build_tasks`.

    Raises:
      ValueError: an environment or a mesh is unusable, or the model cannot be read or cannot read
        the prompts. These are checked before a model is built or its weights are read.
    """
    mesh, _ = build_meshes(config)
    path = config.model.path
    if path == "tiny":
        tiny_words(config)  # raises in all processes, not only in the first
    else:
        check_reader(config)
    if config.warmstart.fine_tune and path != "tiny":
        path = _made_model(config, workdir, fine_tuned_model)
    with main_process_first("model"):
        if path == "tiny":
            path = _made_model(config, workdir, tiny_model)
    enter_phase(f"loading {path}")
    model, params, tokenizer = hf.load(path, mesh=mesh, dtype=config.model.dtype)
    model = build_model(config.model, model.config, mesh)
    tower = hf.load_tower(path, mesh=mesh, dtype=config.model.dtype)
    images: ImageSource = NO_IMAGES
    if tower is None and config.model.lora.rank and config.model.lora.tower:
        raise ValueError(
            f"config.model.lora.tower is True, but the model at {path} has no vision tower; "
            "set model.lora.tower=False, or use a vision-language model"
        )
    if tower is not None and model.config.image_tokens is not None:
        images = ImageTable(tower, model.config.vocab_size, model.config.image_tokens.pad)
    enter_phase("building the environments")
    tasks = build_tasks(
        config,
        tokenizer,
        hf.stop_ids(path),
        images=images,
        positions=model.config.max_positions,
        heldout=heldout,
    )
    return Policy(model, params, tokenizer, tasks)


def load_reference(config: Config, policy: Policy) -> tuple[Qwen, Params] | None:
    """Return (model, params) of algorithm.kl_reference; None if it is the initial policy.

    Raises:
      ValueError: the model cannot be made or read, its tokens are not those of the policy, it
        reads fewer positions than the policy may fill, or the policy reads images.
    """
    name = teacher_path(config.algorithm)
    if name is None:
        return None
    if name == WARMSTART:
        path = warmstart_teacher(config)
    else:
        path = hf.resolve(policy_directory(name))
    tokenizer = hf.load_tokenizer(path)
    teacher, own = hf.model_config(path), policy.model.config
    sizes = teacher.vocab_size, own.vocab_size
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab() or sizes[0] != sizes[1]:
        raise ValueError(
            f"config.algorithm.kl_reference is {name!r}, whose vocabulary ({sizes[0]} ids) is not "
            f"that of the policy ({sizes[1]} ids); the KL compares their probabilities of the "
            "same tokens"
        )
    longest = max(
        min(c.env.max_context or own.max_positions, own.max_positions)
        for c in per_task_configs(config).values()
    )
    if teacher.max_positions < longest:
        raise ValueError(
            f"config.algorithm.kl_reference is {name!r}, which reads at most "
            f"{teacher.max_positions} positions, but a prompt and its reply may have {longest}; "
            f"set env.max_context={teacher.max_positions}, or name another teacher"
        )
    if policy.model.config.image_tokens is not None:
        raise ValueError(
            f"config.algorithm.kl_reference is {name!r}, but the policy reads images; only its "
            f"initial policy can be the reference: set kl_reference={INITIAL}"
        )
    enter_phase(f"loading {path}")
    mesh, _ = build_meshes(config)
    model, params, _ = hf.load(path, mesh=mesh, dtype=config.model.dtype)
    return build_model(config.model, model.config, mesh), params


def warmstart_teacher(config: Config) -> Path:
    """Return the directory of the model that the warm start makes with lab.teacher_styles.

    Raises:
      ValueError: as in `fine_tuned_model`.
    """
    styles = config.lab.teacher_styles or config.warmstart.styles
    warmstart = dataclasses.replace(config.warmstart, styles=styles)
    config = dataclasses.replace(config, warmstart=warmstart)
    if config.model.path != "tiny":
        return fine_tuned_model(config)
    with main_process_first("teacher"):
        return tiny_model(config)


def _made_model(config: Config, workdir: Path | None, make: Callable[[Config], Path]) -> Path:
    """Return the directory of a model that `make` makes: its copy in the run's folder, if any."""
    if workdir is None:
        return make(config)
    path = workdir / "model"
    if not path.exists():
        refuse_links(workdir, path, _unfinished(path))
        made = make(config)
        with_retries(functools.partial(_copy, made, path), path)
    return path


def _unfinished(path: Path) -> Path:
    """Return the path of an unfinished copy, so that a killed copy does not look like a model."""
    return path.with_name(f".{path.name}")


def _copy(source: Path, path: Path) -> None:
    """Copy a folder to `path`, which exists only once the copy is complete."""
    unfinished = _unfinished(path)
    shutil.copytree(source, unfinished, dirs_exist_ok=True)
    unfinished.rename(path)


def check_reader(config: Config) -> None:
    """Refuse a model that cannot read the prompts of the config's environments.

    Terse prompts contain only the observation. They are for a tiny agent, which has learnt the
    rules by imitation. Its tokenizer differs from that of a language model: it has a token for each
    word of an environment. (With several environments, this must be true of at least one; the words
    of the others are read byte by byte.)

    Raises:
      ValueError: the model cannot read the prompts, or an environment is unusable.
    """
    path = config.model.path
    terse = {}  # name of an environment with terse prompts -> its words
    for name, c in per_task_configs(config).items():
        environment = build_environment(c.env, "train")
        if c.env.prompt == "terse":
            terse[name] = getattr(environment, "words", ())
    if not terse:
        return
    tokenizer = hf.load_tokenizer(hf.resolve(path))
    reasons = []
    for name, words in terse.items():
        split = [w for w in words if len(tokenizer.encode(w, add_special_tokens=False)) != 1]
        if words and not split:
            return
        reasons.append(f"{name} has no words" if not words else f"it splits {split[0]!r} of {name}")
    file = "mixture" if config.also else config.env.name
    raise ValueError(
        f"config.model.path is {path!r}, whose tokenizer is not that of a tiny agent "
        f"({reasons[0]}), but config.env.prompt is 'terse', the bare observation without "
        f"rules; train a language model with --config=configs/{file}.py:llm "
        f"--config.model.path={path}"
    )


class Trained(NamedTuple):
    """A run's policy at a checkpoint.

    policy: its parameters are on the training mesh, without adapters; in a LoRA run they are those
        of the base model
    adapters: the adapters of a LoRA run, else None
    """

    config: Config
    step: int
    policy: Policy
    adapters: Params | None


def restore_run(
    workdir: Path,
    config: Config | ConfigDict | None = None,
    step: int | None = None,
    *,
    heldout: bool = False,
    trust: bool = False,
) -> Trained:
    """Return the policy of a run's checkpoint.

    Args:
      config: the run's config, possibly with other values in evaluate.EVALUATION_FIELDS; None:
        the run's config unchanged.
      step: step of a kept checkpoint; None: the newest.
      heldout: as in `build_tasks`.
      trust: whether to import code that the folder's config names even if this user did not start
        the run (config/trust.py); only read if `config` is None.

    Raises:
      ValueError: the folder holds no run or no such checkpoint, the checkpoint is damaged, a value
        is unusable, or the config names code and is not trusted.
    """
    if config is None:
        config = read_run_config(workdir)
        require_trust(workdir, config, trust=trust)
    config = load_config(config, workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    kept = checkpoints.steps()
    if not kept:
        raise ValueError(f"{workdir} has no checkpoint yet")
    if step is None:
        step = kept[-1]
    if step not in kept:
        listed = ", ".join(map(str, kept))
        raise ValueError(
            f"{workdir} has no checkpoint of step {step}; available: {listed} "
            "(config.checkpoint.every and .keep decide)"
        )
    checkpoints.check(step)
    policy = load_policy(config, workdir, heldout=heldout)
    console(f"{workdir}, step {step}")
    if not config.model.lora.rank:
        params = checkpoints.restore_params(step, policy.params)
        return Trained(config, step, policy._replace(params=params), None)
    mesh, _ = build_meshes(config)
    adapters = checkpoints.restore_params(step, build_adapters(config, policy.model, mesh))
    return Trained(config, step, policy, adapters)


def for_sampling(trained: Trained) -> Policy:
    """Return the policy with its parameters on the sampling mesh and any adapters attached."""
    config, _, policy, adapters = trained
    _, mesh = build_meshes(config)
    params = sampling_params(policy.params, policy.model, mesh)
    if adapters is not None:
        params = lora.attach(
            params,
            lora.place_adapters(adapters, policy.model, mesh),
            scale=config.model.lora.alpha / config.model.lora.rank,
        )
    return policy._replace(params=params)


def load_adapted(adapter: Path, config: Config, *, heldout: bool = False) -> Policy:
    """Return the `Policy` of an adapter in PEFT format, merged into the model of config.model.path.

    Args:
      heldout: as in `build_tasks`.

    Raises:
      ValueError: as in `load_policy`, or the adapter does not fit the model.
    """
    policy = load_policy(config, None, heldout=heldout)
    adapters, rank, alpha, _ = lora.load_adapter(adapter, policy.model.config)
    mesh, _ = build_meshes(config)
    adapters = lora.place_adapters(adapters, policy.model, mesh)
    return policy._replace(params=lora.merge(policy.params, adapters, scale=alpha / rank))


def save_policy(
    folder: Path,
    config: Config,
    policy: Policy,
    adapters: Params | None,
    *,
    dtype: str,
    card: str = "",
) -> list[Path]:
    """Write policy/ in Hugging Face format and, for a LoRA run, adapter/ in PEFT format.

    adapter/ is not written if the vision tower has adapters, which PEFT's format cannot store.

    Args:
      policy, adapters: as in `Trained`.
      dtype: dtype of the weights on disk.
      card: the README.md of policy/.

    Returns:
      the directories that were written.
    """
    params, written, first = policy.params, [], policy.tasks[0]
    tower = first.settings.chat.images.tower
    if adapters is not None:
        c = config.model.lora
        scale = c.alpha / c.rank
        if tower is not None and "tower" in adapters:
            console(
                "no adapter/: PEFT's format does not support the vision tower's adapters; "
                "policy/ contains all of them"
            )
            merged = lora.merge(tower.params, adapters["tower"], scale=scale)
            tower = dataclasses.replace(tower, params=merged)
        else:
            written.append(folder / "adapter")
            lora.save_adapter(
                written[-1],
                adapters,
                config=policy.model.config,
                rank=c.rank,
                alpha=c.alpha,
                targets=c.targets,
                base_model=config.model.path,
            )
        params = lora.merge(params, adapters, scale=scale)
    written.append(folder / "policy")
    hf.save(
        written[-1],
        policy.model,
        params,
        policy.tokenizer,
        tower=tower,
        stop_ids=first.settings.chat.end_ids,
        card=card,
        dtype=dtype,
    )
    return written
