"""The laboratory: run an experiment of many small runs, and report what it says.

    python -m ragen_jax.lab --experiment=collapse [--workdir=runs/lab] [--report=docs]
                            [--config=configs/sokoban.py:tiny] [--config.FIELD=VALUE ...]

Runs every arm of an experiment of configs/experiments.py, one after the other, and writes lab.md
and lab_NAME.png. Started again, it goes on where it was stopped; finished arms are only read.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab.arms import arms, finished, set_by
from ragen_jax.lab.report import write_report
from ragen_jax.run import command
from ragen_jax.run.domains import warning
from ragen_jax.run.log import console, read_metrics
from ragen_jax.train import train


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        name = EXPERIMENT.value
        if name not in EXPERIMENTS:
            raise ValueError(f"--experiment is {name!r}; known: {', '.join(EXPERIMENTS)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("the report has a figure: pip install ragen_jax[lab]")
        plan = arms(EXPERIMENTS[name], CONFIG.value)
    given = command.overrides()
    line = warning({field: why for field, why in set_by(name).items() if field in given})
    if line:
        console(line)
    root = Path(WORKDIR.value) / name
    for index, arm in enumerate(plan):
        workdir = root / arm.folder
        if finished(workdir, arm.config.steps):
            continue
        console(f"arm {index + 1} of {len(plan)}: {arm.setting}, {arm.filter}, seed {arm.seed}")
        code = train(arm.config, workdir)
        if code:
            sys.exit(code)
    rows = {
        (arm.setting, arm.filter, arm.seed): read_metrics(root / arm.folder / "metrics.jsonl")
        for arm in plan
    }
    report = write_report(name, rows, Path(REPORT.value))
    console(f"done: {report}")


if __name__ == "__main__":
    CONFIG = command.define_config()
    EXPERIMENT = flags.DEFINE_string(
        "experiment", "collapse", "An entry of configs/experiments.py."
    )
    WORKDIR = flags.DEFINE_string("workdir", "runs/lab", "Folder of the runs.")
    REPORT = flags.DEFINE_string("report", "docs", "Folder of lab.md and its figure.")
    command.run_command(main)
