"""completions/completions_STEP.parquet of TRL (trl/trainer/grpo_trainer.py, log)."""

from decimal import Decimal

from ragen_jax.score import values
from ragen_jax.score.formats.replies import prompt_and_reply
from ragen_jax.score.formats.rows import Format
from ragen_jax.score.values import Fields


def _reward_columns(record: Fields) -> list[str]:
    """Return the reward columns; TRL has a column for each reward function, with its name.

    A column *reward holds rewards, whatever its values are. Others are columns of a reward function
    if they hold a number: a column reward_model may be text.
    """
    return [
        name
        for name, value in record.values.items()
        if name.lower().endswith("reward")
        or "reward" in name.lower()
        and (
            values.is_missing(value)
            or isinstance(value, int | float | Decimal)
            or values.is_number(value)
        )
    ]


def _reward(record: Fields) -> float | None:
    """Return the sum of the reward columns; functions that do not apply have no value."""
    found = [values.number(record.get(name), name) for name in _reward_columns(record)]
    given = [value for value in found if value is not None]
    return values.add_rewards(given) if given else None


FORMAT = Format(("prompt", "completion"), prompt_and_reply("prompt", "completion"), _reward)
