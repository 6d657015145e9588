"""The runs of an experiment."""

import dataclasses

import jax

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
