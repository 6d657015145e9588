"""A run's folder, as far as a page shows it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragen_jax.configs import base
from ragen_jax.groups import Part, metrics_of_each
from ragen_jax.run.flat import flat
from ragen_jax.run.log import read_events, read_outcomes
from ragen_jax.run.rows import read_metrics
from ragen_jax.types import Metrics

ONLY = ""  # the label of a run's only environment


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a run has written so far, or what was found in the rollouts of another trainer."""

    name: str
    about: str  # what it is, in a line
    fields: dict[str, Any]  # {dotted name: value} of its settings
    config: dict[str, Any]  # as config.json has it, with base.py's values where it has none
    rows: list[Metrics]  # of metrics.jsonl
    events: list[dict[str, Any]]  # of events.jsonl: step, rule, action, reason
    labels: tuple[str, ...]  # of its environments; (ONLY,) of one
    outcomes: dict[str, dict[int, list[int]]]  # {label: {step: [solved of each held-out problem]}}

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


def read_run(path: str | Path) -> Recorded:
    """What is in a run's folder.

    Raises:
      ValueError: it is no run's folder, or no step of the run is written yet.
    """
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not the folder of a run: it has no config.json")
    config = _with_defaults(json.loads(file.read_text()), base.get_config().to_dict())
    rows = read_metrics(path / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{path} has no finished step yet: its metrics.jsonl is empty or missing")
    rows = _with_gradients(rows, path / "gradients")
    labels = (config["env"]["name"], *config["also"]) if config["also"] else (ONLY,)
    last = int(rows[-1]["step"])
    return Recorded(
        name=path.resolve().name,
        about=(
            f"{', '.join((config['env']['name'], *config['also']))} · "
            f"model {config['model']['path']} · {config['algorithm']['name']} · "
            f"step {last} of {config['steps']}"
        ),
        fields=flat(config),
        config=config,
        rows=rows,
        events=[event for event in read_events(path / "events.jsonl") if event["step"] <= last],
        labels=labels,
        outcomes={
            label: {s: o for s, o in read_outcomes(path / "eval" / label).items() if s <= last}
            for label in labels
        },
    )


def _with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the fields of `defaults` that it has not, which came later."""
    merged = dict(config)
    for name, value in defaults.items():
        if name not in merged:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(merged[name], dict):
            merged[name] = _with_defaults(merged[name], value)
    return merged


def _with_gradients(rows: list[Metrics], folder: Path) -> list[Metrics]:
    """Rows with the figures of gradients/step_N.json, of checkpoints looked at afterwards."""
    found = {
        int(path.stem.removeprefix("step_")): json.loads(path.read_text())
        for path in sorted(folder.glob("step_*.json"))
    }
    return [found.get(int(row["step"]), {}) | row for row in rows]


def groups_by_seed(runs: list[Recorded]) -> list[list[int]]:
    """Indices of runs, those together that differ in their seed alone."""
    together: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        fields = {name: value for name, value in run.fields.items() if name != "seed"}
        together.setdefault(json.dumps(fields, sort_keys=True, default=str), []).append(index)
    return list(together.values())
