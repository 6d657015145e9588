"""Evaluate a run or a model on the fixed held-out problems: success, return, pass@k, collapse.

    python -m ragen_jax.evaluate --workdir=runs/NAME [--step=N] [--samples=8] [--gradients]
                                 [--out=FILE.json] [--config.FIELD=VALUE ...]
    python -m ragen_jax.evaluate --model=DIR_OR_HUB_ID [--config=configs/sokoban.py:PRESET]
                                 [--out=FILE.json] [--config.FIELD=VALUE ...]

With --workdir the config is the run's own and the model that of a checkpoint, the newest unless
--step names one; fields that evaluation reads (READ) may be changed, env.* for other problems than
those of training. --gradients adds the gradients of the loss's parts by reward variance
(diagnostics/gradients.py) and writes them to the run's folder, gradients/step_N.json. --model may
be an adapter in PEFT's format, whose base model its adapter_config.json names. The figures and the
fields that were set are written as JSON too: --out, of a run evaluation_step_N.json in its folder.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from absl import flags
from ml_collections import ConfigDict

from ragen_jax.config import command_line as command
from ragen_jax.config.auto_fields import fill_auto_fields, fill_date
from ragen_jax.config.build import build_learner, build_meshes
from ragen_jax.config.check import check
from ragen_jax.config.fields import unused_fields, warning
from ragen_jax.config.stored import fields_of, read_run_config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.task_shares import combine_metrics
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, collapse_metrics
from ragen_jax.model import lora
from ragen_jax.model.layout import sampling_params
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.diagnose import heldout_gradients
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import Policy, for_sampling, load_adapted, load_policy, restore_run
from ragen_jax.run.log import write_gradients
from ragen_jax.run.step import Diagnosis
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links

# Fields that an evaluation reads, and sections of them. (A micro-batch must split over the mesh.)
READ = (
    *("env", "also", "rollout.max_new_tokens", "mesh", "sampling_mesh", "optimizer.micro_batch"),
    *(f"eval.{name}" for name in ("episodes", "seed", "temperature", "top_k", "top_p", "min_p")),
    *(f"diagnose.{name}" for name in ("first_turn_samples", "trajectory_samples", "micro_batch")),
)
OF_GRADIENTS = tuple(f"diagnose.gradients_{name}" for name in ("groups", "buckets", "edges"))
OF_ROLLOUT = tuple(f"rollout.{n}" for n in ("groups", "group_size", "compact", "slots", "chunk"))
OF_MODEL = ("model", "warmstart", *OF_ROLLOUT)


def not_read(names: Iterable[str], read: Sequence[str]) -> list[str]:
    """Those of the fields `names` that are not in `read`, nor in a section of it."""
    return [
        name
        for name in names
        if not any(f"{name}.".startswith(f"{part}.") for part in read) or name.endswith("env.pool")
    ]


def config_of_run(workdir: Path, names: Sequence[str], gradients: bool) -> ConfigDict:
    """The config of --workdir with the fields `names` as the command line sets them.

    Raises:
      ValueError: no run is there, or something was set that its evaluation does not read.
    """
    read_run_config(workdir)  # says so where there is none
    if command.config_given():
        raise ValueError(
            "--config and --workdir are both given, but a run is evaluated with its own "
            "config; use --config.FIELD=VALUE alone, or --model"
        )
    read = READ + (OF_GRADIENTS if gradients else ())
    refused = not_read(names, read)
    if refused:
        raise ValueError(
            f"{', '.join(f'config.{name}' for name in refused)} cannot be set when a run is "
            f"evaluated; fields that evaluation reads: {', '.join(read)} (not env.pool)"
        )
    return CONFIG.value


COLLAPSE_PROBLEMS = 64  # held-out problems whose reasonings are cross-scored


def warn_unread(config: ConfigDict, names: Sequence[str]) -> None:
    """One line about the fields `names` that were set but have no part in the evaluation."""
    ignored = [n for n in names if n == "model.path" or n in not_read(names, READ + OF_MODEL)]
    # What evaluation reads does not depend on when training would diagnose and evaluate.
    others = [n for n in names if n not in ignored and not n.startswith(("eval.", "diagnose."))]
    line = warning(dict.fromkeys(ignored, "by evaluate --model") | unused_fields(config, others))
    if line:
        console(line)


def checkpoint_gradients(config: ConfigDict, workdir: Path, policy: Policy, step: int) -> Metrics:
    """gradient/* metrics of the checkpoint of a run's step, on held-out problems.

    Args:
      policy: with the checkpoint's parameters for sampling.
    """
    initial = load_policy(config, workdir)  # the reference of the KL
    images = policy.tasks[0].settings.chat.images
    meshes = build_meshes(config)
    learner, state = build_learner(config, initial.model, initial.params, *meshes, images)
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    state = checkpoints.restore(step, state)
    settings = Diagnosis(**config.diagnose)
    return heldout_gradients(learner, state, policy.params, policy.tasks, settings)


def of_model(path: str, names: Sequence[str]) -> tuple[ConfigDict, Policy]:
    """(config, policy to be sampled with) of --model, a model or an adapter."""
    config = CONFIG.value
    adapted = lora.is_adapter(path)
    config.model.path = lora.base_model(path) if adapted else path
    fill_auto_fields(config, jax.devices())
    fill_date(config, None, command.today())
    check(config)
    warn_unread(config, names)
    if adapted:
        policy = load_adapted(Path(path), config, heldout=True)
    else:
        policy = load_policy(config, None, heldout=True)
    _, mesh = build_meshes(config)
    params = sampling_params(policy.params, policy.model, mesh)
    return config, policy._replace(params=params)


def write_evaluation(
    path: Path, config: ConfigDict, names: Sequence[str], metrics: Metrics
) -> None:
    """The figures as JSON, with the model, the day for its template and the fields that the command
    line set."""
    found = {name: float(value) for name, value in metrics.items()}
    fields = fields_of(config)
    content = {
        "model": MODEL.value or WORKDIR.value,
        "samples": SAMPLES.value,
        "date": config.model.date,
        "set": {name: fields[name] for name in names},
        "metrics": {name: value for name, value in found.items() if math.isfinite(value)},
    }
    atomic_write(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    console(f"written: {path}")


def main(argv: Sequence[str]) -> None:
    del argv
    enable_compilation_cache()
    with command.bad_input():
        if bool(WORKDIR.value) == bool(MODEL.value):
            raise ValueError("give either --workdir (a run) or --model (a directory or hub id)")
        if SAMPLES.value < 1:
            raise ValueError(f"--samples is {SAMPLES.value}; it must be at least 1")
        if GRADIENTS.value and not WORKDIR.value:
            raise ValueError("--gradients needs --workdir, a run with the policy it started from")
        if STEP.value is not None and not WORKDIR.value:
            raise ValueError("--step needs --workdir, the run that has the checkpoint")
        names = command.overrides()
        out = Path(OUT.value) if OUT.value else None
        if WORKDIR.value:
            workdir = Path(WORKDIR.value)
            if out is None or GRADIENTS.value:
                refuse_links(workdir)
            config = config_of_run(workdir, names, GRADIENTS.value)
            fill_date(config, workdir, command.today())
            trained = restore_run(workdir, config, STEP.value, heldout=True)
            warn_unread(config, names)
            policy = for_sampling(trained)
            out = out or workdir / f"evaluation_step_{trained.step:06d}.json"
        else:
            config, policy = of_model(MODEL.value or "", names)
    with jax.set_mesh(build_meshes(config)[1]):
        model, params, tasks = policy.model, policy.params, policy.tasks
        metrics, episodes_E = evaluate(model, params, tasks, samples=SAMPLES.value)
        enter_phase("cross-scoring the reasoning")
        metrics_E = [
            collapse_metrics(
                model,
                tasks[index].seen(params, episodes),
                [episode for episode in episodes if episode.group < COLLAPSE_PROBLEMS],
                ScopeSizes(
                    first_turn_samples=config.diagnose.first_turn_samples,
                    trajectory_samples=config.diagnose.trajectory_samples,
                    micro_batch=config.diagnose.micro_batch,
                ),
                ScopeKey(seed=config.eval.seed, step=0, environment=index),
            )
            for index, episodes in enumerate(episodes_E)
        ]
        metrics |= combine_metrics(tasks, metrics_E)
    if GRADIENTS.value:  # which has needed --workdir
        gradients = checkpoint_gradients(config, workdir, policy, trained.step)
        write_gradients(workdir, trained.step, gradients)
        metrics |= gradients
    if is_main_process():
        for name, value in metrics.items():
            print(f"{name:<45} {value:.6g}")
        if out:
            write_evaluation(out, config, names, metrics)


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to evaluate.")
    MODEL = flags.DEFINE_string("model", None, "Model directory or hub id to evaluate.")
    STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
    OUT = flags.DEFINE_string("out", None, "File for the metrics as JSON.")
    SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes per problem; pass@k for k up to it.")
    GRADIENTS = flags.DEFINE_bool(
        "gradients", False, "Gradients of each part of the loss by reward variance; needs a run."
    )
    command.run_command(main)
