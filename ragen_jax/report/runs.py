"""Read the parts of a run's folder that a page shows."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.config.stored import read_config_file
from ragen_jax.configs.base import Config
from ragen_jax.core.flatten import flatten
from ragen_jax.core.task_shares import rows_of_environment
from ragen_jax.core.types import Metrics
from ragen_jax.run.run_files import read_events, read_gradients, read_outcomes
from ragen_jax.storage.metrics_reader import read_metrics

ONLY = ""  # the label of a run's only environment
SAME = 1e-6  # tolerance for success, which rows hold in float32


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The records of a run so far, or of another trainer's rollouts."""

    name: str
    about: str  # description in one line
    fields: dict[str, Any]  # {dotted name: value} of its settings
    config: dict[str, Any]  # from config.json, with base.py's values for missing fields
    rows: list[Metrics]  # rows of metrics.jsonl
    events: list[dict[str, Any]]  # objects of events.jsonl: step, rule, action, reason
    labels: tuple[str, ...]  # labels of its environments; (ONLY,) for a single environment
    # {label: {step: [success on each held-out problem, NaN if the environment failed]}}
    outcomes: dict[str, dict[int, list[float]]]
    damaged: tuple[str, ...] = ()  # a sentence about each missing or unreadable file

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"])

    def rows_of(self, label: str) -> list[Metrics]:
        """Return the rows of an environment, without its label in the names."""
        return rows_of_environment(self.rows, self.labels, label)


def read_run(path: str | Path) -> RunRecord:
    """Read a run's folder.

    Raises:
      ValueError: it is not a run's folder, or no step of the run has been written yet.
    """
    path = Path(path)
    config = _with_defaults(read_config_file(path), Config().to_dict())
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
    """Return the outcomes of evaluations that are in the run's rows; report others in `damaged`.

    Evaluations with other settings are in another folder (`workdir.set_evaluations_aside`).
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
    """Return a config, adding the fields of `defaults` that it lacks because it is older."""
    merged = dict(config)
    for name, value in defaults.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(merged[name], dict):
            merged[name] = _with_defaults(merged[name], value)
    return merged


def groups_by_seed(runs: list[RunRecord]) -> list[list[int]]:
    """Group the indices of runs that differ only in their seed."""
    together: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.fields.items() if name != "seed"}
        together.setdefault(json.dumps(fields, sort_keys=True, default=str), []).append(index)
    return list(together.values())
