"""What happened in a run: the gain, the alarm, the metric that moved first, and the named cause.

The alarm's rules are replayed on the rows (diagnostics/regimes.py): a metric has moved while it is
a sign, that is, outside its interval. Spans of steps are (first, last).
"""

import dataclasses
import math
from typing import Any

import numpy as np

from ragen_jax.configs.base import Regimes
from ragen_jax.core.domains import from_dict
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.answers import answer_questions
from ragen_jax.diagnostics.intervals import paired_gain
from ragen_jax.diagnostics.level_rules import find_levels
from ragen_jax.diagnostics.levels import FEWEST
from ragen_jax.diagnostics.regimes import (
    CONFIRMED,
    FIGURES,
    MARGINS,
    MEANS,
    SCOPES,
    init_regimes,
    relative,
    update_regimes,
)
from ragen_jax.diagnostics.rules import BAD, UNKNOWN, WEAK, Finding, Records
from ragen_jax.report.causes import Cause, Evidence, find_causes
from ragen_jax.report.episodes import Truncation
from ragen_jax.report.runs import RunRecord

LOST = 0.75  # success below this fraction of its highest value is lost (docs/lab/organism.md)
WORDS = {  # kind of a sign -> its metric in words
    "mi": "information",
    CONFIRMED: "information",
    "valid_think": "valid reasoning",
    "valid_action": "valid actions",
    "grounded": "truth of the reasoning",
    "length": "length of the replies",
    "entropy": "entropy of the reasoning",
}


@dataclasses.dataclass(frozen=True)
class Move:
    """A metric that left its level."""

    what: str  # the metric in words
    key: str  # the metric's name
    step: int  # step at which it was a sign
    share: float  # its value there as a fraction of its level

    @property
    def direction(self) -> str:
        return "fell" if self.share < 1 else "rose"


@dataclasses.dataclass(frozen=True)
class Gain:
    """Gain in held-out success: the last three evaluations minus the first, paired by problem."""

    first: float
    last: float  # mean of the last evaluations
    averaged: int  # number of these evaluations, at most three
    change: float
    half_width: float  # half-width of the 95 % interval


@dataclasses.dataclass(frozen=True)
class Information:
    """How much the first-turn reasonings of a step depend on their prompts."""

    step: int
    retrieval: float  # fraction of reasonings that are likeliest under their own prompt
    chance: float  # retrieval rate expected by chance
    p: float  # p-value of the retrieval rate, by permutation
    margin: float  # own_margin, nats per reasoning


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What happened in an environment of a run."""

    label: str
    gain: Gain | None  # None: no two evaluations of the same problems
    information: Information | None  # None: no step has any
    alarm: list[tuple[int, int]]  # spans in which it was on
    on: int  # number of steps at which it was on
    seen: int  # number of steps with metrics
    tested: list[str]  # metrics in words that were compared with their levels
    least: int  # number of values from which a metric is compared
    unwatched: bool  # information was measured without the metric that the alarm reads
    stop: dict[str, Any] | None  # the event that ended the run
    lost: int | None  # the evaluation at which success was lost
    moves: list[Move]  # in the order of their steps
    causes: list[tuple[Cause, int, str]]  # (cause, first step, evidence in words), earliest first
    findings: list[Finding]  # rules about levels that hold, most basic first
    answers: list[str]  # sentences: does reasoning depend on its prompt, is it used, is it true
    last_step: int
    steps: int  # requested number of steps
    example: str  # why saved replies are invalid, with a reply; "": most are valid

    @property
    def trouble(self) -> bool:
        """Return whether there was an alarm, a stop, lost or decreased success, or a bad level."""
        fell = self.gain is not None and self.gain.change + self.gain.half_width < 0
        bad = any(finding.rule.grade == BAD for finding in self.findings)
        return bool(self.alarm or self.stop or self.lost is not None or fell or bad)

    @property
    def main_finding(self) -> Finding | None:
        """Return the finding that explains the state; None if a cause does, or without findings.

        After an alarm, a cause explains more: it says what changed, and when.
        """
        if not self.findings or self.alarm and self.causes:
            return None
        bad = [finding for finding in self.findings if finding.rule.grade == BAD]
        if self.trouble and not bad:
            return None
        return (bad or self.findings)[0]

    @property
    def state(self) -> str:
        """Return "trouble" (red), "weak" (amber), "unknown" (grey) or "well" (green)."""
        grades = {finding.rule.grade for finding in self.findings}
        if self.trouble:
            return "trouble"
        return next((grade for grade in (UNKNOWN, WEAK) if grade in grades), "well")


def judge(
    run: RunRecord, label: str, truncated: dict[int, Truncation], example: str = ""
) -> Verdict:
    """Return the `Verdict` on an environment of a run.

    Args:
      truncated: {step: `Truncation`} for the steps with saved episodes.
      example: see `Verdict`.
    """
    watched = {key for figure in FIGURES for key in figure.keys}
    rows = [row for row in run.rows_of(label) if watched & row.keys()]  # step 0 may have none
    settings = from_dict(Regimes, run.config["regimes"])
    figures_F, evidence, tested = replay(rows, settings, truncated)
    steps = [e.step for e in evidence]
    on = [e.step for e in evidence if e.alarm]
    alarm = _spans(on, steps)
    moves = _moves(figures_F, steps, alarm[0][0] if alarm else None)
    outcomes = run.outcomes[label]
    lost = success_lost({step: float(np.nanmean(solved)) for step, solved in outcomes.items()})
    if lost is not None:
        moves.append(Move("held-out success", "eval/success", *lost))
    stops = [event for event in run.events if event["action"] == "stop"]
    return Verdict(
        label=label,
        gain=find_gain(list(outcomes.values())),
        information=find_information(rows),
        alarm=alarm,
        on=len(on),
        seen=len(steps),
        tested=tested,
        least=settings.baseline + FEWEST,
        unwatched=information_unwatched(rows),
        stop=stops[-1] if stops else None,
        lost=None if lost is None else lost[0],
        moves=sorted(moves, key=lambda move: move.step),
        causes=find_causes(evidence, run.config),
        findings=find_levels(read_records(run, label, truncated)),
        answers=answer_questions(run.rows_of(label)),
        last_step=run.last_step,
        steps=run.config["steps"],
        example=example,
    )


def find_gain(outcomes: list[list[float]]) -> Gain | None:
    """Return the `Gain` from the success on each problem in each evaluation, NaN if unknown.

    None: fewer than two evaluations, or no problem that is known in the first and in a last one.
    """
    if len(outcomes) < 2:
        return None
    first, last = outcomes[0], outcomes[1:][-3:]
    change, half_width = paired_gain(first, last)
    if math.isnan(change):
        return None
    ends = float(np.nanmean(first)), float(np.nanmean(last))
    return Gain(*ends, len(last), change, half_width)


def read_records(run: RunRecord, label: str, truncated: dict[int, Truncation]) -> Records:
    """Return the `Records` of an environment; arguments as in `judge`."""
    last = truncated[max(truncated)].of_invalid if truncated else math.nan
    return Records(
        rows=run.rows_of(label),
        updates=run.rows,
        outcomes=run.outcomes[label],
        saved_cut_off=last,
        imitated=run.config["model"]["path"] == "tiny",
        baseline=run.config["regimes"]["baseline"],
    )


def replay(
    rows: list[Metrics], settings: Regimes, truncated: dict[int, Truncation]
) -> tuple[list[list[tuple[int, float]]], list[Evidence], list[str]]:
    """Replay the alarm on a run's rows.

    Args:
      rows: rows of one environment.
      settings: the config's regimes section.

    Returns:
      ([(step, fraction of the level) while it is a sign] for each of regimes.FIGURES, `Evidence`
      for each step, metrics in words that had enough values to be compared with their levels).
    """
    state = init_regimes()
    figures_F: list[list[tuple[int, float]]] = [[] for _ in FIGURES]
    evidence = []
    for row in rows:
        state, (metrics,), _ = update_regimes(state, settings, [row])
        step = int(row["step"])
        sign_F, share_F = state.sign_EF[0], relative(state)[0]
        for f in np.flatnonzero(sign_F):
            figures_F[f].append((step, float(share_F[f])))
        evidence.append(
            Evidence(
                step=step,
                row=row,
                signs=frozenset(FIGURES[f].kind for f in np.flatnonzero(sign_F)),
                alarm=metrics["regime/alarm"] > 0,
                h_share=metrics.get("regime/h_relative", math.nan),
                mi_share=metrics.get("regime/mi_relative", math.nan),
                truncated=truncated.get(step),
            )
        )
    enough = np.flatnonzero(state.levels.count_EF[0] >= settings.baseline + FEWEST)
    return figures_F, evidence, list(dict.fromkeys(WORDS[FIGURES[f].kind] for f in enough))


def _moves(
    figures_F: list[list[tuple[int, float]]], steps: list[int], alarm: int | None
) -> list[Move]:
    """Return the first `Move` of each kind in WORDS.

    After an alarm, only signs that were on when it began, or that began later, count.
    """
    found: dict[str, Move] = {}
    for figure, at in zip(FIGURES, figures_F, strict=True):
        shares = dict(at)
        for step, end in _spans(list(shares), steps):
            if alarm is not None and end < alarm:
                continue  # the metric had recovered
            move = Move(WORDS[figure.kind], figure.keys[0], step, shares[step])
            if move.what not in found or step < found[move.what].step:
                found[move.what] = move
            break
    return list(found.values())


def _spans(steps: list[int], all_steps: list[int]) -> list[tuple[int, int]]:
    """Return the spans of consecutive `all_steps` that are in `steps`."""
    spans: list[tuple[int, int]] = []
    wanted, before = set(steps), None
    for step in all_steps:
        if step in wanted:
            spans[-1:] = [(spans[-1][0], step)] if before in wanted else [*spans[-1:], (step, step)]
        before = step
    return spans


def information_unwatched(rows: list[Metrics]) -> bool:
    """Return whether rows have mutual information but no margin, like those of older versions."""
    names = set().union(*rows)
    return f"{SCOPES[0]}/mi_seq" in names and not names & {*MARGINS, *MEANS}


def find_information(rows: list[Metrics]) -> Information | None:
    """Return the `Information` of the last row that has it."""
    first = "collapse/first_turn"
    for row in reversed(rows):
        if f"{first}/retrieval_p" in row and f"{first}/own_margin" in row:
            return Information(
                step=int(row["step"]),
                retrieval=row[f"{first}/retrieval_acc"],
                chance=row[f"{first}/retrieval_chance"],
                p=row[f"{first}/retrieval_p"],
                margin=row[f"{first}/own_margin"],
            )
    return None


def success_lost(success: dict[int, float]) -> tuple[int, float] | None:
    """Return (evaluation, fraction of the highest) at which success is lost, or None.

    Success, averaged with the previous evaluation, is lost when it is first below LOST times the
    highest such average so far.
    """
    steps, values = list(success), list(success.values())
    means = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    highest = 0.0
    for step, mean in zip(steps[1:], means, strict=True):
        if mean < LOST * highest:
            return step, mean / highest
        highest = max(highest, mean)
    return None
