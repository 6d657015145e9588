"""The rows that a page is made from, written beside it as JSON lines, and read again.

A line is a step of a run: what run it is of, and the page's figures. A run's first line also says
what its config has other than configs/base.py, by which it is known again.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.configs import base
from ragen_jax.configs.experiments.experiment import Fields
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import Runs
from ragen_jax.run.workdir import flat

RUN = ("setting", "treatment", "seed")


def not_default(config: ConfigDict) -> Fields:
    """{dotted name: value} of a config's fields that are not as in configs/base.py."""
    defaults = flat(base.get_config())
    return {k: v for k, v in flat(config).items() if k not in defaults or v != defaults[k]}


def write_rows(path: Path, plan: Sequence[Arm], runs: Runs, figures: Sequence[str]) -> None:
    """Writes the figures of an experiment's runs, those of its arms in `plan`."""
    configs = {arm.key: not_default(arm.config) for arm in plan}
    with path.open("w") as file:
        for key, rows in runs.items():
            first = {"config": configs[key]}
            for row in rows:
                of_row = {name: row[name] for name in ("step", *figures) if name in row}
                file.write(json.dumps(dict(zip(RUN, key, strict=True)) | of_row | first) + "\n")
                first = {}


def read_runs(path: Path, configs: dict[tuple, Fields] | None = None) -> Runs:
    """All runs of a file, {} where there is none; with `configs` those of runs that have them."""
    found: Runs = {}
    config = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        setting, treatment, seed = (row.pop(name) for name in RUN)
        key = setting, treatment, seed
        if key not in found:
            config[key] = row.pop("config", None)
        found.setdefault(key, []).append(row)
    if configs is None:
        return found
    return {key: found[key] for key, wanted in configs.items() if config.get(key, ()) == wanted}


def read_rows(path: Path, plan: Sequence[Arm]) -> Runs:
    """The runs of `plan` that were written to `path` with the config that they have there.

    Whether the code is what it was then nobody can see from here.
    """
    return read_runs(path, {arm.key: not_default(arm.config) for arm in plan})
