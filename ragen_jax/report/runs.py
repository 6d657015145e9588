"""A run's folder, as far as a page shows it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.config.stored import read_config_file
from ragen_jax.configs import base
from ragen_jax.core.flatten import flatten
from ragen_jax.core.task_shares import Part, metrics_of_each
from ragen_jax.core.types import Metrics
from ragen_jax.run.run_files import read_events, read_gradients, read_outcomes
from ragen_jax.storage.metrics_reader import read_metrics

ONLY = ""  # the label of a run's only environment
SAME = 1e-6  # rows hold success in float32


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run has written so far, or what was found in the rollouts of another trainer."""

    name: str
    about: str  # what it is, in a line
    fields: dict[str, Any]  # {dotted name: value} of its settings
    config: dict[str, Any]  # as config.json has it, with base.py's values where it has none
    rows: list[Metrics]  # of metrics.jsonl
    events: list[dict[str, Any]]  # of events.jsonl: step, rule, action, reason
    labels: tuple[str, ...]  # of its environments; (ONLY,) of one
    # {label: {step: [solved of each held-out problem, NaN where it broke]}}
    outcomes: dict[str, dict[int, list[float]]]
    damaged: tuple[str, ...] = ()  # a sentence about each file that cannot be read, or is gone

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"])

    def rows_of(self, label: str) -> list[Metrics]:
        """The rows of an environment, under plain names."""
        if label == ONLY:
            return self.rows
        parts, at = [Part(name, 0) for name in self.labels], self.labels.index(label)
        return [
            {"step": row["step"]} | metrics_of_each(parts, _shared(row))[at] for row in self.rows
        ]


def _shared(row: Metrics) -> Metrics:
    """A row without its step, which belongs to no environment."""
    return {name: value for name, value in row.items() if name != "step"}


def read_run(path: str | Path) -> RunRecord:
    """What is in a run's folder.

    Raises:
      ValueError: it is no run's folder, or no step of the run is written yet.
    """
    path = Path(path)
    config = _with_defaults(read_config_file(path), base.get_config().to_dict())
    rows = read_metrics(path / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{path} has no finished step yet: its metrics.jsonl is empty or missing")
    damaged: list[str] = []
    gradients = read_gradients(path, damaged.append)
    rows = [gradients.get(int(row["step"]), {}) | row for row in rows]
    labels = (config["env"]["name"], *config["also"]) if config["also"] else (ONLY,)
    last = int(rows[-1]["step"])
    events = read_events(path / "events.jsonl", damaged.append)
    run = RunRecord(
        name=path.resolve().name,
        about=(
            f"{', '.join((config['env']['name'], *config['also']))} · "
            f"model {config['model']['path']} · {config['algorithm']['name']} · "
            f"step {last} of {config['steps']}"
        ),
        fields=flatten(config),
        config=config,
        rows=rows,
        events=[event for event in events if event["step"] <= last],
        labels=labels,
        outcomes={},
    )
    for label in labels:
        found = read_outcomes(path / "eval" / label, damaged.append)
        run.outcomes[label] = _as_in_rows(run, path, label, found, damaged)
    return dataclasses.replace(run, damaged=tuple(damaged))


def _as_in_rows(
    run: RunRecord, path: Path, label: str, found: dict[int, list[float]], damaged: list[str]
) -> dict[int, list[float]]:
    """The outcomes of evaluations that a run's rows have, too; of others it is told in `damaged`.

    What was evaluated by other settings lies elsewhere (`workdir.set_evaluations_aside`).
    """
    aside = [int(folder.name.rpartition("_")[2]) for folder in path.glob("eval_until_step_*")]
    kept = {}
    for row in run.rows_of(label):
        step = int(row["step"])
        if "eval/success" not in row or step <= max(aside, default=-1):
            continue
        file = path / "eval" / label / f"step_{step:06d}.json"
        if step not in found:
            if not file.exists():
                damaged.append(f"{file} is missing; it holds the evaluation of step {step}")
        elif not abs(row["eval/success"] - np.nanmean(found[step])) <= SAME:
            damaged.append(f"{file} does not match the success in metrics.jsonl")
        else:
            kept[step] = found[step]
    return kept


def _with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the fields of `defaults` that it has not, which came later."""
    merged = dict(config)
    for name, value in defaults.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(merged[name], dict):
            merged[name] = _with_defaults(merged[name], value)
    return merged


def groups_by_seed(runs: list[RunRecord]) -> list[list[int]]:
    """Indices of runs, those together that differ in their seed alone."""
    together: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.fields.items() if name != "seed"}
        together.setdefault(json.dumps(fields, sort_keys=True, default=str), []).append(index)
    return list(together.values())
