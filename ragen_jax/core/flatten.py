"""Nested settings as one flat mapping."""

from collections.abc import Mapping
from typing import Any


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings as {"a.b": value}; an empty section is kept as a value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}.{inner}": x for inner, x in flatten(value).items()}
        else:
            found[name] = value
    return found
