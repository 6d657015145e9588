"""Search for an expression with a target value, by combining the values of parts of the numbers."""

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
    """Return an expression of value `target` that uses every number once; None if there is none.

    With `allow_subset` it uses every number at most once, and as few as possible. Intermediate
    values are whole if possible; otherwise (8/(3-8/3) = 24) they may be fractions, if `fractions`
    allows it. The result depends only on the arguments.
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
            expression = search.find_expression(part, target)
            if expression is not None:
                # Rewritten without the brackets that precedence makes unnecessary.
                return ast.unparse(ast.parse(expression, mode="eval")).replace(" ", "")
    return None


def list_reachable(numbers: Sequence[int], *, operators: str = OPERATORS) -> set[int]:
    """Return all values of expressions that use every number once, with whole intermediates."""
    values = _Search(numbers, operators, fractions=False).values((1 << len(numbers)) - 1)
    return set(values)  # ty: ignore[invalid-explicit-return]  without fractions all of them are int


class _Search:
    """Values of parts of the numbers. A part is a bit set of indices into the numbers."""

    def __init__(self, numbers: Sequence[int], operators: str, fractions: bool) -> None:
        self._numbers: list[Number] = [Fraction(n) if fractions else n for n in numbers]
        self._operators = operators
        self._fractions = fractions
        self.values = functools.cache(self._all_values)

    def find_expression(self, part: int, target: int) -> str | None:
        """Return an expression for `target` that uses all numbers in `part`; None if none.

        For each value on one side of the last operation, it looks up the value needed on the other
        side, so the many values of the whole part are not listed. Target 0 does need the list:
        0 times anything reaches it.
        """
        if part.bit_count() == 1 or target == 0:
            return self.values(part).get(target)
        for left, right in _halves(part):
            right_values = self.values(right)
            for a, text in self.values(left).items():
                for b, operator in self._list_operands(a, target):
                    if b in right_values:
                        return _join(text, operator, right_values[b])
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
        """Return a operator b; None for a quotient that does not exist (or is not whole)."""
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

    def _list_operands(self, a: Number, target: int) -> Iterator[tuple[Number, str]]:
        """Yield all (b, operator) with a operator b = target, which is not 0."""
        candidates = {"+": target - a, "-": a - target, "/": Fraction(a) / target}
        if a != 0:
            candidates["*"] = Fraction(target) / a
        for operator in self._operators:
            b = candidates.get(operator)
            if b is not None and self._apply(a, operator, b) == target:
                yield b, operator


def _halves(part: int) -> Iterator[tuple[int, int]]:
    """Yield all (left, right) of disjoint non-empty parts that make up `part`, in both orders."""
    left = (part - 1) & part
    while left:
        yield left, part ^ left
        left = (left - 1) & part


def _join(left: str, operator: str, right: str) -> str:
    return f"{_bracket(left)}{operator}{_bracket(right)}"


def _bracket(text: str) -> str:
    return text if text.isdigit() else f"({text})"
