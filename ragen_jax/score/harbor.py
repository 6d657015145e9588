"""Trials of Harbor: the files next to a trajectory, TRIAL/agent/trajectory.json.

The reward is in TRIAL/result.json (`verifier_result.rewards`), or in TRIAL/verifier/reward.txt or
reward.json, which the task's tests write. With collect_rollout_details, result.json also holds the
token ids of the calls (`agent_result.rollout_details`).
"""

from pathlib import Path
from typing import Any

from ragen_jax.core.clean_text import describe_error
from ragen_jax.score.values import parse_nested
from ragen_jax.storage.limits import parse_json, read_bytes

TRAJECTORY = "trajectory.json"
AGENT = "agent"  # a trial's folder of the files that its agent wrote
MAX_PARTS = 1000  # largest number of files of a trajectory


def add_trial(record: Any, path: Path) -> tuple[Any, list[str]]:
    """Return (a trajectory with the fields of its trial, a line for each file that is not read).

    Args:
      record: the content of the file.
      path: the file. `record` is returned unchanged if it is not from Harbor.

    Returns:
      the record with `trial` {task_name, rewards, rollout_details} if a reward or a result is
      there, and `continuations`, the trajectories that continue it.
    """
    if path.name != TRAJECTORY or not isinstance(record, dict) or "steps" not in record:
        return record, []
    lines: list[str] = []
    added = dict(record)
    parts = _continuations(record, path, lines)
    if parts:
        added["continuations"] = parts
    trial = _read_trial(path.parent.parent, lines) if path.parent.name == AGENT else {}
    if trial:
        added["trial"] = trial
    return added, lines


def _read_trial(folder: Path, lines: list[str]) -> dict[str, Any]:
    trial: dict[str, Any] = {}
    result = _read_object(folder / "result.json", lines)
    trial["task_name"] = result.get("task_name")
    trial["rewards"] = _object(result.get("verifier_result")).get("rewards")
    trial["rollout_details"] = _object(result.get("agent_result")).get("rollout_details")
    text = folder / "verifier/reward.txt"
    if trial["rewards"] is None and text.is_file():
        content = _read(text, lines)
        trial["rewards"] = None if content is None else {"reward": content.decode(errors="replace")}
    if trial["rewards"] is None:
        trial["rewards"] = _read_object(folder / "verifier/reward.json", lines) or None
    return {name: value for name, value in trial.items() if value is not None}


def _continuations(record: dict[str, Any], path: Path, lines: list[str]) -> list[Any]:
    """Return the trajectories that continue one, each named by the one before."""
    found: list[Any] = []
    seen, current = {path.name}, record
    while isinstance(current, dict) and current.get("continued_trajectory_ref"):
        name = current["continued_trajectory_ref"]
        # The name is the file's content: only files in the same folder are opened.
        is_name = isinstance(name, str) and Path(name).name == name and name not in seen
        following = path.with_name(name) if is_name else path
        if not is_name or not following.is_file() or following.is_symlink():
            lines.append(f"{name!r}, which continues {path}: no such file in its folder")
            return found
        if len(found) == MAX_PARTS:
            lines.append(f"the files that continue {path}, after the first {MAX_PARTS}")
            return found
        current = _read_object(following, lines)
        if current:
            found.append(current)
            seen.add(name)
    return found


def _object(value: Any) -> dict[str, Any]:
    found = parse_nested(value)
    return found if isinstance(found, dict) else {}


def _read_object(path: Path, lines: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; {} without a file, or if it holds anything else."""
    content = _read(path, lines) if path.is_file() else None
    if content is None:
        return {}
    try:
        found = parse_json(content)
    except ValueError as error:
        lines.append(f"{path}: is not JSON: {error}")
        return {}
    if not isinstance(found, dict):
        lines.append(f"{path}: is not an object")
    return found if isinstance(found, dict) else {}


def _read(path: Path, lines: list[str]) -> bytes | None:
    try:
        return read_bytes(path)
    except (OSError, EOFError, ValueError) as error:
        lines.append(f"{path}: {describe_error(error)}")
        return None
