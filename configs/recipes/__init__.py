"""Recipes: named changes of a config, for example to another algorithm.

    python -m ragen_jax.train --config=configs/sokoban.py:tiny+ppo+no_filter

A recipe maps fields of the config to values. Several recipes are applied from left to right. If a
value depends on other fields, it is a function of the config.
"""

from collections.abc import Sequence

from ml_collections import ConfigDict

from ragen_jax.configs.recipes.algorithms import ALGORITHMS
from ragen_jax.configs.recipes.filters import FILTERS
from ragen_jax.configs.recipes.sweeps import SWEEPS
from ragen_jax.core.suggest import did_you_mean

RECIPES = {**ALGORITHMS, **FILTERS, **SWEEPS}


def apply(config: ConfigDict, names: Sequence[str]) -> None:
    """Apply the named recipes to `config`.

    Raises:
      ValueError: a recipe is unknown, or sets a field that the config does not have.
    """
    for name in names:
        if name not in RECIPES:
            near = did_you_mean(name, RECIPES)
            raise ValueError(
                f"unknown recipe {name!r}{near} (--help lists the recipes)"
                if near
                else f"unknown recipe {name!r}; known: {', '.join(RECIPES)}"
            )
        for field, value in RECIPES[name].items():
            *sections, last = field.split(".")
            section = config
            for part in sections:
                section = section[part]
            if last not in section:
                raise ValueError(f"recipe {name!r} sets {field}, which {config.env.name} has not")
            section[last] = value(config) if callable(value) else value
