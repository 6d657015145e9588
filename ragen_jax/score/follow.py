"""Score rollouts while another trainer writes them: `score --follow`.

The files are looked at every few seconds. A file is read once it has not changed between two looks,
so that nobody reads half a line. Steps whose rows are new or have changed are scored, the others
keep their figures.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from ragen_jax.config import command_line as command
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.types import Metrics
from ragen_jax.report.matrices import StoredMatrix
from ragen_jax.score.encode import Counts, Encoder
from ragen_jax.score.episodes import ScoredStep, Surprises, encode_rows, make_steps
from ragen_jax.score.figures import add_alarm
from ragen_jax.score.files import Broken, FileContents, read_files
from ragen_jax.score.folders import find_sources
from ragen_jax.score.formats import Row
from ragen_jax.score.notices import read_line
from ragen_jax.score.run import (
    DEFAULTS,
    Scored,
    Scorer,
    ScoreSettings,
    content_lines,
    is_bad,
    load_scorer,
    make_encoder,
    report_broken_rows,
    show_verdict,
    step_line,
    write_results,
)
from ragen_jax.storage.console import console

LOOK_SECONDS = 5.0  # between two looks at the files
_DIGITS = re.compile(r"\d+")
T = TypeVar("T", Counts, Surprises)

Stamps = dict[Path, tuple[int, int]]  # file -> (bytes, time of its last change in nanoseconds)


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step that is scored."""

    rows: list[Row]  # those it was made of
    step: ScoredStep
    metrics: Metrics
    stored: list[StoredMatrix]
    counts: Counts  # of its rows
    surprises: Surprises


class Follower:
    """The steps of a growing folder that are scored so far."""

    def __init__(self, settings: ScoreSettings, scorer: Scorer, encoder: Encoder) -> None:
        self._settings, self._scorer, self._encoder = settings, scorer, encoder
        self._seen: Stamps = {}  # at the last look
        self._read: Stamps = {}  # of the files that were read last
        self._rows: list[Row] = []
        self._steps: dict[int, _Step] = {}
        self._broken: set[str] = set()  # places of the rows that are named as broken
        self._fired: set[tuple[int, str]] = set()  # (step, reason) of the alarms that are printed
        self._waiting = ""
        self._told: dict[str, str] = {}  # lines about the content, by their words without numbers
        self.scored: Scored | None = None  # the result so far

    def look(self) -> bool:
        """Look at the files and score what is new; return whether anything was."""
        try:
            sources, others = find_sources(self._settings.rollouts)
        except ValueError as error:
            if str(error) != self._waiting:
                self._waiting = str(error)
                console(f"waiting: {error}")
            return False
        before, self._seen = self._seen, _stamps([p for s in sources for p in s.paths])
        settled = {path: stamp for path, stamp in self._seen.items() if before.get(path) == stamp}
        changing = [path for path in self._seen if path not in settled]
        known = {path: self._read[path] for path in changing if path in self._read}
        if self._read == settled | known:
            return False
        self._read = settled | known
        read = read_files(
            self._settings.rollouts,
            self._settings.reward,
            form=self._settings.format,
            skip=changing,
        )
        # A file that is changing keeps the rows that it had.
        kept = [row for row in self._rows if _file_of(row) in known]
        order = {path: place for place, path in enumerate(self._seen)}
        self._rows = sorted([*read.rows, *kept], key=lambda row: order[_file_of(row)])
        return self._score(dataclasses.replace(read, rows=self._rows, others=others))

    def _score(self, read: FileContents) -> bool:
        rows_of: dict[int, list[Row]] = collections.defaultdict(list)
        for row in read.rows:
            assert row.step is not None  # `read_files` gives every row a step
            rows_of[row.step].append(row)
        new = [n for n, rows in sorted(rows_of.items()) if self._known(n) != rows]
        self._steps = {n: step for n, step in self._steps.items() if n in rows_of}
        broken = list(read.broken)
        for number in new:
            self._steps.pop(number, None)
            broken += self._score_step(number, rows_of[number])
        report_broken_rows([row for row in broken if row.place not in self._broken])
        self._broken |= {row.place for row in broken}
        if not new or not self._steps:
            return False
        self._update(dataclasses.replace(read, broken=broken))
        for number in new:
            if number in self._steps:
                console(step_line(number, self._steps[number].metrics))
        return True

    def _known(self, number: int) -> list[Row] | None:
        return self._steps[number].rows if number in self._steps else None

    def _score_step(self, number: int, rows: list[Row]) -> list[Broken]:
        """Score a step and return its rows that cannot be used."""
        self._encoder.counts = Counts()
        spoken, broken = encode_rows(rows, self._encoder)
        self._encoder.forget_prompts()  # a long run has many
        usable = [row for row in rows if row.place in spoken]
        if not usable:
            return broken
        (step,), surprises = make_steps(usable, spoken)
        enter_phase(f"scoring step {number}")
        metrics, stored = self._scorer.score(step)
        counts = self._encoder.counts
        self._steps[number] = _Step(rows, step, metrics, stored, counts, surprises)
        return broken

    def _update(self, read: FileContents) -> None:
        """Judge all steps, print alarms that are new, and write the files."""
        steps = [self._steps[number] for number in sorted(self._steps)]
        rows: Sequence[Metrics] = [step.metrics for step in steps]
        if len(steps) > 1:
            rows, fired = add_alarm(rows, DEFAULTS.regimes)
            for index, alarm in fired:
                event = (steps[index].step.number, alarm.reason)
                if event not in self._fired:
                    console(f"step {event[0]}: {event[1]}")
                self._fired.add(event)
        self._encoder.counts = _add((step.counts for step in steps), Counts())
        first = self.scored is None
        stored = [matrix for step in steps for matrix in step.stored]
        self.scored = Scored([step.step for step in steps], rows, stored, read)
        if first:
            console(read_line(read, self._settings.rollouts))
        self.report(self.scored, new_only=True)
        if self._settings.out:
            lines = write_results(self._settings, self._settings.out, self.scored, self._encoder)
            for line in lines if first else ():
                console(line)

    def report(self, scored: Scored, *, new_only: bool) -> None:
        """Print the lines about the content of the rows that differ from those printed.

        Args:
          new_only: leave out lines of which only the numbers have changed.
        """
        surprises = _add((step.surprises for step in self._steps.values()), Surprises())
        lines = content_lines(self._settings, scored.read, scored.steps, surprises, self._encoder)
        for say, line in lines:
            words = _DIGITS.sub("", line)
            if words not in self._told or not new_only and self._told[words] != line:
                say(line)
                self._told[words] = line


def follow_files(settings: ScoreSettings, *, gate: bool, wait: Callable[[], bool]) -> Scored | None:
    """Score the rollouts of settings.rollouts while they are written.

    Args:
      gate: end as soon as `is_bad` holds.
      wait: called between two looks; False ends.

    Returns:
      the result at the end; None if there were no rows.

    Raises:
      ValueError: the model cannot be read, or a row is from an agent that was shown images.
    """
    with command.bad_input():
        directory, encoder = make_encoder(settings)
        scorer = load_scorer(settings, directory, encoder)
    follower = Follower(settings, scorer, encoder)
    while True:
        with command.bad_input():
            new = follower.look()
        if gate and new and follower.scored is not None and is_bad(follower.scored):
            break
        enter_phase("")  # the next rows may come in hours
        if not wait():
            break
    if follower.scored is not None:
        follower.report(follower.scored, new_only=False)
        show_verdict(follower.scored, scorer)
    return follower.scored


def _add(items: Iterable[T], total: T) -> T:
    """Return the sum of dataclasses, field by field."""
    for item in items:
        names = [field.name for field in dataclasses.fields(total)]
        sums = {name: getattr(total, name) + getattr(item, name) for name in names}
        total = dataclasses.replace(total, **sums)
    return total


def _file_of(row: Row) -> Path:
    """Return the file of a row's place, FILE:LINE."""
    return Path(row.place.rpartition(":")[0])


def _stamps(paths: Sequence[Path]) -> Stamps:
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:  # it was moved or removed meanwhile
            continue
        found[path] = (status.st_size, status.st_mtime_ns)
    return found
