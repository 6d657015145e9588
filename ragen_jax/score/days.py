"""The day that a chat template writes into the prompts of each row, and its source.

The sources, in order: the row's field `date`; `model.date` in the config.json of the run whose
rollouts/ holds the file; --date; today.
"""

import collections
import datetime
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.model.dates import is_day
from ragen_jax.score.formats import Row

FIELD = "date"
FOLDER = "rollouts"  # a run's folder of rollouts, next to its config.json


def field_day(value: Any) -> str | None:
    """Return YYYY-MM-DD for a row's field with an ISO 8601 date or time; else None."""
    if isinstance(value, datetime.datetime):
        return value.date().isoformat()
    if isinstance(value, datetime.date):
        return value.isoformat()
    if not isinstance(value, str):
        return None
    try:
        return datetime.datetime.fromisoformat(value.strip()).date().isoformat()
    except ValueError:
        return None


def run_day(path: Path) -> tuple[str | None, str | None]:
    """Return (model.date of the run that wrote a file, why its config.json cannot be read).

    Both are None if the file is not from a run that recorded a day.
    """
    # With several environments, each has a subfolder.
    folders = [folder for folder in path.absolute().parents[:2] if folder.name == FOLDER]
    config = folders[0].parent / "config.json" if folders else None
    if config is None or not config.is_file():
        return None, None
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{config}, for the day of its run: {type(error).__name__}: {error}"
    model = found.get("model") if isinstance(found, dict) else None
    day = model.get("date") if isinstance(model, dict) else None
    return (day, None) if isinstance(day, str) and is_day(day) else (None, None)


def day_lines(rows: Sequence[Row], fallback: str, *, given: bool) -> Iterator[str]:
    """Yield a line for each day with which prompts are rendered, and its source.

    Args:
      rows: the scored rows.
      fallback: the day for rows that record none.
      given: whether `fallback` is from --date; otherwise it is today.
    """
    counts = collections.Counter((row.day or fallback, row.day_from) for row in rows)
    for (day, origin), count in counts.items():
        which = "prompts" if len(counts) == 1 else f"the prompts of {count} rows"
        line = f"the chat template writes the date: {which} are rendered with "
        if origin:
            line += f"{day}, from {origin}"
        elif given:
            line += f"{day}, from --date"
        else:
            line += f"today's, {day}; set the day of the rollouts with --date=YYYY-MM-DD"
        yield line
