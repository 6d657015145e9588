"""Fields of a config: the default, the accepted values, and when a run reads the field.

A section of a config is a frozen dataclass whose fields are declared by the functions of this
module: `groups: int = whole(8, 1, 2**14)`. To the type checker such a call is its default; at run
time it is a dataclass field with a `Field` in its metadata.

Bounds are wide: they refuse values that would overflow, hang or exhaust memory, not unwise values.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from flax.core import FrozenDict
from ml_collections import ConfigDict

from ragen_jax.core.suggest import did_you_mean

DOMAIN = "domain"  # key of a dataclass field's metadata


@dataclasses.dataclass(frozen=True)
class Section:
    """Base class of a config and its sections, which are frozen dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as nested dictionaries, sorted by name."""
        return plain(self)


Frozen = TypeVar("Frozen", bound=Section)


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
    parts: type[Section] | None = None  # of a section of sections: the dataclass of each

    def declare(self) -> Any:
        """Return the dataclass field with this domain."""
        if isinstance(self.default, Mapping):  # a mapping is not a permitted default
            return dataclasses.field(
                default_factory=lambda: FrozenDict(self.default), metadata={DOMAIN: self}
            )
        return dataclasses.field(default=self.default, metadata={DOMAIN: self})


def whole(default: int, least: int, most: int, *read: ReadWhen) -> int:
    """Accept ints from `least` to `most`; bools are refused."""

    def accepts(value):
        return type(value) is int and least <= value <= most

    return Field(default, f"a whole number from {least} to {most}", accepts, read).declare()


def number(default: float, least: float, most: float, *read: ReadWhen) -> float:
    """Accept finite numbers from `least` to `most`, ints included."""
    accepts = _numbers(least, most)
    return Field(default, f"a number from {least} to {most}", accepts, read).declare()


def above(default: float, least: float, most: float, *read: ReadWhen) -> float:
    """Accept finite numbers above `least` and at most `most`."""
    return _above(default, least, most, read).declare()


def _above(default: float, least: float, most: float, read: tuple[ReadWhen, ...] = ()) -> Field:
    what = f"a number above {least}, at most {most}"
    return Field(default, what, _numbers(least, most, least), read)


def numbers_above(
    default: tuple[float, ...], least: float, most: float, *read: ReadWhen
) -> tuple[float, ...]:
    """Accept a tuple (or list), possibly empty, of numbers that `above` accepts."""
    member = _above(most, least, most)
    what = f"a tuple in which each item is {member.what}"
    return Field(default, what, _tuples(member.accepts), read).declare()


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


def one_of(default: str, choices: Collection[str], *read: ReadWhen) -> str:
    """Accept a string from `choices`."""
    return Field(default, f"one of {', '.join(choices)}", _texts(choices), read).declare()


def several_of(
    default: tuple[str, ...], choices: Collection[str], *read: ReadWhen
) -> tuple[str, ...]:
    """Accept a nonempty tuple (or list) of strings from `choices`."""
    accepts = _tuples(_texts(choices), fewest=1)
    return Field(default, f"a list of {', '.join(choices)}", accepts, read).declare()


def any_of(default: tuple[str, ...], choices: Collection[str], *read: ReadWhen) -> tuple[str, ...]:
    """Accept a tuple (or list), possibly empty, of strings from `choices`."""
    what = f"a tuple in which each item is one of {', '.join(choices)}"
    return Field(default, what, _tuples(_texts(choices)), read).declare()


def flag(default: bool, *read: ReadWhen) -> bool:
    """Accept True or False."""
    return Field(default, "True or False", lambda value: type(value) is bool, read).declare()


def text(default: str, *read: ReadWhen) -> str:
    """Accept a nonempty string."""

    def accepts(value):
        return type(value) is str and value.strip() != ""

    return Field(default, "a text", accepts, read).declare()


def texts(default: tuple[str, ...], *read: ReadWhen) -> tuple[str, ...]:
    """Accept a tuple (or list), possibly empty, of nonempty strings."""

    def accepts(value):
        return type(value) is str and value != ""

    return Field(default, "a tuple of texts", _tuples(accepts), read).declare()


def _is_section(value: Any) -> bool:
    return isinstance(value, ConfigDict)


def section(default: dict[str, Any], *read: ReadWhen) -> Mapping[str, Any]:
    """Accept a section whose fields are not declared; frozen, it is a read-only mapping."""
    return Field(default, "a section", _is_section, read).declare()


def sections(parts: type[Frozen]) -> Mapping[str, Frozen]:
    """Accept a section, empty by default, whose fields are sections of the fields of `parts`."""
    return Field({}, "a section", _is_section, (), parts).declare()


def fractions(default: dict[str, float], *read: ReadWhen) -> Mapping[str, float]:
    """Accept a section, possibly empty, of numbers from 0 to 1 that are not all 0."""
    accepts_one = _numbers(0, 1)

    def accepts(value):
        values = list(value.values()) if isinstance(value, ConfigDict) else [None]
        return not values or (all(map(accepts_one, values)) and max(values) > 0)

    return Field(default, "a section of fractions from 0 to 1, not all 0", accepts, read).declare()


def fields_by_name(settings: type[Section], prefix: str = "") -> dict[str, Field]:
    """Return {"a.b": field} for the dataclass of a config or section, in its order."""
    found: dict[str, Field] = {}
    for declared in dataclasses.fields(settings):
        if DOMAIN in declared.metadata:
            found[prefix + declared.name] = declared.metadata[DOMAIN]
        else:
            found |= fields_by_name(_section_of(declared), f"{prefix}{declared.name}.")
    return found


def _section_of(field: dataclasses.Field) -> type[Section]:
    """Return the dataclass of a field that is a section; its default is an instance."""
    return type(cast(Section, field.default))


def freeze(settings: type[Frozen], values: ConfigDict, prefix: str = "") -> Frozen:
    """Return the dataclass of a config or section with the values of a `ConfigDict`.

    Sections without declared fields become read-only mappings, lists become tuples.

    Args:
      prefix: dotted name of the section and a dot, for error messages.

    Raises:
      ValueError: fields are missing or unknown.
    """
    declared = {field.name: field for field in dataclasses.fields(settings)}
    wrong = declared.keys() ^ set(values)
    if wrong:
        name = min(wrong)
        hint = " is missing" if name in declared else f" is unknown{did_you_mean(name, declared)}"
        raise ValueError(f"config.{prefix}{name}{hint}")
    found: dict[str, Any] = {}
    for name, field in declared.items():
        value, domain = values[name], field.metadata.get(DOMAIN)
        if domain is None:
            found[name] = freeze(_section_of(field), value, f"{prefix}{name}.")
        elif domain.parts is not None:
            found[name] = FrozenDict(
                {x: freeze(domain.parts, part, f"{name}.{x}.") for x, part in value.items()}
            )
        elif isinstance(value, ConfigDict):
            found[name] = FrozenDict(value.to_dict())
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return settings(**found)


def from_dict(settings: type[Frozen], values: Mapping[str, Any]) -> Frozen:
    """Return a section with the values of a stored config, which may be of another version.

    Missing fields get their defaults; unknown fields are ignored.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        if field.name in values:
            value = values[field.name]
            section = DOMAIN not in field.metadata
            found[field.name] = from_dict(_section_of(field), value) if section else value
    return settings(**found)


def plain(value: Any) -> Any:
    """Return a section or mapping as nested dictionaries sorted by name, any other value as is."""
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in sorted(vars(value))}
    if isinstance(value, (Mapping, ConfigDict)):
        return {name: plain(inner) for name, inner in value.items()}
    return value
