"""A step's groups, environment by environment: their episodes, arrays and metrics.

A step has the groups of its first environment, then those of the second, and so on. Metrics of an
environment carry its label: rollout/success of "sokoban" is rollout/sokoban/success. A single
environment has no label, and its metrics are those of the step.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ragen_jax.core.types import Episode, Metrics


class Share(Protocol):
    """The attributes read from a `Part`, or from a `tasks.Task` in its place."""

    @property
    def label(self) -> str: ...

    @property
    def groups(self) -> int: ...


class Part(NamedTuple):
    """An environment's share of a step's groups."""

    label: str  # "" if there is only one environment
    groups: int


def split_groups(
    parts: Sequence[Share], *arrays: Sequence[Any] | np.ndarray
) -> Iterator[tuple[Any, ...]]:
    """Yield (part, its slice of each array) for each part.

    Args:
      arrays: with one entry per episode or per group.
    """
    groups = sum(part.groups for part in parts)
    first = 0
    for part in parts:
        shares = []
        for values in arrays:
            of_group = len(values) // groups  # entries per group
            shares.append(values[first * of_group : (first + part.groups) * of_group])
        yield part, *shares
        first += part.groups


def concatenate_episodes(lists: Iterable[Sequence[Episode]]) -> list[Episode]:
    """Concatenate lists of episodes; group numbers continue from one list to the next."""
    episodes: list[Episode] = []
    for listed in lists:
        first = episodes[-1].group + 1 if episodes else 0
        episodes += [dataclasses.replace(e, group=first + e.group) for e in listed]
    return episodes


def measure_each(
    parts: Sequence[Share],
    measure: Callable[..., Metrics],
    *arrays: Sequence[Any] | np.ndarray,
) -> Metrics:
    """Return the metrics of measure(*shares) for each part, labelled; {} if there is one part.

    Args:
      measure: returns metrics a/b, which become a/label/b.
      arrays: as in `split_groups`.
    """
    return label_metrics(parts, [measure(*shares) for _, *shares in split_groups(parts, *arrays)])


def label_metrics(parts: Sequence[Share], metrics_E: Sequence[Metrics]) -> Metrics:
    """Rename the metrics a/b of each part to a/label/b; return {} if there is one part.

    Args:
      metrics_E: metrics of each part.
    """
    return {
        name.replace("/", f"/{part.label}/", 1): value
        for part, metrics in zip(parts, metrics_E, strict=True)
        if part.label
        for name, value in metrics.items()
    }


def combine_metrics(parts: Sequence[Share], metrics_E: Sequence[Metrics]) -> Metrics:
    """Return the labelled metrics of each part, and their means over the parts that have them.

    The mean of E independent figures has the half-width sqrt(sum of their squared half-widths) / E
    (names ending in _ci95), or no interval if a part has the figure without an interval. P-values
    (names ending in _p) have no mean.

    Args:
      metrics_E: metrics of each part.
    """
    combined: dict[str, Any] = {}  # Python and NumPy floats
    for name in dict.fromkeys(name for metrics in metrics_E for name in metrics):
        values = [metrics[name] for metrics in metrics_E if name in metrics]
        if name.endswith("_ci95"):
            figure = name.removesuffix("_ci95")
            if len(values) == sum(figure in metrics for metrics in metrics_E):
                combined[name] = math.hypot(*values) / len(values)
        elif len(parts) == 1 or not name.endswith("_p"):
            combined[name] = np.mean(values)
    return combined | label_metrics(parts, metrics_E)


def metrics_of_each(parts: Sequence[Share], metrics: Metrics) -> list[Metrics]:
    """Return the metrics of each part without labels: the inverse of `label_metrics`."""
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


def rows_of_environment(
    rows: Sequence[Metrics], labels: Sequence[str], label: str
) -> list[Metrics]:
    """Return an environment's metrics of each row, without its label in the names.

    Args:
      rows: rows of metrics.jsonl.
      labels: labels of the environments; one label if there is only one environment.
    """
    if len(labels) == 1:
        return list(rows)
    parts, at = [Part(name, 0) for name in labels], labels.index(label)
    found = []
    for row in rows:
        shared = {name: value for name, value in row.items() if name != "step"}
        found.append({"step": row["step"]} | metrics_of_each(parts, shared)[at])
    return found
