"""Environments by name. To add one, write `envs/<name>.py` (or a folder) and list it in `ENVS`.

A user's own environment needs no entry: its name is MODULE:CLASS, where Python can import MODULE
(from the folder where the command is started, or as an installed package).

`envs/types.py` defines the contract, including how environments are built.
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
from ragen_jax.envs.harness import Harness
from ragen_jax.envs.metamathqa import MetaMathQA
from ragen_jax.envs.openenv_server import OpenEnv
from ragen_jax.envs.own_code import files_hash, own_files
from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym
from ragen_jax.envs.rubik import Rubik
from ragen_jax.envs.search_qa import SearchQA
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sudoku import Sudoku
from ragen_jax.envs.textarena_games import TextArena
from ragen_jax.envs.types import Environment, EnvironmentClass
from ragen_jax.envs.verifiers_tasks import Verifiers
from ragen_jax.envs.webshop import WebShop

ENVS: dict[str, EnvironmentClass] = {
    "bandit": Bandit,
    "countdown": Countdown,
    "dataset": Dataset,
    "deepcoder": DeepCoder,
    "frozen_lake": FrozenLake,
    "game_2048": Game2048,
    "gymnasium": Gymnasium,
    "harness": Harness,
    "metamathqa": MetaMathQA,
    "openenv": OpenEnv,
    "reasoning_gym": ReasoningGym,
    "rubik": Rubik,
    "search_qa": SearchQA,
    "sokoban": Sokoban,
    "sudoku": Sudoku,
    "textarena": TextArena,
    "verifiers": Verifiers,
    "webshop": WebShop,
}

# Options that name code, or decide what is called with which arguments: a Gymnasium id may begin
# with a module, and some registered environments build any other environment from their arguments.
CODE_OPTIONS = {
    "dataset": ("reward", "step", "tools", "mcp"),
    "gymnasium": ("id", "module", "maker", "arguments"),
    "harness": ("function", "command"),
    "verifiers": ("taskset", "arguments", "settings", "python"),
}

# The members that every environment has; the other members of the contract are optional.
MEMBERS = ("actions", "instructions", "reset", "render", "identity", "step")

# Optional methods of an environment: name in version 0.1.0 -> name now.
RENAMED_METHODS = {"given": "list_problems", "grounded": "count_grounded"}

MODULE_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # MODULE:CLASS


class IncompleteEnvironment(ValueError):
    """A class lacks members of an environment, whatever its options."""


def is_environment_name(name: object) -> bool:
    """Whether a name is in `ENVS` or has the form MODULE:CLASS."""
    return isinstance(name, str) and (name in ENVS or MODULE_CLASS.fullmatch(name) is not None)


def names_code(name: str, option: str | None = None) -> bool:
    """Whether an environment's name, or an option of the environment called `name`, decides which
    code is imported and called."""
    return name not in ENVS if option is None else option in CODE_OPTIONS.get(name, ())


def find_env(name: str) -> EnvironmentClass:
    """Return the class or function that builds the environment called `name`.

    The name is a key of `ENVS`, or MODULE:CLASS.

    Raises ValueError for an unknown name (listing the known names), for a module that cannot be
    imported, for a module that has no such class, and for a class with a method of an old name.
    """
    if name in ENVS:
        return ENVS[name]
    if not is_environment_name(name):
        raise ValueError(
            f"unknown environment {name!r}; known: {', '.join(sorted(ENVS))}, or MODULE:CLASS"
        )
    module_name, class_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's file may raise anything when it is imported
        hint = ""
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name == module_name
            and "." not in module_name
        ):
            hint = f"; start the command in the folder of {module_name}.py"
        raise ValueError(
            f"environment {name!r}: module {module_name} cannot be imported: "
            f"{type(error).__name__}: {error}{hint}"
        ) from error
    if not callable(getattr(module, class_name, None)):
        raise ValueError(f"environment {name!r}: {module.__file__} has no class {class_name}")
    found = getattr(module, class_name)
    for old, new in RENAMED_METHODS.items():
        if callable(getattr(found, old, None)):
            raise ValueError(
                f"environment {name!r}: its method {old} is now called {new}; rename it in "
                f"{module.__file__}"
            )
    return found


def code_hash(name: str) -> str | None:
    """Return the SHA-256 of the sources of a user's own environment; None for a built-in one.

    Problems and agents cached on disk depend on that code: the named module and the user's own
    modules that it imports (`own_code.own_files`).
    """
    if name in ENVS:
        return None
    find_env(name)  # raises ValueError if it cannot be imported
    return files_hash(own_files(name.partition(":")[0]))


def make_env(name: str, **options: Any) -> Environment:
    """Build the environment called `name` with keyword `options`.

    Raises ValueError for a name that `find_env` does not find and for an unknown option (listing
    the accepted options), IncompleteEnvironment for a class that lacks members; the environment
    itself checks the options' values. A constructor with
    **options, such as that of a subclass that passes them on, receives all of them.
    """
    build = find_env(name)
    accepted = inspect.signature(build).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        try:
            return _complete(name, build(**options))
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"environment {name!r} has an unknown option: {error}") from error
    unknown = sorted(option for option in options if option not in accepted)
    if unknown:
        if "split" in unknown:
            raise ValueError(
                f"environment {name!r} must accept split='train' or 'eval' as a keyword of "
                "__init__, and give other problems for each"
            )
        others = ", ".join(option for option in accepted if option != "split")
        raise ValueError(
            f"environment {name!r} has no option {', '.join(map(repr, unknown))}; "
            f"accepted: {others or 'none'}"
        )
    return _complete(name, build(**options))


def _complete(name: str, environment: Any) -> Environment:
    """Return an environment that has all members of envs.types.Environment.

    Raises:
      IncompleteEnvironment: it lacks some.
    """
    missing = [member for member in MEMBERS if not hasattr(environment, member)]
    if missing:
        raise IncompleteEnvironment(
            f"environment {name!r} lacks {', '.join(missing)}; an environment has "
            f"{', '.join(MEMBERS)} (ragen_jax/envs/types.py)"
        )
    return environment
