"""The package itself: its tasks by name, the refused tasks, and their data sets.

Items and scorers are those of one version, of which every scorer was reviewed. Changes that the
package makes to the process are undone (`isolate`).
"""

import contextlib
import dataclasses
import decimal
import difflib
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from ragen_jax.envs.options import whole

VERSION = "0.1.25"  # of reasoning-gym; other versions may have other problems, unreviewed scorers
ITEMS = 2**31 - 1  # size of a task's data set
FEWER_ITEMS = {"acre": 10_000, "gsm_symbolic": 1_000_000}  # tasks that prepare all items at once
_EVALUATES = "its scorer evaluates the answer as Python"
_DIFFERS = "its problems differ from process to process"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _EVALUATES),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), _EVALUATES),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), _EVALUATES),
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "list_functions", "ransom_note"), _DIFFERS
    ),
    "composite": "it combines other tasks; name one of those",
    "game_of_life_halting": "its scorer gives 1 to any answer",
    "pool_matrix": "it seeds NumPy's global generator",
    **dict.fromkeys(("codeio", "word_ladder"), "its answers differ from process to process"),
}

# Texts in no right answer, for which the scorers take minutes or give credit.
TRAPS: dict[str, re.Pattern[str]] = {
    "coin_flip": re.compile("e", re.IGNORECASE),  # 1e99999999 becomes an exact fraction
    "complex_arithmetic": re.compile("nan", re.IGNORECASE),  # at distance NaN from anything
    "number_sorting": re.compile("nan", re.IGNORECASE),
}


class RefusedTask(ValueError):
    """A task or an option that cannot be used, with a message of this module."""


@contextlib.contextmanager
def isolate() -> Generator[None]:
    """Isolate calls of the package: some tasks set the global precision of decimals."""
    with decimal.localcontext(decimal.DefaultContext):
        yield


def error_line(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def load() -> Any:
    """Return the package's module `factory`; imported here because that takes seconds.

    Raises:
      RefusedTask: the package is not installed, or in another version.
    """
    try:
        found = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise RefusedTask(
            f"reasoning_gym needs reasoning-gym {VERSION} (installed: {found}): "
            "pip install 'ragen_jax[gym]'"
        )
    importlib.import_module("reasoning_gym")  # registers the tasks
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym."):
            # Some modules print while they generate a problem.
            vars(module).setdefault("print", _print_nothing)
    return importlib.import_module("reasoning_gym.factory")


def _print_nothing(*_: object, **__: object) -> None:
    """Replaces `print` in the package's modules."""


def data_set(task: str, level: int, settings: Mapping[str, Any] | None) -> Any:
    """Return the data set of a task, with `items(task)` items; arguments as in `ReasoningGym`.

    Raises:
      RefusedTask: an unknown or refused task, or options that it does not accept.
    """
    factory = load()
    _check_task(task, factory)
    kind = factory.DATASETS[task][1]
    if not isinstance(settings, Mapping | None):
        raise RefusedTask(f"settings must be a mapping or None, got {settings!r}")
    settings = settings or {}
    fixed = {"seed": 0, "size": items(task)}
    accepted = [f.name for f in dataclasses.fields(kind) if f.init and f.name not in fixed]
    unknown = [name for name in settings if name not in accepted]
    if unknown:
        raise RefusedTask(
            f"settings of task {task!r} has {', '.join(map(repr, unknown))}; "
            f"accepted: {', '.join(accepted) or 'none'}"
        )
    curriculum, levels = None, 0
    if factory.has_curriculum(task):
        curriculum = factory.create_curriculum(task)
        levels = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    try:
        level = whole("level", level, least=0, most=levels)
    except ValueError as error:
        reason = f"task {task!r} has {levels or 'no'} levels"
        raise RefusedTask(f"{error} ({reason})") from error
    try:
        values = _level_settings(curriculum, level, accepted)
        with isolate():
            return factory.create_dataset(task, **{**values, **settings, **fixed})
    except Exception as error:  # the task's checks raise several kinds
        raise RefusedTask(
            f"task {task!r} does not take level={level} and settings={settings!r}: "
            f"{error_line(error)}"
        ) from error


def items(task: str) -> int:
    """Return the number of items of the task's data set."""
    return FEWER_ITEMS.get(task, ITEMS)


def _check_task(task: str, factory: Any) -> None:
    if not isinstance(task, str) or task not in factory.DATASETS:
        accepted = sorted(set(factory.DATASETS) - set(REFUSED))
        close_names = (
            difflib.get_close_matches(task, accepted, n=4) if isinstance(task, str) else []
        )
        hint = (
            f"near: {', '.join(close_names)}" if close_names else "docs/reasoning_gym.md lists them"
        )
        raise RefusedTask(f"task must be one of reasoning-gym's, got {task!r}; {hint}")
    if task in REFUSED:
        raise RefusedTask(f"task {task!r} is refused: {REFUSED[task]}")


def _level_settings(curriculum: Any, level: int, accepted: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a level of a curriculum; {} for level 0."""
    if level == 0:
        return {}
    curriculum.set_global_level(level - 1)
    config = curriculum.generate_configuration()
    return {name: getattr(config, name) for name in accepted}
