"""Choices by name: a table is a dict, an entry says all there is to know of a choice."""

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], what: str, name: str) -> Entry:
    """The entry of a table.

    Raises:
      ValueError: there is none of that name; the message says which there are.
    """
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]
