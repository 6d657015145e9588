"""NeMo-RL's train_data_stepN.jsonl, N the step.

The writers: nemo_rl/algorithms/grpo.py, and nemo_rl/utils/logger.py, log_batched_dict_as_jsonl,
which writes each value of a row as a list of one. Ids are padded on the right; several masked spans
are several turns. Rows record no group: rows with equal ids before their first sampled token are
one. Its older files and those of distillation have no ids and are not read.
"""

from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.replies import masked_replies
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields, format_value, parse_nested


def _only_value(record: Fields, name: str) -> Any:
    found = parse_nested(record.get(name))
    if not isinstance(found, list) or len(found) != 1:
        raise ValueError(f"has {format_value(found)} as its {name}; expected a list of one value")
    return found[0]


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    ids = values.ids(_only_value(record, "token_ids"), "token_ids")
    mask = parse_nested(_only_value(record, "token_loss_mask"))
    length = values.whole(_only_value(record, "input_lengths"), "input_lengths")
    if length is None or length > len(ids):
        raise ValueError(
            f"has {format_value(length)} as its input_lengths, with {len(ids)} token_ids"
        )
    if isinstance(mask, list) and len(mask) == len(ids):
        mask = mask[:length]  # of another length: refused by masked_replies
        ids = ids[:length]
    return masked_replies(ids, mask, "token_loss_mask")


FORMAT = Format(("token_ids", "token_loss_mask", "input_lengths"), _read)
