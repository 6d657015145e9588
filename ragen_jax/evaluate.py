"""Evaluate a run or a model on fixed held-out problems: success, return, pass@k and collapse.

    python -m ragen_jax.evaluate --workdir=runs/NAME [--step=N] [--samples=8] [--gradients]
                                 [--all] [--out=FILE.json] [--config.FIELD=VALUE ...]
    python -m ragen_jax.evaluate --model=DIR_OR_HUB_ID [--config=configs/sokoban.py:PRESET]
                                 [--out=FILE.json] [--config.FIELD=VALUE ...]

With --workdir, the run's config is used and the model is loaded from a checkpoint: the newest, or
that of --step. Fields that evaluation reads (READ) may be changed, for example env.* to play other
problems than in training. --gradients adds the gradients of the parts of the loss by reward
variance (diagnostics/gradients.py). They are also written to gradients/step_N.json in the run's
folder, which the report reads, unless fields other than diagnose.gradients_* were changed.

--model may be an adapter in PEFT format; its adapter_config.json names the base model.

A few lines sum up the metrics; --all prints every one. If fewer than half of the replies are valid,
further lines say why, with counts and an example. The metrics and the fields that were set are
written as JSON to --out. For a run, the default is evaluation_step_N.json in its folder. An
evaluation with other settings than the run's, or with --samples, does not replace that file: the
name of its own file ends with a hash of these settings. For a model, nothing is written without
--out.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.fields import is_within, unused_fields, warning
from ragen_jax.config.load import load_config
from ragen_jax.config.stored import fields_of, read_run_config
from ragen_jax.configs.base import Config
from ragen_jax.core.callable_module import make_callable
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.task_shares import combine_metrics, rows_of_environment
from ragen_jax.core.types import Episode, Metrics
from ragen_jax.diagnostics.answers import answer_questions
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, collapse_metrics
from ragen_jax.model import lora
from ragen_jax.model.layout import sampling_params
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.diagnose import heldout_gradients
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import (
    Policy,
    for_sampling,
    load_adapted,
    load_policy,
    load_reference,
    restore_run,
)
from ragen_jax.run.log import eval_line, write_gradients
from ragen_jax.run.run_files import policy_directory
from ragen_jax.run.samples import invalid_reply_lines
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.datasets import settings_hash
from ragen_jax.storage.links import refuse_links
from ragen_jax.storage.program_store import enable_program_store

# Fields and sections that an evaluation reads. (A micro-batch must split over the mesh.)
EVALUATION_FIELDS = (
    *("env", "also", "rollout.max_new_tokens", "mesh", "sampling_mesh", "optimizer.micro_batch"),
    *(f"eval.{name}" for name in ("episodes", "seed", "temperature", "top_k", "top_p", "min_p")),
    *(f"diagnose.{name}" for name in ("first_turn_samples", "trajectory_samples", "micro_batch")),
)
GRADIENT_FIELDS = tuple(f"diagnose.gradients_{name}" for name in ("groups", "buckets", "edges"))
ROLLOUT_FIELDS = tuple(
    f"rollout.{n}" for n in ("groups", "group_size", "compact", "slots", "chunk")
)
MODEL_FIELDS = ("model", "warmstart", *ROLLOUT_FIELDS)


def find_ignored(names: Iterable[str], read: Sequence[str]) -> list[str]:
    """Return the fields of `names` that are neither in `read` nor in one of its sections."""
    return [name for name in names if not is_within(name, read) or name.endswith("env.pool")]


def load_run_config(workdir: Path, names: Sequence[str], gradients: bool) -> Config:
    """Return the config of --workdir, in which the command line has set the fields `names`.

    Raises:
      ValueError: the folder holds no run, or a field was set that evaluation does not read.
    """
    read_run_config(workdir)  # raises if the folder holds no run
    if command.config_given():
        raise ValueError(
            "--config and --workdir are both given, but a run is evaluated with its own "
            "config; use --config.FIELD=VALUE alone, or --model"
        )
    read = EVALUATION_FIELDS + (GRADIENT_FIELDS if gradients else ())
    refused = find_ignored(names, read)
    if refused:
        raise ValueError(
            f"{', '.join(f'config.{name}' for name in refused)} cannot be set when a run is "
            f"evaluated; fields that evaluation reads: {', '.join(read)} (not env.pool)"
        )
    return load_config(CONFIG.value, workdir)


def changed_settings(config: Config, workdir: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an evaluation's config that differ from the run's config.

    Args:
      names: dotted fields and sections that the command line sets.
    """
    stored = fields_of(read_run_config(workdir))
    given = given_fields(config, names)
    return {name: value for name, value in given.items() if value != stored.get(name)}


def given_fields(config: Config, names: Sequence[str]) -> dict[str, Any]:
    """Return {dotted field: value} of the fields and sections `names` of a config."""
    return {name: x for name, x in fields_of(config).items() if is_within(name, names)}


def evaluation_file(workdir: Path, step: int, settings: Mapping[str, Any]) -> Path:
    """Return the file of a run's evaluation.

    Args:
      settings: those that differ from a plain evaluation of the run.
    """
    suffix = f"_{settings_hash(dict(settings))}" if settings else ""
    return workdir / f"evaluation_step_{step:06d}{suffix}.json"


COLLAPSE_PROBLEMS = 64  # number of held-out problems whose reasonings are cross-scored


def warn_unread(config: Config, names: Sequence[str]) -> None:
    """Print a line about the fields of `names` that the evaluation ignores, if any."""
    ignored = [
        n
        for n in names
        if n == "model.path" or n in find_ignored(names, EVALUATION_FIELDS + MODEL_FIELDS)
    ]
    # Evaluation reads these fields whether or not training would diagnose and evaluate.
    others = [n for n in names if n not in ignored and not n.startswith(("eval.", "diagnose."))]
    line = warning(dict.fromkeys(ignored, "by evaluate --model") | unused_fields(config, others))
    if line:
        console(line)


def checkpoint_gradients(config: Config, workdir: Path, policy: Policy, step: int) -> Metrics:
    """Return the gradient/* metrics of a run's checkpoint at `step`, on held-out problems.

    Args:
      policy: holds the checkpoint's parameters in the form that sampling needs.
    """
    initial = load_policy(config, workdir)  # the reference policy of the KL term
    images = policy.tasks[0].settings.chat.images
    meshes = build_meshes(config)
    learner, state = build_learner(
        config,
        initial.model,
        initial.params,
        *meshes,
        images,
        load_reference(config, initial),
    )
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    state = checkpoints.restore(step, state)
    return heldout_gradients(learner, state, policy.params, policy.tasks, config.diagnose)


def of_model(path: str, names: Sequence[str]) -> tuple[Config, Policy]:
    """Return (config, policy ready for sampling) of --model, which is a model or an adapter."""
    given = CONFIG.value
    adapted = lora.is_adapter(path)
    given.model.path = lora.base_model(path) if adapted else path
    given.warmstart.fine_tune = False  # the model is evaluated as it is
    config = load_config(given)
    warn_unread(config, names)
    if adapted:
        policy = load_adapted(Path(path), config, heldout=True)
    else:
        policy = load_policy(config, None, heldout=True)
    _, mesh = build_meshes(config)
    params = sampling_params(policy.params, policy.model, mesh)
    return config, policy._replace(params=params)


def write_evaluation(path: Path, config: Config, names: Sequence[str], metrics: Metrics) -> None:
    """Write the metrics as JSON.

    The file also names the model, the date in its prompts and the fields that the command line set.
    """
    found = {name: float(value) for name, value in metrics.items()}
    content = {
        "model": MODEL.value or WORKDIR.value,
        "samples": SAMPLES.value,
        "date": config.model.date,
        "set": given_fields(config, names),
        "metrics": {name: value for name, value in found.items() if math.isfinite(value)},
    }
    atomic_write(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    console(f"written: {path}")


def evaluate_policy(
    config: Config, policy: Policy, samples: int
) -> tuple[Metrics, list[list[Episode]]]:
    """Play the held-out problems, and cross-score their reasoning.

    Args:
      policy: ready for sampling.
      samples: episodes per problem.

    Returns:
      (eval/* and collapse/* metrics, the episodes of each environment).
    """
    with jax.set_mesh(build_meshes(config)[1]):
        model, params, tasks = policy.model, policy.params, policy.tasks
        metrics, episodes_E = evaluate(model, params, tasks, samples=samples)
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
        return metrics | combine_metrics(tasks, metrics_E), episodes_E


def all_lines(metrics: Metrics) -> list[str]:
    """Return a line for each metric."""
    return [
        f"{name:<45} {f'{value:.6g}' if math.isfinite(value) else 'unknown'}"
        for name, value in metrics.items()
    ]


def summary_lines(metrics: Metrics, step: int, labels: Sequence[str]) -> list[str]:
    """Return a few lines: success, pass@k, and the program's questions about the reasoning.

    Args:
      step: step of the checkpoint.
      labels: labels of the environments; ("",) for a single environment.
    """
    passes = [f"{k.removeprefix('eval/')} {x:.3f}" for k, x in metrics.items() if "/pass_at" in k]
    lines = [eval_line(step, metrics).strip(), *(["  ".join(passes)] if passes else [])]
    for label in labels:
        (row,) = rows_of_environment([{"step": step} | metrics], labels, label)
        lines += [f"{label}: {line}" if label else line for line in answer_questions([row])]
    return lines


def main(argv: Sequence[str]) -> None:
    del argv
    enable_compilation_cache()
    enable_program_store(command.config_files())
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
            config = load_run_config(workdir, names, GRADIENTS.value)
            trained = restore_run(workdir, config, STEP.value, heldout=True)
            warn_unread(config, names)
            policy = for_sampling(trained)
            changed = changed_settings(config, workdir, names)
            samples = {"samples": SAMPLES.value} if SAMPLES.value > 1 else {}
            out = out or evaluation_file(workdir, trained.step, changed | samples)
        else:
            config, policy = of_model(policy_directory(MODEL.value or ""), names)
    metrics, episodes_E = evaluate_policy(config, policy, SAMPLES.value)
    if GRADIENTS.value:  # --workdir is set, as checked above
        gradients = checkpoint_gradients(config, workdir, policy, trained.step)
        if all(is_within(name, GRADIENT_FIELDS) for name in changed):  # the report reads the file
            write_gradients(workdir, trained.step, gradients)
        metrics |= gradients
    if is_main_process():
        step = trained.step if WORKDIR.value else 0
        labels = [task.label for task in policy.tasks]
        for line in all_lines(metrics) if ALL.value else summary_lines(metrics, step, labels):
            console(line)
        for task, episodes in zip(policy.tasks, episodes_E, strict=True):
            most = task.settings.budgets.max_new_tokens
            for line in invalid_reply_lines(task, episodes, most):
                console(line)
        if not ALL.value:
            console(f"--all prints all {len(metrics)} figures")
        if out:
            write_evaluation(out, config, names, metrics)
        else:
            console("nothing was saved; --out=FILE.json saves the metrics")


make_callable(__name__, "evaluate")

if __name__ == "__main__":
    CONFIG = command.define_config(
        f"that of the run in --workdir, which is evaluated with no other; with --model, "
        f"{command.DEFAULT_CONFIG}",
        reads_run=True,
    )
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to evaluate.")
    MODEL = flags.DEFINE_string("model", None, "Model directory or hub id to evaluate.")
    STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
    OUT = flags.DEFINE_string("out", None, "File for the metrics as JSON.")
    SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes per problem; pass@k for k up to it.")
    ALL = flags.DEFINE_bool("all", False, "Print every figure.")
    GRADIENTS = flags.DEFINE_bool(
        "gradients", False, "Gradients of each part of the loss by reward variance; needs a run."
    )
    command.run_command(main)
