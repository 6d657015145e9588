"""Experiments of the laboratory (`python -m ragen_jax.lab`), as data: what is varied, how often.

An arm is a setting with a treatment and a seed; each gives fields of the config and their values.
"""

from ragen_jax.configs.experiments.claims import ON_TINY, OTHERWISE
from ragen_jax.configs.experiments.experiment import Experiment
from ragen_jax.configs.experiments.organism import ON_ORGANISM
from ragen_jax.configs.experiments.tasks import ON_TASKS

__all__ = ["EXPERIMENTS", "OTHERWISE", "Experiment"]

EXPERIMENTS = {**ON_TINY, **ON_ORGANISM, **ON_TASKS}
