"""Captures of OpenEnv's harness (openenv/core/harness/capture/export.py), an episode a document.

A sequence is a path of the episode's graph of calls; only those of the role `agent` are its work.
Paths share their first calls, whose replies are read once. The reward is recorded elsewhere.
"""

from ragen_jax.score import values
from ragen_jax.score.formats.replies import masked_replies
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    replies: list[ParsedReply] = []
    for sequence in record.objects("sequences"):
        role = str(sequence.get("role") or "agent")
        if role != "agent":
            record.leave_out(f"{role} sequences")
            continue
        ids = values.ids(sequence.get("input_ids"), "input_ids")
        for reply in masked_replies(ids, sequence.get("loss_mask"), "loss_mask"):
            if reply not in replies:
                replies.append(reply)
    if not replies:
        raise ValueError("has no sequence of the role 'agent'")
    return tuple(replies)


FORMAT = Format(("sequences",), _read)
