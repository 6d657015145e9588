"""Convert the rows of a step to episodes in groups, the input of the diagnostics."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Episode
from ragen_jax.score.encode import EncodedReply, Encoder
from ragen_jax.score.files import Broken, make_broken
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

    split_groups: list[str] = dataclasses.field(default_factory=list)  # rows with another prompt
    text_before: int = 0  # first replies with text before their reasoning
    invalid_texts: int = 0  # reply texts that contain U+FFFD, which replaced invalid bytes


def encode_rows(
    rows: Sequence[Row], encoder: Encoder
) -> tuple[dict[str, list[EncodedReply]], list[Broken]]:
    """Return ({place: its replies} for the rows that can be encoded, the other rows).

    Rows that record no day are rendered with the day of the encoder.
    """
    responses = [reply.response for row in rows for reply in row.replies]
    encoder.detect_prefilled(text for text in responses if isinstance(text, str))
    replies_of, unusable = {}, []
    fallback = encoder.date
    for row in rows:
        encoder.set_date(row.day or fallback)
        try:
            replies_of[row.place] = [
                encoded for reply in row.replies for encoded in encoder.encode_replies(reply)
            ]
        except Exception as error:  # raised by the chat template or the tokenizer
            unusable.append(make_broken(row.place, error))
    encoder.set_date(fallback)
    return replies_of, unusable


def make_steps(
    rows: Sequence[Row], replies_of: dict[str, list[EncodedReply]]
) -> tuple[list[ScoredStep], Surprises]:
    """Return the steps of rows, in order.

    Rows of a group have the same `Row.group`, if given, and the same first prompt, since first-turn
    metrics compare prompts. A group's reasonings are scored after the text that most of its members
    have up to their reasoning.

    Args:
      rows: rows that are in `replies_of`.
    """
    surprises = Surprises()
    by_step = collections.defaultdict(list)
    for row in rows:
        by_step[row.step].append(row)
    steps = []
    for number in sorted(by_step):
        groups = collections.defaultdict(list)
        prompts = {}  # {Row.group: the first prompt of its first row}
        for row in by_step[number]:
            first_prompt = replies_of[row.place][0].prompt_ids.tobytes()
            groups[row.group, first_prompt].append(row)
            if (
                row.group is not None
                and prompts.setdefault(row.group, first_prompt) != first_prompt
            ):
                surprises.split_groups.append(row.place)
        episodes = []
        for group, members in enumerate(groups.values()):
            turns_K = [[encoded.turn for encoded in replies_of[row.place]] for row in members]
            first_prompts = [turns[0].prompt for turns in turns_K if turns[0].reasoning[1]]
            if first_prompts:
                common = _most_common(first_prompts)
                surprises.text_before += sum(not np.array_equal(x, common) for x in first_prompts)
                for turns in turns_K:
                    turns[0] = dataclasses.replace(turns[0], prompt=common)
            episodes += [
                Episode(group, group, member, tuple(turns), bool(row.success))
                for member, (row, turns) in enumerate(zip(members, turns_K, strict=True))
            ]
        group_rows = [row for members in groups.values() for row in members]
        replies = [reply for row in group_rows for reply in row.replies]
        texts = [reply.response for reply in replies if isinstance(reply.response, str)]
        surprises.invalid_texts += sum("\ufffd" in text for text in texts)
        rewards = [np.nan if row.reward is None else row.reward for row in group_rows]
        steps.append(
            ScoredStep(
                number=number,
                episodes=episodes,
                reward_E=np.array(rewards),
                success=all(row.success is not None for row in group_rows),
                valid=all(reply.valid is not None for reply in replies),
            )
        )
    return steps, surprises


def _most_common(arrays: Sequence[np.ndarray]) -> np.ndarray:
    counts = collections.Counter(array.tobytes() for array in arrays)
    most = counts.most_common(1)[0][0]
    return next(array for array in arrays if array.tobytes() == most)
