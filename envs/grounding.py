"""What a text says about where things are: claims that can be checked against a state."""

import functools
import re
from collections.abc import Mapping, Set

# What may stand between the name of a thing and its positions. Anything else ends the claim, so
# that "the player moves to (2, 3)" says nothing about where the player is.
_FILLER = r"(?:\s|[:;,.=]|\b(?:is|are|at|and|in|on|position|positions|cell|cells|row|column|the)\b)"

# (2, 3), or two digits alone, as "23" for row 2, column 3, or 2,3.
_POSITION = r"(?:\(\s*\d{1,3}\s*,\s*\d{1,3}\s*\)|(?<!\d)\d\d(?!\d)|(?<!\d)\d\s*,\s*\d(?!\d))"

Claim = tuple[str, tuple[int, int]]  # a thing and the (row, column) it is said to be in


def stated_positions(text: str, things: Mapping[str, str]) -> list[Claim]:
    """The positions that a text says things to be in, in order.

    A name of a thing, then positions with nothing but filler words between them: "player 23 box 33
    44", "The player is at (2, 3)", "Boxes: (3, 3), (4, 4)". Capitals do not matter.

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
    """The pattern of a claim about one of the names."""
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"\b({any_name})\b((?:{_FILLER}|{_POSITION})*)", re.IGNORECASE | re.ASCII)


def grid_lines(text: str, symbols: str) -> str:
    """The lines of a text that hold symbols of a grid alone, joined by newlines."""
    return "\n".join(line for line in text.splitlines() if line and set(line) <= set(symbols))


def count_true(claims: list[Claim], truth: Set[Claim]) -> tuple[int, int]:
    """(claims that are so, claims)."""
    return sum(claim in truth for claim in claims), len(claims)
