"""The cache of slots: pages of all rows, and the few sizes of the programs of chunks.py.

A row of the cache keeps the tokens that it has read. The first page holds a first prompt. Pages are
added as rows get longer, and programs read only the pages that some row uses. When few rows remain,
they are gathered into smaller pages. New tokens are read a few rows at a time.

Axes: as in chunks.py. With several processes, each process passes the rows of its shards, and all
processes call the same programs: they first agree on the sizes.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import max_over_processes, place_rows, read_rows, row_shards
from ragen_jax.core.types import Array, Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.chunks import (
    DecodeBatch,
    Page,
    decode_chunk,
    empty_page,
    fold,
    keep_rows,
    read,
)
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.stops import Stops
from ragen_jax.rollout.tails import Tail, can_continue, empty_tail, fold_tail, has_tail

PIECE = 256  # maximum tokens of a row that are read in a call
QUARTERS = (1, 2, 4)  # piece lengths, in quarters of the longest piece
LARGEST_PAGE = 1024  # maximum positions of a page after the first
LEAST_CHUNK = 24  # minimum of the default tokens per decode chunk
FEWEST = 64  # minimum rows of a compacted cache: below it XLA's CPU matmuls round differently


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that determine the shapes of a cache's programs, per shard."""

    rows: tuple[int, ...]  # possible rows of the cache, ascending; the last is that of all slots
    at_a_time: int  # rows that are read in a call
    first: int  # positions of the first page: a first prompt or an eighth of a reply, the larger
    pieces: tuple[int, ...]  # possible tokens of a row that a call reads, ascending
    chunk: int  # tokens per decode chunk

    def pages(self) -> Iterator[int]:
        """Yield the positions of each page: equal at first, then half of all pages before.

        A row thus attends to hardly more positions than it uses, and the number of pages is small.
        """
        size = total = self.first
        while True:
            yield size
            longer = self.first * max(total // (2 * self.first), 1)
            size = min(longer, LARGEST_PAGE)
            total += size

    def piece(self, tokens: int) -> int:
        """Return the shortest of `pieces` with room for `tokens`, or the longest piece."""
        return next((piece for piece in self.pieces if piece >= tokens), self.pieces[-1])


@dataclasses.dataclass
class PendingRead:
    """Tokens to be read after the first `start` tokens of some rows of a shard."""

    rows: list[int]  # indices within the shard
    start: int  # number of cached tokens to keep
    tokens: np.ndarray  # int32, the new tokens
    shift: int = 0  # `ImageTable.shift` of the first `start` tokens
    # int16 [T, X] each, the experts of the tokens read so far, if they are kept
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)


def cache_sizes(
    *, slots: int, chunk: int, episodes: int, prompt: int, max_new_tokens: int, compact: bool
) -> Sizes:
    """Return the `Sizes` of a rollout on the mesh in use.

    Args:
      slots: number of slots of all shards; 0: the number of episodes.
      chunk: tokens per decode chunk; 0: an eighth of a reply, at least 24.
      episodes: number of episodes of the rollout.
      prompt: approximate tokens of the longest first prompt; longer prompts need more calls.
      max_new_tokens: maximum tokens per reply.
      compact: whether the cache may shrink when few episodes are left.
    """
    shards, _ = row_shards()
    most = -(-(slots or episodes) // shards)
    rows = row_sizes(most) if compact else (most,)
    enough = next((n for n in rows if n * shards >= episodes), most)
    longest = length_bucket(-(-prompt // -(-prompt // PIECE)))  # equal parts of a first prompt
    return Sizes(
        rows=tuple(n for n in rows if n <= enough),
        at_a_time=min(most, max(-(-most // 8), 8)),
        first=length_bucket(max(prompt, -(-max_new_tokens // 8))),
        pieces=tuple(sorted({min(length_bucket(-(-longest * n // 4)), longest) for n in QUARTERS})),
        chunk=min(chunk or max(-(-max_new_tokens // 8), LEAST_CHUNK), max_new_tokens),
    )


def row_sizes(rows: int) -> tuple[int, ...]:
    """Return the possible rows of a shard's cache, ascending: a quarter, half, all; >= FEWEST."""
    return tuple(sorted({max(-(-rows // parts), min(rows, FEWEST)) for parts in (1, 2, 4)}))


class Cache:
    """The pages of all slots' rows, shard by shard, and the programs that use them."""

    def __init__(
        self, model: Qwen, params: Params, sizes: Sizes, images: ImageSource = NO_IMAGES
    ) -> None:
        self.model, self.params, self.sizes, self.images = model, params, sizes, images
        self.count, mine = row_shards()  # number of shards of all processes
        self.shards = len(mine)  # number of shards of this process
        self.rows = sizes.rows[-1]  # rows per shard
        self.pages: list[Page] = []
        self.tail: Tail | None = None  # None also before the first page
        self.lengths: list[int] = []  # positions of each page
        self.to_come = sizes.pages()

    def compact(self, live: list[list[int]], most: int) -> list[list[int]] | None:
        """Drop rows if a smaller cache can hold the live rows.

        Args:
          live: rows of each shard to keep. most: largest number of live rows of any shard.

        Returns:
          For each shard, the old index of each new row; None if nothing was dropped.
        """
        rows = next(size for size in self.sizes.rows if size >= most)
        if rows >= self.rows:
            return None
        kept = []
        for part in live:
            free = [row for row in range(self.rows) if row not in set(part)]
            kept.append(part + free[: rows - len(part)])
        rows_B = place_rows(np.concatenate(kept).astype(np.int32))
        self.pages = [keep_rows(page, rows_B) for page in self.pages]
        if self.tail is not None:
            self.tail = keep_rows(self.tail, rows_B)
        self.rows = rows
        return kept

    def read(self, news: Sequence[Sequence[PendingRead]]) -> None:
        """Read the new tokens of each shard, longest first, a few rows per call."""
        R, B = self.sizes.at_a_time, self.shards * self.rows
        queues = [sorted(part, key=lambda n: -len(n.tokens)) for part in news]
        (longest,) = max_over_processes(
            max((len(part[0].tokens) for part in queues if part), default=0)
        )
        E = self.sizes.piece(longest)
        while True:
            now = [n for part in queues for n in part[:R]]
            count = {id(n): min(len(n.tokens), E) for n in now}
            waiting, start, end, least = max_over_processes(
                len(now),
                max((n.start for n in now), default=0),
                max((n.start + count[id(n)] for n in now), default=0),
                max((-n.start for n in now), default=-(2**31)),
            )
            if not waiting:
                return
            rows_R, start_R, count_R, shift_R = (
                np.zeros(self.shards * R, np.int32) for _ in range(4)
            )
            tokens_RE = np.zeros((self.shards * R, E), np.int32)
            reader_B = np.full(B, R, np.int32)
            for shard, part in enumerate(queues):
                for row, n in enumerate(part[:R]):
                    at, size = shard * R + row, count[id(n)]
                    rows_R[at], start_R[at], count_R[at] = n.rows[0], n.start, size
                    shift_R[at] = n.shift
                    n.shift += self.images.shift(n.tokens[:size])
                    tokens_RE[at, :size] = n.tokens[:size]
                    reader_B[shard * self.rows + np.array(n.rows)] = row
                    n.start, n.tokens = n.start + size, n.tokens[size:]
            self._grow(end)
            tokens = tokens_RE
            rows_R, start_R, tokens_RE, count_R, reader_B = map(
                place_rows, (rows_R, start_R, tokens_RE, count_R, reader_B)
            )
            history = self.pages[: self._needed(start)]
            shown = self.images.attach(self.params, tokens)
            # Without images the program has no such argument.
            shifts = () if self.images.tower is None else (place_rows(shift_R),)
            # Nor does it have these if there is no tail, or if all rows start from nothing.
            tails: dict[str, Any] = {} if self.tail is None else {"count_R": count_R}
            if history and self.tail is not None:
                tails["tail"] = self.tail
            new, experts, new_tail = read(
                self.model, shown, history, rows_R, start_R, tokens_RE, *shifts, **tails
            )
            self._fold(new, start_R, count_R, reader_B, -least, end)
            self._fold_tail(new_tail, start_R, count_R, reader_B)
            if experts is not None:
                experts_RTX = read_rows(experts)
                for shard, part in enumerate(queues):
                    for row, n in enumerate(part[:R]):
                        n.experts.append(experts_RTX[shard * R + row, : count[id(n)]])
            queues = [[n for n in part if len(n.tokens)] for part in queues]
            for part in queues:
                part.sort(key=lambda n: -len(n.tokens))

    def decode(
        self,
        batch: DecodeBatch,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
        stops: Stops | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None] | None:
        """Decode a chunk of every running reply.

        Args:
          batch: arrays on the host, with an entry for each row of this process; `keys_B` is on the
            mesh in use.

        Returns:
          (tokens_BC, logp_BC, count_B, experts_BCX of the tokens read, if they are kept), or None
          if no reply is running in any process.
        """
        chunk = self.sizes.chunk
        running_B = batch.budget_B > 0
        before = np.asarray(batch.length_B)[running_B]
        after = before + np.minimum(chunk, batch.budget_B[running_B])
        longest, end, least = max_over_processes(
            max(before.tolist(), default=0),
            max(after.tolist(), default=0),
            max((-before).tolist(), default=-(2**31)),
        )
        if not end:
            return None
        self._grow(end)
        placed = DecodeBatch(
            token_B=place_rows(np.asarray(batch.token_B)),
            length_B=place_rows(np.asarray(batch.length_B)),
            drawn_B=place_rows(np.asarray(batch.drawn_B)),
            budget_B=place_rows(np.asarray(batch.budget_B)),
            keys_B=batch.keys_B,
            shift_B=None if batch.shift_B is None else place_rows(np.asarray(batch.shift_B)),
            stop_B=None if batch.stop_B is None else place_rows(np.asarray(batch.stop_B)),
        )
        tails = {} if self.tail is None else {"tail": self.tail}
        new, tokens_BC, logp_BC, count_B, experts, new_tail = decode_chunk(
            self.model,
            self.params,
            self.pages[: self._needed(max(longest, 1))],
            placed,
            np.float32(sampling.temperature),
            settings=sampling.decode_settings(stop_ids, chunk, stops),
            **tails,
        )
        each = place_rows(np.tile(np.arange(self.rows, dtype=np.int32), self.shards))
        self._fold(new, placed.length_B, count_B, each, -least, end)
        self._fold_tail(new_tail, placed.length_B, count_B, each)
        experts_BCX = None if experts is None else read_rows(experts)
        return read_rows(tokens_BC), read_rows(logp_BC), read_rows(count_B), experts_BCX

    def _fold(
        self,
        new: Page,
        start_R: Array,
        count_R: Array,
        reader_B: Array,
        least: int,
        end: int,
    ) -> None:
        """Call `fold` for each page that has positions from `least` (inclusive) to `end`."""
        first = 0
        for index, size in enumerate(self.lengths):
            if first < end and first + size > least:
                page = self.pages[index]
                self.pages[index] = fold(page, new, np.int32(first), start_R, count_R, reader_B)
            first += size

    def _fold_tail(self, new: Tail | None, start_R: Array, count_R: Array, reader_B: Array) -> None:
        if self.tail is not None and new is not None:
            self.tail = fold_tail(self.model.config, self.tail, new, start_R, count_R, reader_B)

    def can_continue(self, cached: int, start: int) -> bool:
        """Return whether a row with `cached` tokens can go on after its first `start` tokens."""
        return can_continue(self.model.config, cached, start)

    def _needed(self, positions: int) -> int:
        """Return the number of pages that hold the first `positions` positions of a row."""
        starts = itertools.accumulate(self.lengths[:-1], initial=0)
        return sum(start < positions for start in starts) if self.lengths else 0

    def _grow(self, positions: int) -> None:
        while sum(self.lengths) < positions:
            size, rows = next(self.to_come), self.count * self.rows
            if self.tail is None and has_tail(self.model.config):
                self.tail = empty_tail(self.model, self.params, rows=rows)
            page = empty_page(self.model, self.params, rows=rows, positions=size)
            self.pages.append(page)
            self.lengths.append(size)
