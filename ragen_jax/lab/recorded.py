"""The rows that a page is made from, written beside it as JSON lines, and read again.

A line is a step of a run: what run it is of, and the page's figures. A run's first line also says
what its config has other than configs/base.py, by which it is known again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from ragen_jax.configs import base
from ragen_jax.configs.experiments.experiment import Fields
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.curves import Rows, Runs
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


def read_rows(path: Path, plan: Sequence[Arm]) -> Runs:
    """The runs of `plan` that were written to `path` with the config that they have there.

    Whether the code is what it was then nobody can see from here.
    """
    if not path.exists():
        return {}
    found: dict[tuple, Rows] = {}
    configs: Mapping = {arm.key: not_default(arm.config) for arm in plan}
    same = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        key = tuple(row.pop(name) for name in RUN)
        if key in configs and row.pop("config", None) == configs[key]:
            same.add(key)
        found.setdefault(key, []).append(row)
    return {arm.key: found[arm.key] for arm in plan if arm.key in same}
