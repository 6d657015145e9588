"""Write and read the stored rows of a page, JSON lines in a file next to it.

A line is a run: its key, the config fields that differ from configs/base.py (which identify it),
its steps, and the values of each metric at these steps (null if missing).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ragen_jax.config.stored import fields_of
from ragen_jax.configs import base
from ragen_jax.configs.base import Config
from ragen_jax.configs.experiments.experiment import Experiment, Fields
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import Rows, Runs
from ragen_jax.storage.atomic_io import atomic_open

RUN = ("setting", "treatment", "seed")
DIGITS = 7  # significant digits of a value


def changed_fields(config: Config) -> Fields:
    """Return {dotted name: value} for a config's fields that differ from configs/base.py."""
    defaults = fields_of(base.get_config())
    return {k: v for k, v in fields_of(config).items() if k not in defaults or v != defaults[k]}


def trim_rows(rows: Rows, figures: Sequence[str]) -> Rows:
    """Return a run's rows with only the metrics of a page, rounded to DIGITS digits.

    Pages are made from these rows, so that the stored rows reproduce the same page.
    """
    return [
        {"step": row["step"]}
        | {name: float(f"{row[name]:.{DIGITS}g}") for name in figures if name in row}
        for row in rows
    ]


def write_runs(path: Path, plan: Sequence[Arm], runs: Runs) -> None:
    """Write the runs of the arms in `plan`, whose rows `trim_rows` has reduced."""
    configs = {arm.key: changed_fields(arm.config) for arm in plan}
    with atomic_open(path) as file:
        for key, rows in runs.items():
            names = dict.fromkeys(name for row in rows for name in row if name != "step")
            line = dict(zip(RUN, key, strict=True)) | {
                "config": configs[key],
                "step": [row["step"] for row in rows],
                "figures": {name: [row.get(name) for row in rows] for name in names},
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def stored_runs(report: Path, name: str, experiment: Experiment, suffix: str = "") -> Runs:
    """Read the stored rows that the page of an experiment is made from; {} without any.

    Args:
      suffix: "_quick" for the rows of the short form.
    """
    return read_runs(report / f"{experiment.rows or name}{suffix}.jsonl")


def read_runs(path: Path, plan: Sequence[Arm] | None = None) -> Runs:
    """Read the runs of a file; {} if it does not exist.

    With `plan`, return only the runs of arms in `plan` whose stored config is the same. Changes of
    the code since those runs cannot be detected.
    """
    found: Runs = {}
    configs = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        run = json.loads(line)
        key = (run["setting"], run["treatment"], run["seed"])
        configs[key] = run["config"]
        columns = run["figures"].items()
        found[key] = [
            {"step": step} | {name: values[i] for name, values in columns if values[i] is not None}
            for i, step in enumerate(run["step"])
        ]
    if plan is None:
        return found
    return {
        arm.key: found[arm.key]
        for arm in plan
        if arm.key in found and configs[arm.key] == changed_fields(arm.config)
    }
