"""Parsing of answers and reasoning about arms: a choice, and facts that can be checked."""

import functools
import re
from collections.abc import Sequence
from decimal import Decimal

from ragen_jax.envs.bandit.names import WORDS

MAX_TEXT = 200  # characters of an answer; a longer answer names no arm

# Characters and words allowed around the name in an answer; "not Red Table" is no choice.
_MARKS = r"""[\s"'`*.,:;!()\[\]“”‘’-]*"""
_BEFORE = rf"{_MARKS}(?:\b(?:i|will|would|choose|pull|pick|take|answer|arm|is|the)\b{_MARKS})*"

_FIRST, _SECOND = ("|".join(sum((pool[i] for pool in WORDS.values()), [])) for i in (0, 1))
_NAME = rf"\b((?:{_FIRST})\s+(?:{_SECOND}))\b"
_NUMBER = r"([0-9]{1,3}(?:\.[0-9]{1,4})?(?![0-9])(?:\s?%)?)"
# Filler allowed between a name, a kind of fact, and its number. Anything else ends the claim.
_FILLER = r"(?:\s|[:;,=(]|\b(?:is|of|a|an|the|with|its|it|and|has|pay|was|times?)\b)*"
_FACT = rf"{_FILLER}\b(pays|chance|expected|pulled|mean)\b{_FILLER}{_NUMBER}"
_FACTS = re.compile(_FACT, re.IGNORECASE | re.ASCII)
_CLAIM = re.compile(rf"{_NAME}((?:{_FACT})+)", re.IGNORECASE | re.ASCII)

# Patterns for an observation.
_NAMES = re.compile(_NAME, re.ASCII)
_PULLED = re.compile(r"^Pulled: (.*)$", re.MULTILINE)
_PULL = re.compile(rf"(?:{_NAME}|none) {_NUMBER}", re.ASCII)

Claim = tuple[str, str, Decimal]  # an arm's name in lower case, the kind of fact, its number


def find_arm(answer: str, names: Sequence[str]) -> int | None:
    """Return the index of the arm that an answer names; None if it says much else.

    Case, white space, quotation marks, brackets and phrases such as "I choose the arm" do not
    matter. Never raises, whatever `answer` holds.
    """
    if len(answer) > MAX_TEXT:
        return None
    for number, name in enumerate(names):
        if _choice(name).fullmatch(answer):
            return number
    return None


@functools.cache
def _choice(name: str) -> re.Pattern[str]:
    words = r"\s+".join(name.split())
    return re.compile(rf"{_BEFORE}{words}{_MARKS}(?:arm{_MARKS})?", re.IGNORECASE | re.ASCII)


def parse_claims(text: str) -> list[Claim]:
    """Return the facts about arms that a text states, in order: "Red Table pays 0.10 chance 1.00".

    A claim is a name, then one or more of pays, chance, expected, pulled and mean, each with a
    number, with only filler words between them.
    """
    claims = []
    for match in _CLAIM.finditer(text):
        name = " ".join(match[1].lower().split())
        for quantity, number in _FACTS.findall(match[2]):
            claims.append((name, quantity.lower(), _value(number)))
    return claims


@functools.lru_cache(maxsize=1024)  # the members of a group see the same arms
def list_supported_facts(observation: str) -> frozenset[Claim]:
    """Return all facts that an observation supports, in the form of `parse_claims`."""
    claims = parse_claims(observation)
    numbers = {(name, quantity): number for name, quantity, number in claims}
    for name, quantity in list(numbers):
        if quantity == "pays":
            claims.append((name, "expected", numbers[name, quantity] * numbers[name, "chance"]))
    payments: dict[str, list[Decimal]] = {name.lower(): [] for name in _NAMES.findall(observation)}
    for line in _PULLED.findall(observation):
        for name, number in _PULL.findall(line):
            if name:
                payments[name.lower()].append(_value(number))
    for name, pays in payments.items():
        claims.append((name, "pulled", Decimal(len(pays))))
        if pays:
            claims.append((name, "mean", mean(pays)))
    return frozenset(claims)


def mean(pays: Sequence[Decimal]) -> Decimal:
    """Return the mean of an arm's payments, rounded to hundredths."""
    return round(sum(pays, Decimal(0)) / len(pays), 2)


def _value(number: str) -> Decimal:
    if number.endswith("%"):
        return Decimal(number[:-1].strip()) / 100
    return Decimal(number)
