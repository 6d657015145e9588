"""The day that a chat template writes into the prompts of each row, and where it is recorded.

a row's field `date`, else `model.date` in the config.json of the run whose rollouts/ holds the
file, else --date, else today
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
FOLDER = "rollouts"  # of a run, beside its config.json


def field_day(value: Any) -> str | None:
    """YYYY-MM-DD of a row's field: a day or a moment, as ISO 8601 writes them; else None."""
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
    """(model.date of the run whose rollouts a file holds, why its config.json cannot be read).

    Both None: the file is not of a run that recorded a day.
    """
    # Of several environments each has a folder in it.
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
    """A line for each day that prompts are rendered with, and where it is from.

    Args:
      rows: those that are scored. fallback: the day of rows that record none.
      given: whether that is of --date; else it is today's.
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
