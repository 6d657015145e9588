"""Our own rollouts (ragen_jax/run/log.py, write_rollouts)."""

from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    return tuple(
        ParsedReply(
            prompt=values.ids(turn.get("prompt_ids"), "prompt_ids"),
            response=values.ids(turn.get("sampled_ids"), "sampled_ids"),
            actions=values.texts(turn.get("actions")) or (),
            valid=values.boolean(turn.get("valid"), "valid"),
            whole=True,
        )
        for turn in record.objects("turns")
    )


def _reward(record: Fields) -> float | None:
    return values.total([turn.get("reward") for turn in record.objects("turns")], "reward")


def shows_images(record: Any) -> bool:
    """Return whether a record is from ragen_jax and a turn shows images.

    Only its own model with its vision tower could read them.
    """
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        return False
    return any(isinstance(turn, dict) and turn.get("images") for turn in turns)


FORMAT = Format(("turns",), _read, _reward)
