"""The policy that a config, or a run's folder, starts from: its model, and the tasks it plays."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict

from ragen_jax.model import hf, lora
from ragen_jax.model.qwen import Qwen
from ragen_jax.run.build import (
    build_adapters,
    build_environment,
    build_meshes,
    build_model,
    tiny_words,
)
from ragen_jax.run.check import check
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.log import console
from ragen_jax.run.sizes import of_environments
from ragen_jax.run.tasks import Task, build_tasks
from ragen_jax.run.workdir import read_run_config
from ragen_jax.sharding import first_goes_first, sampling_params
from ragen_jax.types import Params
from ragen_jax.warmstart.imitate import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Policy(NamedTuple):
    """A model, and what it plays."""

    model: Qwen
    params: Params
    tokenizer: "PreTrainedTokenizerFast"
    tasks: tuple[Task, ...]


def load_policy(config: ConfigDict, workdir: Path | None) -> Policy:
    """The `Policy` of a config's model.

    A tiny agent is copied into the run's folder, so that the run can be continued and evaluated
    where the cache is another one.

    Raises:
      ValueError: an unusable environment or mesh, a model that cannot be read, or one that could
        not read the prompts; all before a model is built or its weights are read.
    """
    mesh, _ = build_meshes(config)
    path = config.model.path
    if path == "tiny":
        tiny_words(config)  # all processes refuse it, not the first alone
    else:
        check_reader(config)
    with first_goes_first("model"):
        if path == "tiny":
            path = tiny_model(config) if workdir is None else workdir / "model"
            if not path.exists():
                unfinished = path.with_name(".model")  # a killed copy must not look like a model
                shutil.copytree(tiny_model(config), unfinished, dirs_exist_ok=True)
                unfinished.rename(path)
    model, params, tokenizer = hf.load(path, mesh=mesh, dtype=config.model.dtype)
    model = build_model(config, model.config, mesh)
    return Policy(model, params, tokenizer, build_tasks(config, tokenizer, hf.stop_ids(path)))


def check_reader(config: ConfigDict) -> None:
    """Refuses a model directory that could not read the prompts of the config's environments.

    Terse prompts hold the bare observation. They are for a tiny agent, which has learnt the rest by
    imitation; what tells one from a language model is that its tokenizer keeps the words of an
    environment whole (of several, those of one at least: it reads the others byte by byte).

    Raises:
      ValueError: that, or an unusable environment.
    """
    path = config.model.path
    terse = {}  # environment -> its words
    for name, c in of_environments(config).items():
        environment = build_environment(c, "train")
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
        f"config.model.path is {path!r}, whose tokenizer is no tiny agent's ({reasons[0]}), but "
        "config.env.prompt is 'terse', the bare observation without rules; train a language model "
        f"with --config=configs/{file}.py:llm --config.model.path={path}"
    )


def restore_run(workdir: Path, config: ConfigDict | None = None) -> tuple[ConfigDict, Policy]:
    """(config, `Policy`) of a run, with the parameters of its newest checkpoint for sampling.

    Args:
      config: the run's own with other values in fields of READ; None: as it was.

    Raises:
      ValueError: the folder holds no run, or none with a checkpoint; unusable values.
    """
    if config is None:
        config = read_run_config(workdir)
    check(config)
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"{workdir} has no checkpoint yet")
    policy = load_policy(config, workdir)
    console(f"{workdir}, step {step}")
    mesh, sampling_mesh = build_meshes(config)
    if not config.model.lora.rank:
        params = checkpoints.restore_params(step, policy.params)
        return config, policy._replace(params=sampling_params(params, policy.model, sampling_mesh))
    adapters = build_adapters(config, policy.model, mesh)
    adapters = checkpoints.restore_params(step, adapters)
    params = lora.attach(
        sampling_params(policy.params, policy.model, sampling_mesh),
        lora.place_adapters(adapters, policy.model, sampling_mesh),
        scale=config.model.lora.alpha / config.model.lora.rank,
    )
    return config, policy._replace(params=params)
