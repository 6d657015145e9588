"""Lines about the content of rollout files: what is read, what is not, and what rows lack."""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import ScoredStep, Surprises
from ragen_jax.score.files import FileContents

# The kinds of prompts of prompts.py, in words.
PROMPT_KINDS = {
    "token ids": "with recorded token ids",
    "messages": "rendered from messages by the chat template",
    "control tokens": "of text with its control tokens",
    "restored": "restored exactly from text",
    "text": "scored as plain text",
}


def read_line(read: FileContents, names: Sequence[str]) -> str:
    """Return the line that names the formats of the rows and where they are from.

    Args:
      names: the files and folders that were named; empty: the rows were in memory.
    """
    places = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    counted = [
        f"{count} row{'s' * (count > 1)} of {form}" for form, count in count_formats(read).items()
    ]
    return f"read {', '.join(counted)} from {places or 'memory'}"


def count_formats(read: FileContents) -> dict[str, int]:
    """Return {format: number of rows}, the most frequent first."""
    return dict(collections.Counter(row.form for row in read.rows).most_common())


def prompts_line(encoder: Encoder) -> str:
    """Return the line that counts prompts by how exactly their token ids are known."""
    kinds = [(encoder.counts.prompt_kinds[kind], words) for kind, words in PROMPT_KINDS.items()]
    return "prompts: " + ", ".join(f"{count} {words}" for count, words in kinds if count)


def unrecorded_lines(read: FileContents) -> Iterator[str]:
    """Yield a line for each format of which no row records a reward, a success or a group."""
    for form, count in count_formats(read).items():
        rows = [row for row in read.rows if row.form == form]
        names = ("reward", "success", "group")
        *most, last = [x for x in names if all(getattr(row, x) is None for row in rows)] or [""]
        if last:
            what = f"{', '.join(most)} or {last}" if most else last
            some = f"{count} rows of {form} record" if count > 1 else f"1 row of {form} records"
            groups = ": equal prompts are a group" if last == "group" else ""
            yield f"{some} no {what}{groups}"


def left_out(read: FileContents) -> dict[str, int]:
    """Return {parts of rows that are not scored: their number}."""
    total: collections.Counter[str] = collections.Counter()
    for row in read.rows:
        total.update(row.left_out)
    return dict(sorted(total.items()))


def unwritten_keys(read: FileContents, encoder: Encoder) -> dict[str, int]:
    """Return {message key that the chat template does not write: number of messages with it}."""
    counts: collections.Counter[str] = collections.Counter()
    for row in read.rows:
        counts.update(row.message_keys)
    return {key: counts[key] for key in sorted(counts) if key not in encoder.written_keys}


def unread_lines(read: FileContents, encoder: Encoder) -> Iterator[str]:
    """Yield lines for files, fields and message keys that are not read, with their counts."""
    for other in read.others:
        yield f"files that are not read: {other}"
    if read.unread:
        yield f"fields that are not read: {_counted(read.unread, 'row')}"
    parts = left_out(read)
    if parts:
        counted = ", ".join(f"{count} {part}" for part, count in parts.items())
        yield f"parts of rows that are not scored: {counted}"
    keys = unwritten_keys(read, encoder)
    if keys:
        counted = _counted(keys, "message")
        yield f"keys of messages that the chat template does not write: {counted}"


def warning_lines(
    read: FileContents,
    steps: Sequence[ScoredStep],
    surprises: Surprises,
    rewards: Sequence[str],
    encoder: Encoder,
) -> Iterator[str]:
    """Yield lines for values that some rows lack, and rows that are read unexpectedly."""
    yield from _encoding_lines(encoder)
    if read.repeated:
        yield (
            f"{len(read.repeated)} rows repeat an earlier row of their step verbatim and count "
            f"as rollouts; the first: {read.repeated[0]}"
        )
    total = len(read.rows)
    without = sum(int(np.sum(~np.isfinite(step.reward_E))) for step in steps)
    if without and (rewards or without < total):
        named = f" ({' + '.join(rewards)})" if rewards else ""
        yield f"{without} of {total} rows have no reward{named}; their groups have no anatomy"
    unsaid = sum(row.success is None for row in read.rows)
    if 0 < unsaid < total:
        yield (
            f"{unsaid} of {total} rows do not report success (true, false, 0 or 1); steps with "
            "such rows have no success metrics"
        )
    if surprises.split_groups:
        yield (
            f"{len(surprises.split_groups)} rows have a prompt that differs from the first row of "
            f"their group and form separate groups; the first: {surprises.split_groups[0]}"
        )
    if surprises.text_before:
        yield (
            f"{surprises.text_before} replies begin their reasoning unlike most of their group "
            f"(for example with text before {encoder.opening}) and are scored as if they did not"
        )
    if surprises.invalid_texts:
        yield (
            f"{surprises.invalid_texts} replies contain U+FFFD, which replaces undecodable bytes; "
            "they are scored with that character and look unlikely"
        )


def _encoding_lines(encoder: Encoder) -> Iterator[str]:
    """Yield lines for parts that the template omits, and texts that it did not write."""
    counts = encoder.counts
    for name, count in sorted(counts.missing_parts.items()):
        if count:
            yield f"{count} prompts or replies lack the {name}: the chat template leaves them out"
    if counts.transcripts:
        yield (
            f"{counts.transcripts} outputs hold later messages of a conversation, and are read as "
            "several turns"
        )
    if counts.trailing_observations:
        yield (
            f"{counts.trailing_observations} outputs end with an observation, which is no reply: "
            "left out"
        )
    if counts.prompt_kinds["text"] and encoder.tokenizer.chat_template:
        yield (
            f"{counts.prompt_kinds['text']} prompts are plain text that the model's chat template "
            "did not write; they are scored unchanged (messages would go through the template)"
        )


def _counted(counts: dict[str, int], unit: str) -> str:
    return ", ".join(f"{name} ({n} {unit}{'s' * (n > 1)})" for name, n in counts.items())
