"""Experiments of the laboratory (`python -m ragen_jax.lab`), as data.

An arm is a setting, a treatment and a seed. Settings and treatments are config fields with values.
"""

from ragen_jax.configs.experiments.claims import ON_TINY, OTHERWISE
from ragen_jax.configs.experiments.experiment import Experiment
from ragen_jax.configs.experiments.organism import ON_ORGANISM
from ragen_jax.configs.experiments.tasks import ON_TASKS

__all__ = ["EXPERIMENTS", "OTHERWISE", "Experiment"]

EXPERIMENTS = {**ON_TINY, **ON_ORGANISM, **ON_TASKS}
