"""Rows of a step as episodes in groups, which is what the diagnostics read."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Episode
from ragen_jax.score.encode import Encoder, Spoken
from ragen_jax.score.files import Broken, broken
from ragen_jax.score.formats import Row


@dataclasses.dataclass(frozen=True)
class ScoredStep:
    """The rollouts of a step."""

    number: int
    episodes: list[Episode]  # group by group, members in the order of their rows
    reward_E: np.ndarray  # float64, of each episode; NaN: not given
    success: bool  # whether every row says if it succeeded
    valid: bool  # whether every reply is said to be valid or not


@dataclasses.dataclass
class Surprises:
    """What is told of rows that are scored, but not as they were meant to be."""

    parted: list[str] = dataclasses.field(default_factory=list)  # rows of groups with other prompts
    before: int = 0  # first replies that say something before their reasoning
    lost: int = 0  # texts of replies that hold U+FFFD: bytes that were no text


def encode_rows(
    rows: Sequence[Row], encoder: Encoder
) -> tuple[dict[str, list[Spoken]], list[Broken]]:
    """({place: its replies} of the rows that can be encoded, the others).

    Rows that record no day are rendered with the day of the encoder.
    """
    responses = [reply.response for row in rows for reply in row.replies]
    encoder.look(text for text in responses if isinstance(text, str))
    spoken, unusable = {}, []
    fallback = encoder.date
    for row in rows:
        encoder.set_date(row.day or fallback)
        try:
            spoken[row.place] = [said for reply in row.replies for said in encoder.replies(reply)]
        except Exception as error:  # by the chat template or the tokenizer
            unusable.append(broken(row.place, error))
    encoder.set_date(fallback)
    return spoken, unusable


def make_steps(
    rows: Sequence[Row], spoken: dict[str, list[Spoken]]
) -> tuple[list[ScoredStep], Surprises]:
    """The steps of rows, in order.

    Rows of a group have the same `Row.group`, where that is given, and the same first prompt: what
    a first-turn figure compares are prompts. What a reasoning of the group is scored behind is
    what most of its members wrote up to their reasoning.

    Args:
      rows: that `spoken` has.
    """
    surprises = Surprises()
    by_step = collections.defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    steps = []
    for number in sorted(by_step):
        groups = collections.defaultdict(list)
        prompts = {}  # of a group that is given: the first prompt of its first row
        for row in by_step[number]:
            given = spoken[row.place][0].given.tobytes()
            groups[row.group, given].append(row)
            if row.group is not None and prompts.setdefault(row.group, given) != given:
                surprises.parted.append(row.place)
        episodes = []
        for group, members in enumerate(groups.values()):
            turns_K = [[said.turn for said in spoken[row.place]] for row in members]
            begun = [turns[0].prompt for turns in turns_K if turns[0].reasoning[1]]
            if begun:
                common = _most_common(begun)
                surprises.before += sum(not np.array_equal(x, common) for x in begun)
                for turns in turns_K:
                    turns[0] = dataclasses.replace(turns[0], prompt=common)
            episodes += [
                Episode(group, group, member, tuple(turns), bool(row.success))
                for member, (row, turns) in enumerate(zip(members, turns_K, strict=True))
            ]
        ordered = [row for members in groups.values() for row in members]
        replies = [reply for row in ordered for reply in row.replies]
        texts = [reply.response for reply in replies if isinstance(reply.response, str)]
        surprises.lost += sum("\ufffd" in text for text in texts)
        rewards = [np.nan if row.reward is None else row.reward for row in ordered]
        steps.append(
            ScoredStep(
                number=number,
                episodes=episodes,
                reward_E=np.array(rewards),
                success=all(row.success is not None for row in ordered),
                valid=all(reply.valid is not None for reply in replies),
            )
        )
    return steps, surprises


def _most_common(arrays: Sequence[np.ndarray]) -> np.ndarray:
    counts = collections.Counter(array.tobytes() for array in arrays)
    most = counts.most_common(1)[0][0]
    return next(array for array in arrays if array.tobytes() == most)
