"""Writes a run's metrics, events, rollouts with their images, and lines on the console."""

import dataclasses
import functools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.clean_text import clean_text, shorten
from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.types import Episode, Metrics, Turn
from ragen_jax.diagnostics.intervals import paired_gain
from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.envs.scalars import plain_scalar
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.transcript import image_files, transcript
from ragen_jax.run.counters import Counters
from ragen_jax.run.run_files import read_events, read_outcomes
from ragen_jax.storage.atomic_io import append_line, atomic_open, atomic_write, with_retries
from ragen_jax.storage.console import console
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.storage.trackers import Follower, end_all


@dataclasses.dataclass(frozen=True)
class Column:
    """A metric of the console's lines."""

    metric: str
    name: str
    form: str
    chance: str = ""  # metric of its chance level, shown in the same format


MOST_FACT = 1000  # characters of a text in the facts of a turn
FIRST_TURN = "collapse/first_turn"
COLUMNS = (
    Column("rollout/success", "success", "{:.2f}"),
    Column("rollout/return", "return", "{:+.2f}"),
    Column("update/entropy", "entropy", "{:.3f}"),
    Column(f"{FIRST_TURN}/own_margin", "information", "{:.2f}"),
    Column(
        f"{FIRST_TURN}/retrieval_acc",
        "retrieval",
        "{:.2f}",
        chance=f"{FIRST_TURN}/retrieval_chance",
    ),
    Column("filter/kept_ratio", "kept", "{:.2f}"),
    Column("throughput/tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("time/step", "s", "{:.2f}"),
    Column("time/diagnose_share", "diagnosis", "{:.0%}"),
)
# Columns that are measured every few steps: the lines between repeat the last value with its step.
REPEATED = frozenset(c.metric for c in COLUMNS if c.metric.startswith("collapse/"))


class MetricsLog:
    """Writer of metrics.jsonl, which has one flat JSON object per step.

    Only the first process writes, and each row is flushed at once. Values that are not finite are
    left out.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        last_step: int,
        trackers: Iterable[str] = (),
        config: dict[str, Any] | None = None,
        on_row: Callable[[Metrics], None] | None = None,
    ) -> None:
        """Open the log to continue after `last_step`; drop later rows and torn lines.

        Args:
          trackers: keys of trackers.TRACKERS, the trackers that receive the rows.
          config: the run's config, for the trackers.
          on_row: called with each row after it is written.
        """
        self.path = Path(path)
        self.file, self.followers, self.on_row = None, [], on_row
        self.last: Metrics = {}  # the last written row
        self.measured: Metrics = {}  # the last row with the metrics of REPEATED
        self.totals = Counters([])
        if not is_main_process():
            return
        rows = [row for row in read_metrics(self.path) if row["step"] <= last_step]
        self.totals, self.last = Counters(rows), rows[-1] if rows else {}
        self.measured = next((row for row in reversed(rows) if REPEATED <= row.keys()), {})
        atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self.file = with_retries(functools.partial(self.path.open, "r+b", buffering=0), self.path)
        for name in dict.fromkeys(trackers):
            self.followers.append(Follower(name, self.path, config or {}, console))
            self.followers[-1].wake()  # send the rows that it may lack

    def write(self, step: int, metrics: Metrics) -> Metrics:
        """Append a row and return it."""
        row = {"step": int(step)}
        for name, value in metrics.items():
            value = float(value)
            if math.isfinite(value):
                row[clean_text(name)] = value
        self.last = row
        if REPEATED <= row.keys():
            self.measured = row
        if self.file:
            append_line(self.file, json.dumps(row, allow_nan=False) + "\n")
        for follower in self.followers:
            follower.wake()
        if self.on_row is not None:
            self.on_row(row)
        return row

    def sync(self) -> None:
        """Wait until all rows are on the disk.

        Called before a checkpoint is saved: after a crash, no row before it may be missing.
        """
        if self.file:
            with_retries(functools.partial(os.fsync, self.file.fileno()), self.path)

    def close(self, exit_code: int = 0) -> None:
        """Close the log and its trackers, which receive the run's exit code."""
        if self.file:
            self.file.close()
        end_all(self.followers, exit_code, console)
        self.followers = []


def write_events(path: Path, step: int, fired: Iterable[Fired], *, further: bool = False) -> None:
    """Write the step, rule, action and reason of each fired rule as a line of events.jsonl.

    Existing events of this step and of later steps are replaced: a run that was resumed from an
    earlier step writes them again.

    Args:
      further: keep the existing events of this step.
    """
    if not is_main_process():
        return
    events = [event for event in read_events(path) if event["step"] < step + further]
    events += [{"step": step} | dataclasses.asdict(rule) for rule in fired]
    if not events and not path.exists():
        return
    atomic_write(path, "".join(json.dumps(event) + "\n" for event in events))


def write_rollouts(
    path: str | Path,
    episodes: Iterable[Episode],
    chat: Chat,
    reward_of_turn: Callable[[Turn], float],
    kept: Collection[tuple[int, int]] | None,
) -> None:
    """Write episodes as JSON lines: OpenAI messages, token ids, log-probs, rewards and success.

    Success is null if the environment does not define it. Each turn is written as the policy saw
    it: the messages of its prompt, then its reply (rollout/transcript.py explains which of these
    reproduce the ids), and the `facts` of its info, if any. The images are PNG files in a folder
    next to the file (step_N_images for step_N.jsonl); each image is stored once, and the lines
    refer to it by name. Images of an earlier pass over the step to which no line refers are
    removed.

    Args:
      kept: (seed, member) of the episodes that the step learns from; None: of held-out problems,
        from which nothing is learned.
    """
    path, episodes = Path(path), list(episodes)
    defined = success_is_defined(episodes)
    folder = path.with_name(f"{path.stem}_images")
    images = {
        name: image
        for episode in episodes
        for turn in episode.turns
        for name, image in zip(image_files(turn), turn.images, strict=True)
    }
    for name, image in images.items():
        if not (folder / name).exists():
            with atomic_open(folder / name, "wb") as file:
                Image.fromarray(image).save(file, format="PNG")
    with atomic_open(path) as file:
        for episode in episodes:
            turns = [
                {
                    **transcript(chat, episode.turns[:number], turn, folder=f"{folder.name}/"),
                    "prompt_ids": turn.prompt.tolist(),
                    "sampled_ids": turn.sampled.tolist(),
                    "logps": [round(logp, 4) for logp in turn.logp.tolist()],
                    "actions": list(turn.actions),
                    "valid": turn.valid,
                    "reward": reward_of_turn(turn),
                    **({"facts": found} if (found := facts(turn.info)) else {}),
                }
                for number, turn in enumerate(episode.turns)
            ]
            record = {
                "seed": episode.seed,
                "group": episode.group,
                "member": episode.member,
                "success": episode.success if defined else None,
                "kept": None if kept is None else (episode.seed, episode.member) in kept,
                **({"error": episode.error} if episode.error else {}),
                "turns": turns,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    for left in folder.glob("*.png"):
        if left.name not in images:
            with_retries(functools.partial(left.unlink, missing_ok=True), left)


def facts(info: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the numbers and texts of a turn's info that JSON can hold, without its success."""
    found = {}
    for name, value in info.items():
        value = plain_scalar(value)
        if isinstance(value, str):
            value = shorten(clean_text(value), MOST_FACT)
        elif not isinstance(value, bool | int | float) or not abs(value) < 2**63:
            continue
        if isinstance(name, str) and name != "success":
            found[clean_text(name)] = value
    return found


def step_line(step: int, steps: int, row: Metrics, measured: Metrics | None = None) -> str:
    """Return the console line of a step: the first of COLUMNS, limited to the terminal's width.

    Args:
      measured: the last row with the metrics of REPEATED, which are shown with its step if the
        step's row does not have them. None: there is no such row.
    """
    width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else math.inf
    line = f"step {step:>{len(str(steps))}}/{steps}"
    for cell in _cells(row, measured or {}):
        if len(line) + 2 + len(cell) > width:
            break
        line += f"  {cell}"
    return line


def live_figures(row: Metrics) -> str:
    """Return the text of a progress bar after a step: the first two of COLUMNS in the row."""
    return ", ".join(_cells(row, {})[:2])


def _cells(row: Metrics, measured: Metrics) -> list[str]:
    cells = []
    for column in COLUMNS:
        repeated = column.metric in REPEATED and column.metric not in row
        source = measured if repeated else row
        if column.metric not in source:
            continue
        notes = []
        if column.chance in source:
            notes.append(f"chance {column.form.format(source[column.chance])}")
        if repeated:
            notes.append(f"step {source['step']:.0f}")
        value = column.form.format(source[column.metric])
        cells.append(f"{column.name} {value}" + (f" ({', '.join(notes)})" if notes else ""))
    return cells


def eval_line(step: int, row: Metrics) -> str:
    """Return the console line of an evaluation."""
    if "eval/return" not in row:
        return f"  eval at step {step}: all {row['eval/errors']:.0f} episodes failed"
    success = ""
    if "eval/success" in row:
        success = f"success {row['eval/success']:.3f} ± {row['eval/success_ci95']:.3f} (95 % CI)  "
    if "eval/chance_success" in row:
        success += f"chance {row['eval/chance_success']:.3f}  "
    return (
        f"  eval at step {step}: {success}return {row['eval/return']:+.2f}  "
        f"valid replies {row['eval/valid_rate']:.3f}"
    )


def write_outcomes(folder: Path, step: int, episodes: Iterable[Episode]) -> None:
    """Write step_N.json: [seed, solved] for every held-out problem.

    `solved` is 1 or 0, or null if the problem's environment broke. No file is written if all of
    them broke, or if the environment does not define success.
    """
    episodes = list(episodes)
    outcomes = [[e.seed, None if e.error else int(e.success)] for e in episodes]
    nothing = all(solved is None for _, solved in outcomes)
    if not is_main_process() or nothing or not success_is_defined(episodes):
        return
    path = Path(folder) / f"step_{step:06d}.json"
    atomic_write(path, json.dumps(outcomes))


def write_gradients(workdir: Path, step: int, metrics: Metrics) -> None:
    """Write the gradient/* metrics of a step's checkpoint to gradients/step_N.json."""
    if not is_main_process():
        return
    path = Path(workdir) / "gradients" / f"step_{step:06d}.json"
    atomic_write(path, json.dumps(metrics, indent=2, allow_nan=False) + "\n")


def learning_curve(folder: Path, title: str = "held-out success") -> str:
    """Return the evaluations as lines with bars, and the gain since the first evaluation.

    The gain is the mean of the last three evaluations minus the first, over the same problems with
    the same noise, with a 95 % half-width over problems.
    """
    outcomes = read_outcomes(folder)
    lines = [title]
    for step, solved in outcomes.items():
        value = float(np.nanmean(solved))
        lines.append(f"  step {step:>5}  {value:.3f}  " + "#" * round(50 * value))
    if len(outcomes) > 1:
        first, *later = outcomes.values()
        gain, half_width = paired_gain(first, later[-3:])
        if not math.isnan(gain):
            lines.append(f"  gained {100 * gain:+.1f} ± {100 * half_width:.1f} points (95 % CI)")
    return "\n".join(lines)


MOST_SCORED = 64  # maximum number of reasonings, and of prompts, in a stored score matrix


def write_scores(folder: Path, step: int, scores: Scores) -> None:
    """Write the arrays of `scores_to_show` to step_N.npz."""
    if not is_main_process():
        return
    path = Path(folder) / f"step_{step:06d}.npz"
    with atomic_open(path, "wb") as file:
        np.savez_compressed(file, **vars(scores_to_show(scores)))


def scores_to_show(scores: Scores) -> Scores:
    """Return the scores under the first MOST_SCORED prompts.

    Of the reasonings sampled from these prompts, the first MOST_SCORED are kept.
    """
    rows = np.flatnonzero(scores.prompt_M < MOST_SCORED)[:MOST_SCORED]
    return Scores(
        score_MN=scores.score_MN[rows, :MOST_SCORED].astype(np.float32),
        length_M=scores.length_M[rows].astype(np.int32),
        prompt_M=scores.prompt_M[rows].astype(np.int32),
    )
