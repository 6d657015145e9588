"""Exact evaluation of arithmetic in arbitrary text from a policy.

Nothing is executed: Python's parser turns the text into a tree, and only whole numbers, + - * /
and signs are evaluated. Every limit is far above what an honest answer needs.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_TEXT = 200  # characters
MAX_NESTING = 20  # brackets
MAX_NODES = 100  # numbers and operations
MAX_DEPTH = 40  # nested operations; a + b + c + ... nests to the left
MAX_SIZE = 10**30  # of a value's numerator and denominator, including intermediate values

# Excludes Python syntax that arithmetic does not have: names, calls with commas, decimals,
# hexadecimal, underscores, comments, digits of other scripts.
_CHARACTERS = frozenset("0123456789+-*/() ")

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True)
class Evaluation:
    """A parsed expression.

    numbers: its numbers, in the order in which the operations use them
    value: exact; None if it has none (division by zero, or beyond MAX_SIZE)
    """

    numbers: tuple[int, ...]
    value: Fraction | None


def evaluate(text: str) -> Evaluation | None:
    """Parse an expression of whole numbers, + - * /, signs and brackets; None for other text.

    Never raises, and takes well under a millisecond whatever the text holds.
    """
    tree = parse(text)
    if tree is None:
        return None
    constants = [node.value for node in _nodes(tree) if isinstance(node, ast.Constant)]
    numbers = tuple(value for value in constants if isinstance(value, int))  # all of them are int
    return Evaluation(numbers, _value(tree))


def list_operations(text: str) -> list[str]:
    """Return the operations of an expression, as "44-19=25", innermost and leftmost first.

    Raises ValueError for a text without a value in `evaluate`.
    """
    tree = parse(text)
    if tree is None or _value(tree) is None:
        raise ValueError(f"not an expression with a value: {text!r}")
    return [
        f"{_value(node.left)}{_SYMBOLS[type(node.op)]}{_value(node.right)}={_value(node)}"
        for node in _nodes(tree)
        if isinstance(node, ast.BinOp)
    ]


def parse(text: str) -> ast.expr | None:
    """Return the tree of an expression within all limits; None for any other text."""
    if len(text) > MAX_TEXT:
        return None
    text = text.strip()
    if not _CHARACTERS.issuperset(text) or _nesting(text) > MAX_NESTING:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if _within_limits(tree) else None


def _nesting(text: str) -> int:
    """Return the deepest nesting of brackets, whether or not they match."""
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _within_limits(tree: ast.expr) -> bool:
    """Whether only numbers, + - * / and signs occur, not too many and not too deep.

    Uses a list instead of recursion, so that the depth is checked before anything recurses.
    """
    stack, count = [(tree, 1)], 0
    while stack:
        node, depth = stack.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            return False
        match node:
            case ast.Constant(value=int(number)) if number <= MAX_SIZE:
                pass
            case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
                stack.append((operand, depth + 1))
            case ast.BinOp(
                op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), left=left, right=right
            ):
                stack += [(left, depth + 1), (right, depth + 1)]
            case _:
                return False
    return True


def _nodes(tree: ast.expr) -> Iterator[ast.expr]:
    """Yield all nodes, operands before their operation, left before right."""
    match tree:
        case ast.BinOp(left=left, right=right):
            yield from _nodes(left)
            yield from _nodes(right)
        case ast.UnaryOp(operand=operand):
            yield from _nodes(operand)
    yield tree


def _value(tree: ast.expr) -> Fraction | None:
    match tree:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=op, operand=operand):
            value = _value(operand)
            return -value if value is not None and isinstance(op, ast.USub) else value
        case ast.BinOp(op=op):
            left, right = _value(tree.left), _value(tree.right)
        case _:
            raise AssertionError(f"a tree beyond the limits: {ast.dump(tree)}")
    if left is None or right is None:
        return None
    match op:
        case ast.Add():
            value = left + right
        case ast.Sub():
            value = left - right
        case ast.Mult():
            value = left * right
        case _:
            if right == 0:
                return None
            value = left / right
    return value if max(abs(value.numerator), value.denominator) <= MAX_SIZE else None
