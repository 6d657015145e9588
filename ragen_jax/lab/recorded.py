"""The figures that a page is made from, written beside it as JSON lines, and read again.

A line is a run: which it is, what its config has other than configs/base.py (by which it is known
again), its steps, and each figure's values at these (null where a step has none).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.config.stored import fields_of
from ragen_jax.configs import base
from ragen_jax.configs.experiments.experiment import Fields
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import Rows, Runs
from ragen_jax.storage.atomic_io import atomic_open

RUN = ("setting", "treatment", "seed")
DIGITS = 7  # significant ones, of a figure


def not_default(config: ConfigDict) -> Fields:
    """{dotted name: value} of a config's fields that are not as in configs/base.py."""
    defaults = fields_of(base.get_config())
    return {k: v for k, v in fields_of(config).items() if k not in defaults or v != defaults[k]}


def cut(rows: Rows, figures: Sequence[str]) -> Rows:
    """A run's rows as they are written: a page's figures alone, to DIGITS digits. Pages are made
    from these, so that what is read again makes the same page.
    """
    return [
        {"step": row["step"]}
        | {name: float(f"{row[name]:.{DIGITS}g}") for name in figures if name in row}
        for row in rows
    ]


def write_runs(path: Path, plan: Sequence[Arm], runs: Runs) -> None:
    """Writes an experiment's runs, those of its arms in `plan`, as `cut` left them."""
    configs = {arm.key: not_default(arm.config) for arm in plan}
    with atomic_open(path) as file:
        for key, rows in runs.items():
            names = dict.fromkeys(name for row in rows for name in row if name != "step")
            line = dict(zip(RUN, key, strict=True)) | {
                "config": configs[key],
                "step": [row["step"] for row in rows],
                "figures": {name: [row.get(name) for row in rows] for name in names},
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_runs(path: Path, plan: Sequence[Arm] | None = None) -> Runs:
    """The runs of a file, {} where there is none; with `plan` those of its arms that were written
    with the config that they have there.

    Whether the code is what it was then nobody can see from here.
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
        if arm.key in found and configs[arm.key] == not_default(arm.config)
    }
