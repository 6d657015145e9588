"""The texts of a page, as escaped HTML: what happened, marks of the curves, settings."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ragen_jax.diagnostics.intervals import interval
from ragen_jax.report.causes import Cause
from ragen_jax.report.runs import RunRecord
from ragen_jax.report.verdict import Gain, Information, Move, Verdict

MOST_DAMAGED = 8  # largest number of damaged files that are listed
MOST_FIELDS = 3  # largest number of fields in a group's name


def title(runs: Sequence[RunRecord]) -> str:
    names = runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more"
    return escape(names)


def top(
    runs: Sequence[RunRecord], verdicts: Sequence[Sequence[Verdict]], together: list[list[int]]
) -> str:
    """Return the top of the page: one run's summary or a row per run, and damaged files."""
    notes = "".join(f'<p class="rule">Damaged: {escape(line)}</p>' for line in list_damage(runs))
    if len(runs) == 1:
        run, judged = runs[0], verdicts[0]
        parts = [f'<p class="of">{escape(run.about)}</p>']
        return "".join(parts + [_verdict(verdict) for verdict in judged]) + notes
    rows = [
        _row(run, verdict) for run, judged in zip(runs, verdicts, strict=True) for verdict in judged
    ]
    heads = (
        *("run", "held-out success", "gain", "information at the end", "retrieval"),
        *("alarm", "first change", "cause"),
    )
    table = _table(heads, rows, "What happened in each run")
    means = [_mean(runs, verdicts, group) for group in together if len(group) > 1]
    return f'<p class="of">{len(runs)} runs</p>{table}' + "".join(means) + notes


def list_damage(runs: Iterable[RunRecord]) -> list[str]:
    """Return sentences about damaged files in the runs' folders, limited in number."""
    lines = [line for run in runs for line in run.damaged]
    more = [f"and {len(lines) - MOST_DAMAGED} more"] if len(lines) > MOST_DAMAGED else []
    return lines[:MOST_DAMAGED] + more


def _verdict(v: Verdict) -> str:
    label = f"<h3>{escape(v.label)}</h3>" if v.label else ""
    first = ("Held-out success", *_gain_tile(v.gain))
    if v.gain is None and v.information:
        first = ("Information", *_information_tile(v.information))
    tiles = [
        first,
        ("Alarm", *_alarm_tile(v)),
        ("First change", *_move_tile(v)),
        ("Cause", *_cause_tile(v)),
    ]
    cells = "".join(
        f"<div><dt>{head}</dt><dd><b>{escape(big)}</b><span>{escape(small)}</span></dd></div>"
        for head, big, small in tiles
    )
    said = v.gain is None and v.information is not None  # in the headline
    sentences = " ".join(v.answers[1:] if said else v.answers)
    answers = f'<p class="answers">{escape(sentences)}</p>' if sentences else ""
    answers += f'<p class="answers">{escape(v.example)}</p>' if v.example else ""
    return (
        f'<div class="verdict {v.state}">{label}<p class="headline">{escape(headline(v))}</p>'
        f'{answers}<dl class="tiles">{cells}</dl>{_order(v)}{_cure(v)}</div>'
    )


def headline(v: Verdict) -> str:
    """Return two or three sentences: gain, alarm or stop, first move and cause."""
    words = [v.answers[0] if v.gain is None and v.information else gain_words(v.gain)]
    if v.stop:
        words.append(f"A rule stopped the run at step {v.stop['step']}: {v.stop['reason']}.")
    if v.alarm:
        words.append(alarm_words(v))
    for finding in v.findings:
        words.append(f"{finding.words[0].upper()}{finding.words[1:]}.")
    if not v.alarm and not v.trouble:
        words.append("There was no alarm." if v.tested else f"No alarm was possible: {_needs(v)}.")
    if v.unwatched:
        words.append(
            "The alarm did not watch information: the rows lack own_margin, which this version "
            "reads (see docs/diagnostics.md)."
        )
    if v.lost is not None:
        words.append(f"A quarter of success was lost by the evaluation at step {v.lost}.")
    if v.trouble and v.moves:
        words.append(f"The first change was in {move_words(v.moves[0])}.")
    if v.main_finding:
        words.append(f"Cause: {v.main_finding.rule.name}.")
    elif v.trouble and v.causes:
        cause, since, figures = v.causes[0]
        words.append(f"Cause: {cause.name}, since step {since} ({figures}).")
    elif v.trouble:
        words.append("None of the named causes holds.")
    return " ".join(words)


def _needs(v: Verdict) -> str:
    return f"it needs {v.least} values of a metric"


def _information_tile(x: Information) -> tuple[str, str]:
    return f"{x.margin:.2f} nats", f"own_margin at step {x.step}; retrieval has p = {x.p:.3f}"


def gain_words(gain: Gain | None) -> str:
    if gain is None:
        return "The gain is unknown: it needs two evaluations of the same problems."
    change, half = 100 * gain.change, 100 * gain.half_width
    ends = f"from {_ends(gain)}, ± {half:.1f} (95 % CI)"
    if abs(change) <= half:
        return (
            f"Held-out success did not change beyond its interval ({change:+.1f} points, {ends})."
        )
    return (
        f"Held-out success {'rose' if change > 0 else 'fell'} by {abs(change):.1f} points ({ends})."
    )


def alarm_words(v: Verdict) -> str:
    (first, end), *later = v.alarm
    if end == v.last_step:
        return f"The alarm started at step {first} and was still on at the end."
    again = f", and {len(later)} more time{'s' * (len(later) > 1)}" if later else ""
    return f"The alarm started at step {first} and ended after step {end}{again}."


def move_words(move: Move) -> str:
    share = f"{move.share:.2f} of its {'highest' if move.key == 'eval/success' else 'level'}"
    return f"{move.what}, which {move.direction} at step {move.step} ({move.key}: {share})"


def _gain_tile(gain: Gain | None) -> tuple[str, str]:
    if gain is None:
        return "unknown", "needs two evaluations of the same problems"
    change = f"{100 * gain.change:+.1f} ± {100 * gain.half_width:.1f} points"
    mean = ("", ", mean of the last two", ", mean of the last three")[gain.averaged - 1]
    return change, _ends(gain) + mean


def _ends(gain: Gain) -> str:
    return f"{gain.first:.3f} to {gain.last:.3f}"


def _alarm_tile(v: Verdict) -> tuple[str, str]:
    if v.stop:
        return f"stopped at step {v.stop['step']}", f"rule: {v.stop['rule']}"
    if not v.alarm and not v.tested:
        return "not possible", _needs(v)
    if not v.alarm:
        return "none", f"in {v.seen} step{'s' * (v.seen != 1)}"
    return f"step {v.alarm[0][0]}", f"on for {v.on} of {v.seen} steps"


def _move_tile(v: Verdict) -> tuple[str, str]:
    if not v.moves and not v.tested:
        return "unknown", "no metric could be compared with its level"
    if not v.moves:
        return "nothing", f"kept their levels: {', '.join(v.tested)}"
    move = v.moves[0]
    return move.what, f"{move.direction} at step {move.step}"


def _cause_tile(v: Verdict) -> tuple[str, str]:
    if v.main_finding:
        return v.main_finding.rule.name, v.main_finding.words
    if not v.trouble:
        return "none needed", "no alarm, no stop, success kept" if v.gain else "no alarm"
    if not v.causes:
        return "unknown", "no rule of causes.py holds"
    cause, since, _ = v.causes[0]
    return cause.name, f"since step {since}"


def _order(v: Verdict) -> str:
    """Return all moves and further causes, in the order of their steps."""
    lines = [
        (
            move.step,
            escape(f"{move.what} {move.direction}"),
            escape(f"{move.key}, {move.share:.2f} of its level"),
        )
        for move in v.moves
    ]
    lines += [
        (since, escape(f"rule holds: {cause.name}"), escape(figures))
        for cause, since, figures in v.causes
    ]
    if v.alarm:
        lines.append((v.alarm[0][0], "alarm", "regime/alarm"))
    if not lines:
        return ""
    items = "".join(
        f"<li><b>step {step}</b> {words} <small>{figures}</small></li>"
        for step, words, figures in sorted(lines, key=lambda line: line[0])
    )
    head = "In order of occurrence" if v.trouble else "Worth a look, though there was no alarm"
    return f'<h4>{head}</h4><ol class="order">{items}</ol>'


def _cure(v: Verdict) -> str:
    if v.main_finding:
        rule = v.main_finding.rule
        return (
            f"<h4>What to do</h4><blockquote><p>{_code(rule.cure)}</p></blockquote>"
            f'<p class="rule"><b>{escape(rule.name)}</b> is named if {_code(rule.rule)}.</p>'
        )
    if not v.trouble or not v.causes:
        return ""
    cause = v.causes[0][0]
    return (
        f"<h4>What to do</h4><blockquote><p>{_code(cause.cure)}</p>"
        f"<footer>docs/diagnostics.md, <code>{escape(cause.section)}</code></footer></blockquote>"
        f'<p class="rule">{_rule(cause)}</p>'
    )


def _rule(cause: Cause) -> str:
    return f"<b>{escape(cause.name)}</b> is named if {escape(cause.rule)}."


def _code(text: str) -> str:
    """Convert Markdown's `code` to HTML."""
    return "".join(
        f"<code>{escape(part)}</code>" if i % 2 else escape(part)
        for i, part in enumerate(text.split("`"))
    )


def _row(run: RunRecord, v: Verdict) -> tuple[str, ...]:
    name = environment_name(run, v.label, alone=False)
    gain = v.gain
    success = _ends(gain) if gain else "unknown"
    change = _gain_tile(gain)[0] if gain else ""
    move = _move_tile(v)[0]
    if v.moves:
        move += f" {v.moves[0].direction}, step {v.moves[0].step}"
    facts = v.information
    reads = (
        [f"{facts.margin:.2f} nats", f"{facts.retrieval:.0%} (chance {facts.chance:.0%})"]
        if facts
        else ["unknown"] * 2
    )
    return name, success, change, *reads, _alarm_tile(v)[0], move, _cause_tile(v)[0]


def environment_name(run: RunRecord, label: str, *, alone: bool) -> str:
    """Return the name of an environment of a run on a page with one run or with several."""
    return label if alone else run.name + (f" / {label}" if label else "")


def _mean(
    runs: Sequence[RunRecord], verdicts: Sequence[Sequence[Verdict]], group: list[int]
) -> str:
    """Return the mean gain of runs that differ only in their seed."""
    name = escape(group_name(runs, group))
    lines = []
    for index, label in enumerate(runs[group[0]].labels):
        gains = [verdicts[i][index].gain for i in group]
        changes = [100 * gain.change for gain in gains if gain]
        if len(changes) > 1:
            halves = [100 * gain.half_width for gain in gains if gain]
            mean, half = interval(changes, halves=halves)
            of = f" of {escape(label)}" if label else ""
            bounded = half < 100 + abs(mean)  # else the interval holds every possible change
            interval_words = f" ± {half:.1f}" if bounded else ""
            rule = "95 % CI, Student's t" if bounded else "too few seeds for an interval"
            lines.append(
                f"<p><b>{name}</b>: held-out success{of} changed by {mean:+.1f}{interval_words} "
                f"points on average over {len(changes)} seeds ({rule}).</p>"
            )
    return "".join(lines)


def group_name(runs: Sequence[RunRecord], group: Sequence[int]) -> str:
    """Return the settings in which a group of seeds differs from other runs, or a run's name."""
    if len(group) == 1:
        return runs[group[0]].name
    fields = [name for name in list_differences(runs) if name != "seed"]
    settings = [
        f"{name} {_value(runs[group[0]].fields.get(name))}" for name in fields[:MOST_FIELDS]
    ]
    return ", ".join(settings) or f"{runs[group[0]].name} and {len(group) - 1} more"


def list_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return the fields that differ between runs."""
    names = dict.fromkeys(name for run in runs for name in run.fields)
    return [n for n in names if len({_value(run.fields.get(n)) for run in runs}) > 1]


def settings(runs: Sequence[RunRecord]) -> str:
    """Return tables of the fields: those that differ between runs, then all."""
    names = dict.fromkeys(name for run in runs for name in run.fields)
    heads = ("field", *(run.name for run in runs))

    def rows(wanted):
        return [(n, *(_value(run.fields.get(n)) for run in runs)) for n in wanted]

    if len(runs) == 1:
        return _table(heads, rows(names), "All settings")
    different = list_differences(runs)
    first = (
        _table(heads, rows(different), "Different settings")
        if different
        else "<p>The runs have the same settings.</p>"
    )
    everything = _table(heads, rows(names), "All settings")
    return f"{first}<details><summary>All {len(names)} fields</summary>{everything}</details>"


def list_marks(run: RunRecord, judged: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the marks at steps of the curves: {step, label, kind, words}."""
    found = [
        {"step": e["step"], "label": None, "kind": e["action"], "words": e["reason"]}
        for e in run.events
        if e["rule"] != "regimes"  # the alarm is read from the rows
    ]
    for v in judged:
        for start, end in v.alarm:
            words = f"alarm on from step {start} to {end}"
            found.append({"step": start, "label": v.label, "kind": "alarm", "words": words})
        if v.trouble and v.moves:
            words = f"first change: {move_words(v.moves[0])}"
            found.append(
                {"step": v.moves[0].step, "label": v.label, "kind": "first", "words": words}
            )
    return found


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(x)}</th>' for x in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(x)}</td>" for x in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
