"""Checks of what an environment is given: the value back, or a ValueError that names it."""

import math
import operator
from collections.abc import Sequence


def whole(name: str, value: int, *, least: int) -> int:
    """`value` as an int of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def problem_seed(seed: int) -> int:
    """A seed as `Environment.reset` takes it: an int in [0, 2**63)."""
    seed = whole("seed", seed, least=0)
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return seed


def grid_size(size: Sequence[int], *, least: int) -> tuple[int, int]:
    """`size` as (rows, columns), each at least `least`."""
    if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != 2:
        raise ValueError(f"size must be two whole numbers (rows, columns), got {size!r}")
    rows, columns = (whole("size", side, least=least) for side in size)
    return rows, columns


def probability(name: str, value: float) -> float:
    """`value` as a float from 0 to 1."""
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    number = float(value)
    if math.isnan(number) or not 0 <= number <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return number


def one_of(name: str, value: str | None, accepted: tuple[str | None, ...]) -> str | None:
    """`value` if it is among `accepted`."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}")
    return value
