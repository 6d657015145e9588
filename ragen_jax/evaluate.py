"""Evaluate a run or a model on the fixed held-out problems: success, return, pass@k, collapse.

    python -m ragen_jax.evaluate --workdir=runs/NAME [--samples=8] [--gradients]
                                 [--config.FIELD=VALUE ...]
    python -m ragen_jax.evaluate --model=DIR_OR_HUB_ID [--config=configs/sokoban.py:PRESET]
                                 [--config.FIELD=VALUE ...]

With --workdir the config is the run's own and the model its newest checkpoint; fields that
evaluation reads (READ) may be changed, env.* for other problems than those of training. --gradients
adds the gradients of the loss's parts by reward variance (diagnostics/gradients.py) and writes them
to the run's folder, gradients/step_N.json.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from ragen_jax.diagnostics.gradients import checkpoint_gradients
from ragen_jax.diagnostics.scopes import collapse_metrics
from ragen_jax.model import hf, lora
from ragen_jax.randomness import Purpose, stream_key
from ragen_jax.run import command
from ragen_jax.run.build import (
    build_adapters,
    build_budgets,
    build_environment,
    build_eval_sampling,
    build_meshes,
    build_model,
    tiny_words,
)
from ragen_jax.run.check import check
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.domains import unread, warning
from ragen_jax.run.heldout import play_problems, summarise
from ragen_jax.run.log import console, write_gradients
from ragen_jax.run.settle import settle
from ragen_jax.run.sizes import of_environments
from ragen_jax.run.tasks import build_tasks, joined
from ragen_jax.run.workdir import read_run_config
from ragen_jax.sharding import first_goes_first, is_first, sampling_params
from ragen_jax.warmstart.imitate import tiny_model


class Policy(NamedTuple):
    """A model, and what it plays."""

    model: object
    params: dict
    tokenizer: object
    tasks: tuple  # of `Task`


def load_policy(config, workdir):
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
        tiny_words(config)
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


def check_reader(config):
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


def restore_run(workdir, config=None):
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


def evaluate(model, params, tasks, *, samples=1):
    """eval/* metrics on the held-out problems of each task, and the episodes.

    Args:
      samples: episodes a problem.

    Returns:
      (metrics, [episodes of the first task, ...]). Where there are several tasks, each has figures
      under its label, and eval/success is their mean.
    """
    found, played = [], []
    for task in tasks:
        c = task.config
        episodes = play_problems(
            model,
            params,
            task.chat,
            task.heldout_environment,
            *task.heldout,
            samples=samples,
            rows=c.rollout.groups * c.rollout.group_size,
            key=stream_key(Purpose.EVALUATE, c.eval.seed),
            budgets=build_budgets(c),
            sampling=build_eval_sampling(c),
            compact=c.rollout.compact,
        )
        found.append(summarise(episodes, samples=samples, format_penalty=c.env.format_penalty))
        played.append(episodes)
    return joined(tasks, found), played


# Fields that an evaluation reads, and sections of them. (A micro-batch must split over the mesh.)
READ = (
    *("env", "also", "rollout.max_new_tokens", "mesh", "sampling_mesh", "optimizer.micro_batch"),
    *(f"eval.{name}" for name in ("episodes", "seed", "temperature", "top_k", "top_p", "min_p")),
    *(f"diagnose.{name}" for name in ("first_turn_samples", "trajectory_samples", "micro_batch")),
)
OF_GRADIENTS = tuple(f"diagnose.gradients_{name}" for name in ("groups", "buckets", "edges"))
OF_MODEL = ("model", "warmstart", "rollout.groups", "rollout.group_size", "rollout.compact")


def not_read(names, read):
    """Those of the fields `names` that are not in `read`, nor in a section of it."""
    return [
        name
        for name in names
        if not any(f"{name}.".startswith(f"{part}.") for part in read) or name.endswith("env.pool")
    ]


def config_of_run(workdir, names, gradients):
    """The config of --workdir with the fields `names` as the command line sets them.

    Raises:
      ValueError: no run is there, or something was set that its evaluation does not read.
    """
    read_run_config(workdir)  # says so where there is none
    if command.config_given():
        raise ValueError(
            "--config is given beside --workdir, but a run is evaluated with its own config; give "
            "--config.FIELD=VALUE alone, or --model"
        )
    read = READ + (OF_GRADIENTS if gradients else ())
    refused = not_read(names, read)
    if refused:
        raise ValueError(
            f"{', '.join(f'config.{name}' for name in refused)} cannot be set where a run is "
            f"evaluated; what evaluation reads: {', '.join(read)} (not env.pool)"
        )
    return CONFIG.value


COLLAPSE_PROBLEMS = 64  # held-out problems whose reasonings are cross-scored


def warn_unread(config, names):
    """One line about the fields `names` that were set but have no part in the evaluation."""
    ignored = [n for n in names if n == "model.path" or n in not_read(names, READ + OF_MODEL)]
    # What evaluation reads does not depend on when training would diagnose and evaluate.
    others = [n for n in names if n not in ignored and not n.startswith(("eval.", "diagnose."))]
    line = warning(dict.fromkeys(ignored, "by evaluate --model") | unread(config, others))
    if line:
        console(line)


def main(argv):
    del argv
    with command.bad_input():
        if bool(WORKDIR.value) == bool(MODEL.value):
            raise ValueError("give either --workdir (a run) or --model (a directory or hub id)")
        if SAMPLES.value < 1:
            raise ValueError(f"--samples is {SAMPLES.value}; it must be at least 1")
        if GRADIENTS.value and not WORKDIR.value:
            raise ValueError("--gradients needs --workdir: a run, and the policy it started from")
        names = command.overrides()
        if WORKDIR.value:
            workdir = Path(WORKDIR.value)
            config = config_of_run(workdir, names, GRADIENTS.value)
            config, policy = restore_run(workdir, config)
            warn_unread(config, names)
        else:
            config = CONFIG.value
            config.model.path = MODEL.value
            settle(config, jax.devices())
            check(config)
            warn_unread(config, names)
            policy = load_policy(config, None)
            _, mesh = build_meshes(config)
            params = sampling_params(policy.params, policy.model, mesh)
            policy = policy._replace(params=params)
    with jax.set_mesh(build_meshes(config)[1]):
        model, params, _, tasks = policy
        metrics, played = evaluate(model, params, tasks, samples=SAMPLES.value)
        found = [
            collapse_metrics(
                model,
                params,
                [episode for episode in episodes if episode.group < COLLAPSE_PROBLEMS],
                first_turn_samples=config.diagnose.first_turn_samples,
                trajectory_samples=config.diagnose.trajectory_samples,
                micro_batch=config.diagnose.micro_batch,
                seed=config.eval.seed,
                step=0,
                environment=index,
            )
            for index, episodes in enumerate(played)
        ]
        metrics |= joined(tasks, found)
    if GRADIENTS.value:
        workdir = Path(WORKDIR.value)
        step, found = checkpoint_gradients(config, workdir, load_policy(config, workdir), policy)
        write_gradients(workdir, step, found)
        metrics |= found
    if is_first():
        for name, value in metrics.items():
            print(f"{name:<45} {value:.6g}")


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to evaluate.")
    MODEL = flags.DEFINE_string("model", None, "Model directory or hub id to evaluate.")
    SAMPLES = flags.DEFINE_integer("samples", 1, "Episodes a problem; pass@k up to it.")
    GRADIENTS = flags.DEFINE_bool(
        "gradients", False, "Gradients of the loss's parts by reward variance, of a run."
    )
    command.run_command(main)
