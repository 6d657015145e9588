"""verl's dumps of generations (trainer.rollout_data_dir), also written by RAGEN's training.

The writers: verl/trainer/ppo/ray_trainer.py, _dump_generations, and, with a uid of each row,
verl/trainer/ppo/v1/trainer_base.py.
"""

import re

from ragen_jax.score import values
from ragen_jax.score.formats.replies import prompt_and_reply
from ragen_jax.score.formats.rows import Format
from ragen_jax.score.values import Fields

# The newer trainer names a row UID_ROLLOUT_OUTPUT; the rows of a group share the UID.
_UID = re.compile(r"(.+)_[0-9]+_[0-9]+$")


def _group(record: Fields) -> str | None:
    found = _UID.match(values.label(record.get("uid")) or "")
    return found[1] if found else None


FORMAT = Format(("input", "output"), prompt_and_reply("input", "output"), group=_group)
