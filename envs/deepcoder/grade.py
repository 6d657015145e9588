"""Grading: how many of its tests a program passes. Expected outputs are known only here.

A program is given a test's input and returns an output: the text that it prints, or the value that
its function returns. Nothing else comes back, and the right output passes the test, however it was
produced.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from ragen_jax.envs.deepcoder import sandbox as sandboxes
from ragen_jax.envs.deepcoder.process import Limits
from ragen_jax.envs.files import is_text

TESTTYPES = ("stdin_stdout", "functional")

OUTPUT_BYTES = 1 << 20  # bytes that a program may print, in addition to twice the expected output
# Differences of numbers that count as equal: from the order of a sum, and near 0 from its rounding.
RELATIVE_TOLERANCE = 1e-9
ABSOLUTE_TOLERANCE = 1e-12
MAX_INT = 4300  # digits of an integer that Python parses by default (sys.int_info)
SPACE = " \t\r"  # stripped from lines; only "\n" ends a line, as in a program's input
MAX_CODE = 1 << 18  # characters of a program: no agent's answer is longer


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of grading.

    outcomes: "passed", "wrong", "error", "time" or "output" (limit exceeded) for each test
    """

    passed: int
    total: int
    outcomes: tuple[str, ...]

    @property
    def reward(self) -> float:
        """The fraction of tests that were passed."""
        return self.passed / self.total


def grade(
    code: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    time_limit_s: float = 3.0,
    memory_mb: int = 512,
    sandbox: str | None = None,
) -> Grade:
    """Run `code` on each test in a separate process, and compare the outputs outside it.

    tests: each has "input", "output", "testtype" (one of TESTTYPES) and, for a function,
        "metadata" with its "func_name". A function's input is a list of arguments or text with one
        literal per line; its return value is right if it equals the output or has the same text
        (the released rule). If the output is a list object of one element, that element counts as
        right as well (TACO's format). Printed text is compared line by line as in LiveCodeBench's
        harness: stripped, or number by number (`is_same_text`).
    time_limit_s: seconds per test
    memory_mb: MiB of address space per test
    sandbox: one of sandbox.SANDBOXES, or None: the best available

    Raises ValueError for a malformed test, and process.SandboxFault if the machine failed, which
    says nothing about the program.
    """
    if not tests:
        raise ValueError("there is nothing to grade by: tests is empty")
    for index, test in enumerate(tests):
        check_test(test, f"test {index}")
    if not is_program(code):
        return Grade(0, len(tests), ("error",) * len(tests))
    name = sandboxes.find_sandbox(sandbox)
    outcomes = []
    for test in tests:
        limits = Limits(time_limit_s, memory_mb << 20, OUTPUT_BYTES + 2 * _size(test["output"]))
        outcomes.append(_outcome(name, code, test, limits))
    return Grade(outcomes.count("passed"), len(outcomes), tuple(outcomes))


def is_program(code: str) -> bool:
    """Whether `code` is text that UTF-8 can encode, of at most MAX_CODE characters."""
    return len(code) <= MAX_CODE and is_text(code)


def check_test(test: Any, where: str) -> None:
    """Raise ValueError, which says `where`, for a test that `grade` does not accept."""
    for field in ("input", "output", "testtype"):
        if not isinstance(test, Mapping) or field not in test:
            raise ValueError(f"{where} lacks the field {field}: {str(test)[:60]}")
    if test["testtype"] not in TESTTYPES:
        accepted = ", ".join(TESTTYPES)
        raise ValueError(f"{where}: testtype must be one of {accepted}, got {test['testtype']!r}")
    if test["testtype"] == "functional" and not _function(test):
        raise ValueError(f"{where} is of a function and lacks metadata.func_name")
    for field in ("input", "output"):
        text = test["testtype"] == "stdin_stdout" or isinstance(test[field], str)
        if text and not is_text(test[field]):
            shown = ascii(test[field])[:60]
            raise ValueError(f"{where}: field {field} of printed text must be text: {shown}")


def _function(test: Mapping[str, Any]) -> str:
    """Return the name of the function to call; "" if there is none."""
    metadata = test["metadata"] if "metadata" in test else None
    name = metadata["func_name"] if metadata and "func_name" in metadata else None
    return name if isinstance(name, str) else ""


def _size(value: Any) -> int:
    """Return the approximate number of characters of a value; `str` refuses long integers."""
    match value:
        case list() | tuple():
            return sum(map(_size, value), 2 * len(value))
        case dict():
            return _size([*value, *value.values()])
        case int():
            return value.bit_length() // 3 + 2
        case _:
            return len(str(value))


def _outcome(name: str, code: str, test: Mapping[str, Any], limits: Limits) -> str:
    functional = test["testtype"] == "functional"
    result = sandboxes.run(
        name,
        code=code,
        stdin=b"" if functional else test["input"].encode(),
        limits=limits,
        function=_function(test) if functional else None,
        arguments=parse_arguments(test["input"]) if functional else None,
    )
    if result.end != "exit":
        return result.end
    judge = is_same_value if functional else is_same_text
    return "passed" if judge(test["output"], result.output) else "wrong"


def parse_arguments(value: Any) -> list[Any]:
    """Return a function's arguments, from a list of them or text with one literal per line."""
    if isinstance(value, str):
        lines = (line.strip(SPACE) for line in value.split("\n"))
        return [parse_literal(line) for line in lines if line]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def parse_literal(text: str) -> Any:
    """Parse a text as JSON or as a Python literal; return the text if it is neither."""
    for read in (_read_json, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return text


def _read_json(text: str) -> Any:
    return json.loads(text, parse_int=lambda digits: int(_integer(digits)))


def _integer(digits: str) -> int | Decimal:
    """Return an exact number; a Decimal beyond MAX_INT digits, which takes linear time."""
    return int(digits) if len(digits) <= MAX_INT else Decimal(digits)


# Only ASCII digits, without the other spellings that Decimal accepts (1_000, Infinity, NaN).
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def is_same_text(right: str, answer: bytes) -> bool:
    """Return whether a program printed the right text.

    The number of lines must agree, without empty lines at either end. Two lines are the same if
    they agree when stripped, or if both consist of the same number of numbers that are equal in
    pairs: 2 and 2.0. If the expected number is not an integer, a difference of RELATIVE_TOLERANCE
    is allowed.
    """
    try:
        lines = _lines(answer.decode()), _lines(right)
    except UnicodeDecodeError:
        return False
    return len(lines[0]) == len(lines[1]) and all(map(_is_same_line, lines[1], lines[0]))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(right: str, answer: str) -> bool:
    if right == answer:
        return True
    pairs = [re.split(f"[{SPACE}]+", line) for line in (right, answer)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_is_same_number, *pairs))


def _is_same_number(right: str, answer: str) -> bool:
    if not _NUMBER.fullmatch(right) or not _NUMBER.fullmatch(answer):
        return False
    try:
        wanted, found = Decimal(right), Decimal(answer)
    except InvalidOperation:  # an exponent beyond what Decimal holds
        return False
    exact = right.lstrip("+-").isdigit()
    return wanted == found or (not exact and _is_close(float(wanted), found))


def _is_close(right: float, answer: int | float | Decimal) -> bool:
    """Return whether two finite numbers differ by rounding."""
    try:
        answer = float(answer)
    except OverflowError:
        return False
    return math.isfinite(right) and math.isclose(
        right, answer, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE
    )


def is_same_value(right: Any, answer: bytes) -> bool:
    """Return whether a function returned the right value.

    right: a text is parsed as one literal; a list object of one element may hold the value
    answer: JSON of `inside.to_plain` of the returned value
    """
    try:
        value = json.loads(answer, parse_int=_integer)
        if _matches(right, value):
            return True
        return isinstance(right, (list, tuple)) and len(right) == 1 and _matches(right[0], value)
    except (RecursionError, ValueError):  # not JSON, nested too deep, or a number too long
        return False


def _matches(right: Any, value: Any) -> bool:
    wanted = parse_literal(right) if isinstance(right, str) else right
    if _is_equal(wanted, value):
        return True
    try:
        return str(right) == str(value)
    except ValueError:  # a long integer, which only `_is_equal` can compare
        return False


def _is_equal(right: Any, answer: Any) -> bool:
    if isinstance(right, (list, tuple)) and isinstance(answer, list):
        return len(right) == len(answer) and all(map(_is_equal, right, answer))
    if isinstance(right, dict) and isinstance(answer, dict):
        right = {str(key): item for key, item in right.items()}  # as JSON writes keys
        return right.keys() == answer.keys() and all(_is_equal(right[k], answer[k]) for k in right)
    if isinstance(right, float) and isinstance(answer, (int, float, Decimal)):
        return right == answer or (right != right and answer != answer) or _is_close(right, answer)
    return bool(right == answer)
