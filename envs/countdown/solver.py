"""An expression for a target, by combining the values that parts of the numbers can have."""

import ast
import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction

OPERATORS = "+-*/"

Number = int | Fraction
Values = dict[Number, str]  # value -> the first expression found for it


def solve(
    numbers: Sequence[int],
    target: int,
    *,
    operators: str = OPERATORS,
    allow_subset: bool = False,
    fractions: bool = True,
) -> str | None:
    """An expression of value `target` that uses every number once, or None if there is none.

    With `allow_subset` every number at most once, as few as possible. The values on the way are
    whole if that is possible; only where it is not (8/(3-8/3) = 24) and `fractions` allows it are
    they fractions. The answer depends on the arguments alone.
    """
    every = (1 << len(numbers)) - 1
    parts = [every]
    if allow_subset:
        parts = sorted(range(1, every + 1), key=lambda part: (part.bit_count(), part))
    for search in (
        _Search(numbers, operators, fractions=False),
        *([_Search(numbers, operators, fractions=True)] if fractions and "/" in operators else []),
    ):
        for part in parts:
            expression = search.reach(part, target)
            if expression is not None:
                # Written anew without the brackets that precedence makes needless.
                return ast.unparse(ast.parse(expression, mode="eval")).replace(" ", "")
    return None


def reachable(numbers: Sequence[int], *, operators: str = OPERATORS) -> set[int]:
    """All values of expressions that use every number once and stay whole on the way."""
    values = _Search(numbers, operators, fractions=False).values((1 << len(numbers)) - 1)
    return set(values)  # ty: ignore[invalid-explicit-return]  without fractions all of them are int


class _Search:
    """Values of parts of the numbers. A part is a bit-set of indices into them."""

    def __init__(self, numbers: Sequence[int], operators: str, fractions: bool) -> None:
        self._numbers: list[Number] = [Fraction(n) if fractions else n for n in numbers]
        self._operators = operators
        self._fractions = fractions
        self.values = functools.cache(self._all_values)

    def reach(self, part: int, target: int) -> str | None:
        """An expression for `target` of all numbers in `part`.

        The last operation is found by asking, for each value on its one side, which value its
        other side would need; so the many values of the whole part are not listed. For 0 they
        are: 0 times anything reaches it.
        """
        if part.bit_count() == 1 or target == 0:
            return self.values(part).get(target)
        for left, right in _halves(part):
            others = self.values(right)
            for a, text in self.values(left).items():
                for b, operator in self._needed(a, target):
                    if b in others:
                        return _join(text, operator, others[b])
        return None

    def _all_values(self, part: int) -> Values:
        if part.bit_count() == 1:
            number = self._numbers[part.bit_length() - 1]
            return {number: str(number)}
        values: Values = {}
        for left, right in _halves(part):
            for a, a_text in self.values(left).items():
                for b, b_text in self.values(right).items():
                    for operator in self._operators:
                        value = self._apply(a, operator, b)
                        if value is not None and value not in values:
                            values[value] = _join(a_text, operator, b_text)
        return values

    def _apply(self, a: Number, operator: str, b: Number) -> Number | None:
        """a operator b; None for a quotient that does not exist (or is not whole)."""
        match operator:
            case "+":
                return a + b
            case "-":
                return a - b
            case "*":
                return a * b
        if b == 0:
            return None
        if self._fractions:
            return Fraction(a) / b
        return None if a % b else a // b

    def _needed(self, a: Number, target: int) -> Iterator[tuple[Number, str]]:
        """All (b, operator) with a operator b = target, which is not 0."""
        candidates = {"+": target - a, "-": a - target, "/": Fraction(a) / target}
        if a != 0:
            candidates["*"] = Fraction(target) / a
        for operator in self._operators:
            b = candidates.get(operator)
            if b is not None and self._apply(a, operator, b) == target:
                yield b, operator


def _halves(part: int) -> Iterator[tuple[int, int]]:
    """All (left, right) of disjoint parts, neither empty, that make up `part`; both orders."""
    left = (part - 1) & part
    while left:
        yield left, part ^ left
        left = (left - 1) & part


def _join(left: str, operator: str, right: str) -> str:
    return f"{_bracket(left)}{operator}{_bracket(right)}"


def _bracket(text: str) -> str:
    return text if text.isdigit() else f"({text})"
