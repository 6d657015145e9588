"""Checks of what an environment is given: the value back, or a ValueError that names it."""

import importlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def whole(name: str, value: int, *, least: int, most: int) -> int:
    """`value` as an int from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if number > most:
        raise ValueError(f"{name} must be a whole number of at most {most}, got {value!r}")
    return number


def problem_seed(seed: int) -> int:
    """A seed as `Environment.reset` takes it: an int in [0, 2**63)."""
    return whole("seed", seed, least=0, most=2**63 - 1)


def bounds(
    name: str, value: Sequence[int], *, least: int = 1, most: int, ends: str = "low, high"
) -> tuple[int, int]:
    """`value` as (low, high), whole numbers with least <= low <= high <= most.

    ends: what the two are called
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} must be two whole numbers ({ends}), got {value!r}")
    low = whole(name, value[0], least=least, most=most)
    return low, whole(name, value[1], least=low, most=most)


MAX_SIDE = 20  # of a grid: on larger ones drawing a problem and solving it take seconds


def grid_size(size: Sequence[int], *, least: int) -> tuple[int, int]:
    """`size` as (rows, columns), each from `least` to MAX_SIDE."""
    if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != 2:
        raise ValueError(f"size must be two whole numbers (rows, columns), got {size!r}")
    rows, columns = (whole("size", side, least=least, most=MAX_SIDE) for side in size)
    return rows, columns


def probability(name: str, value: float) -> float:
    """`value` as a float from 0 to 1."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # NaN compares false
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def finite_number(name: str, value: float, *, most: float) -> float:
    """`value` as a float from -`most` to `most`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= most:  # NaN compares false
        raise ValueError(f"{name} must be a number from -{most:g} to {most:g}, got {value!r}")
    return float(value)


def one_of(name: str, value: str | None, accepted: tuple[str | None, ...]) -> str | None:
    """`value` if it is among `accepted`."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
    return value


def flag(name: str, value: bool) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def file_name(name: str, value: str | Path | None, what: str = "file") -> str | Path | None:
    """`value` if it is the name of a file or None. what: a file, or what else it may be."""
    if value is not None and not isinstance(value, (str, Path)):
        raise ValueError(f"{name} must be the name of a {what} or None, got {value!r}")
    return value


def text(name: str, value: str, what: str = "a text") -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return value


def imported(name: str, module: str) -> Any:
    """The module called `module`, of the folder where the command is started, or installed."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever a user's file does when it is imported
        raise ValueError(
            f"{name} {module!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def attribute_of(name: str, value: str, form: str) -> Any:
    """What `value`, of the form MODULE:NAME, stands for; None where the module has no such name."""
    module, _, attribute = text(name, value, form).partition(":")
    if not module or not attribute:
        raise ValueError(f"{name} must be {form}, got {value!r}")
    return getattr(imported(name, module), attribute, None)


def function_of(name: str, value: str) -> Callable[..., Any]:
    """The function that `value`, MODULE:FUNCTION, stands for."""
    found = attribute_of(name, value, "MODULE:FUNCTION")
    if not callable(found):
        function = value.partition(":")[2]
        raise ValueError(f"{name} must be MODULE:FUNCTION, got {value!r}: no function {function}")
    return found
