"""A step's groups, environment by environment: their episodes, arrays and metrics.

A step's groups are those of its first environment, then those of the second, and so on. What is
said of an environment carries its label: rollout/success of "sokoban" is rollout/sokoban/success.
Where an environment is alone it has no label, and its figures are the step's.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """An environment's share of a step's groups; `tasks.Task` has the same attributes."""

    label: str  # "" where it is alone
    groups: int


def split_groups(parts, *arrays):
    """(part, its share of each array) of each part.

    Args:
      arrays: lists or arrays, episode by episode or group by group.
    """
    groups = sum(part.groups for part in parts)
    first = 0
    for part in parts:
        shares = []
        for values in arrays:
            of_group = len(values) // groups  # entries of a group
            shares.append(values[first * of_group : (first + part.groups) * of_group])
        yield part, *shares
        first += part.groups


def concatenate_episodes(lists):
    """The episodes of several lists, their groups numbered on from one list to the next."""
    episodes = []
    for listed in lists:
        first = episodes[-1].group + 1 if episodes else 0
        episodes += [dataclasses.replace(e, group=first + e.group) for e in listed]
    return episodes


def measure_each(parts, measure, *arrays):
    """measure(*shares) of each part, under its label; {} where there is but one.

    Args:
      measure: returns a dict of metrics a/b, which become a/label/b. arrays: as in `split_groups`.
    """
    return label_metrics(parts, [measure(*shares) for _, *shares in split_groups(parts, *arrays)])


def label_metrics(parts, metrics_E):
    """The metrics a/b of each part as a/label/b; {} where there is but one part.

    Args:
      metrics_E: one dict a part.
    """
    return {
        name.replace("/", f"/{part.label}/", 1): value
        for part, metrics in zip(parts, metrics_E, strict=True)
        if part.label
        for name, value in metrics.items()
    }


def combine_metrics(parts, metrics_E):
    """The metrics of each part under its label, and their mean over the parts that have them.

    The mean of E independent figures has the interval sqrt(sum of their squared half-widths) / E
    (names ending in _ci95); p-values (in _p) have no mean.

    Args:
      metrics_E: one dict a part.
    """
    combined = {}
    for name in dict.fromkeys(name for metrics in metrics_E for name in metrics):
        values = [metrics[name] for metrics in metrics_E if name in metrics]
        if name.endswith("_ci95"):
            combined[name] = math.hypot(*values) / len(values)
        elif len(parts) == 1 or not name.endswith("_p"):
            combined[name] = np.mean(values)
    return combined | label_metrics(parts, metrics_E)


def metrics_of_each(parts, metrics):
    """The metrics of each part under their plain names: the inverse of `label_metrics`."""
    if len(parts) == 1:
        return [metrics]
    return [
        {
            name.replace(f"/{part.label}/", "/", 1): value
            for name, value in metrics.items()
            if name.split("/")[1:2] == [part.label]
        }
        for part in parts
    ]
