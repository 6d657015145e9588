"""Problems of the data set's parquet files: agentica-org/DeepCoder-Preview-Dataset.

The problems of a single file are assigned to splits by content. In a folder, files named test* are
for evaluation, all others for training; a problem in both is left out of training.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.deepcoder.problems import Problem, Test
from ragen_jax.envs.files import is_text, normalize, open_parquet, parquet_rows
from ragen_jax.storage.datasets import StoredExamples
from ragen_jax.storage.limits import parse_json

FIELDS = ("problem", "tests")  # required columns
OPTIONAL_FIELDS = ("starter_code", "metadata")
BATCH_ROWS = 16  # rows read at once: the tests of a row can be many megabytes


class Problems:
    """Problems of files, each read on demand, with its tests read separately."""

    def __init__(self, examples: "StoredExamples", tests: "StoredExamples") -> None:
        self._examples, self._tests = examples, tests

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Problem:
        example = self._examples[index]
        text, identity, split = example["text"], example["about"], example["split"]
        return Problem(text, identity, row=index, split=split)

    def __iter__(self) -> Iterator[Problem]:
        return map(self.__getitem__, range(len(self)))

    def tests(self, index: int) -> tuple[Test, ...]:
        """Return the tests of problem number `index`."""
        return tuple(Test(*parts) for parts in json.loads(self._tests[index]["tests"]))


def load_problems(path: str | Path) -> Problems:
    """Return the problems of a parquet file or a folder's files, in the order of names and rows.

    The first call converts them to two data sets in the user's cache, named by the files' content;
    later calls read single rows from them, since a problem's tests can be many megabytes. The first
    call also prints how many rows were left out, and why.

    Raises:
      ValueError: pyarrow is not installed, there is no such file, or a file is not parquet, lacks a
        column or has a row that is not a problem.
    """
    # Imported here: these modules import environments, and importing TFDS takes seconds.
    from ragen_jax.storage.cache import cache_directory, content_hash
    from ragen_jax.storage.console import console
    from ragen_jax.storage.datasets import open_or_generate

    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'ragen_jax[data]'")
    files = parquet_files(path)
    try:
        content = content_hash(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    left_out = Counter()  # reason -> rows, if the files are converted now
    parts = {"deepcoder": ("text", "about", "split"), "deepcoder_tests": ("tests",)}
    stored = []
    for name, fields in parts.items():
        counts = Counter() if stored else left_out

        def generate(fields=fields, counts=counts):
            counts.clear()  # discard the counts of an attempt that a full disk ended
            for example in _examples(files, Path(path).is_dir(), counts):
                yield {field: example[field] for field in fields}

        stored.append(
            open_or_generate(
                name,
                {"content": content, "format": 2},
                features=dict.fromkeys(fields, np.str_),
                generate=generate,
                directory=cache_directory() / "datasets",
            )
        )
    if left_out:  # nothing is printed while TFDS generates
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
        console(f"{path}: row(s) left out: {reasons}")
    return Problems(*stored)


def parquet_files(path: str | Path) -> list[Path]:
    """Return the file, or the folder's parquet files. Raises ValueError if there are none."""
    path = Path(path)
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.parquet"))
    if not files:
        what = "folder with parquet files" if path.is_dir() else "file or folder"
        raise ValueError(f"there is no {what} {path}")
    return files


def _examples(files: Sequence[Path], named: bool, left_out: Counter) -> Iterator[dict[str, str]]:
    """Yield the cached fields of each row. named: whether file names decide the splits."""
    test = [file for file in files if named and file.name.startswith("test")]
    held_out = {
        normalize(row["problem"])
        for file in test
        for index, row in _rows(file, ("problem",))
        if _require_text(row, "problem", f"row {index} of {file}")
    }
    seen, count = set(), 0
    for file in files:
        split = "" if not named else "eval" if file in test else "train"
        for index, row in _rows(file, FIELDS):
            where = f"row {index} of {file}"
            text = _require_text(row, "problem", where)
            identity = normalize(text)
            tests = parse_tests(row, where)
            if not tests:
                left_out["without a test that can be run"] += 1
            elif split == "train" and identity in held_out:
                left_out["of train* that are in test*"] += 1
            elif identity in seen:
                left_out["given before"] += 1
            else:
                seen.add(identity)
                count += 1
                stored = json.dumps([[t.input, t.output, t.function] for t in tests])
                text = _statement(text, row)
                yield {"text": text, "about": identity, "split": split, "tests": stored}
    if not count:
        raise ValueError(f"{', '.join(map(str, files))}: no row has a problem with tests")


def _rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a file, with the columns `wanted` and any optional columns."""
    with open_parquet(path, wanted, rows=BATCH_ROWS) as file:
        columns = [*wanted, *(name for name in OPTIONAL_FIELDS if name in file.schema_arrow.names)]
        yield from enumerate(parquet_rows(file, path, columns, rows=BATCH_ROWS))


def _require_text(row: dict[str, Any], field: str, where: str) -> str:
    """Return the text of a field; raise ValueError if it is not text or is blank."""
    if not is_text(row[field]) or not row[field].strip():
        shown = ascii(row[field])[:60]
        raise ValueError(f"field {field} of {where} must be text that is not empty: {shown}")
    return row[field]


def _statement(text: str, row: dict[str, Any]) -> str:
    """Return the problem statement, with the code that an answer must begin with, if any."""
    starter = row["starter_code"] if "starter_code" in row else None
    if not starter or not is_text(starter):
        return text.strip()
    return f"{text.strip()}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"


def parse_tests(row: dict[str, Any], where: str) -> list[Test]:
    """Return the tests of a row, in any of the data set's formats; [] if there are none.

    The format is a list of objects with `input`, `output` and `testtype` or `type`, or one object
    with `inputs`, `outputs` and perhaps `fn_name`. A function's name is in the test or in the row's
    `metadata`; a test without a name is run as a program, as in the released code.
    """
    found = _read(row["tests"], f"field tests of {where}")
    named = _read(row["metadata"] or {}, f"field metadata of {where}") if "metadata" in row else {}
    name = named["func_name"] if isinstance(named, dict) and "func_name" in named else None
    if isinstance(found, dict) and "inputs" in found and "outputs" in found:
        function = found["fn_name"] if "fn_name" in found else ""
        pairs = zip(found["inputs"], found["outputs"], strict=False)
        # This format wraps a function's output in a list of one element.
        return [
            _make_test(i, o[0] if function and _is_single(o) else o, function) for i, o in pairs
        ]
    tests = []
    for number, test in enumerate(found if isinstance(found, list) else [found] if found else []):
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
            raise ValueError(f"test {number} of {where} lacks input or output: {str(test)[:60]}")
        function, right = _function(test, name), test["output"]
        # TACO's format, one object per test.
        if function and "fn_name" in test and _is_single(right):
            right = right[0]
        tests.append(_make_test(test["input"], right, function))
    return tests


def _is_single(output: Any) -> bool:
    return isinstance(output, list) and len(output) == 1


def _function(test: dict[str, Any], name: Any) -> str:
    """Return the function that a test calls; "" for a program."""
    kind = test["testtype"] if "testtype" in test else test["type"] if "type" in test else ""
    if kind not in ("functional", "function_call"):
        return ""
    metadata = test["metadata"] if "metadata" in test else None
    own_name = (
        metadata["func_name"] if isinstance(metadata, dict) and "func_name" in metadata else None
    )
    return str(own_name or (test["fn_name"] if "fn_name" in test else None) or name or "")


def _make_test(value: Any, right: Any, function: str) -> Test:
    if function:
        if isinstance(value, list):
            value = "\n".join(map(json.dumps, value))
        return Test(_text(value, json.dumps), _text(right, json.dumps), function)
    return Test(_text(value, _lines), _text(right, _lines))


def _text(value: Any, write: Any) -> str:
    text = value if isinstance(value, str) else write(value)
    return text.encode(errors="replace").decode()


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(value: Any, where: str) -> Any:
    """Parse a text as JSON; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
