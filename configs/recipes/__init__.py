"""Recipes: what a run does differently from its environment's defaults, as data.

    python -m ragen_jax.train --config=configs/sokoban.py:tiny+ppo+no_filter

A recipe maps fields of the config to values; several are applied from left to right. A value may be
a function of the config, where it follows from another field.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax.configs.recipes.algorithms import ALGORITHMS
from ragen_jax.configs.recipes.filters import FILTERS
from ragen_jax.configs.recipes.sweeps import SWEEPS

RECIPES = {**ALGORITHMS, **FILTERS, **SWEEPS}


def apply(config: ConfigDict, names: Sequence[str]) -> None:
    """Changes `config` by the named recipes.

    Raises:
      ValueError: an unknown recipe, or one about a field that the config does not have.
    """
    for name in names:
        if name not in RECIPES:
            raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
        for field, value in RECIPES[name].items():
            *sections, last = field.split(".")
            section = config
            for part in sections:
                section = section[part]
            if last not in section:
                raise ValueError(f"recipe {name!r} sets {field}, which {config.env.name} has not")
            section[last] = value(config) if callable(value) else value
