"""Statements in a text about positions of things: claims that can be checked against a state."""

import functools
import re
from collections.abc import Mapping, Set

# Filler allowed between the name of a thing and its positions. Anything else ends the claim, so
# "the player moves to (2, 3)" says nothing about where the player is.
_FILLER = r"(?:\s|[:;,.=]|\b(?:is|are|at|and|in|on|position|positions|cell|cells|row|column|the)\b)"

# (2, 3) or 2,3, or two adjacent digits, such as "23" for row 2, column 3.
_POSITION = r"(?:\(\s*\d{1,3}\s*,\s*\d{1,3}\s*\)|(?<!\d)\d\d(?!\d)|(?<!\d)\d\s*,\s*\d(?!\d))"

Claim = tuple[str, tuple[int, int]]  # a thing and its stated (row, column)


def parse_positions(text: str, things: Mapping[str, str]) -> list[Claim]:
    """Return the positions that a text states for things, in order of appearance.

    A claim is the name of a thing, then positions with only filler words between them: "player 23
    box 33 44", "The player is at (2, 3)", "Boxes: (3, 3), (4, 4)". Case does not matter.

    things: name as it is written, in lower case -> the thing it names
    """
    claims = []
    for name, places in _claim(tuple(things)).findall(text):
        for place in re.findall(_POSITION, places):
            numbers = re.findall(r"\d+", place)
            row, column = numbers if len(numbers) == 2 else place
            claims.append((things[name.lower()], (int(row), int(column))))
    return claims


@functools.cache
def _claim(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of a claim about any of the names."""
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"\b({any_name})\b((?:{_FILLER}|{_POSITION})*)", re.IGNORECASE | re.ASCII)


def grid_lines(text: str, symbols: str) -> str:
    """Return the lines of a text that consist only of a grid's symbols, joined by newlines."""
    return "\n".join(line for line in text.splitlines() if line and set(line) <= set(symbols))


def count_true(claims: list[Claim], truth: Set[Claim]) -> tuple[int, int]:
    """Return (number of true claims, number of claims)."""
    return sum(claim in truth for claim in claims), len(claims)
