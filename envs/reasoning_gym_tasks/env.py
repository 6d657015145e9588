"""Tasks of the package reasoning-gym: a question in words, and a scorer of answers from 0 to 1.

A problem is an item of the task's data set, which generates it from the item's number alone.
"""

import contextlib
import copy
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ragen_jax.envs.options import one_of, problem_seed, whole
from ragen_jax.envs.problems import SPLITS, Draws, split_by_hash
from ragen_jax.envs.reasoning_gym_tasks import judge, package
from ragen_jax.envs.types import Step

TAG = 0x6A5C93E1  # tag of this environment's `Draws`

MAX_DRAWS = 300  # per seed: each is in the wanted split with a probability of at least 0.2

MAX_ATTEMPTS = 20
MAX_ANSWER = 10_000  # characters: some scorers take seconds for longer answers

SAMPLE = 200  # items from which `words` are taken
MAX_WORDS = 200  # in addition to numbers
MAX_RESTATED = 160  # characters of the question that the expert's reasoning repeats
_WORD = re.compile(r" ?[^\W\d_]{2,}| [^\w\s]")

_RULES = """\
A question is shown. Give its answer in the form that the question asks for, and nothing else.
A right answer earns 1; a part of that is earned by some answers that are partly right."""
_TRIES = """
You have {attempts} tries. A right answer ends the task. What an answer earns is halved with each \
try, and the best one counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The state of an episode."""

    index: int  # index of the item in the task's data set
    question: str
    entry: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)  # the item itself
    attempt: int = 1  # number of the next answer, from 1
    best: float = 0.0  # reward earned by the answers so far


class ReasoningGym:
    """A task of reasoning-gym; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty. docs/reasoning_gym.md lists the tasks.

    task: its name in the package
    level: 0: the task's defaults; n: level n of its curriculum, where 1 is the easiest; an
        attribute with fewer levels stays at its last
    settings: fields of the task's config, which override the level. The task checks them; the time
        that it takes to generate a problem with extreme settings is not bounded
    attempts: maximum number of answers in an episode, if env.max_turns and env.max_actions allow
        it. Answer n earns its score times 2^-(n-1), and an episode the value of its best answer
    split: "imitation", "train" or "eval": three sets of problems that share no question; None
        draws from all
    """

    actions: tuple[str, ...] = ()

    def __init__(
        self,
        task: str = "chain_sum",
        level: int = 0,
        settings: Mapping[str, Any] | None = None,
        attempts: int = 1,
        split: str | None = "train",
    ) -> None:
        self.attempts = whole("attempts", attempts, least=1, most=MAX_ATTEMPTS)
        self.split = one_of("split", split, (*SPLITS, None))
        self._dataset = package.data_set(task, level, settings)
        self.task = task
        try:
            answer = self._problem(0).entry["answer"]
        except Exception as error:  # settings that passed the task's checks
            raise ValueError(
                f"task {task!r} makes no problem with level={level} and settings={settings!r}: "
                f"{package.error_line(error)}"
            ) from error
        self._solvable = answer is not None
        self.instructions: str = _RULES
        if self.attempts > 1:
            self.instructions += _TRIES.format(attempts=self.attempts)

    def reset(self, seed: int) -> Problem:
        """Return problem number `seed`, an int in [0, 2**63), of this split.

        It is the first of draws 0, 1, ... in the split. Raises ValueError after MAX_DRAWS: the task
        has too few questions.
        """
        seed = problem_seed(seed)
        failed = ""
        for draw in range(MAX_DRAWS):
            try:
                problem = self._problem(Draws(seed, draw, TAG).below(package.items(self.task)))
            except Exception as error:  # a few items of some tasks cannot be generated
                failed = f"; the last item that was not made: {package.error_line(error)}"
                continue
            content = self.identity(problem)
            if self.split in (None, split_by_hash("reasoning_gym", content)):
                return problem
        raise ValueError(
            f"no problem found in {MAX_DRAWS} draws for seed={seed}, task={self.task!r}, "
            f"split={self.split!r}: the task has too few different questions; take another level "
            f"or settings{failed}"
        )

    def _problem(self, index: int) -> Problem:
        with package.isolate():
            entry = self._dataset[index]
        return Problem(index, entry["question"], entry)

    def render(self, state: Problem) -> str:
        """Return the task's question, and after a wrong answer the number of the try."""
        if state.attempt == 1:
            return state.question
        tries = f"try {state.attempt} of {self.attempts}"
        return f"{state.question}\nYour last answer was not right. This is {tries}."

    def identity(self, state: Problem) -> str:
        """Return the question with normalized spaces."""
        return " ".join(state.question.split())

    def step(self, state: Problem, action: str, rng: np.random.Generator | None = None) -> Step:
        """Score an answer of any content. `rng` is unused.

        info: "success" (its score is 1), "score" and "unreadable" (too long, a trap, or the scorer
        raised; it earns 0, because an episode whose environment raises would not be learned from).
        """
        score = self._score(state, action)
        success = score is not None and score >= 1
        earned = (score or 0.0) / 2 ** (state.attempt - 1)
        reward = max(0.0, earned - state.best)
        done = success or state.attempt >= self.attempts
        state = dataclasses.replace(state, attempt=state.attempt + 1, best=max(state.best, earned))
        info = {"success": success, "score": score or 0.0, "unreadable": score is None}
        return Step(state, reward, done, info)

    def _score(self, state: Problem, answer: str) -> float | None:
        """Return the corrected score of an answer, from 0 to 1; None if it cannot be scored."""
        trap = package.TRAPS.get(self.task)
        if len(answer) > MAX_ANSWER or (trap is not None and trap.search(answer)):
            return None
        entry = copy.deepcopy(dict(state.entry))  # some scorers modify it
        try:
            with package.isolate():
                score = float(self._dataset.score_answer(answer, entry))
        except Exception:  # an answer may make the scorer raise anything
            return None
        if math.isnan(score):
            return None
        return judge.correct_score(self.task, answer, state.entry, min(max(score, 0.0), 1.0))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The numbers up to 99, and the most frequent words of the task's first items."""
        if not self._solvable:
            raise AttributeError(f"task {self.task!r} gives no answers that could be imitated")
        numbers = (*(f" {n}" for n in range(100)), *(str(n) for n in range(10, 100)))
        count: Counter[str] = Counter()
        for index in range(SAMPLE):
            with contextlib.suppress(Exception):
                problem = self._problem(index)
                count.update(_WORD.findall(f"{problem.question} {problem.entry['answer']}"))
        frequent = sorted(count, key=lambda word: (-count[word], word))[:MAX_WORDS]
        return tuple(dict.fromkeys((" so", *sorted(frequent), *numbers)))

    def solve(self, state: Problem) -> tuple[str, ...] | None:
        """Return the task's answer; None if there is none, or its scorer does not give it 1."""
        answer = state.entry["answer"]
        if not isinstance(answer, str) or not answer.strip():
            return None
        answer = answer.strip()  # as the chat format passes it
        return (answer,) if self._score(state, answer) == 1 else None

    def explain(self, state: Problem, plan: Sequence[str]) -> str:
        """Return the end of the question and the answer: the task gives no way to the answer.

        For example "12 + 30 - 5 = so 37".
        """
        line = [line for line in state.question.splitlines() if line.strip()][-1]
        restated = line.rpartition(": ")[2].strip()[-MAX_RESTATED:]
        return f"{restated} so {' '.join(plan)}"
