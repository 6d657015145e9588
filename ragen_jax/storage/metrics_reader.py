"""Read metrics.jsonl, which has one row per line; find damaged lines and steps without a row."""

import bisect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ragen_jax.core.types import Metrics
from ragen_jax.storage.atomic_io import atomic_open, atomic_write
from ragen_jax.storage.limits import parse_json, read_bytes

SET_ASIDE = "metrics.damaged.jsonl"  # in the same folder: the lines that `repair` removed


def read_metrics(path: str | Path) -> list[Metrics]:
    """Return the rows of a metrics.jsonl; [] if there is no file.

    Lines at the end that are not rows are left out: a killed process leaves half a line, and a
    failing disk leaves other damage.

    Raises:
      ValueError: an earlier line is not a row, or its step is not after the step of the row before.
    """
    rows, damaged = _read(Path(path))
    for number, line in damaged:
        raise ValueError(
            f"{path}: line {number} does not continue the rows above it ({_shorten_line(line)}); "
            f"python -m ragen_jax.train --workdir={Path(path).parent} --repair resumes with "
            f"the intact lines and moves the others to {SET_ASIDE}"
        )
    return rows


def count_rows(path: Path) -> int:
    """Return the number of whole lines of a metrics.jsonl, intact or not; 0 if there is no file."""
    return read_bytes(path).count(b"\n") if path.exists() else 0


def repair(path: Path) -> list[str]:
    """Move the damaged lines of a metrics.jsonl to SET_ASIDE in the same folder.

    Returns:
      A list with a sentence about the moved lines; [] if there were none.
    """
    rows, damaged = _read(path)
    if not damaged:
        return []
    aside = path.with_name(SET_ASIDE)
    before = aside.read_bytes() if aside.exists() else b""
    lines = "".join(f"{line}\n" for _, line in damaged)
    with atomic_open(aside, "wb") as file:
        file.write(before + lines.encode(errors="surrogateescape"))
    atomic_write(path, "".join(json.dumps(row) + "\n" for row in rows))
    numbers = ", ".join(str(number) for number, _ in damaged)
    return [f"{path}: moved damaged line(s) {numbers} to {aside.name}"]


def lost_steps(rows: Iterable[Metrics], last_step: int) -> list[int]:
    """Return the steps from 1 to `last_step` that have no row."""
    steps = {int(row["step"]) for row in rows}
    return [step for step in range(1, last_step + 1) if step not in steps]


def _read(path: Path) -> tuple[list[Metrics], list[tuple[int, str]]]:
    """Return (rows, (number, text) of damaged lines, except those at the end of the file)."""
    lines = [""]
    if path.exists():
        lines = read_bytes(path).decode(errors="surrogateescape").split("\n")
    found = {  # text after the last newline is an incomplete line
        number: (row, line)
        for number, line in enumerate(lines[:-1], start=1)
        if line
        for row in [_row(line)]
    }
    while found and found[max(found)][0] is None:
        del found[max(found)]
    steps = {number: int(row["step"]) for number, (row, _) in found.items() if row}
    kept = _ascending(steps)
    rows = [row for number, (row, _) in found.items() if row and number in kept]
    return rows, [(number, line) for number, (_, line) in found.items() if number not in kept]


def _ascending(steps: dict[int, int]) -> set[int]:
    """Return the keys of the longest strictly increasing subsequence of the steps.

    A single wrong step must not make all later rows count as damaged.
    """
    ends: list[int] = []  # the smallest step that ends an increasing subsequence of each length
    last: list[int] = []  # the key of that step
    before: dict[int, int | None] = {}
    for key, step in steps.items():
        length = bisect.bisect_left(ends, step)
        ends[length : length + 1] = [step]
        last[length : length + 1] = [key]
        before[key] = last[length - 1] if length else None
    kept, key = set(), last[-1] if last else None
    while key is not None:
        kept.add(key)
        key = before[key]
    return kept


def _row(line: str) -> Metrics | None:
    """Parse a line as a row; return None if it is not a row."""
    try:
        row: Any = parse_json(line, parse_constant=_no_number)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or row["step"] < 0:
        return None
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in row.values())
    return row if numbers else None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is in no row")


def _shorten_line(line: str) -> str:
    """Return the beginning of a line in printable form."""
    return repr(line if len(line) <= 40 else line[:40] + "...")
