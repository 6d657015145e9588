"""Problems with their tests, from seeds or from files, and the split of a problem."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragen_jax.envs.deepcoder import tasks
from ragen_jax.envs.deepcoder.tasks import FAMILIES
from ragen_jax.envs.problems import Draws, split_by_hash

LANGUAGES = ("python", "expression")
FUNCTION = "solve"  # name of a generated problem's function


@dataclass(frozen=True, slots=True)
class Test:
    """A test.

    input: standard input, or arguments, one literal per line
    output: the expected output
    function: name of the function to call; "": run as a program
    """

    __test__ = False  # pytest must not collect it

    input: str
    output: str
    function: str = ""

    def to_graded(self) -> dict[str, Any]:
        """Return the test in the form that `grade` takes."""
        kind = "functional" if self.function else "stdin_stdout"
        metadata = {"func_name": self.function or None}
        return {"input": self.input, "output": self.output, "testtype": kind, "metadata": metadata}


@dataclass(frozen=True, slots=True)
class Problem:
    """A state, which an answer does not change.

    text: the problem statement
    identity: the same for equal problems, whatever their wording
    tests: of a generated problem; those of a file's problem are read on demand
    solution: a right answer of a generated problem
    steps: steps of a generated problem, in words
    row: row of a file's problem; else -1
    split: split of a file's problem
    """

    text: str
    identity: str
    tests: tuple[Test, ...] = ()
    solution: str = ""
    steps: tuple[str, ...] = ()
    row: int = -1
    split: str = ""


def split_of(problem: Problem) -> str:
    """Return the split of a problem: its file's, or from a hash of its identity."""
    return problem.split or split_by_hash("deepcoder", problem.identity)


def draw_problem(
    draws: Draws, *, language: str, steps: tuple[int, int], tests: int
) -> Problem | None:
    """Make one attempt at a problem; None if its tests do not distinguish programs.

    language: one of LANGUAGES
    steps: (fewest, most) steps of arithmetic
    tests: number of tests
    """
    family = "numbers" if language == "expression" else tuple(FAMILIES)[draws.below(len(FAMILIES))]
    task = FAMILIES[family].task(draws, steps)
    inputs = [FAMILIES[family].draw(draws) for _ in range(tests + 1)]
    answers = [tasks.compute_answer(task, values) for values in inputs]
    if len(set(map(str, answers))) <= tests // 2 or "" in answers:
        return None
    function = FUNCTION if language == "python" and draws.below(2) else ""
    test_cases = [
        Test("\n".join(map(repr, values)), repr(right), function)
        if function
        else Test(tasks.format_input(values), f"{right}\n")
        for values, right in zip(inputs, answers, strict=True)
    ]
    if language == "expression":
        text, solution = " ".join(task.steps), task.expression
    else:
        text, solution = _statement(task, test_cases[0]), _program(task, function)
    identity = tasks.identity(task)
    return Problem(text, identity, tuple(test_cases[1:]), solution, task.steps)


def _statement(task: tasks.Task, example: Test) -> str:
    """Return the statement of a task for a programmer, with an example that is not a test."""
    family = FAMILIES[task.family]
    if example.function:
        signature = f"{FUNCTION}({', '.join(family.names)})"
        input_name = " of the list xs" if family.names == ("xs",) else ""
        begin = f"Write a function {signature} that returns the answer{input_name}."
        shown = ", ".join(example.input.split("\n"))
        end = f"Example: {FUNCTION}({shown}) returns {example.output}"
    else:
        begin = f"Read {family.input_text}, and print the answer."
        end = f"Example input:\n{example.input}Example output:\n{example.output}".rstrip()
    return "\n".join([begin, " ".join(task.steps), end])


def _program(task: tasks.Task, function: str) -> str:
    family = FAMILIES[task.family]
    if function:
        return f"def {function}({', '.join(family.names)}):\n    return {task.expression}"
    return f"{family.read}\nprint({task.expression})"


def select_longest(tests: Sequence[Test], most: int | None) -> tuple[Test, ...]:
    """Return at most `most` tests, those with the longest inputs, in their order."""
    ranked = sorted(range(len(tests)), key=lambda i: (-len(tests[i].input), i))
    return tuple(tests[i] for i in sorted(ranked[:most]))
