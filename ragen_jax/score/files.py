"""Files of rollouts: JSON lines, or Parquet tables as TRL writes them."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.score.formats import Row, read_row, shows_images

ENDINGS = (".jsonl", ".parquet")
# The number of a step in the name of a file (step_000010.jsonl, 10.jsonl,
# completions_00010.parquet) or of a folder that it is in (step_10/train/all/traces.jsonl).
_FILE_STEP = re.compile(r"(?:step_|completions_|^)(\d+)$")
_FOLDER_STEP = re.compile(r"^step_(\d+)$")


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row that cannot be used."""

    place: str  # FILE:LINE
    reason: str


@dataclasses.dataclass(frozen=True)
class Read:
    """What files hold."""

    rows: list[Row]  # each with a step
    broken: list[Broken]
    unread: list[str]  # names of fields that nothing was made of, in order


def read_files(names: Sequence[str], rewards: Sequence[str] = ()) -> Read:
    """The rows of files. A row's step is what it says, else the number in the file's name, else
    the file's place in order, from 1.

    Args:
      names: of files; or of folders, for all rollouts directly in them.
      rewards: as `formats.read_row`.

    Raises:
      ValueError: a file is not there or of another kind, pyarrow is missing for one, or a row is of
        an agent that was shown images.
    """
    rows, broken, unread = [], [], {}
    for order, path in enumerate(_paths(names), start=1):
        step = _step_of(path)
        for number, record in _records(path):
            place = f"{path}:{number}"
            if shows_images(record):
                raise ValueError(
                    f"{place} is of an agent that was shown images, which score does not read; "
                    "give files of text alone"
                )
            try:
                if isinstance(record, ValueError):
                    raise record
                row, others = read_row(record, place, rewards)
            except ValueError as error:
                broken.append(Broken(place, str(error)))
                continue
            unread |= dict.fromkeys(sorted(others))
            if row.step is None:
                row = dataclasses.replace(row, step=order if step is None else step)
            rows.append(row)
    return Read(rows, broken, list(unread))


def _paths(names: Sequence[str]) -> list[Path]:
    paths = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in ENDINGS)
            if not inside:
                raise ValueError(f"--rollouts={name} is a folder without {' or '.join(ENDINGS)}")
            paths += inside
        elif not path.exists():
            raise ValueError(f"--rollouts={name} is not there")
        elif path.suffix == ".pkl":
            raise ValueError(
                f"--rollouts={name} is a pickle; RAGEN's scripts/convert_to_jsonl.py makes JSON "
                "lines of it"
            )
        else:
            paths.append(path)
    return paths


def _step_of(path: Path) -> int | None:
    found = _FILE_STEP.search(path.stem)
    for folder in path.parents:
        found = found or _FOLDER_STEP.search(folder.name)
    return int(found[1]) if found else None


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """(number of the line or row from 1, what it holds, or a ValueError why that is unreadable)."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import ArrowInvalid, parquet
        except ImportError as error:
            raise ValueError(f"--rollouts={path} needs pyarrow: pip install pyarrow") from error
        try:
            table = parquet.read_table(path)
        except (ArrowInvalid, OSError) as error:
            raise ValueError(f"--rollouts={path} is no Parquet file: {error}") from error
        yield from enumerate(table.to_pylist(), start=1)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # of UTF-8, too
                yield number, ValueError(f"is not JSON: {error}")
