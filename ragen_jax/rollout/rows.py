"""Rows of a cache while they write replies: what to read for a prompt, and decoding in chunks.

The rows of episodes (slots.py) and those of requests (serving/engine.py) are such rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.chunks import DecodeBatch
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.pages import Cache, PendingRead
from ragen_jax.rollout.routes import join
from ragen_jax.rollout.stops import Stops

NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class Row:
    """A row of the cache, and the reply that it writes."""

    cached_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: NOTHING
    )  # tokens in the cache
    token: int = 0  # the next token, not in the cache yet
    shift: int = 0  # `ImageTable.shift` of the tokens in the cache
    tokens_left: int = 0  # tokens that its reply may still get; 0: no reply is running
    stop_state: int = 0  # state of the stop strings after the sampled tokens
    sampled: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    logp: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING.astype(np.float32))
    # int16 [T, X], the experts of the tokens in the cache, if they are kept, without those of
    # `reading`, which come next
    experts: np.ndarray | None = None
    reading: PendingRead | None = None

    def note_experts(self, new: np.ndarray) -> None:
        """Append the experts of the tokens of a chunk to the record."""
        read = [] if self.reading is None else self.reading.experts
        self.experts, self.reading = join(self.experts, *read, new), None


SomeRow = TypeVar("SomeRow", bound=Row)


@dataclasses.dataclass(frozen=True)
class Endings:
    """What ends a reply."""

    ids: tuple[int, ...]  # token ids
    stops: Stops | None  # stop strings; None: there are none


def begin_replies(
    prompts: Sequence[tuple[int, Row, np.ndarray, int]], cache: Cache, images: ImageSource
) -> list[list[PendingRead]]:
    """Let rows begin a reply; return the tokens to read for their prompts, shard by shard.

    Args:
      prompts: (index of the row in the cache, the row, its prompt, maximum tokens of the reply).
    """
    news: list[list[PendingRead]] = [[] for _ in range(cache.shards)]
    # (shard, prompt) -> its read, which the members of a group share in their first turn
    same: dict[tuple[int, bytes], PendingRead] = {}
    for index, row, prompt, most in prompts:
        before = prompt[:-1]
        start = common(row.cached_ids, before)
        if not cache.can_continue(len(row.cached_ids), start):
            start = 0
        row.cached_ids, row.token, row.tokens_left = before, int(prompt[-1]), most
        row.sampled, row.logp = NOTHING, np.zeros(0, np.float32)
        row.stop_state = 0
        row.shift = images.shift(before)
        shard, place = divmod(index, cache.rows)
        if start < len(before) <= cache.sizes.pieces[-1] and (
            cache.sizes.piece(len(before)) == cache.sizes.piece(len(before) - start)
        ):
            start = 0  # reading all is as fast, since there is no cache to attend to
        row.reading = None
        if row.experts is not None:
            row.experts = row.experts[:start]
        if start == len(before):
            continue
        if start == 0 and (shard, before.tobytes()) in same:
            row.reading = same[shard, before.tobytes()]
            row.reading.rows.append(place)
            continue
        found = PendingRead([place], start, before[start:], images.shift(before[:start]))
        row.reading = found
        news[shard].append(found)
        if start == 0:
            same[shard, before.tobytes()] = found
    return news


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two rows of tokens."""
    size = min(len(a), len(b))
    apart = np.flatnonzero(a[:size] != b[:size])
    return int(apart[0]) if len(apart) else size


def decode_rows(
    cache: Cache,
    rows: Sequence[SomeRow],
    keys_B: jax.Array,
    sampling: Sampling,
    endings: Endings,
    images: ImageSource = NO_IMAGES,
) -> list[SomeRow]:
    """Decode a chunk of every running reply and return the rows whose reply has ended.

    Args:
      rows: all rows of the cache in this process, in order.
      keys_B: the result of `episode_keys`, on the mesh in use.
    """
    stops = endings.stops
    shift_B = np.array([row.shift for row in rows], np.int32)
    stop_B = np.array([row.stop_state for row in rows], np.int32)
    batch = DecodeBatch(
        token_B=np.array([row.token for row in rows], np.int32),
        length_B=np.array([len(row.cached_ids) for row in rows], np.int32),
        drawn_B=np.array([len(row.sampled) for row in rows], np.int32),
        budget_B=np.array([row.tokens_left for row in rows], np.int32),
        keys_B=keys_B,
        shift_B=None if images.tower is None else shift_B,
        stop_B=stop_B if stops else None,
    )
    found = cache.decode(batch, sampling, endings.ids, stops)
    if found is None:
        return []
    stopped = []
    tokens_BC, logp_BC, count_B, experts_BCX = found
    for index, (row, tokens_C, logp_C, count) in enumerate(
        zip(rows, tokens_BC, logp_BC, count_B, strict=True)
    ):
        if not row.tokens_left:
            continue
        new, last = tokens_C[:count], int(tokens_C[count - 1])
        row.cached_ids = np.concatenate([row.cached_ids, [row.token], new[:-1]]).astype(np.int32)
        if experts_BCX is not None:
            row.note_experts(experts_BCX[index, :count])
        row.sampled = np.concatenate([row.sampled, new])
        row.logp = np.concatenate([row.logp, logp_C[:count]])
        row.token = last
        ended = last in endings.ids
        if stops:
            row.stop_state = stops.advance(row.stop_state, new)
            ended |= row.stop_state == stops.ended
        row.tokens_left = 0 if ended else row.tokens_left - int(count)
        if not row.tokens_left:
            stopped.append(row)
    return stopped
