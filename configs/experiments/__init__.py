"""The experiments of the laboratory (`python -m ragen_jax.lab`), as data.

An arm is a run with one setting, one treatment and one seed. Settings and treatments give values of
config fields.
"""

from ragen_jax.configs.experiments.claims import ON_TINY, OTHERWISE
from ragen_jax.configs.experiments.experiment import Experiment
from ragen_jax.configs.experiments.organism import ON_ORGANISM
from ragen_jax.configs.experiments.tasks import ON_TASKS

__all__ = ["EXPERIMENTS", "OTHERWISE", "Experiment"]

EXPERIMENTS = {**ON_TINY, **ON_ORGANISM, **ON_TASKS}
