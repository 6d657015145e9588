"""The laboratory: run an experiment of many small runs, and report what it says.

    python -m ragen_jax.lab --experiment=collapse [--workdir=runs/lab] [--report=docs]
                            [--config=configs/sokoban.py:tiny] [--config.FIELD=VALUE ...]

Runs every arm of an experiment of configs/experiments.py, one after the other, and writes lab.md
and lab_NAME.png. Started again, it goes on where it was stopped; finished arms are only read.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
from absl import flags

from configs.experiments import EXPERIMENTS
from ragen_jax import command
from ragen_jax.check import check
from ragen_jax.domains import warning
from ragen_jax.lab_report import write_report
from ragen_jax.log import console, read_metrics
from ragen_jax.settle import settle
from ragen_jax.train import train


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run of an experiment."""

    setting: str
    filter: str
    seed: int
    config: object  # ConfigDict

    @property
    def folder(self):
        """Where the run lies within the experiment's folder."""
        name = f"{self.setting} {self.filter} {self.seed}"
        return name.replace(",", "").replace(" ", "_")


def arms(experiment, config):
    """The `Arm`s of an experiment: seeds outermost, so that a part of it has all settings.

    Args:
      experiment: an entry of EXPERIMENTS.
      config: what the arms have in common besides the experiment's own fields.

    Raises:
      ValueError: an arm that no run could use.
    """
    found = []
    for seed in experiment["seeds"]:
        for setting, changes in experiment["settings"].items():
            for name, selection in experiment["filters"].items():
                own = config.copy_and_resolve_references()
                own.update_from_flattened_dict(
                    {**experiment["always"], **changes, **selection, "seed": seed}
                )
                settle(own, jax.devices())
                check(own)
                found.append(Arm(setting, name, seed, own))
    return found


def set_by(name):
    """{field: why} of what an experiment sets itself, whatever the command line says."""
    experiment = EXPERIMENTS[name]
    varied = [*experiment["settings"].values(), *experiment["filters"].values()]
    fields = {"seed", *experiment["always"], *(field for changes in varied for field in changes)}
    return dict.fromkeys(sorted(fields), f"by experiment {name}, which sets it")


def finished(workdir, steps):
    """Whether a run's folder holds all its steps."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] >= steps


def main(argv):
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
