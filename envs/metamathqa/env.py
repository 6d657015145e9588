"""MetaMathQA for language agents: a question with a final answer, and any number of tries.

As in the released RAGEN, the first right answer earns 1, halved with each earlier try, a wrong
answer is reported as wrong, and only a right answer ends the task. The number of tries is limited
by the rollout (env.max_turns and env.max_actions).
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ragen_jax.envs.metamathqa import questions, stories
from ragen_jax.envs.metamathqa.compare import COMPARE, check_installed, judge_answer
from ragen_jax.envs.metamathqa.questions import Question
from ragen_jax.envs.options import bounds, file_name, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import Step

MAX_ROWS = 10**7  # rows of a file
MAX_SHOWN = 60  # characters of a wrong answer that are shown
SECOND_TRIES = 4  # one of this many imitated questions is shown after a wrong answer

_RULES = """\
You are answering a question of mathematics. Write the final answer alone, a number or an \
expression, without the way to it: for example 12.
After a wrong answer you see it again behind "Wrong:", and the number of the next attempt behind \
"Attempt:". The first right answer ends the task. It earns 1 in the first attempt, 0.5 in the \
second, 0.25 in the third, and half as much in each further one; a wrong answer earns nothing."""

# The rules of `MetaMathQA.brief`.
_BRIEF = """\
Answer the question with the final number or expression alone, such as 12. A wrong answer is shown \
after "Wrong:"; give another one."""

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)
_VERBS = "|".join((stories.START, *stories.SYMBOLS))
_CLAIM = re.compile(rf"\b({_VERBS})\b(?:\s|:|\b(?:them|it|into)\b)*([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A state: a question, the number of answers given, and the last answer if it was wrong."""

    question: Question
    tries: int = 0
    last_wrong: str = ""  # in one line, at most MAX_SHOWN characters


class MetaMathQA:
    """Generated or given questions; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    operations: (fewest, most) operations of a generated question
    largest: largest number in a generated question, including intermediate values
    operators: operators that a generated question may need, some of "+-*/"
    compare: "string": the answer must equal the right one in lower case, ignoring spaces (the
        released rule); "math_verify": equivalent answers count as right, such as 1/2 and 0.5
        (extra "math")
    path: JSON file of questions to draw from instead of generating them (`load_questions`);
        operations, largest and operators are then unused
    max_rows: number of its rows to draw from (None: all)
    types: prefix of the `type` of the questions to draw from; the released code keeps "MATH_"
    split: "imitation", "train" or "eval": three sets of questions that are disjoint, even with
        other names and things, or rephrased: the file's questions made from the same original
        share a split. None draws from all
    """

    actions: tuple[str, ...] = ()
    fields: tuple[str, ...] = questions.FIELDS
    words: tuple[str, ...] = (
        *(*stories.WORDS, "\nWrong:", "\nAttempt:", " plan"),
        *(f" {number}" for number in range(100)),
        *(str(number) for number in range(10, 100)),
    )
    budget_matters = False

    def __init__(
        self,
        operations: Sequence[int] = (2, 3),
        largest: int = 99,
        operators: str = stories.OPERATORS,
        compare: str = "string",
        path: str | Path | None = None,
        max_rows: int | None = None,
        types: str = "",
        split: str | None = "train",
    ) -> None:
        self.operations = bounds("operations", operations, most=stories.MAX_OPERATIONS)
        least = 2 * stories.MAX_FACTOR  # leaves each operation numbers to choose from
        self.largest = whole("largest", largest, least=least, most=stories.MAX_VALUE)
        is_valid = isinstance(operators, str) and set(operators) <= set(stories.OPERATORS)
        if not is_valid or not operators:
            raise ValueError(f"operators must be some of {stories.OPERATORS}, got {operators!r}")
        self.operators = operators
        self.compare = str(one_of("compare", compare, COMPARE))
        check_installed(self.compare)
        self.max_rows = None
        if max_rows is not None:
            self.max_rows = whole("max_rows", max_rows, least=1, most=MAX_ROWS)
        if not isinstance(types, str):
            raise ValueError(f"types must be a text, got {types!r}")
        self.types = types
        self.split = one_of("split", split, (*SPLITS, None))
        self.path = file_name("path", path)
        self._file_questions = None if path is None else questions.load_questions(path)
        self.instructions: str = _RULES
        self.brief: str = _BRIEF

    def reset(self, seed: int) -> Attempt:
        """Return question number `seed`, an int in [0, 2**63), of this split.

        Some imitated questions are shown after a wrong answer, since an expert makes none. Raises
        ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            draws = Draws(seed, attempt, stories.TAG)
            question = self._draw(draws)
            if question is not None and self.split in (None, questions.split_of(question)):
                state = Attempt(question)
                if self.split == "imitation" and not draws.below(SECOND_TRIES):
                    wrong = str(draws.below(100))
                    return state if wrong == question.answer else Attempt(question, 1, wrong)
                return state
        raise ValueError(
            f"no question found in {MAX_ATTEMPTS} attempts for seed={seed}, "
            f"operations={self.operations}, largest={self.largest}, operators={self.operators!r}, "
            f"path={self.path}, max_rows={self.max_rows}, types={self.types!r}, "
            f"split={self.split!r}: widen the bounds, or read more rows"
        )

    def _draw(self, draws: Draws) -> Question | None:
        """Make one attempt at a question of any split."""
        if self._file_questions is None:
            return stories.draw_question(
                draws,
                operations=self.operations,
                largest=self.largest,
                operators=self.operators,
            )
        question = self._file_questions[
            draws.below(min(len(self._file_questions), self.max_rows or MAX_ROWS))
        ]
        return question if self._may_draw(question) else None

    def _may_draw(self, question: Question) -> bool:
        """Whether a question of the file may be drawn."""
        return bool(question.answer) and question.kind.startswith(self.types)

    def list_problems(self) -> Iterator[tuple[int, str, Attempt]]:
        """Yield (row, split, state) of each question of the file that may be drawn, in order."""
        for row, question in enumerate(itertools.islice(self._file_questions or (), self.max_rows)):
            if self._may_draw(question):
                yield row, questions.split_of(question), Attempt(question)

    def render(self, state: Attempt) -> str:
        """Return "Question: ...", and after a wrong answer "Wrong: 9\\nAttempt: 2"."""
        shown = f"Question: {state.question.text}"
        if state.tries:
            shown += f"\nWrong: {state.last_wrong}\nAttempt: {state.tries + 1}"
        return shown

    def step(self, state: Attempt, action: str, rng: np.random.Generator | None = None) -> Step:
        """Check an answer of any content. `rng` is unused.

        info: "success", "readable" (there was something to compare) and, if the comparison failed,
        "error".
        """
        verdict = judge_answer(state.question.answer, action, self.compare)
        info: dict[str, object] = {"success": verdict.right, "readable": verdict.readable}
        if verdict.error:
            info["error"] = verdict.error
        after = replace(
            state, tries=state.tries + 1, last_wrong="" if verdict.right else _line(action)
        )
        return Step(after, 0.5**state.tries if verdict.right else 0.0, verdict.right, info)

    def identity(self, state: Attempt) -> str:
        """Return the question's operations and numbers, or the text of its original."""
        return state.question.identity

    def solve(self, state: Attempt) -> tuple[str, ...]:
        """Return the right answer, for imitation."""
        return (state.question.answer,)

    def explain(self, state: Attempt, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the facts of the question, and one operation at a time.

        For example "has 12 gets 5 loses 3 plan 12+5=17 17-3=14"; for a given question, whose facts
        are unknown, "plan" and the answer.
        """
        facts = state.question.facts
        parts = [f"{verb} {n}" for verb, n in facts]
        return " ".join([*parts, "plan", *(stories.list_operations(facts) if facts else plan)])

    def narrate(self, state: Attempt, plan: Sequence[str]) -> str:
        """Return the expert's reasoning in sentences: each fact of the question, and its operation.

        For example "At first Anna has 12. Anna gets 5 more: 12+5=17. Anna loses 3: 17-3=14."; for a
        given question, whose facts are unknown, "The answer is 14."
        """
        facts = state.question.facts
        if not facts:
            return f"The answer is {' '.join(plan)}." if plan else "The answer follows."
        name = state.question.text.partition(" ")[0]
        steps = zip(facts[1:], stories.list_operations(facts), strict=True)
        sentences = [
            stories.sentence(verb, name, n).rstrip(".") + (f": {operation}." if plan else ".")
            for (verb, n), operation in steps
        ]
        return " ".join([f"At first {name} {stories.START} {facts[0][1]}.", *sentences])

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        if self._file_questions is not None:
            return make_styles(self.narrate, r"The answer (?:is (?s:.+)|follows)\.", "The")
        name = f"(?:{'|'.join(stories.NAMES)})"
        steps = "|".join(
            stories.sentence(verb, name, "[0-9]+").rstrip(".") for verb in stories.SYMBOLS
        )
        pattern = rf"At first {name} {stories.START} [0-9]+\."
        pattern += rf"(?: (?:{steps})(?:: [0-9]+[-+*/][0-9]+=[0-9]+)?\.)*"
        return make_styles(self.narrate, pattern, "At")

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true numbers in `thought` after a verb of the question, number stated).

        "has" may state the number at the start or after any operation. For given questions, whose
        wording is free, nothing is checked: (0, 0).
        """
        question = _QUESTION.search(observation)
        if self._file_questions is not None or question is None:
            return 0, 0
        facts = [(verb, int(n)) for verb, n in _CLAIM.findall(question[1])]
        values = {str(value) for value in stories.values(facts)}
        stated = [(verb.lower(), n) for verb, n in _CLAIM.findall(thought)]
        true = Counter((verb, str(n)) for verb, n in facts[1:])
        right = (Counter(claim for claim in stated if claim[0] != stories.START) & true).total()
        right += sum(verb == stories.START and n in values for verb, n in stated)
        return right, len(stated)


def _line(answer: str) -> str:
    """Return an answer as it is shown: one line of characters that UTF-8 can encode, truncated."""
    text = " ".join(answer[: 4 * MAX_SHOWN].encode(errors="replace").decode().split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
