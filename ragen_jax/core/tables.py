"""Choices by name: a table is a dict, and each entry fully describes a choice."""

from collections.abc import Mapping
from typing import TypeVar

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], what: str, name: str) -> Entry:
    """Return the entry of a table.

    Raises:
      ValueError: the table has no entry of that name; the message lists the known names.
    """
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]
