"""The page of a supervised fine-tuning: its curves and checks, as one HTML file without scripts."""

import html
from collections.abc import Sequence
from pathlib import Path

from ragen_jax.core.types import Metrics
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.metrics_reader import read_metrics

WIDTH, HEIGHT, MARGIN = 640, 200, 44  # of a chart, in pixels
COLOURS = ("#1f6fb4", "#c2571a", "#3a8a3a")
CHARTS = (  # title, (metric, name) of each curve
    (
        "Loss (nats per token)",
        (("sft/loss", "demonstrations"), ("sft/heldout_loss", "held-out demonstrations")),
    ),
    (
        "Success and valid replies on new problems",
        (("eval/success", "success"), ("eval/valid_rate", "valid replies")),
    ),
)
TABLE = (  # metric, heading, format
    ("step", "update", "{:.0f}"),
    ("sft/loss", "loss", "{:.3f}"),
    ("sft/heldout_loss", "held-out loss", "{:.3f}"),
    ("eval/success", "success", "{:.3f}"),
    ("eval/success_ci95", "± 95 %", "{:.3f}"),
    ("eval/valid_rate", "valid replies", "{:.3f}"),
    ("eval/response_length", "tokens per reply", "{:.1f}"),
    ("sft/entropy", "entropy", "{:.3f}"),
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;"
    "border-bottom:1px solid #ddd}svg{max-width:100%}text{font-size:12px;fill:#444}"
)


def write_page(workdir: Path) -> Path:
    """Write report.html in the folder of a fine-tuning, and return its path.

    Raises:
      ValueError: it has no metrics yet.
    """
    rows = read_metrics(workdir / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{workdir} has no finished update yet: its metrics.jsonl is empty")
    out = workdir / "report.html"
    atomic_write(out, render_page(workdir.resolve().name, rows))
    return out


def render_page(name: str, rows: Sequence[Metrics]) -> str:
    """Return the HTML of the rows of a metrics.jsonl."""
    checks = [row for row in rows if "eval/success" in row]
    parts = [
        f"<h1>Fine-tuning: {html.escape(name)}</h1>",
        f"<p>{html.escape(_summary(checks))}</p>" if checks else "",
        *(_chart(title, curves, rows) for title, curves in CHARTS),
        "<h2>Checks</h2>",
        _table(checks),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
        "style-src 'unsafe-inline'\">"
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style>" + "".join(parts) + "</html>\n"
    )


def _summary(checks: Sequence[Metrics]) -> str:
    first, last = checks[0], checks[-1]
    return (
        f"Success on new problems went from {first['eval/success']:.2f} to "
        f"{last['eval/success']:.2f} in {last['step']:.0f} updates, valid replies from "
        f"{first.get('eval/valid_rate', 0.0):.2f} to {last.get('eval/valid_rate', 0.0):.2f}, and "
        f"the held-out loss from {first['sft/heldout_loss']:.2f} to "
        f"{last['sft/heldout_loss']:.2f} nats per token."
    )


def _chart(title: str, curves: Sequence[tuple[str, str]], rows: Sequence[Metrics]) -> str:
    """Return a chart as SVG; the vertical axis begins at 0."""
    found = [
        (name, [(row["step"], row[metric]) for row in rows if metric in row])
        for metric, name in curves
    ]
    points = [point for _, line in found for point in line]
    if not points:
        return ""
    right = max(x for x, _ in points) or 1
    top = max(max(y for _, y in points), 1e-9)
    parts = [f"<h2>{html.escape(title)}</h2><svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img>"]
    for share in (0.0, 0.5, 1.0):
        y = _place_y(share)
        parts.append(
            f"<line x1={MARGIN} x2={WIDTH} y1={y:.0f} y2={y:.0f} stroke=#ddd />"
            f"<text x={MARGIN - 6} y={y + 4:.0f} text-anchor=end>{share * top:.3g}</text>"
        )
    for (name, line), colour in zip(found, COLOURS, strict=False):
        path = " ".join(
            f"{MARGIN + x / right * (WIDTH - MARGIN):.1f},{_place_y(y / top):.1f}" for x, y in line
        )
        parts.append(f"<polyline points='{path}' fill=none stroke={colour} stroke-width=2 />")
        parts.append(
            f"<text x={WIDTH - 4} y={14 + 15 * found.index((name, line))} text-anchor=end "
            f"style='fill:{colour}'>{html.escape(name)}</text>"
        )
    parts.append(f"<text x={WIDTH} y={HEIGHT - 4} text-anchor=end>{right:.0f} updates</text></svg>")
    return "".join(parts)


def _place_y(share: float) -> float:
    return HEIGHT - 24 - share * (HEIGHT - 40)


def _table(checks: Sequence[Metrics]) -> str:
    heads = "".join(f"<th>{html.escape(head)}</th>" for _, head, _ in TABLE)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{form.format(row[m]) if m in row else ''}</td>" for m, _, form in TABLE)
        + "</tr>"
        for row in checks
    )
    return f"<table><tr>{heads}</tr>{body}</table>"
