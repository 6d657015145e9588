"""Environments by name. To add one, write `envs/<name>.py` (or a folder) and list it in `ENVS`.

One of your own needs no row: its name is MODULE:CLASS, of a module that Python can import (from the
folder where the command is started, or installed).

The contract, how they are built included, is in `envs/types.py`.
"""

import importlib
import inspect
import re
from typing import Any

from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.dataset import Dataset
from ragen_jax.envs.deepcoder import DeepCoder
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.gymnasium_text import Gymnasium
from ragen_jax.envs.metamathqa import MetaMathQA
from ragen_jax.envs.own_code import files_hash, own_files
from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym
from ragen_jax.envs.rubik import Rubik
from ragen_jax.envs.search_qa import SearchQA
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sudoku import Sudoku
from ragen_jax.envs.textarena_games import TextArena
from ragen_jax.envs.types import Environment, EnvironmentClass
from ragen_jax.envs.webshop import WebShop

ENVS: dict[str, EnvironmentClass] = {
    "bandit": Bandit,
    "countdown": Countdown,
    "dataset": Dataset,
    "deepcoder": DeepCoder,
    "frozen_lake": FrozenLake,
    "game_2048": Game2048,
    "gymnasium": Gymnasium,
    "metamathqa": MetaMathQA,
    "reasoning_gym": ReasoningGym,
    "rubik": Rubik,
    "search_qa": SearchQA,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "textarena": TextArena,
    "webshop": WebShop,
}

# Options that name code, or say what is called with what: an id of Gymnasium's may begin with a
# module, and some registered environments make any other from their arguments.
CODE_OPTIONS = {
    "dataset": ("reward", "step", "tools"),
    "gymnasium": ("id", "module", "maker", "arguments"),
}

OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # MODULE:CLASS


def known(name: object) -> bool:
    """Whether a name is one of ours, or has the form of one's own."""
    return isinstance(name, str) and (name in ENVS or OWN.fullmatch(name) is not None)


def names_code(name: str, option: str | None = None) -> bool:
    """Whether the name of an environment, or an option of the environment called `name`, says what
    code is imported and called."""
    return name not in ENVS if option is None else option in CODE_OPTIONS.get(name, ())


def find_env(name: str) -> EnvironmentClass:
    """What builds the environment called `name`: a row of `ENVS`, or MODULE:CLASS.

    Raises ValueError for an unknown name (listing the known ones), or a module that has no such
    class or cannot be imported.
    """
    if name in ENVS:
        return ENVS[name]
    if not known(name):
        raise ValueError(
            f"unknown environment {name!r}; known: {', '.join(sorted(ENVS))}, or MODULE:CLASS"
        )
    module_name, class_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's file does when it is imported
        raise ValueError(
            f"environment {name!r}: module {module_name} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(module, class_name, None)):
        raise ValueError(f"environment {name!r}: {module.__file__} has no class {class_name}")
    return getattr(module, class_name)


def code_hash(name: str) -> str | None:
    """SHA-256 of the sources of an environment of one's own; None of one of ours.

    Problems and agents that are kept on disk were made by that code: the module that is named and
    the user's own modules that it imports (`own_code.own_files`).
    """
    if name in ENVS:
        return None
    find_env(name)  # refuses what cannot be imported
    return files_hash(own_files(name.partition(":")[0]))


def make_env(name: str, **options: Any) -> Environment:
    """The environment called `name`, built with keyword `options`.

    Raises ValueError for a name that `find_env` does not find or an unknown option (listing the
    accepted ones); the environment itself checks the options' values.
    """
    build = find_env(name)
    accepted = inspect.signature(build).parameters
    unknown = sorted(option for option in options if option not in accepted)
    if unknown:
        raise ValueError(
            f"environment {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"accepted: {', '.join(accepted)}"
        )
    return build(**options)
