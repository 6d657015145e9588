"""Rows with a prompt, from a file or a data set of the Hub, and their splits.

The rows are converted once, to data sets in the user's cache that are named by their content;
later starts read single rows.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.files import is_text, json_rows, json_value, open_parquet, parquet_rows
from ragen_jax.envs.problems import SPLITS, split_by_hash
from ragen_jax.storage.atomic_io import disk_error_message
from ragen_jax.storage.datasets import StoredExamples

FORMAT = 1  # version of the cached data; raise it when a change of this file changes that data
MAX_TEXT = 100_000  # characters of a prompt: the limit on observations (rollout/env_calls.py)
ROLES = ("system", "user")  # accepted roles of a prompt's messages

# Value of a row's split field -> split.
SPLIT_NAMES = dict(zip(SPLITS, SPLITS, strict=True)) | dict.fromkeys(
    ("test", "validation", "valid", "dev"), "eval"
)
# One letter per row in the cached text of all splits.
SPLIT_LETTERS = {split: split[0] for split in SPLITS}
LEFT_OUT = "-"


@dataclasses.dataclass(frozen=True)
class Source:
    """The source of rows.

    name: for messages
    content: JSON-like; determines the rows, for names of caches
    read: returns all rows, from the first; raises ValueError
    """

    name: str
    content: Mapping[str, str]
    read: Callable[[], Iterable[Any]]


class Rows:
    """The rows of a source, each read on demand.

    splits: split of each row; "" if the row is left out
    """

    def __init__(self, examples: "StoredExamples", splits: np.ndarray) -> None:
        self._examples, self.splits = examples, splits

    def prompt(self, index: int) -> str:
        """Return the text shown for a row's prompt."""
        return self._examples[index]["shown"]

    def solution(self, index: int) -> str:
        """Return the solution of a row; "" if no solutions are read."""
        return self._examples[index]["solution"]

    def row(self, index: int) -> dict[str, Any]:
        """Return a row as it was given; a fresh copy each time."""
        return json.loads(self._examples[index]["row"])


def file_source(path: str | Path) -> Source:
    """Return the rows of a file: parquet, a JSON list or JSON Lines, detected by its first bytes.

    Raises:
      ValueError: there is no such file, or it cannot be read.
    """
    from ragen_jax.storage.cache import content_hash

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        content = content_hash(path)
        with path.open("rb") as file:
            head = file.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    read = json_rows
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        read = _parquet
    elif head.startswith(b"["):
        read = json_value
    return Source(str(path), {"content": content}, functools.partial(read, path))


def hub_source(name: str, *, subset: str, split: str, revision: str) -> Source:
    """Return the rows of a split of a data set that `datasets.load_dataset` finds.

    name: an id of the Hub, which is downloaded once, or a folder.
    subset: its configuration; "": the only one.
    revision: a commit, tag or branch; "": the newest.

    Raises:
      ValueError: `datasets` is not installed or finds no such data set, or the name is "pandas",
        its reader of pickles.
    """
    if name == "pandas":
        raise ValueError(f"hub={name!r} reads pickles, which are code; give JSON or parquet files")
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"hub={name!r} needs datasets: pip install 'ragen_jax[data]'")
    datasets: Any = importlib.import_module("datasets")  # an optional dependency, without types
    where = "/".join(part for part in (name, subset, split) if part)
    try:
        data = datasets.load_dataset(
            name,
            subset or None,
            split=split,
            revision=revision or None,
            trust_remote_code=False,  # otherwise versions before 4 ask on standard input
        )
    except Exception as error:  # its readers and the network raise many kinds
        if disk_error_message(error) is not None:  # the download cache failed
            raise
        line = " ".join(str(error).split())[:300]
        raise ValueError(
            f"datasets.load_dataset finds no {where}: {type(error).__name__}: {line}"
        ) from error
    return Source(where, {"hub": where, "fingerprint": data._fingerprint}, lambda: data)


def load_rows(source: Source, *, prompt: str, solution: str = "", split_field: str = "") -> Rows:
    """Return the rows of a source, assigned to splits.

    The split is a hash of the prompt, ignoring case and spaces, or the value of a field. If the
    field puts one prompt into several splits, only its rows in eval are kept, or else those in
    train; a printed line reports the number of rows left out.

    Args:
      prompt: the field with a text, or with messages as `prompt_text` takes them; "": the whole
        row, as JSON.
      solution: the field with a correct reply, a text; "": no solutions are read.
      split_field: a field whose text is a key of SPLIT_NAMES; "": none.

    Raises:
      ValueError: nothing can be read, or a row is not an object or lacks a field; the message
        names row and field.
    """
    # Imported here: these modules import environments, and importing TFDS takes seconds.
    from ragen_jax.storage.cache import cache_directory
    from ragen_jax.storage.console import console
    from ragen_jax.storage.datasets import open_or_generate

    settings = {
        **source.content,
        "prompt": prompt,
        "solution": solution,
        "format": FORMAT,
    }
    directory = cache_directory() / "datasets"
    examples = open_or_generate(
        "dataset",
        settings,
        features=dict.fromkeys(("row", "shown", "solution"), np.str_),
        generate=lambda: _examples(source, prompt, solution),
        directory=directory,
    )
    left_out = []  # number of rows left out, if splits are computed now
    (stored_splits,) = open_or_generate(
        "dataset_splits",
        {**settings, "split_field": split_field},
        features={"letters": np.str_},
        generate=lambda: [{"letters": _letters(source.name, examples, split_field, left_out)}],
        directory=directory,
    )
    if any(left_out):  # nothing is printed while TFDS generates
        console(
            f"{source.name}: {left_out[0]} row(s) left out, because their prompts are in "
            "another split"
        )
    split_of = {letter: split for split, letter in SPLIT_LETTERS.items()} | {LEFT_OUT: ""}
    return Rows(examples, np.array([split_of[letter] for letter in stored_splits["letters"]]))


def rows_of_split(splits: np.ndarray, split: str | None, name: str) -> np.ndarray:
    """Return the indices of the rows of a split; None: of all rows that are not left out.

    Args:
      splits: split of each row; "" if it is left out.
      name: of the source, for messages.

    Raises:
      ValueError: the split has no row.
    """
    found = np.flatnonzero(splits != "" if split is None else splits == split)
    if not len(found):
        counts = ", ".join(f"{np.sum(splits == each)} of {each}" for each in SPLITS)
        raise ValueError(
            f"{name} has no row of split {split!r} ({counts}); give more rows, or name each one's "
            "split in a field (split_field)"
        )
    return found


def prompt_identity(shown: str) -> str:
    """Return the identity of a prompt: case and spaces do not count."""
    return " ".join(shown.lower().split())


def prompt_text(value: Any, where: str) -> str:
    """Return the text shown for a prompt.

    The prompt is a text, or messages {"role", "content"} of the system and the user, which are
    separated by empty lines.

    Raises:
      ValueError: anything else, such as a message of the assistant.
    """
    if not isinstance(value, list):
        return _text(value, where)
    parts = [_content(message, f"message {i} of {where}") for i, message in enumerate(value)]
    if not parts or value[-1]["role"] != "user":
        raise ValueError(f"the messages of {where} must end with one of role 'user'")
    return _text("\n\n".join(parts), where)


def _content(message: Any, where: str) -> str:
    """Return the text of a message, whose content may be a list of parts of type "text"."""
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError(f"{where} must have role and content, got {ascii(message)[:60]}")
    if message["role"] not in ROLES:
        raise ValueError(
            f"{where} has role {message['role']!r}; accepted: {', '.join(ROLES)} (the policy "
            "writes all replies itself)"
        )
    content = message["content"]
    if isinstance(content, list) and all(map(_is_part, content)):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not is_text(content):
        raise ValueError(f"{where} must have text as content, got {ascii(message)[:60]}")
    return content


def _is_part(part: Any) -> bool:
    """Whether a part of a message is text: {"type": "text", "text": ...}."""
    return isinstance(part, dict) and part.get("type") == "text" and is_text(part.get("text"))


# ------------------------------------------------------------------------------------ conversion


def _examples(source: Source, prompt: str, solution: str) -> Iterator[dict[str, str]]:
    """Yield the cached fields of each row."""
    index = -1
    for index, row in enumerate(source.read()):
        where = f"row {index} of {source.name}"
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object with fields, got {ascii(row)[:60]}")
        for option, field in (("prompt", prompt), ("solution", solution)):
            if field and field not in row:
                raise ValueError(
                    f"{where} lacks the field {field} (option {option}); it has {', '.join(row)}"
                )
        fields = (f"{json.dumps(name)}: {_json(row[name], name, where)}" for name in row)
        whole = "{" + ", ".join(fields) + "}"
        yield {
            "row": whole,
            "shown": prompt_text(row[prompt], f"field {prompt} of {where}") if prompt else whole,
            "solution": _text(row[solution], f"field {solution} of {where}") if solution else "",
        }
    if index < 0:
        raise ValueError(f"{source.name} holds no rows")


def _text(value: Any, where: str) -> str:
    """Return a text without surrounding spaces; it must not be empty or too long."""
    if not is_text(value) or not value.strip() or len(value) > MAX_TEXT:
        shown = ascii(value)[:60]
        raise ValueError(f"{where} must be text of 1 to {MAX_TEXT} characters, got {shown}")
    return value.strip()


def _json(value: Any, name: str, where: str) -> str:
    """Return the JSON of a field's value; dates are written as text."""
    try:
        return json.dumps(value, default=_as_text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"field {name} of {where} cannot be kept as JSON: {error}") from error


def _as_text(value: Any) -> str:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} is not a number, text, list or object")


def _letters(name: str, examples: "StoredExamples", field: str, left_out: list[int]) -> str:
    """Return a letter per row for its split; append the number of rows left out to `left_out`."""
    if not field:
        return "".join(
            SPLIT_LETTERS[split_by_hash("dataset", prompt_identity(x["shown"]))] for x in examples
        )
    order = ("imitation", "train", "eval")  # the last of these that has a prompt keeps it
    ranked_rows, best = [], {}
    for index, example in enumerate(examples):
        value = json.loads(example["row"]).get(field)
        if not isinstance(value, str) or value not in SPLIT_NAMES:
            raise ValueError(
                f"field {field} (option split_field) of row {index} of {name} must be one of "
                f"{', '.join(SPLIT_NAMES)}, got {ascii(value)[:60]}"
            )
        key, rank = prompt_identity(example["shown"]), order.index(SPLIT_NAMES[value])
        best[key] = max(rank, best.get(key, 0))
        ranked_rows.append((key, rank))
    letters = [
        SPLIT_LETTERS[order[rank]] if rank == best[key] else LEFT_OUT for key, rank in ranked_rows
    ]
    left_out.append(Counter(letters)[LEFT_OUT])
    return "".join(letters)


def _parquet(path: Path) -> Iterator[Any]:
    with open_parquet(path) as file:
        yield from parquet_rows(file, path)
