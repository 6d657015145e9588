"""Console lines that say what metrics so far mean, like the first screen of a report."""

from collections.abc import Sequence
from pathlib import Path

from ragen_jax.config.stored import read_config_file
from ragen_jax.core.task_shares import rows_of_environment
from ragen_jax.diagnostics.answers import answer_questions
from ragen_jax.diagnostics.level_rules import find_levels
from ragen_jax.diagnostics.rules import BAD, UNKNOWN, WEAK, Records
from ragen_jax.run.run_files import read_outcomes
from ragen_jax.storage.metrics_reader import read_metrics


def judgement_lines(folder: Path, labels: Sequence[str]) -> list[str]:
    """Return the lines of a run so far; that a young run is too short to judge is left out.

    Args:
      folder: the run's folder.
      labels: the labels of its environments; ("",) for a single environment.
    """
    config = read_config_file(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    lines = []
    for label in labels:
        records = Records(
            rows=rows_of_environment(rows, labels, label),
            updates=rows,
            outcomes=read_outcomes(folder / "eval" / label),
            imitated=config["model"]["path"] == "tiny",
        )
        name = f"{label}: " if label else ""
        lines += [f"  {name}{line}" for line in describe(records, grades=(BAD, WEAK))]
    return lines


def describe(records: Records, grades: Sequence[str] = (BAD, WEAK, UNKNOWN)) -> list[str]:
    """Return the answers to the program's questions, and the rules about levels that hold.

    Args:
      grades: the grades of the rules that are mentioned.
    """
    findings = [found for found in find_levels(records) if found.rule.grade in grades]
    lines = [f"{found.rule.name}: {found.words}. {found.rule.cure}" for found in findings]
    return [*answer_questions(records.steps), *lines]
