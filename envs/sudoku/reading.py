"""Parsing of answers and reasoning about cells: placements, and facts that can be checked."""

import re

from ragen_jax.envs.sudoku.grid import EMPTY, UNITS, units
from ragen_jax.envs.sudoku.solver import Placement, candidates

MAX_TEXT = 1000  # characters of an answer: enough for all placements of a grid

# Only these forms: "r1c2=3" and "row 1, column 2: 3", or "1,2,3" and "(1, 2) = 3".
_NAMED = r"r(?:ow)?\s*([0-9])[\s,]*c(?:ol(?:umn)?)?\s*([0-9])\s*(?:=|:|,|\bis\b)?\s*([0-9])"
_LISTED = r"\(?\s*([0-9])\s*,\s*([0-9])\s*\)?\s*[=:,]\s*([0-9])\s*\)?"
_PLACEMENT = re.compile(f"{_NAMED}|{_LISTED}", re.IGNORECASE | re.ASCII)
_BETWEEN = re.compile(r"\|\||[;\n]")

# A cell, then the contents of its units, the digits that fit it, or its digit: "r1c2 row 1 . 3 4
# leaves 2", "r1c1 is 1". Anything else ends the claim, so "r1c2=3" states no fact.
_LIST = r"[1-9.](?: [1-9.])*(?![0-9])"
_FACT = rf"[\s:,;]+(row|column|box|leaves|is)\s+({_LIST})"
_CLAIM = re.compile(rf"\br([1-9])c([1-9])((?:{_FACT})+)", re.IGNORECASE | re.ASCII)
_FACTS = re.compile(_FACT, re.IGNORECASE | re.ASCII)

Claim = tuple[int, str, str]  # a cell, the kind of fact, digits and dots


def placements(answer: str, size: int) -> list[Placement | None]:
    """Return an answer's placements in order; None for a part that is invalid or off the grid.

    They are separated by ||, semicolons or line ends. Never raises, whatever `answer` holds.
    """
    if len(answer) > MAX_TEXT:
        return [None]
    parts = [part.strip() for part in _BETWEEN.split(answer)]
    return [_placement(part, size) for part in parts if part] or [None]


def _placement(text: str, size: int) -> Placement | None:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        return None
    row, column, digit = (int(number) for number in match.groups() if number is not None)
    if not all(1 <= number <= size for number in (row, column, digit)):
        return None
    return (row - 1) * size + column - 1, str(digit)


def parse_claims(thought: str, size: int) -> list[Claim]:
    """Return the facts that a text states, in order; -1 for a cell that is off the grid."""
    claims = []
    for match in _CLAIM.finditer(thought):
        row, column = int(match[1]), int(match[2])
        cell = (row - 1) * size + column - 1 if max(row, column) <= size else -1
        for kind, listed in _FACTS.findall(match[3]):
            claims.append((cell, kind.lower(), listed))
    return claims


def is_true(cells: str, size: int, claim: Claim) -> bool:
    """Whether a claim is true of a grid."""
    cell, kind, listed = claim
    if cell < 0:
        return False
    if kind == "is":
        return listed == cells[cell] != EMPTY
    if kind == "leaves":
        return cells[cell] == EMPTY and listed == " ".join(candidates(cells, cell))
    return listed == spell(cells, units(size)[cell][UNITS.index(kind)])


def spell(cells: str, unit: tuple[int, ...]) -> str:
    """Return the cells of a unit in reading order: "1 . 3 4"."""
    return " ".join(cells[cell] for cell in unit)
