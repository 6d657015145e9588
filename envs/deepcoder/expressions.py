"""One-line expressions of the names a, b and c, which the tiny agent writes instead of programs.

Nothing is executed: Python's parser turns the text into a tree, and only whole numbers, the names,
+ - *, and max and min of two values are evaluated. Such an expression has the same value in Python.
"""

import ast
from collections.abc import Mapping

NAMES = ("a", "b", "c")

MAX_TEXT = 200  # characters
MAX_NESTING = 20  # brackets
MAX_DEPTH = 40  # nested operations
MAX_SIZE = 10**30  # of a value, including intermediate values

_CHARACTERS = frozenset("0123456789+-*(), abcmaxin")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult)
_CHOICES = {"max": max, "min": min}


def parse(text: str) -> ast.expr | None:
    """Return the tree of an expression; None for any other text. Never raises."""
    text = text.strip()
    if len(text) > MAX_TEXT or not _CHARACTERS.issuperset(text) or text.count("(") > MAX_NESTING:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if _is_supported(tree, MAX_DEPTH) else None


def _is_supported(tree: ast.expr, depth: int) -> bool:
    """Whether a tree has only the supported nodes, nested at most `depth` deep."""
    if depth == 0:
        return False
    match tree:
        case ast.Constant(value=int(number)):
            return not isinstance(number, bool) and number <= MAX_SIZE
        case ast.Name(id=name):
            return name in NAMES
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_supported(operand, depth - 1)
        case ast.BinOp(op=op, left=left, right=right):
            known = isinstance(op, _OPERATORS)
            return known and _is_supported(left, depth - 1) and _is_supported(right, depth - 1)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]):
            known = name in _CHOICES
            return known and _is_supported(left, depth - 1) and _is_supported(right, depth - 1)
        case _:
            return False


def value(tree: ast.expr, names: Mapping[str, int]) -> int | None:
    """Return the value of a tree from `parse`; None beyond MAX_SIZE."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.UnaryOp(operand=operand):
            found = value(operand, names)
            return None if found is None else -found
        case ast.BinOp(op=op, left=left, right=right):
            first, second = value(left, names), value(right, names)
            if first is None or second is None:
                return None
            match op:
                case ast.Add():
                    found = first + second
                case ast.Sub():
                    found = first - second
                case _:
                    found = first * second
            return found if abs(found) <= MAX_SIZE else None
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            first, second = value(left, names), value(right, names)
            return None if first is None or second is None else _CHOICES[name](first, second)
        case _:
            raise AssertionError(f"not of parse: {ast.dump(tree)}")
