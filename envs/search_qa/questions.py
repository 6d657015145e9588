"""Questions with short answers, generated or from a data set's file, and their splits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.envs.files import is_text, json_rows, open_parquet, parquet_rows
from ragen_jax.envs.problems import split_by_hash
from ragen_jax.envs.search_qa.world import Link

QUESTION = "question"
ANSWERS = ("ground_truth", "answer", "answers", "golden_answers")  # one of these: a text or a list
FIELDS = (QUESTION, " or ".join(ANSWERS))

MAX_TEXT = 10_000  # characters of a question or an answer


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its right answers.

    answers: any of them counts as right
    identity: the same for equal questions
    world: for a generated question, the number of its encyclopedia
    chain: for a generated question, the facts that lead to its answer
    """

    text: str
    answers: tuple[str, ...]
    identity: str
    world: int = 0
    chain: tuple[Link, ...] = ()


def split_of(question: Question) -> str:
    """Return the split of a question, from a hash of its identity."""
    return split_by_hash("search_qa", question.identity)


def load_questions(path: str | Path, *, max_rows: int | None = None) -> tuple[Question, ...]:
    """Return the first `max_rows` questions (None: all) of a file, in the order of its rows.

    The file is parquet if its name ends with .parquet, or else JSON Lines. A row has the text
    `question` and, in one of ANSWERS, a right answer or a list of right answers. Other fields are
    not read.

    Raises:
      ValueError: the file is missing, has another format, is empty, or has a row that is not a
        question; or pyarrow is needed and not installed.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    rows = _parquet_rows(path) if Path(path).suffix == ".parquet" else json_rows(path)
    questions = []
    for index, row in enumerate(rows):
        if index == max_rows:
            break
        questions.append(_question(path, index, row))
    if not questions:
        raise ValueError(f"{path} holds no questions")
    return tuple(questions)


def normalize(text: str) -> str:
    """Return only the letters and digits of a text, in lower case."""
    return re.sub(r"[\W_]", "", text.lower())


def _question(path: str | Path, index: int, row: Any) -> Question:
    if not isinstance(row, dict):
        raise ValueError(f"row {index} of {path} is not a question: {ascii(row)[:60]}")
    field = next((name for name in ANSWERS if row.get(name) is not None), None)
    if QUESTION not in row or field is None:
        missing = QUESTION if QUESTION not in row else FIELDS[1]
        raise ValueError(f"row {index} of {path} lacks the field {missing}")
    answers = [row[field]] if isinstance(row[field], str) else row[field]
    if not isinstance(answers, list) or not answers or not all(map(_is_valid_text, answers)):
        raise ValueError(
            f"field {field} of row {index} of {path} must be a text or some texts of up to "
            f"{MAX_TEXT} characters: {ascii(row[field])[:60]}"
        )
    text = row[QUESTION]
    if not _is_valid_text(text):
        raise ValueError(
            f"field {QUESTION} of row {index} of {path} must be a text of up to {MAX_TEXT} "
            f"characters: {ascii(text)[:60]}"
        )
    # A question without letters or digits is identified by its text.
    return Question(
        text.strip(), tuple(a.strip() for a in answers), normalize(text) or text.strip()
    )


def _is_valid_text(value: Any) -> bool:
    """Whether a value is text that is not blank and not too long."""
    return is_text(value) and 0 < len(value.strip()) and len(value) <= MAX_TEXT


def _parquet_rows(path: str | Path) -> Iterator[Any]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in (QUESTION, *ANSWERS) if name in names]
        if QUESTION not in columns or len(columns) < 2:
            missing = QUESTION if QUESTION not in columns else FIELDS[1]
            raise ValueError(f"{path} lacks the column {missing}; it has {', '.join(names)}")
        yield from parquet_rows(file, path, columns)
