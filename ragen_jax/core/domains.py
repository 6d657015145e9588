"""Fields of a config: the default, the accepted values, and when a run reads the field.

Bounds are wide: they refuse values that would overflow, hang or exhaust memory, not unwise values.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True)
class ReadWhen:
    """A condition on other fields that must hold for a field to be read."""

    names: tuple[str, ...]  # dotted names of the deciding fields
    holds: Callable[..., bool]  # called with their values


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a config."""

    default: Any
    what: str  # the accepted values in words, to follow "it must be"
    accepts: Callable[[Any], bool]
    read: tuple[ReadWhen, ...]  # conditions that must all hold for a run to read it; (): always


def whole(default: int, least: int, most: int, *read: ReadWhen) -> Field:
    """Accept ints from `least` to `most`; bools are refused."""

    def accepts(value):
        return type(value) is int and least <= value <= most

    return Field(default, f"a whole number from {least} to {most}", accepts, read)


def number(default: float, least: float, most: float, *read: ReadWhen) -> Field:
    """Accept finite numbers from `least` to `most`, ints included."""
    return Field(default, f"a number from {least} to {most}", _numbers(least, most), read)


def above(default: float, least: float, most: float, *read: ReadWhen) -> Field:
    """Accept finite numbers above `least` and at most `most`."""
    return Field(
        default, f"a number above {least}, at most {most}", _numbers(least, most, least), read
    )


def numbers_above(default: tuple[float, ...], least: float, most: float, *read: ReadWhen) -> Field:
    """Accept a tuple (or list), possibly empty, of numbers that `above` accepts."""
    member = above(most, least, most)
    return Field(
        default, f"a tuple in which each item is {member.what}", _tuples(member.accepts), read
    )


def _numbers(least: float, most: float, open_end: float | None = None) -> Callable[[Any], bool]:
    def accepts(value):
        return type(value) in (int, float) and least <= value <= most and value != open_end

    return accepts


def _tuples(accepts: Callable[[Any], bool], *, fewest: int = 0) -> Callable[[Any], bool]:
    def accepts_all(value):
        return type(value) in (tuple, list) and len(value) >= fewest and all(map(accepts, value))

    return accepts_all


def _texts(choices: Collection[str]) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in choices


def one_of(default: str, choices: Collection[str], *read: ReadWhen) -> Field:
    """Accept a string from `choices`."""
    return Field(default, f"one of {', '.join(choices)}", _texts(choices), read)


def several_of(default: tuple[str, ...], choices: Collection[str], *read: ReadWhen) -> Field:
    """Accept a nonempty tuple (or list) of strings from `choices`."""
    accepts = _tuples(_texts(choices), fewest=1)
    return Field(default, f"a list of {', '.join(choices)}", accepts, read)


def any_of(default: tuple[str, ...], choices: Collection[str], *read: ReadWhen) -> Field:
    """Accept a tuple (or list), possibly empty, of strings from `choices`."""
    what = f"a tuple in which each item is one of {', '.join(choices)}"
    return Field(default, what, _tuples(_texts(choices)), read)


def flag(default: bool, *read: ReadWhen) -> Field:
    """Accept True or False."""
    return Field(default, "True or False", lambda value: type(value) is bool, read)


def text(default: str, *read: ReadWhen) -> Field:
    """Accept a nonempty string."""
    return Field(default, "a text", lambda value: type(value) is str and value.strip() != "", read)


def section(default: dict[str, Any], *read: ReadWhen) -> Field:
    """Accept a section whose fields are not declared in the settings."""
    return Field(default, "a section", lambda value: isinstance(value, ConfigDict), read)


def fractions(default: dict[str, float], *read: ReadWhen) -> Field:
    """Accept a section, possibly empty, of numbers from 0 to 1 that are not all 0."""
    accepts_one = _numbers(0, 1)

    def accepts(value):
        values = list(value.values()) if isinstance(value, ConfigDict) else [None]
        return not values or (all(map(accepts_one, values)) and max(values) > 0)

    return Field(default, "a section of fractions from 0 to 1, not all 0", accepts, read)


Settings = dict[str, Any]  # name -> Field, or Settings of a section


def default_values(settings: Settings) -> dict[str, Any]:
    """Return the defaults of a tree of fields, with the same nesting."""
    return {
        name: node.default if isinstance(node, Field) else default_values(node)
        for name, node in settings.items()
    }


def fields_by_name(settings: Settings, prefix: str = "") -> dict[str, Field]:
    """Return {"a.b": field} for a tree of fields, in its order."""
    found: dict[str, Field] = {}
    for name, node in settings.items():
        if isinstance(node, Field):
            found[prefix + name] = node
        else:
            found |= fields_by_name(node, f"{prefix}{name}.")
    return found
