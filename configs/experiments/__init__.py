"""Experiments of the laboratory (`python -m ragen_jax.lab`), as data.

An arm is a setting, a treatment and a seed. Settings and treatments are config fields with values.
"""

from ragen_jax.configs.experiments.claims import OTHER_CLAIMS, TINY_EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Experiment
from ragen_jax.configs.experiments.organism import ORGANISM_EXPERIMENTS
from ragen_jax.configs.experiments.referee import (
    NOT_TO_CONCLUDE,
    REFEREE,
    REFEREE_EXPERIMENTS,
    REFEREE_QUICK,
)
from ragen_jax.configs.experiments.tasks import TASK_EXPERIMENTS

__all__ = [
    "EXPERIMENTS",
    "NOT_TO_CONCLUDE",
    "OTHER_CLAIMS",
    "REFEREE",
    "REFEREE_QUICK",
    "Experiment",
]

EXPERIMENTS = {
    **TINY_EXPERIMENTS,
    **ORGANISM_EXPERIMENTS,
    **TASK_EXPERIMENTS,
    **REFEREE_EXPERIMENTS,
}
