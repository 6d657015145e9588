"""The environments of a run, each with all that playing it needs.

Most runs have one. Where several train together, each has its own groups, filter and figures, and
one update learns from all of them.
"""

import dataclasses
import math

import jax
import numpy as np

from ragen_jax.randomness import Purpose, stream_key
from ragen_jax.rollout.chat import Chat
from ragen_jax.run import datasets
from ragen_jax.run.build import build_chat, build_environment, environment_settings
from ragen_jax.run.sizes import of_environments
from ragen_jax.run.workdir import cache_directory
from ragen_jax.sharding import first_goes_first


@dataclasses.dataclass(frozen=True)
class Task:
    """One environment of a run."""

    name: str
    label: str  # its name where several train together, "" where it is alone: for metrics, folders
    config: object  # ConfigDict, the run's, with this environment as its only one
    chat: Chat
    environment: object  # problems of the training split
    heldout_environment: object  # of the evaluation split
    heldout: tuple  # (seeds, states)
    key: jax.Array  # of the policy's draws and the environment's noise while training

    @property
    def groups(self):
        """Groups of a step."""
        return self.config.rollout.groups


def build_tasks(config, tokenizer, stop_ids):
    """The `Task`s of a config, in the order of sizes.of_environments.

    Args:
      stop_ids: token ids at which the model's replies end.
    """
    alone = of_environments(config)
    return tuple(
        _build(name, name if len(alone) > 1 else "", index, c, tokenizer, stop_ids)
        for index, (name, c) in enumerate(alone.items())
    )


def _build(name, label, index, config, tokenizer, stop_ids):
    environment = build_environment(config, "train")
    heldout_environment = build_environment(config, "eval")
    with first_goes_first("heldout"):
        heldout = datasets.heldout_problems(
            heldout_environment,
            count=config.eval.episodes,
            seed=config.eval.seed,
            settings=environment_settings(config),
            directory=cache_directory() / "datasets",
        )
    return Task(
        name=name,
        label=label,
        config=config,
        chat=build_chat(config, tokenizer, environment, stop_ids),
        environment=environment,
        heldout_environment=heldout_environment,
        heldout=heldout,
        # Environments count their seeds alike, so that each needs noise of its own.
        key=stream_key(Purpose.PLAY, config.seed, index),
    )


def labelled(tasks, measure, *listed):
    """measure(*listed) of each task alone, under its label; {} where there is but one task.

    Args:
      measure: returns a dict of metrics a/b, which become a/label/b.
      listed: lists or arrays, episode by episode or group by group, task by task.
    """
    return apart(tasks, [measure(*parts) for _, *parts in split(tasks, *listed)])


def split(tasks, *listed):
    """(task, its part of each list) of each task; `listed` as in `labelled`."""
    groups = sum(task.groups for task in tasks)
    first = 0
    for task in tasks:
        parts = []
        for values in listed:
            each = len(values) // groups  # entries of a group
            parts.append(values[first * each : (first + task.groups) * each])
        yield task, *parts
        first += task.groups


def joined(tasks, found):
    """The metrics of each task under its label, and their mean over the tasks that have them.

    The mean of E independent figures has the interval sqrt(sum of their squared half-widths) / E
    (names ending in _ci95); p-values (in _p) have no mean.

    Args:
      found: one dict of metrics a task.
    """
    metrics = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one[name] for one in found if name in one]
        if name.endswith("_ci95"):
            metrics[name] = math.hypot(*values) / len(values)
        elif len(tasks) == 1 or not name.endswith("_p"):
            metrics[name] = np.mean(values)
    return metrics | apart(tasks, found)


def own_rows(tasks, metrics):
    """The metrics of each task under their plain names: what `apart` put under its label."""
    if len(tasks) == 1:
        return [metrics]
    return [
        {
            name.replace(f"/{task.label}/", "/", 1): value
            for name, value in metrics.items()
            if name.split("/")[1:2] == [task.label]
        }
        for task in tasks
    ]


def apart(tasks, found):
    """The metrics of each task under its label; {} where there is but one task.

    Args:
      found: one dict of metrics a/b a task, which become a/label/b.
    """
    return {
        name.replace("/", f"/{task.label}/", 1): value
        for task, one in zip(tasks, found, strict=True)
        if task.label
        for name, value in one.items()
    }
