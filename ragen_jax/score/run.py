"""Score rollouts: read files, cross-score their reasoning, write figures and the page."""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from ragen_jax.config import command_line as command
from ragen_jax.config.build_model import build_model
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Metrics, Params
from ragen_jax.diagnostics.level_rules import find_levels
from ragen_jax.diagnostics.rules import BAD, Records
from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.diagnostics.symptoms import Text
from ragen_jax.model import hf
from ragen_jax.model.dates import is_day
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen
from ragen_jax.report.matrices import StoredMatrix
from ragen_jax.report.page import Contents, write_page
from ragen_jax.report.runs import ONLY
from ragen_jax.run.judgement import describe
from ragen_jax.run.log import scores_to_show
from ragen_jax.run.run_files import policy_directory
from ragen_jax.score import notices
from ragen_jax.score.days import day_lines
from ragen_jax.score.encode import ANSWER, THINK, Encoder
from ragen_jax.score.episodes import ScoredStep, Surprises, encode_rows, make_steps
from ragen_jax.score.estimate import estimate_line
from ragen_jax.score.figures import ScoringSettings, add_alarm, step_metrics, step_symptoms
from ragen_jax.score.files import Broken, FileContents, read_files
from ragen_jax.score.page import contents
from ragen_jax.score.shared import shared_lines, text_decoder
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.console import console
from ragen_jax.storage.console_streams import show_line

DEFAULTS = Config()
# A model organism, and rollouts of its run (configs/organism.py, sokoban+no_filter, seed 0): four
# members of eight groups in every tenth step.
SAMPLE_FILES = Path(__file__).parent / "sample"
NOT_SHOWN = ("date", "micro_batch", "out", "all", "rows")  # settings that the page does not list
NAMED = 5  # largest number of broken rows that are listed individually
# Columns of a timeline: metric, short name, format.
COLUMNS = (
    ("collapse/first_turn/own_margin", "information", "{:.2f}"),
    ("collapse/first_turn/retrieval_acc", "retrieval", "{:.2f}"),
    ("collapse/first_turn/retrieval_chance", "chance", "{:.2f}"),
    ("collapse/first_turn/retrieval_p", "p", "{:.3f}"),
    ("collapse/first_turn/h_cond", "H(Z|X)", "{:.3f}"),
    ("flow/first_turn/za_swap", "za", "{:.2f}"),
    ("rollout/valid_think_rate", "thinking", "{:.2f}"),
    ("rollout/response_length", "tokens", "{:.0f}"),
    ("anatomy/mixed", "mixed", "{:.2f}"),
    ("regime/alarm", "alarm", "{:.0f}"),
)


@dataclasses.dataclass(frozen=True)
class ScoreSettings:
    """Settings of a scoring; docs/score.md explains them."""

    model: str  # directory or hub id of the model that scores
    rollouts: tuple[str, ...]  # files, or folders of files
    think: tuple[str, ...] = THINK  # tags around the reasoning
    answer: tuple[str, ...] = ANSWER  # tags around the answer; (): the text after the reasoning
    reward: tuple[str, ...] = ()  # fields that are summed to the reward of a row
    date: str = ""  # YYYY-MM-DD, of rows that record none; "": today
    first_turn_samples: int = DEFAULTS.diagnose.first_turn_samples  # per step; 0: all
    trajectory_samples: int = DEFAULTS.diagnose.trajectory_samples  # 0: one per episode
    micro_batch: int = DEFAULTS.diagnose.micro_batch  # pairs per device call
    seed: int = DEFAULTS.seed  # of draws and permutations
    dtype: str = "float32"  # of activations
    format: str = ""  # name of the format of all rows; "": recognised row by row
    rows: tuple[Any, ...] = ()  # further rollouts, as a JSON file would hold them
    out: Path | None = None  # JSON file of all figures, with a page next to it; None: no files
    all: bool = False  # print every figure of a single step


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A model that scores, on its mesh.

    text, tags: as in `symptom_metrics`
    """

    model: Qwen
    params: Params
    mesh: jax.sharding.Mesh
    sampling: ScoringSettings
    text: Text
    tags: tuple[str, str]

    def estimate(self, steps: Sequence[ScoredStep]) -> str:
        """Return a line with the expected time of a long scoring; "" if it is short."""
        with jax.set_mesh(self.mesh):
            return estimate_line(self.model, self.params, steps, self.sampling)

    def score(self, step: ScoredStep) -> tuple[Metrics, list[StoredMatrix]]:
        """Return (the metrics of a step, its first-turn scores if any)."""
        scores: list[Scores] = []
        with jax.set_mesh(self.mesh):
            metrics = step_metrics(self.model, self.params, step, self.sampling, scores.append)
        metrics |= step_symptoms(step, self.text, self.tags)
        return metrics, [StoredMatrix(ONLY, step.number, scores_to_show(each)) for each in scores]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Scored steps, in order, and the rows that they are from."""

    steps: Sequence[ScoredStep]
    rows: Sequence[Metrics]  # with the alarm, if there are several
    stored: Sequence[StoredMatrix]
    read: FileContents


def score_files(settings: ScoreSettings) -> Scored:
    """Score the rollouts, print what they show, and write the files of settings.out.

    Raises:
      ValueError: the model cannot be read, or no row can be used.
    """
    with command.bad_input():
        enter_phase("reading the rollouts")
        directory, encoder = make_encoder(settings)
        steps, read, surprises = prepare(settings, encoder)
        for say, line in content_lines(settings, read, steps, surprises, encoder):
            say(line)
        if encoder.writes_date():
            for line in day_lines(read.rows, encoder.date or "", given=bool(settings.date)):
                console(line)
        scorer = load_scorer(settings, directory, encoder)
    enter_phase("estimating the time")
    if line := scorer.estimate(steps):
        console(line)
    rows: list[Metrics] = []
    stored: list[StoredMatrix] = []
    for step in steps:
        enter_phase(f"scoring step {step.number}")
        metrics, matrices = scorer.score(step)
        rows.append(metrics)
        stored += matrices
        if len(steps) > 1:
            console(step_line(step.number, metrics))
    if len(steps) > 1:
        rows, fired = add_alarm(rows, DEFAULTS.regimes)
        for index, alarm in fired:
            console(f"step {steps[index].number}: {alarm.reason}")
    elif settings.all:
        for line in figure_lines(rows[0]):
            console(line)
    scored = Scored(steps, rows, stored, read)
    show_verdict(scored, scorer)
    if len(steps) == 1 and not settings.all:
        console(step_line(None, rows[0]))
        console("--all prints every figure")
    for step, row in zip(steps, rows, strict=True):
        if not any(name.startswith("collapse/") for name in row):
            _warn(f"step {step.number}: fewer than two prompts have reasoning to compare")
    if settings.out:
        for line in write_results(settings, settings.out, scored, encoder):
            console(line)
    return scored


def make_encoder(settings: ScoreSettings) -> tuple[Path, Encoder]:
    """Return (the directory of the model, what encodes rows for it).

    Raises:
      ValueError: the model cannot be read, or the date is none.
    """
    directory = hf.resolve(policy_directory(settings.model))
    shape = hf.model_config(directory)
    date = settings.date or command.today().isoformat()
    if not is_day(date):
        raise ValueError(f"--date={date} is not a date; expected YYYY-MM-DD")
    tokenizer = hf.load_tokenizer(directory)
    return directory, Encoder(
        tokenizer, shape.vocab_size, settings.think, settings.answer, date, shape.max_positions
    )


def load_scorer(settings: ScoreSettings, directory: Path, encoder: Encoder) -> Scorer:
    """Load the model of a directory.

    Raises:
      ValueError: it cannot be read.
    """
    enter_phase(f"loading {directory}")
    mesh = make_mesh(data=-1, fsdp=1, tensor=1)
    model, params, _ = hf.load(directory, mesh=mesh, dtype=settings.dtype)
    model = build_model(
        dataclasses.replace(DEFAULTS.model, dtype=settings.dtype), model.config, mesh
    )
    return Scorer(
        model=model,
        params=sampling_params(params, model, mesh),
        mesh=mesh,
        sampling=ScoringSettings(
            first_turn_samples=settings.first_turn_samples,
            trajectory_samples=settings.trajectory_samples,
            micro_batch=settings.micro_batch,
            seed=settings.seed,
        ),
        text=text_decoder(encoder.tokenizer),
        tags=(encoder.opening, encoder.closing),
    )


def show_verdict(scored: Scored, scorer: Scorer) -> None:
    """Print what the figures say about the reasoning, and what reasonings share if it is little."""
    records = _records(scored)
    for line in describe(records):
        console(line)
    for line in shared_lines(scored.steps[-1], find_levels(records), scorer.text, scorer.tags):
        console(line)


def is_bad(scored: Scored) -> bool:
    """Return whether the alarm is on at the last step, or a rule of the grade BAD holds."""
    findings = find_levels(_records(scored))
    on = scored.rows[-1].get("regime/alarm", 0.0) > 0
    return on or any(finding.rule.grade == BAD for finding in findings)


def _records(scored: Scored) -> Records:
    pairs = zip(scored.steps, scored.rows, strict=True)
    found = [{"step": step.number} | row for step, row in pairs]
    return Records(rows=found, updates=found, outcomes={})


def prepare(
    settings: ScoreSettings, encoder: Encoder
) -> tuple[list[ScoredStep], FileContents, Surprises]:
    """Return the steps of the files, their other content, and surprises to report.

    Raises:
      ValueError: a file cannot be read, or no row is usable or has reasoning.
    """
    read = read_files(settings.rollouts, settings.reward, settings.rows, settings.format)
    spoken, others = encode_rows(read.rows, encoder)
    rows = [row for row in read.rows if row.place in spoken]
    read = dataclasses.replace(read, rows=rows, broken=[*read.broken, *others])
    if rows:
        console(notices.read_line(read, settings.rollouts))
    report_broken_rows(read.broken)
    if not rows:
        first = f"; the first: {_words(read.broken[0])}" if read.broken else ", the files are empty"
        raise ValueError(
            f"no row of {', '.join(settings.rollouts or ['the rows'])} can be used{first}"
        )
    if not any(reply.turn.reasoning[1] for replies in spoken.values() for reply in replies):
        raise ValueError(
            f"none of {len(rows)} rows holds reasoning that ends with {encoder.closing}; set "
            "its tags with --think=OPENING,CLOSING"
        )
    steps, surprises = make_steps(rows, spoken)
    return steps, read, surprises


def report_broken_rows(broken: Sequence[Broken]) -> None:
    """Print a line for each of the first unusable rows, and the number of the others."""
    for row in broken[:NAMED]:
        _warn(_words(row))
    if len(broken) > NAMED:
        _warn(f"{len(broken) - NAMED} more rows cannot be used")


def content_lines(
    settings: ScoreSettings,
    read: FileContents,
    steps: Sequence[ScoredStep],
    surprises: Surprises,
    encoder: Encoder,
) -> list[tuple[Callable[[str], None], str]]:
    """Return [(what prints it, line about prompts, missing values or rows read unexpectedly)]."""
    told = [notices.prompts_line(encoder), *notices.unrecorded_lines(read)]
    told += notices.unread_lines(read, encoder)
    warned = notices.warning_lines(read, steps, surprises, settings.reward, encoder)
    return [*((console, line) for line in told), *((_warn, line) for line in warned)]


def figure_lines(metrics: Metrics) -> Iterable[str]:
    """Return a line for each metric, with its interval."""
    for name, value in metrics.items():
        if not name.endswith("_ci95"):
            half = metrics.get(f"{name}_ci95")
            yield f"{name:<45} {value:.6g}" + (f"  ± {half:.3g}" if half is not None else "")


def step_line(number: int | None, metrics: Metrics) -> str:
    """Return the line of COLUMNS for a step, with its number if there are several."""
    cells = [f"{name} {form.format(metrics[m])}" for m, name, form in COLUMNS if m in metrics]
    return "  ".join([f"step {number}"] * (number is not None) + cells)


def write_results(
    settings: ScoreSettings, path: Path, scored: Scored, encoder: Encoder
) -> list[str]:
    """Write all metrics and their sources as a JSON object, and the report page next to it.

    Returns:
      lines that name the files.
    """
    read, page = scored.read, path.with_suffix(".html")
    days = dict(collections.Counter(row.day or encoder.date for row in read.rows))
    document: dict[str, Any] = {
        "model": settings.model,
        "rollouts": list(settings.rollouts),
        "seed": settings.seed,
        "date": next(iter(days)) if len(days) == 1 else None,
        "dates": days,
        "rows": len(read.rows),
        "formats": notices.count_formats(read),
        "parts_not_scored": notices.left_out(read),
        "broken": [{"place": row.place, "reason": row.reason} for row in read.broken],
        "fields_not_read": read.unread,
        "message_keys_not_written": notices.unwritten_keys(read, encoder),
        "prompts": dict(encoder.counts.prompt_kinds),
        "steps": [
            {"step": s.number, "episodes": len(s.episodes), "groups": s.episodes[-1].group + 1}
            | {name: value for name, value in row.items() if math.isfinite(value)}
            for s, row in zip(scored.steps, scored.rows, strict=True)
        ],
    }
    atomic_write(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
    write_page([_page(settings, scored, encoder)], page)
    return [f"all metrics: {path}", f"report: {page}"]


def _page(settings: ScoreSettings, scored: Scored, encoder: Encoder) -> Contents:
    """Return the contents of the report page."""
    steps = scored.steps
    files = [Path(name).name for name in settings.rollouts] or ["rows"]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return contents(
        steps,
        scored.rows,
        scored.stored,
        encoder.tokenizer.backend_tokenizer,
        name=files[0] + more,
        about=(
            f"{sum(len(step.episodes) for step in steps)} rollouts of {len(steps)} "
            f"step{'s' * (len(steps) > 1)} · scored under {settings.model}"
        ),
        settings={
            name: value
            for name, value in dataclasses.asdict(settings).items()
            if name not in NOT_SHOWN
        },
        config=DEFAULTS.to_dict(),
        tags=(encoder.opening, encoder.closing),
    )


def _words(row: Broken) -> str:
    return f"{row.place} {row.reason}"


def _warn(line: str) -> None:
    show_line("warning", line)
