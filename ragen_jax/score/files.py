"""Read rollout files: JSON lines, lists or documents, optionally with gzip, or Parquet tables."""

import codecs
import dataclasses
import hashlib
import importlib.util
import io
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from ragen_jax.core.clean_text import describe_error, shorten
from ragen_jax.score.days import FIELD, field_day, run_day
from ragen_jax.score.folders import find_sources, step_of
from ragen_jax.score.formats import Row, find_format, read_row, shows_images
from ragen_jax.score.harbor import add_trial
from ragen_jax.storage import limits
from ragen_jax.storage.confined import BATCH_ROWS, check_parquet
from ragen_jax.storage.limits import parse_json, read_bytes, read_lines
from ragen_jax.storage.parquet import rows_of_batch

MOST_REASON = 1000  # largest number of characters of a reason


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row that cannot be used."""

    place: str  # FILE:LINE, or FILE if it cannot be read
    reason: str


def make_broken(place: str, error: Exception) -> Broken:
    """Return a row that cannot be used because reading it raised `error`.

    The message of a ValueError becomes the reason.
    """
    if isinstance(error, ValueError):
        return Broken(place, shorten(str(error), MOST_REASON))
    return Broken(place, f"cannot be read: {describe_error(error)}")


@dataclasses.dataclass(frozen=True)
class FileContents:
    """Content of files; every row is either in `rows` or in `broken`."""

    rows: list[Row]  # each with a step
    broken: list[Broken]
    unread: dict[str, int]  # {field that no reader uses: number of rows with it}, in order
    others: list[str] = dataclasses.field(default_factory=list)  # files that are not read, and why
    repeated: list[str] = dataclasses.field(default_factory=list)  # rows equal to an earlier one


def read_files(
    names: Sequence[str],
    rewards: Sequence[str] = (),
    rows: Sequence[Any] = (),
    form: str = "",
    skip: Collection[Path] = (),
) -> FileContents:
    """Read the rows of files, and rows that are in memory.

    A row's step is its field, else the number in the file's name (below 2**32), else the file's
    place in order, from 1. Its day is its field `date`, else the day of the file's run.

    Args:
      names: files, or folders (see folders.py).
      rewards: see `formats.read_row`.
      rows: further rows, as a JSON file would hold them; they count as a file after the others.
      form: name of the format of all rows, in any case; "": recognised row by row.
      skip: files that are not read, but count in the order of files.

    Raises:
      ValueError: a file is missing or of an unknown kind, pyarrow is needed but missing, the format
        is unknown, or a row is from an agent that was shown images.
    """
    form = find_format(form)
    listed, others = find_sources(names)
    paths = [
        (order, path)
        for order, source in enumerate(listed, 1)
        for path in source.paths
        if path not in skip
    ]
    _check_parquet([path for _, path in paths if path.suffix == ".parquet"])
    found = FileContents([], [], {}, others)
    digests: set[bytes] = set()  # digests of all rows
    sources: list[tuple[int, str, int | None, str | None, Iterable[tuple[int, Any]]]] = []
    for order, path in paths:
        day, damage = run_day(path)
        if damage and damage not in others:
            others.append(damage)
        records = _with_trial(_records(path), path, others)
        sources.append((order, str(path), step_of(path), day, records))
    if rows:
        sources.append((len(listed) + 1, "rows", None, None, enumerate(rows, start=1)))
    for order, source, step, day, records in sources:
        for number, record in records:
            place = f"{source}:{number}" if number else source
            if shows_images(record):
                raise ValueError(
                    f"{place} is from an agent with images, which score does not support; pass "
                    "files of text only"
                )
            try:
                if isinstance(record, ValueError):
                    raise record
                row, unread = read_row(record, place, rewards, form)
                if row.step is None:
                    row = dataclasses.replace(row, step=order if step is None else step)
                digest = _digest(row.step, record)
            except Exception as error:  # the content of a row may cause any error
                found.broken.append(make_broken(place, error))
                continue
            own = field_day(record.get(FIELD)) if isinstance(record, dict) else None
            if own:
                unread = unread - {FIELD}
                row = dataclasses.replace(row, day=own, day_from=f"their field {FIELD!r}")
            elif day:
                row = dataclasses.replace(row, day=day, day_from="the config.json of their run")
            for name in sorted(unread):
                found.unread[name] = found.unread.get(name, 0) + 1
            found.rows.append(row)
            if digest in digests:
                found.repeated.append(place)
            digests.add(digest)
    return found


def _digest(step: int | None, record: Any) -> bytes:
    content = json.dumps([step, record], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode()).digest()


def _with_trial(
    records: Iterable[tuple[int, Any]], path: Path, others: list[str]
) -> Iterator[tuple[int, Any]]:
    """Yield records, with the trials of Harbor's trajectories; unread files are added to others."""
    for number, record in records:
        added, lines = add_trial(record, path)
        others += lines
        yield number, added


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line or row number from 1, its content or a ValueError if that is unreadable).

    Number 0 is a file that cannot be read, or not to its end.
    """
    if path.suffix == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path) as file:
                batches = file.iter_batches(batch_size=BATCH_ROWS)
                records = (record for batch in batches for record in rows_of_batch(batch))
                for number, record in enumerate(records, start=1):
                    if isinstance(record, dict):
                        record = {name: _plain(value) for name, value in record.items()}
                    yield number, record
        except (ArrowException, OSError) as error:
            yield 0, ValueError(f"cannot be read as Parquet: {error}")
        return
    try:
        lines = _lines(path)
        if ".json" in path.suffixes:
            content = _document(lines)
            if isinstance(content, ValueError) and _is_indented(lines):
                content = [ValueError(f"is not JSON: {content}")]
            if not isinstance(content, ValueError):
                yield from enumerate(content if isinstance(content, list) else [content], start=1)
                return
    except (OSError, EOFError, zlib.error) as error:
        yield 0, ValueError(f"cannot be read: {error}")
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, parse_json(line)
        except ValueError as error:  # includes invalid UTF-8
            yield number, ValueError(f"is not JSON: {error}")


def _check_parquet(paths: Sequence[Path]) -> None:
    """Refuse Parquet files that are too large, or that cannot be read without pyarrow."""
    if not paths:
        return
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"--rollouts={paths[0]} needs pyarrow: pip install pyarrow")
    check_parquet(*paths, most=limits.MAX_FILE_BYTES)


def _plain(value: Any) -> Any:
    """Convert the value of a Parquet cell to its JSON form.

    A struct has the fields of all rows: a null in it means that the row lacks the field.
    """
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        is_map = bool(value) and all(isinstance(each, tuple) and len(each) == 2 for each in value)
        return _plain(dict(value)) if is_map else [_plain(each) for each in value]
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value % 1 == 0 else float(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    return value


def _document(lines: Sequence[bytes]) -> Any:
    """Parse the list or object of a .json file; the error if it contains JSON lines or is torn."""
    try:
        return parse_json(b"".join(lines))
    except ValueError as error:
        return error


def _is_indented(lines: Sequence[bytes]) -> bool:
    """Return whether a file is one document on several lines, rather than JSON lines."""
    return next((line.strip() for line in lines if line.strip()), b"") in (b"{", b"[")


def _lines(path: Path) -> list[bytes]:
    """Read the lines of a UTF-8, UTF-16 or gzip file as UTF-8, without byte-order marks."""
    content = read_bytes(path)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        content = content.decode("utf-16", errors="surrogateescape").encode(errors="surrogatepass")
    lines = read_lines(io.BytesIO(content), path)
    return [line.removeprefix(codecs.BOM_UTF8) for line in lines]  # files may be concatenated
