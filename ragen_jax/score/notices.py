"""Lines about content of rollout files that is not read, or that some rows lack."""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import ScoredStep
from ragen_jax.score.files import FileContents


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
    keys = unwritten_keys(read, encoder)
    if keys:
        counted = _counted(keys, "message")
        yield f"keys of messages that the chat template does not write: {counted}"


def warning_lines(
    read: FileContents, steps: Sequence[ScoredStep], rewards: Sequence[str], encoder: Encoder
) -> Iterator[str]:
    """Yield lines for values that some rows lack, repeated rows, and parts the template omits."""
    for name, count in sorted(encoder.missing_parts.items()):
        if count:
            yield f"{count} prompts or replies lack the {name}: the chat template leaves them out"
    if encoder.transcripts:
        yield (
            f"{encoder.transcripts} outputs hold later messages of a conversation, and are read as "
            "several turns"
        )
    if encoder.trailing_observations:
        yield (
            f"{encoder.trailing_observations} outputs end with an observation, which is no reply: "
            "left out"
        )
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


def _counted(counts: dict[str, int], unit: str) -> str:
    return ", ".join(f"{name} ({n} {unit}{'s' * (n > 1)})" for name, n in counts.items())
