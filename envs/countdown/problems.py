"""Problems from seeds or from a file, and the split of a problem."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.envs.countdown import solver
from ragen_jax.envs.files import open_parquet, parquet_rows
from ragen_jax.envs.problems import Draws, split_by_hash

TAG = 0xC0117D03  # tag of this environment's `Draws`

FIELDS = ("target", "nums")  # columns of a file
MAX_COUNT = 5  # numbers of a problem: with six the search takes seconds
MAX_NUMBER = 10_000  # keeps all values that five numbers can make far below arithmetic.MAX_SIZE


@dataclass(frozen=True, slots=True)
class Problem:
    """The state of an episode, which an answer does not change."""

    numbers: tuple[int, ...]  # positive, in the order shown
    target: int


def draw_problem(
    draws: Draws, *, count: tuple[int, int], largest: int, targets: tuple[int, int], operators: str
) -> Problem | None:
    """Make one attempt at a problem with a whole-number solution; None if no target is in bounds.

    All bounds are inclusive.

    count: (fewest, most) numbers, each uniform on 1..largest
    targets: (lowest, highest) target, uniform over the values in these bounds that the numbers
        reach with `operators`
    """
    n = count[0] + draws.below(count[1] - count[0] + 1)
    numbers = tuple(1 + draws.below(largest) for _ in range(n))
    values = solver.list_reachable(numbers, operators=operators)
    candidates = sorted(value for value in values if targets[0] <= value <= targets[1])
    return Problem(numbers, candidates[draws.below(len(candidates))]) if candidates else None


def identity(problem: Problem) -> str:
    """Return a text that is the same for problems that differ only in the order of numbers."""
    return " ".join(map(str, sorted(problem.numbers))) + f" -> {problem.target}"


def split_of(problem: Problem) -> str:
    """Return the split of a problem, from a hash of its identity."""
    return split_by_hash("countdown", identity(problem))


def load_problems(path: str | Path, *, max_rows: int | None = None) -> tuple[Problem, ...]:
    """Return the first `max_rows` problems (None: all) of a parquet file, in row order.

    The format is that of Jiayi-Pan/Countdown-Tasks-3to4: columns `target` (int) and `nums`
    (list of int).

    Raises:
      ValueError: pyarrow is not installed, the file is missing or not parquet, lacks a column, or
        has a row that is not a problem.
    """
    with open_parquet(path, FIELDS) as file:
        rows = list(itertools.islice(parquet_rows(file, path, FIELDS), max_rows))
    problems = tuple(_problem(path, i, row) for i, row in enumerate(rows))
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return problems


def _problem(path: str | Path, index: int, row: dict[str, Any]) -> Problem:
    numbers, target = row["nums"], row["target"]
    if (
        type(target) is not int
        or not isinstance(numbers, list)
        or not all(type(n) is int and 1 <= n <= MAX_NUMBER for n in numbers)
        or not 1 <= len(numbers) <= MAX_COUNT
    ):
        raise ValueError(
            f"row {index} of {path} is not a problem: target={target!r}, nums={numbers!r}; a "
            f"target is a whole number, nums are 1 to {MAX_COUNT} numbers from 1 to {MAX_NUMBER}"
        )
    return Problem(tuple(numbers), target)
