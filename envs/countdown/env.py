"""Countdown for language agents: one turn, one arithmetic expression that reaches the target.

Rewards follow the released RAGEN: 1 for the target, 0.1 for an expression of the right numbers with
another value, 0 for everything else. The released code runs `eval`; here answers are parsed (see
`arithmetic`), so division by zero, which has no value, earns 0.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.envs.countdown import arithmetic, problems, solver
from ragen_jax.envs.countdown.problems import Problem
from ragen_jax.envs.narration import enumerate_words
from ragen_jax.envs.options import bounds, file_name, flag, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import Step

MAX_TARGET = 10**9
MAX_ROWS = 10**7  # rows of a file

REWARD_SOLVED, REWARD_WRONG_VALUE, REWARD_UNREADABLE = 1.0, 0.1, 0.0

_RULES = """\
You are playing Countdown. Write an arithmetic expression whose value is the target.
Use every given number {how_often}, and no other number. You may add (+), subtract (-), multiply \
(*) and divide (/), and use brackets. Write the expression alone, without an equals sign: \
for example (44-19)+35.
You have one try. The target earns 1, an expression of the right numbers with another value earns \
0.1, anything else earns nothing."""

# The rules of `Countdown.brief`.
_BRIEF = """\
Countdown: reach the target with + - * / and brackets. Use every given number {how_often}, and no \
other number. The answer is the expression alone, such as (44-19)+35."""

# The list of numbers after the word "numbers", and the number after "target".
_NUMBERS = re.compile(
    r"\bnumbers?\b(?:\s|:|\bis\b|\bare\b)*((?:\d+(?:\s|,|\band\b)*)+)", re.IGNORECASE
)
_TARGET = re.compile(r"\btarget\b(?:\s|:|\bis\b)*(\d+)", re.IGNORECASE)


class Countdown:
    """Generated or given Countdown problems; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    count: (fewest, most) numbers of a generated problem
    largest: generated numbers are uniform on 1..largest
    targets: (lowest, highest) target of a generated problem
    operators: operators with which a problem, generated or given, must be solvable. The released
        code keeps "+-"; all are "+-*/". Answers may always use all four
    allow_subset: allow an answer to leave numbers out (the paper: "at most once")
    path: parquet file of problems to draw from instead of generating them (`load_problems`);
        count, largest and targets are then unused
    max_rows: number of its rows to read (None: all)
    split: "imitation", "train" or "eval": three disjoint sets of problems, regardless of the order
        of the numbers; None draws from all
    """

    actions: tuple[str, ...] = ()
    fields: tuple[str, ...] = problems.FIELDS
    words: tuple[str, ...] = (
        *("Numbers:", "\nTarget:", "numbers", " target", " plan"),
        *(f" {number}" for number in range(100)),
        *(str(number) for number in range(10, 100)),
    )

    def __init__(
        self,
        count: Sequence[int] = (3, 4),
        largest: int = 99,
        targets: Sequence[int] = (10, 100),
        operators: str = "+-",
        allow_subset: bool = False,
        path: str | Path | None = None,
        max_rows: int | None = 20_000,
        split: str | None = "train",
    ) -> None:
        self.count = bounds("count", count, most=problems.MAX_COUNT)
        self.largest = whole("largest", largest, least=1, most=problems.MAX_NUMBER)
        self.targets = bounds("targets", targets, most=MAX_TARGET)
        is_valid = isinstance(operators, str) and set(operators) <= set(solver.OPERATORS)
        if not is_valid or not operators:
            raise ValueError(f"operators must be some of {solver.OPERATORS}, got {operators!r}")
        self.operators = operators
        self.allow_subset = flag("allow_subset", allow_subset)
        self.max_rows = None
        if max_rows is not None:
            self.max_rows = whole("max_rows", max_rows, least=1, most=MAX_ROWS)
        self.split = one_of("split", split, (*SPLITS, None))
        self.path = file_name("path", path)
        self._file_problems = None
        if path is not None:
            self._file_problems = problems.load_problems(path, max_rows=self.max_rows)
        how_often = "at most once" if allow_subset else "exactly once"
        self.instructions: str = _RULES.format(how_often=how_often)
        self.brief: str = _BRIEF.format(how_often=how_often)

    def reset(self, seed: int) -> Problem:
        """Return problem number `seed`, an int in [0, 2**63), of this split.

        It can be solved by `operators` with whole intermediate values. It is the first of attempts
        0, 1, ... that meets the constraints. Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            problem = self._draw(Draws(seed, attempt, problems.TAG))
            if problem is not None and self.split in (None, problems.split_of(problem)):
                return problem
        raise ValueError(
            f"no problem found in {MAX_ATTEMPTS} attempts for seed={seed}, count={self.count}, "
            f"largest={self.largest}, targets={self.targets}, operators={self.operators!r}, "
            f"path={self.path}, split={self.split!r}: allow more operators, or widen the bounds"
        )

    def _draw(self, draws: Draws) -> Problem | None:
        """Make one attempt at a problem of any split."""
        if self._file_problems is None:
            return problems.draw_problem(
                draws,
                count=self.count,
                largest=self.largest,
                targets=self.targets,
                operators=self.operators,
            )
        problem = self._file_problems[draws.below(len(self._file_problems))]
        return problem if self._may_draw(problem) else None

    def _may_draw(self, problem: Problem) -> bool:
        """Whether a problem of the file may be drawn."""
        # Ruling out every solution with fractions would take most of the time.
        return self._solution(problem, fractions=False) is not None

    def list_problems(self) -> Iterator[tuple[int, str, Problem]]:
        """Yield (row, split, problem) of each problem of the file that may be drawn, in order."""
        for row, problem in enumerate(self._file_problems or ()):
            if self._may_draw(problem):
                yield row, problems.split_of(problem), problem

    def render(self, state: Problem) -> str:
        """Return the observation, for example "Numbers: 44, 19, 35\\nTarget: 60"."""
        return f"Numbers: {', '.join(map(str, state.numbers))}\nTarget: {state.target}"

    def step(self, state: Problem, action: str, rng: np.random.Generator | None = None) -> Step:
        """Check an answer of any content and end the episode. `rng` is unused.

        info: "success", "readable" (it is an expression, whether or not it has a value) and
        "right_numbers" (it uses the given numbers, as often as required).
        """
        evaluation = arithmetic.evaluate(action)
        value = None if evaluation is None else evaluation.value
        right = evaluation is not None and self._right_numbers(evaluation.numbers, state.numbers)
        success = right and value == state.target
        reward = REWARD_UNREADABLE
        if right and value is not None:
            reward = REWARD_SOLVED if success else REWARD_WRONG_VALUE
        info = {"success": success, "readable": evaluation is not None, "right_numbers": right}
        return Step(state, reward, True, info)

    def identity(self, state: Problem) -> str:
        """Return numbers and target as a text that does not depend on the order of the numbers."""
        return problems.identity(state)

    def solve(self, state: Problem) -> tuple[str, ...] | None:
        """Return a right answer that uses `operators`, for imitation; None if there is none."""
        answer = self._solution(state, fractions=True)
        return None if answer is None else (answer,)

    def sample_plan(self, state: Problem, rng: np.random.Generator) -> tuple[str, ...] | None:
        """Return a right answer as `solve` does, but one of several that `rng` chooses.

        It is the first that the search finds when the numbers and the operators are in a random
        order: it differs in the order of operations, and in its operators if several reach the
        target.
        """
        numbers = [state.numbers[i] for i in rng.permutation(len(state.numbers))]
        operators = "".join(self.operators[i] for i in rng.permutation(len(self.operators)))
        answer = solver.solve(
            numbers, state.target, operators=operators, allow_subset=self.allow_subset
        )
        return None if answer is None else (answer,)

    def explain(self, state: Problem, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the problem, and its answer one operation at a time.

        For example "numbers 44 19 35 target 60 plan 44-19=25 25+35=60".
        """
        operations = [
            operation for answer in plan for operation in arithmetic.list_operations(answer)
        ]
        words = ["numbers", *map(str, state.numbers), "target", str(state.target)]
        return " ".join([*words, "plan", *operations])

    def narrate(self, state: Problem, plan: Sequence[str]) -> str:
        """Return the expert's reasoning in sentences: the problem, and its answer one operation at
        a time.

        For example "The numbers are 44, 19 and 35; the target is 60. 44-19=25. 25+35=60."
        """
        numbers = enumerate_words([str(number) for number in state.numbers])
        subject = "number is" if len(state.numbers) == 1 else "numbers are"
        operations = "".join(
            f" {operation}." for answer in plan for operation in arithmetic.list_operations(answer)
        )
        return f"The {subject} {numbers}; the target is {state.target}.{operations}"

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        value = r"-?[0-9]+(?:/[0-9]+)?"
        facts = r"The (?:number is|numbers are) [0-9]+(?:(?:, [0-9]+)* and [0-9]+)?; "
        facts += r"the target is [0-9]+\."
        operations = rf"(?: {value}[-+*/]{value}={value}\.)*"
        return make_styles(self.narrate, facts + operations, "The")

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true statements of the problem's numbers in `thought`, number stated).

        Each list of numbers is compared with the given numbers, and each target with the target.
        """
        (given,), (target,) = _NUMBERS.findall(observation), _TARGET.findall(observation)
        given = Counter(re.findall(r"\d+", given))
        right = stated = 0
        for listed in _NUMBERS.findall(thought):
            numbers = Counter(re.findall(r"\d+", listed))
            right += (numbers & given).total()
            stated += numbers.total()
        targets = _TARGET.findall(thought)
        return right + targets.count(target), stated + len(targets)

    def _solution(self, problem: Problem, *, fractions: bool) -> str | None:
        return solver.solve(
            problem.numbers,
            problem.target,
            operators=self.operators,
            allow_subset=self.allow_subset,
            fractions=fractions,
        )

    def _right_numbers(self, used: Sequence[int], given: Sequence[int]) -> bool:
        if self.allow_subset:
            return Counter(used) <= Counter(given)
        return Counter(used) == Counter(given)
