"""The page: a single HTML file that contains its data, styles and scripts.

Text written by a run's agent is untrusted. It enters the page only as JSON in which no tag can
begin, and from there only text nodes. The Content-Security-Policy allows only the two scripts
below, identified by their hashes, and no network requests.
"""

import base64
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragen_jax.diagnostics.shared_texts import THINK
from ragen_jax.report import episodes, matrices, sentences, templates, timelines
from ragen_jax.report.glossary import glossary_html
from ragen_jax.report.runs import RunRecord, groups_by_seed, read_run
from ragen_jax.report.verdict import Verdict, judge
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links

EPISODE_BYTES = 1_100_000  # budget for the episodes of all runs
MATRIX_BYTES = 300_000
FIGURE_BYTES = 1_200_000  # above this size, the page has only the metrics of the charts
ASSETS = resources.files("ragen_jax.report") / "assets"


@dataclasses.dataclass(frozen=True)
class Contents:
    """The content of a page about a run."""

    run: RunRecord
    saved: list[episodes.SavedEpisodes]
    stored: list[matrices.StoredMatrix]
    tokenizer: Tokenizer | None  # tokenizer of its episodes; None: not on this machine
    place: str = "rollouts/ and eval/"  # folders with all its episodes
    tags: tuple[str, str] = THINK  # the tags around a reasoning


def read_contents(folder: Path) -> Contents:
    """Read the `Contents` of a run's folder.

    Raises:
      ValueError: it is not a run's folder, or has no finished step.
    """
    run, damaged = read_run(folder), []
    found = Contents(
        run,
        episodes.read_saved(folder, run, damaged.append),
        matrices.read_stored(folder, run, damaged.append),
        episodes.find_tokenizer(folder, run, damaged.append),
    )
    run = dataclasses.replace(run, damaged=(*run.damaged, *damaged))
    return dataclasses.replace(found, run=run)


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of some runs and return its path.

    Args:
      out: file to write; default: report.html in the first folder.

    Raises:
      ValueError: a folder is not a run's or has no finished step, `out` cannot be written, or the
        page of the first run is a link to another place.
    """
    if out is None:
        out = Path(paths[0]) / "report.html"
        refuse_links(Path(paths[0]), out)
    found = [read_contents(Path(path)) for path in paths]
    for line in sentences.list_damage(contents.run for contents in found):
        console(f"warning: {line}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is {out}, but folder {out.parent} does not exist")
    write_page(found, out)
    return out


def write_page(found: Sequence[Contents], out: Path) -> None:
    """Write the page of some runs' contents."""
    atomic_write(out, render_page(found))


def render_page(found: Sequence[Contents]) -> str:
    """Return the HTML of some runs' contents."""
    runs = [contents.run for contents in found]
    together = groups_by_seed(runs)
    verdicts = []
    for contents in found:
        run, limit = contents.run, contents.run.config["rollout"]["max_new_tokens"]
        verdicts.append(
            [
                judge(
                    run,
                    x,
                    episodes.truncations(contents.saved, x, limit),
                    episodes.invalid_example(contents.saved, x),
                )
                for x in run.labels
            ]
        )
    data = {
        **_curves(runs, together, verdicts),
        "charts": timelines.described(timelines.CHARTS),
        "matrices": [
            {"run": i} | matrix
            for i, contents in enumerate(found)
            for matrix in matrices.select_matrices(contents.stored, MATRIX_BYTES // len(runs))
        ],
        "episodes": [
            {"run": i} | episode
            for i, contents in enumerate(found)
            for episode in episodes.select_episodes(
                contents.saved, contents.tokenizer, EPISODE_BYTES // len(runs)
            )
        ],
        "place": found[0].place,
        "saved": sum(len(part.records) for contents in found for part in contents.saved),
    }
    return _document(
        title=sentences.title(runs),
        top=sentences.top(runs, verdicts, together) + _templates(found),
        settings=sentences.settings(runs),
        data=data,
    )


def _templates(found: Sequence[Contents]) -> str:
    """Return what the reasonings of each run share, as HTML."""
    return "".join(
        templates.template_html(
            sentences.environment_name(contents.run, label, alone=len(found) == 1),
            templates.first_and_last(contents.saved, label, contents.tokenizer, contents.tags),
        )
        for contents in found
        for label in contents.run.labels
    )


def _curves(
    runs: Sequence[RunRecord], together: list[list[int]], verdicts: list[list[Verdict]]
) -> dict[str, Any]:
    """Return steps, each run's metrics, bands and marks, and means of runs that differ in seed."""
    steps = sorted({int(row["step"]) for run in runs for row in run.rows})
    figures = [timelines.columns(run.rows, steps) for run in runs]
    if sum(len(json.dumps(columns)) for columns in figures) > FIGURE_BYTES:
        figures = [
            _of_charts(columns, run.labels) for run, columns in zip(runs, figures, strict=True)
        ]
    means = [timelines.average([figures[i] for i in g]) if len(g) > 1 else {} for g in together]
    return {
        "steps": steps,
        "runs": [
            {
                "name": run.name,
                "seed": run.config["seed"],
                "labels": run.labels,
                "figures": columns,
                "bands": timelines.bands(columns, run.labels),
                "marks": sentences.list_marks(run, judged),
                "alarm": {v.label: v.alarm for v in judged},
            }
            for run, columns, judged in zip(runs, figures, verdicts, strict=True)
        ],
        "groups": [
            {"name": sentences.group_name(runs, g), "runs": g, "mean": mean}
            for g, mean in zip(together, means, strict=True)
        ],
    }


def _of_charts(columns: dict[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Return the metrics that CHARTS show for each environment, and their intervals."""
    plain = {name for chart in timelines.CHARTS for name in chart.figures}
    wanted = {timelines.labelled(name, label) for name in plain for label in ("", *labels)}
    return {
        name: values for name, values in columns.items() if name.removesuffix("_ci95") in wanted
    }


def encode_for_script(data: Any) -> str:
    """Return JSON in which no tag, comment or line of a script can begin or end."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    # An unpaired surrogate, which a reply may contain, is not valid UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _document(*, title: str, top: str, settings: str, data: dict[str, Any]) -> str:
    scripts = [(ASSETS / name).read_text("utf-8") for name in ("uPlot.iife.min.js", "page.js")]
    style = "".join((ASSETS / name).read_text("utf-8") for name in ("uPlot.min.css", "page.css"))
    allowed = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = (ASSETS / "page.html").read_text("utf-8")
    parts = {
        "POLICY": policy,
        "STYLE": style,
        "TITLE": title,
        "TOP": top,
        "SETTINGS": settings,
        "GLOSSARY": glossary_html(),
        "DATA": encode_for_script(data),
        "PLOT": scripts[0],
        "SCRIPT": scripts[1],
    }
    # A single pass, so that the content of a part is never read as the name of another part.
    pieces = body.split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _hash(text: str) -> str:
    """Return the Content-Security-Policy source expression for an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
