"""Checks of an environment's options: return the value, or raise a ValueError that names it."""

import importlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def whole(name: str, value: int, *, least: int, most: int) -> int:
    """Return `value` as an int from `least` to `most`."""
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
    """Return a seed as `Environment.reset` takes it: an int in [0, 2**63)."""
    return whole("seed", seed, least=0, most=2**63 - 1)


def bounds(
    name: str, value: Sequence[int], *, least: int = 1, most: int, ends: str = "low, high"
) -> tuple[int, int]:
    """Return `value` as (low, high), whole numbers with least <= low <= high <= most.

    ends: names of the two numbers, for the message
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} must be two whole numbers ({ends}), got {value!r}")
    low = whole(name, value[0], least=least, most=most)
    return low, whole(name, value[1], least=low, most=most)


MAX_SIDE = 20  # of a grid; generating and solving a problem on a larger grid takes seconds


def grid_size(size: Sequence[int], *, least: int) -> tuple[int, int]:
    """Return `size` as (rows, columns), each from `least` to MAX_SIDE."""
    if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != 2:
        raise ValueError(f"size must be two whole numbers (rows, columns), got {size!r}")
    rows, columns = (whole("size", side, least=least, most=MAX_SIDE) for side in size)
    return rows, columns


def probability(name: str, value: float) -> float:
    """Return `value` as a float from 0 to 1."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # NaN compares false
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


def finite_number(name: str, value: float, *, most: float) -> float:
    """Return `value` as a float from -`most` to `most`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= most:  # NaN compares false
        raise ValueError(f"{name} must be a number from -{most:g} to {most:g}, got {value!r}")
    return float(value)


def one_of(name: str, value: str | None, accepted: tuple[str | None, ...]) -> str | None:
    """Return `value` if it is among `accepted`."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
    return value


def flag(name: str, value: bool) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def file_name(name: str, value: str | Path | None, what: str = "file") -> str | Path | None:
    """Return `value` if it is a file name or None.

    what: "file", or another kind of path, for the message
    """
    if value is not None and not isinstance(value, (str, Path)):
        raise ValueError(f"{name} must be the name of a {what} or None, got {value!r}")
    return value


def text(name: str, value: str, what: str = "a text") -> str:
    """Return `value` if it is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return value


def import_option(name: str, module: str) -> Any:
    """Return the module called `module`, from the current folder or an installed package."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's file may raise anything when it is imported
        raise ValueError(
            f"{name} {module!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def attribute_of(name: str, value: str, form: str) -> Any:
    """Return the object that `value`, of the form MODULE:NAME, names; None if there is none."""
    module, _, attribute = text(name, value, form).partition(":")
    if not module or not attribute:
        raise ValueError(f"{name} must be {form}, got {value!r}")
    return getattr(import_option(name, module), attribute, None)


def function_of(name: str, value: str) -> Callable[..., Any]:
    """Return the function that `value`, MODULE:FUNCTION, names."""
    found = attribute_of(name, value, "MODULE:FUNCTION")
    if not callable(found):
        function = value.partition(":")[2]
        raise ValueError(f"{name} must be MODULE:FUNCTION, got {value!r}: no function {function}")
    return found
