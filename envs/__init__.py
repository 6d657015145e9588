"""Environments by name. To add one, write `envs/<name>.py` (or a folder) and list it in `ENVS`.

A user's own environment needs no entry: its name is MODULE:CLASS, where Python can import MODULE
(from the folder where the command is started, or as an installed package).

`envs/types.py` defines the contract, including how environments are built.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, MutableMapping
from typing import Any

from ragen_jax.envs.own_code import files_hash, own_files
from ragen_jax.envs.types import Environment, EnvironmentClass


class Classes(MutableMapping[str, EnvironmentClass]):
    """Environment classes by name; a module of this package is imported when its class is read.

    A command needs one environment of many, whose imports take a tenth of a second together.
    """

    def __init__(self, **places: str) -> None:
        """Create it from MODULE:CLASS of each name, with MODULE in this package."""
        self._classes: dict[str, EnvironmentClass | str] = {**places}

    def __getitem__(self, name: str) -> EnvironmentClass:
        found = self._classes[name]
        if isinstance(found, str):
            module, _, kind = found.partition(":")
            found = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
            self._classes[name] = found
        return found

    def __setitem__(self, name: str, value: EnvironmentClass) -> None:
        self._classes[name] = value

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:  # without importing the class
        return name in self._classes


ENVS = Classes(
    bandit="bandit:Bandit",
    countdown="countdown:Countdown",
    dataset="dataset:Dataset",
    deepcoder="deepcoder:DeepCoder",
    frozen_lake="frozen_lake:FrozenLake",
    game_2048="game_2048:Game2048",
    gymnasium="gymnasium_text:Gymnasium",
    harness="harness:Harness",
    metamathqa="metamathqa:MetaMathQA",
    openenv="openenv_server:OpenEnv",
    reasoning_gym="reasoning_gym_tasks:ReasoningGym",
    rubik="rubik:Rubik",
    search_qa="search_qa:SearchQA",
    sokoban="sokoban:Sokoban",
    sudoku="sudoku:Sudoku",
    textarena="textarena_games:TextArena",
    verifiers="verifiers_tasks:Verifiers",
    webshop="webshop:WebShop",
)

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
