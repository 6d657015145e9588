"""Rollouts of slime, as JSON lines that examples/slime_to_jsonl.py writes.

slime itself writes a pickle (slime/observability/rollout_data_utils.py, save_debug_rollout_data),
which is never read here. A line is a Sample (slime/utils/types.py) and the step. The prompt is
`tokens` before the last `response_length`; results of tools are in the response, with mask 0.
"""

from ragen_jax.score import values
from ragen_jax.score.formats.replies import masked_replies
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields, format_value


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    status = record.get("status")
    if status == "aborted":
        raise ValueError("was aborted by the trainer (its status)")
    ids = values.ids(record.get("tokens"), "tokens")
    length = values.whole(record.get("response_length"), "response_length")
    if length is None or length > len(ids):
        raise ValueError(
            f"has {format_value(length)} as its response_length, with {len(ids)} tokens"
        )
    mask = values.parse_nested(record.get("loss_mask"))
    if mask is None:
        mask = [1] * length
    if isinstance(mask, list):
        if len(mask) != length:
            raise ValueError(f"has {len(mask)} values in its loss_mask for {length} tokens")
        mask = [0] * (len(ids) - length) + mask
    return masked_replies(ids, mask, "loss_mask")


def _group(record: Fields) -> str | None:
    return values.label(record.get("group_index"))


def _reward(record: Fields) -> float | None:
    found = record.object("reward")
    return values.one_reward(found) if found else None


FORMAT = Format(("tokens", "response_length"), _read, _reward, _group)
