"""DeepCoder for language agents: one turn, one program, rewarded by the fraction of tests passed.

As in the released RAGEN, the reward is passed / total, and success means all tests. The released
code runs program and tests in one process and trusts the program's output; `grade` runs each test
in a separate process and compares outside it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.envs.deepcoder import expressions, file_problems, problems, tasks
from ragen_jax.envs.deepcoder.grade import grade
from ragen_jax.envs.deepcoder.problems import LANGUAGES, Problem, Test
from ragen_jax.envs.deepcoder.sandbox import SANDBOXES, find_sandbox
from ragen_jax.envs.options import bounds, file_name, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.types import Step

MAX_TESTS = 1000  # of a generated problem
MAX_SECONDS = 600  # per test
MEMORY = (64, 1 << 20)  # minimum and maximum MiB per test

_RULES = {
    "python": """\
You are solving a programming task in Python 3 with its standard library. Put the whole program \
into one block that begins with ```python and ends with ```; of several blocks the last one counts.
Where a function is asked for, or code to begin with is shown, define that function; else read the \
input as described and print the output alone. You have one try. The reward is the share of hidden \
tests that the program passes; each test has {seconds:g} seconds and {memory} MiB of memory.""",
    "expression": """\
You are given steps of arithmetic on the whole numbers a, b and c. Write one expression that \
carries them all out: of a, b, c, whole numbers, + - *, max(x,y), min(x,y) and brackets. Write the \
expression alone: for example max(a+b,7)*2.
You have one try. The reward is the share of hidden tests, numbers for a, b and c, of which the \
expression gives the right value.""",
}

# The rules of `DeepCoder.brief`.
_BRIEF = {
    "python": """\
Write a Python 3 program with the standard library in one block that begins with ```python and \
ends with ```. Define the function that is asked for or begun; else read the input and print the \
output alone. It has {seconds:g} seconds and {memory} MiB for each hidden test.""",
    "expression": """\
Write one expression that carries out all steps on the whole numbers a, b and c. It may hold a, b, \
c, whole numbers, + - *, max(x,y), min(x,y) and brackets. The answer is the expression alone, such \
as max(a+b,7)*2.""",
}

_LETTERS = ("a", "b", "c", *map(str, range(10)))


class DeepCoder:
    """Generated or given programming problems; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    language: "python": the last ```python block of a response is the program; "expression": the
        response is one expression of a, b and c (`expressions`), which is parsed and never
        executed: for the tiny agent, whose generated problems are arithmetic only
    steps: (fewest, most) steps of a generated arithmetic problem
    tests: number of tests of a generated problem
    time_limit_s: seconds per test
    memory_mb: MiB of address space per test
    sandbox: required sandbox, one of sandbox.SANDBOXES; None: the best that works
    path: parquet file, or folder of such files, to draw problems from instead of generating them
        (`file_problems.load_problems`); steps and tests are then unused
    max_tests: maximum number of tests of a given problem, those with the longest inputs; None: all
    split: "imitation", "train" or "eval": three disjoint sets of problems, whatever their wording;
        None draws from all. In a folder, test* files are for evaluation, all others for training
    """

    actions: tuple[str, ...] = ()
    fields: tuple[str, ...] = (*file_problems.FIELDS, *file_problems.OPTIONAL_FIELDS)
    words: tuple[str, ...] = (
        *("Start with", "Add", "Increase it by", "Subtract", "Take away", "Multiply by", ". "),
        *("Take the larger of it and", "Make it at least", "Take the smaller of it and"),
        *("Make it at most", "max(", "min(", " then "),
        *(f" {letter}" for letter in _LETTERS),
        *(f"{symbol}{letter}" for symbol in ("+", "-", "*", ",") for letter in _LETTERS),
    )

    def __init__(
        self,
        language: str = "python",
        steps: Sequence[int] = (2, 4),
        tests: int = 8,
        time_limit_s: float = 3.0,
        memory_mb: int = 512,
        sandbox: str | None = None,
        path: str | Path | None = None,
        max_tests: int | None = None,
        split: str | None = "train",
    ) -> None:
        self.language = str(one_of("language", language, LANGUAGES))
        self.steps = bounds("steps", steps, most=tasks.MAX_STEPS)
        self.tests = whole("tests", tests, least=2, most=MAX_TESTS)
        number = isinstance(time_limit_s, (int, float)) and not isinstance(time_limit_s, bool)
        if not number or not 0 < time_limit_s <= MAX_SECONDS:
            raise ValueError(
                f"time_limit_s must be seconds above 0, at most {MAX_SECONDS}, got {time_limit_s!r}"
            )
        self.time_limit_s = float(time_limit_s)
        self.memory_mb = whole("memory_mb", memory_mb, least=MEMORY[0], most=MEMORY[1])
        self.sandbox = one_of("sandbox", sandbox, (*SANDBOXES, None))
        self.path = file_name("path", path, "file or folder")
        if path is not None and language == "expression":
            raise ValueError("language='expression' is of generated problems: path must be None")
        self.max_tests = None
        if max_tests is not None:
            self.max_tests = whole("max_tests", max_tests, least=1, most=10**6)
        self.split = one_of("split", split, (*SPLITS, None))
        if self.language == "python":
            find_sandbox(self.sandbox)
        if path is not None and split == "imitation" and Path(path).is_dir():
            raise ValueError(
                f"{path}, a folder, has no problems to be imitated: path must be a file"
            )
        self._file_problems = None if path is None else file_problems.load_problems(path)
        self.instructions: str = _RULES[self.language].format(
            seconds=self.time_limit_s, memory=self.memory_mb
        )
        self.brief: str = _BRIEF[self.language].format(
            seconds=self.time_limit_s, memory=self.memory_mb
        )

    def reset(self, seed: int) -> Problem:
        """Return problem number `seed`, an int in [0, 2**63), of this split.

        Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            problem = self._draw(Draws(seed, attempt, tasks.TAG))
            if problem is not None and self.split in (None, problems.split_of(problem)):
                return problem
        raise ValueError(
            f"no problem found in {MAX_ATTEMPTS} attempts for seed={seed}, "
            f"language={self.language!r}, steps={self.steps}, tests={self.tests}, "
            f"path={self.path}, split={self.split!r}: allow more steps, or give more files"
        )

    def _draw(self, draws: Draws) -> Problem | None:
        """Make one attempt at a problem of any split."""
        if self._file_problems is not None:
            return self._file_problems[draws.below(len(self._file_problems))]
        return problems.draw_problem(
            draws, language=self.language, steps=self.steps, tests=self.tests
        )

    def list_problems(self) -> Iterator[tuple[int, str, Problem]]:
        """Yield (row, split, problem) of each problem of the file that may be drawn, in order."""
        for row, problem in enumerate(self._file_problems or ()):
            yield row, problems.split_of(problem), problem

    def render(self, state: Problem) -> str:
        """Return the problem statement."""
        return state.text

    def step(self, state: Problem, action: str, rng: np.random.Generator | None = None) -> Step:
        """Test an answer of any content and end the episode. `rng` is unused.

        info: "success", "readable" (there is a program, or an expression), "passed", "total".
        Raises process.SandboxFault if the machine failed: the episode is then left out.
        """
        tests = state.tests if self._file_problems is None else self._file_problems.tests(state.row)
        tests = problems.select_longest(tests, self.max_tests)
        if self.language == "python":
            passed = self._run(extract_program(action), tests)
        else:
            passed = _evaluate(action, tests)
        success = passed == len(tests)
        info = {
            "success": success,
            "readable": passed is not None,
            "passed": passed or 0,
            "total": len(tests),
        }
        return Step(state, (passed or 0) / len(tests), True, info)

    def _run(self, program: str | None, tests: Sequence[Test]) -> int | None:
        """Return the number of tests that a program passes; None if there is no program."""
        if program is None:
            return None
        return grade(
            program,
            [test.to_graded() for test in tests],
            time_limit_s=self.time_limit_s,
            memory_mb=self.memory_mb,
            sandbox=self.sandbox,
        ).passed

    def identity(self, state: Problem) -> str:
        """Return the results on probes as a hash; for a given problem, its normalized text."""
        return state.identity

    def solve(self, state: Problem) -> tuple[str, ...] | None:
        """Return an answer that passes all tests, for imitation; None for a given problem."""
        if not state.solution:
            return None
        block = self.language == "python"
        return (f"```python\n{state.solution}\n```" if block else state.solution,)

    def explain(self, state: Problem, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: for arithmetic the expression after each step, such as
        "a then a+b then max(a+b,7)"; otherwise the steps again."""
        if self.language == "python" or not plan:
            return " ".join(state.steps)
        return " then ".join(tasks.list_partial_expressions(plan[0]))


def extract_program(reply: str) -> str | None:
    """Return the last ```python block of a reply, whose fences begin their lines; None if there is
    no such block."""
    found, block = None, None
    for line in reply.split("\n"):
        if block is None:
            if line.strip().lower() in ("```python", "```python3", "```py"):
                block = []
        elif line.strip() == "```":
            found, block = "\n".join(block), None
        else:
            block.append(line)
    return found


def _evaluate(text: str, tests: Sequence[Test]) -> int | None:
    """Return the number of tests that an expression passes; None for any other text."""
    tree = expressions.parse(text)
    if tree is None:
        return None
    named = [dict(zip(expressions.NAMES, map(int, t.input.split()), strict=True)) for t in tests]
    values = [expressions.value(tree, names) for names in named]
    return sum(value == int(test.output) for value, test in zip(values, tests, strict=True))
