"""Suggestions for names that do not exist."""

import difflib
from collections.abc import Iterable

CLOSE = 0.75  # similarity from which a name is suggested (difflib's ratio)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is most similar to `name`, if any is similar enough."""
    return difflib.get_close_matches(name, list(known), 1, CLOSE)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known name, "" if none is near."""
    return "".join(f"; did you mean {near}?" for near in nearest(name, known))
