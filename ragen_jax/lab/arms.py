"""The runs of an experiment."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.run.check import check
from ragen_jax.run.log import read_metrics
from ragen_jax.run.settle import settle


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run of an experiment."""

    setting: str
    filter: str
    seed: int
    config: ConfigDict

    @property
    def folder(self) -> str:
        """Where the run lies within the experiment's folder."""
        name = f"{self.setting} {self.filter} {self.seed}"
        return name.replace(",", "").replace(" ", "_")


def arms(experiment: dict[str, Any], config: ConfigDict) -> list[Arm]:
    """The `Arm`s of an experiment: seeds outermost, so that a part of it has all settings.

    Args:
      experiment: an entry of EXPERIMENTS.
      config: what the arms have in common besides the experiment's own fields.

    Raises:
      ValueError: an arm that no run could use.
    """
    plan = []
    for seed in experiment["seeds"]:
        for setting, changes in experiment["settings"].items():
            for name, selection in experiment["filters"].items():
                arm_config = config.copy_and_resolve_references()
                arm_config.update_from_flattened_dict(
                    {**experiment["always"], **changes, **selection, "seed": seed}
                )
                settle(arm_config, jax.devices())
                check(arm_config)
                plan.append(Arm(setting, name, seed, arm_config))
    return plan


def set_by(name: str) -> dict[str, str]:
    """{field: why} of what an experiment sets itself, whatever the command line says."""
    experiment: dict[str, Any] = EXPERIMENTS[name]
    varied = [*experiment["settings"].values(), *experiment["filters"].values()]
    fields = {"seed", *experiment["always"], *(field for changes in varied for field in changes)}
    return dict.fromkeys(sorted(fields), f"by experiment {name}, which sets it")


def finished(workdir: Path, steps: int) -> bool:
    """Whether a run's folder holds all its steps."""
    rows = read_metrics(workdir / "metrics.jsonl")
    return bool(rows) and rows[-1]["step"] >= steps
