"""Reads the files that a run writes at its steps, and reports files that cannot be read."""

import math
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.storage.console_streams import show
from ragen_jax.storage.limits import parse_json, read_arrays, read_bytes, read_json

T = TypeVar("T")
Say = Callable[[str], None]

# Exceptions that reading and checking a damaged JSON or npz file can raise.
DAMAGED = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError),
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error),
)


# Path of an image as `log.write_rollouts` names it. No other path is accepted, because a page
# shows the file.
IMAGE_FILE = re.compile(r"step_\d+_images/[0-9a-f]{16}\.png", re.ASCII)


def warn_unreadable(line: str) -> None:
    """Print a warning above any progress bar."""
    show(f"warning: {line}")


def policy_directory(path: str) -> str:
    """Return the directory of the model that `path` names: for a run's folder, that of its policy.

    Raises:
      ValueError: the run has not exported its policy.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() or not (folder / "metrics.jsonl").exists():
        return path
    if not (folder / "policy").is_dir():
        raise ValueError(
            f"{path} is a run without policy/, which is written at its end; export a checkpoint "
            f"with python -m ragen_jax.export --workdir={path}"
        )
    return str(folder / "policy")


def read_events(path: Path, say: Say = warn_unreadable) -> list[dict[str, Any]]:
    """Return the events that `log.write_events` wrote, without damaged lines; [] without a file."""
    found = []
    lines = read_bytes(path).split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event = parse_json(line)
            texts = [event[name] for name in ("rule", "action", "reason")]
            if type(event["step"]) is not int or not all(isinstance(x, str) for x in texts):
                raise ValueError("expected a step and three texts")
            found.append(event)
        except DAMAGED:
            say(f"{path}: line {number} is damaged")
    return found


def read_outcomes(folder: Path, say: Say = warn_unreadable) -> dict[int, list[float]]:
    """Return {step: [solved, ...]} for the files of `log.write_outcomes`, in order of steps.

    `solved` of a held-out problem is 1, 0, or NaN if its environment broke. At least one value of a
    step is not NaN.
    """

    def read(path: Path) -> list[float]:
        solved = [solved for _, solved in read_json(path)]
        known = [x for x in solved if x is not None]
        if not known or not all(type(x) is int and x in (0, 1) for x in known):
            raise ValueError(
                "expected 1 (solved), 0 (not solved) or null (failed) for each problem"
            )
        return [math.nan if x is None else x for x in solved]

    return _read_steps(folder, "json", read, say)


def read_gradients(workdir: Path, say: Say = warn_unreadable) -> dict[int, Metrics]:
    """Return {step: gradient/* metrics} for the files of `log.write_gradients`, in order."""

    def read(path: Path) -> Metrics:
        figures = read_json(path)
        return {str(name): _finite(value) for name, value in figures.items()}

    return _read_steps(workdir / "gradients", "json", read, say)


def read_scores(folder: Path, say: Say = warn_unreadable) -> dict[int, Scores]:
    """Return {step: `Scores`} for the files of `log.write_scores`, in order."""

    def read(path: Path) -> Scores:
        scores = Scores(**read_arrays(path))
        if scores.score_MN.shape != (len(scores.length_M), scores.score_MN.shape[1]):
            raise ValueError("expected one row per reasoning")
        return scores

    return _read_steps(folder, "npz", read, say)


def read_rollouts(folder: Path, say: Say = warn_unreadable) -> dict[int, list[dict[str, Any]]]:
    """Return {step: episodes} for the files of `log.write_rollouts`, in order."""

    def read(path: Path) -> list[dict[str, Any]]:
        records = [parse_json(line) for line in read_bytes(path).split(b"\n") if line]
        for record in records:
            for name in ("seed", "group", "member"):
                _whole_numbers([record[name]])
            for turn in record["turns"]:
                _finite(turn["reward"])
                _whole_numbers(turn["prompt_ids"])
                _whole_numbers(turn["sampled_ids"])
                if not isinstance(turn["valid"], bool):
                    raise ValueError("expected true (valid) or false for each reply")
                ", ".join(turn["actions"])
                for message in turn["messages"]:
                    text_of(message["content"])
                for name in turn.get("images", ()):
                    if not IMAGE_FILE.fullmatch(name):
                        raise ValueError("an image must be a file in the same folder")
        return records

    return _read_steps(folder, "jsonl", read, say)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message, with [image] in place of each image."""
    if isinstance(content, str):
        return content
    return "".join(str(part["text"]) if "text" in part else "[image]" for part in content)


def _read_steps(folder: Path, ending: str, read: Callable[[Path], T], say: Say) -> dict[int, T]:
    """Return {N: read(path)} for the files step_N of a folder, in order.

    Files that `read` cannot read are left out, and `say` receives a message about each.
    """
    found = {}
    for path in sorted(Path(folder).glob(f"step_*.{ending}")):
        try:
            found[int(path.stem.removeprefix("step_"))] = read(path)
        except DAMAGED:
            say(f"{path} is damaged")
    return found


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _whole_numbers(values: Sequence[Any]) -> None:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("expected whole numbers from 0")
