"""prime-rl's token_exports/step_N/rank_R.jsonl: the sequences that a process trained on.

The writer: src/prime_rl/trainer/rl/token_export.py. Rows record no group: rows with equal ids
before their first trained token are one. Newer files repeat the reward of a sequence for each of
its tokens (src/prime_rl/trainer/batch.py, prepare_sample); older ones have none.
"""

from ragen_jax.score import values
from ragen_jax.score.formats.replies import masked_replies
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields, format_value, parse_nested


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    ids = values.ids(record.get("token_ids"), "token_ids")
    return masked_replies(ids, record.get("loss_mask"), "loss_mask")


def _reward(record: Fields) -> float | None:
    found = parse_nested(record.get("rewards"))
    if not isinstance(found, list):
        return values.number(found, "rewards")
    distinct = {values.number(each, "rewards") for each in found} - {None}
    if len(distinct) > 1:
        raise ValueError(
            f"has {format_value(found)} as its rewards; expected one reward, repeated per token"
        )
    return next(iter(distinct), None)


FORMAT = Format(("token_ids", "loss_mask"), _read, _reward)
