"""Convert the rows of a step to episodes in groups, the input of the diagnostics."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Episode
from ragen_jax.score.encode import Encoder, Spoken
from ragen_jax.score.files import Broken, broken_row
from ragen_jax.score.formats import Row


@dataclasses.dataclass(frozen=True)
class ScoredStep:
    """The rollouts of a step."""

    number: int
    episodes: list[Episode]  # group by group, members in the order of their rows
    reward_E: np.ndarray  # float64, reward of each episode; NaN: not given
    success: bool  # whether every row records success or failure
    valid: bool  # whether every reply is recorded as valid or invalid


@dataclasses.dataclass
class Surprises:
    """Counts of rows that are scored in an unexpected way, to be reported."""

    parted: list[str] = dataclasses.field(default_factory=list)  # rows with another prompt
    before: int = 0  # first replies with text before their reasoning
    lost: int = 0  # reply texts that contain U+FFFD, which replaced invalid bytes


def encode_rows(
    rows: Sequence[Row], encoder: Encoder
) -> tuple[dict[str, list[Spoken]], list[Broken]]:
    """Return ({place: its replies} for the rows that can be encoded, the other rows).

    Rows that record no day are rendered with the day of the encoder.
    """
    responses = [reply.response for row in rows for reply in row.replies]
    encoder.look(text for text in responses if isinstance(text, str))
    spoken, unusable = {}, []
    fallback = encoder.date
    for row in rows:
        encoder.set_date(row.day or fallback)
        try:
            spoken[row.place] = [
                spoken_reply for reply in row.replies for spoken_reply in encoder.replies(reply)
            ]
        except Exception as error:  # raised by the chat template or the tokenizer
            unusable.append(broken_row(row.place, error))
    encoder.set_date(fallback)
    return spoken, unusable


def make_steps(
    rows: Sequence[Row], spoken: dict[str, list[Spoken]]
) -> tuple[list[ScoredStep], Surprises]:
    """Return the steps of rows, in order.

    Rows of a group have the same `Row.group`, if given, and the same first prompt, since first-turn
    metrics compare prompts. A group's reasonings are scored after the text that most of its members
    have up to their reasoning.

    Args:
      rows: rows that are in `spoken`.
    """
    surprises = Surprises()
    by_step = collections.defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    steps = []
    for number in sorted(by_step):
        groups = collections.defaultdict(list)
        prompts = {}  # {given group: the first prompt of its first row}
        for row in by_step[number]:
            given = spoken[row.place][0].given.tobytes()
            groups[row.group, given].append(row)
            if row.group is not None and prompts.setdefault(row.group, given) != given:
                surprises.parted.append(row.place)
        episodes = []
        for group, members in enumerate(groups.values()):
            turns_K = [[spoken_reply.turn for spoken_reply in spoken[row.place]] for row in members]
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
