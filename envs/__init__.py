"""Environments by name. To add one, write `envs/<name>.py` (or a folder) and list it in `ENVS`.

The contract, how they are built included, is in `envs/types.py`.
"""

import inspect
from typing import Any

from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import Environment, EnvironmentClass

ENVS: dict[str, EnvironmentClass] = {
    "countdown": Countdown,
    "frozen_lake": FrozenLake,
    "sokoban": Sokoban,
}


def make_env(name: str, **options: Any) -> Environment:
    """The environment called `name`, built with keyword `options`.

    Raises ValueError for an unknown name (listing the known ones) or an unknown option (listing
    the accepted ones); the environment itself checks the options' values.
    """
    if name not in ENVS:
        raise ValueError(f"unknown environment {name!r}; known: {', '.join(sorted(ENVS))}")
    accepted = inspect.signature(ENVS[name]).parameters
    unknown = sorted(option for option in options if option not in accepted)
    if unknown:
        raise ValueError(
            f"environment {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"accepted: {', '.join(accepted)}"
        )
    return ENVS[name](**options)
