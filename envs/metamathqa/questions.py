"""Questions with a final answer, generated or from the data set's file, and their splits."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ragen_jax.envs.files import is_text, json_value, normalize
from ragen_jax.envs.problems import split_by_hash
from ragen_jax.storage.datasets import StoredExamples

FIELDS = ("type", "query", "original_question", "response")
MARKER = "The answer is: "  # precedes the answer at the end of a response


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its right answer.

    identity: the same for equal questions, whatever their wording
    facts: for a generated question, its numbers with their verbs, in order: ("has", 12), ("gets",
        5)
    kind: for a given question, its `type`
    """

    text: str
    answer: str  # "" for a row of the file without an answer
    identity: str
    facts: tuple[tuple[str, int], ...] = ()
    kind: str = ""


def split_of(question: Question) -> str:
    """Return the split of a question, from a hash of its identity."""
    return split_by_hash("metamathqa", question.identity)


class Questions:
    """The questions of a file, each read on demand."""

    def __init__(self, examples: "StoredExamples") -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Iterator[Question]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Question:
        example = self._examples[index]
        return Question(
            text=example["query"],
            answer=example["answer"],
            identity=example["about"],
            kind=example["type"],
        )


def load_questions(path: str | Path) -> Questions:
    """Return the questions of a JSON file in the order of its rows.

    The format is that of meta-math/MetaMathQA: a list of objects with the texts FIELDS. The answer
    is the text after MARKER in a response. The first call converts the file to a data set in the
    user's cache, named by the file's content, from which later calls read single rows; it also
    prints how many rows have no answer.

    Raises:
      ValueError: the file is missing, not JSON, not such a list, or without any answer.
    """
    # Imported here: these modules import environments, and importing TFDS takes seconds.
    from ragen_jax.storage.cache import cache_directory, content_hash
    from ragen_jax.storage.console import console
    from ragen_jax.storage.datasets import open_or_generate

    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        content = content_hash(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    unanswered = []  # number of rows without an answer, if the file is converted now
    examples = open_or_generate(
        "metamathqa",
        {"content": content, "format": 2},
        features=dict.fromkeys(("type", "query", "about", "answer"), np.str_),
        generate=lambda: _examples(path, unanswered),
        directory=cache_directory() / "datasets",
    )
    if any(unanswered):  # nothing is printed while TFDS generates
        console(f"{path}: {unanswered[0]} row(s) without {MARKER!r} are left out")
    return Questions(examples)


def _examples(path: str | Path, unanswered: list[int]) -> Iterator[dict[str, str]]:
    """Yield the cached fields of each row; append the number without an answer to `unanswered`."""
    rows = _rows(path)
    answers = [_answer(row["response"]) for row in rows]
    if not any(answers):
        raise ValueError(f"none of the {len(rows)} rows of {path} has {MARKER!r} in its response")
    unanswered.append(answers.count(""))
    for row, answer in zip(rows, answers, strict=True):
        yield {
            "type": row["type"],
            "query": row["query"].strip(),
            "about": normalize(row["original_question"]),
            "answer": answer,
        }


def _answer(response: str) -> str:
    """Return the text after the last MARKER; "" if there is none."""
    _, marker, answer = response.rpartition(MARKER)
    return answer.strip() if marker else ""


def _rows(path: str | Path) -> list[dict[str, str]]:
    """Return all rows of the file, each with text in all FIELDS."""
    rows = json_value(path)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} must hold a list of questions, got {str(rows)[:60]}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {index} of {path} is not a question: {str(row)[:60]}")
        for field in FIELDS:
            if field not in row:
                raise ValueError(f"row {index} of {path} lacks the field {field}")
            if not is_text(row[field]):
                shown = ascii(row[field])[:60]
                raise ValueError(f"field {field} of row {index} of {path} must be text: {shown}")
    return rows
