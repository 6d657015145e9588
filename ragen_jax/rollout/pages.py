"""The cache of slots: pages of all rows, and the few sizes that the programs of chunks.py come in.

A row of the cache keeps what it has read. The first page holds a first prompt, later ones are added
where rows get longer, and those that no row reaches are not looked at; few rows that are left are
gathered into smaller pages. What is new is read some rows at a time.

Axes: as in chunks.py. Where several processes sample, each tells its own shards' rows, and all call
the same programs: sizes are agreed on.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import max_over_processes, place_rows, read_rows, row_shards
from ragen_jax.core.types import Array, Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import ImageTable
from ragen_jax.rollout.chunks import Page, decode_chunk, empty_page, fold, keep_rows, read
from ragen_jax.rollout.episode import Sampling

PIECE = 256  # tokens of a row that are read at a time, at most
QUARTERS = (1, 2, 4)  # of the longest piece, what is new may be read in
LARGEST_PAGE = 1024  # positions of a page behind the first
LEAST_CHUNK = 24  # tokens between two looks at the rows, where nothing is said of it
FEWEST = 64  # rows that a smaller cache has: below it XLA's products on CPU round differently


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the programs of a cache are shaped by, of a shard each."""

    rows: tuple[int, ...]  # of the cache, rising: of all slots, and of those left at the end
    at_a_time: int  # rows that are read in a call
    first: int  # positions of the first page: a first prompt, or an eighth of a reply
    pieces: tuple[int, ...]  # tokens of a row that a call reads, rising
    chunk: int  # tokens of a decode chunk

    def pages(self) -> Iterator[int]:
        """Positions of the first page, of the second, ...: alike at first, then half of all before.

        So a row attends to hardly more than it has, with few numbers of pages.
        """
        size = held = self.first
        while True:
            yield size
            longer = self.first * max(held // (2 * self.first), 1)
            size = min(longer, LARGEST_PAGE)
            held += size

    def piece(self, tokens: int) -> int:
        """Of `pieces` the one that reads so many tokens, or else as many as one can."""
        return next((piece for piece in self.pieces if piece >= tokens), self.pieces[-1])


@dataclasses.dataclass
class PendingRead:
    """Tokens to be read behind the first `start` ones of some rows of a shard."""

    rows: list[int]
    start: int
    tokens: np.ndarray
    shift: int = 0  # of `Album.shift`, of the first `start` ones


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """Rows whose replies a chunk goes on with: a column each, of this process's rows."""

    token: list[int]  # the last one
    before: list[int]  # how many tokens are before it
    drawn: list[int]  # how many its reply has
    tokens_left: list[int]  # how many it may still have; 0: none is under way
    shift: list[int]  # of `Album.shift`, of the tokens before


def cache_sizes(
    *, slots: int, chunk: int, episodes: int, prompt: int, max_new_tokens: int, compact: bool
) -> Sizes:
    """The `Sizes` of a rollout on the mesh in use.

    Args:
      slots: of all shards; 0: as many as episodes.
      chunk: tokens of a decode chunk; 0: an eighth of a reply, at least 24.
      prompt: tokens of the longest first prompt, about; a longer one is only read in more calls.
      compact: whether few episodes may have fewer rows.
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
    """Rows that a shard's cache may have, rising: all, half and a quarter, at least FEWEST."""
    return tuple(sorted({max(-(-rows // parts), min(rows, FEWEST)) for parts in (1, 2, 4)}))


class Cache:
    """The pages of all slots' rows, shard by shard, and the programs that use them."""

    def __init__(
        self, model: Qwen, params: Params, sizes: Sizes, album: ImageTable | None = None
    ) -> None:
        self.model, self.params, self.sizes, self.album = model, params, sizes, album
        self.count, mine = row_shards()  # of all processes
        self.shards = len(mine)  # of this one
        self.rows = sizes.rows[-1]  # of a shard
        self.pages: list[Page] = []
        self.lengths: list[int] = []  # positions of each
        self.to_come = sizes.pages()

    def shift(self, tokens: np.ndarray) -> int:
        """`Album.shift` of a row's first tokens."""
        return 0 if self.album is None else self.album.shift(tokens)

    def _places(self, *shift: Sequence[int] | np.ndarray) -> list[Array]:
        """Shifts as the programs take them: not at all where there are no images."""
        return [] if self.album is None else [place_rows(np.array(s, np.int32)) for s in shift]

    def compact(self, live: list[list[int]], most: int) -> list[list[int]] | None:
        """Drops rows, if a smaller size holds those that are kept.

        Args:
          live: rows of each shard to be kept. most: how many a shard has at most.

        Returns:
          which of the old rows each shard's rows are now; None: all stay.
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
        self.rows = rows
        return kept

    def read(self, news: Sequence[Sequence[PendingRead]]) -> None:
        """Reads what is new in each shard, longest first, some rows in a call."""
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
                    n.shift += self.shift(n.tokens[:size])
                    tokens_RE[at, :size] = n.tokens[:size]
                    reader_B[shard * self.rows + np.array(n.rows)] = row
                    n.start, n.tokens = n.start + size, n.tokens[size:]
            self._grow(end)
            tokens = tokens_RE
            rows_R, start_R, tokens_RE, count_R, reader_B = map(
                place_rows, (rows_R, start_R, tokens_RE, count_R, reader_B)
            )
            history = self.pages[: self._needed(start)]
            shown = self.params
            if self.album is not None:
                shown = self.album.attach(shown, tokens)
            args = rows_R, start_R, tokens_RE, *self._places(shift_R)
            new = read(self.model, shown, history, *args)
            self._fold(new, start_R, count_R, reader_B, -least, end)
            queues = [[n for n in part if len(n.tokens)] for part in queues]
            for part in queues:
                part.sort(key=lambda n: -len(n.tokens))

    def decode(
        self, rows: DecodeBatch, keys_B: jax.Array, sampling: Sampling, stop_ids: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(tokens_BC, logp_BC, count_B) of a chunk of every reply; None: none is under way."""
        chunk = self.sizes.chunk
        under_way = [i for i, left in enumerate(rows.tokens_left) if left]
        longest, end, least = max_over_processes(
            max((rows.before[i] for i in under_way), default=0),
            max((rows.before[i] + min(chunk, rows.tokens_left[i]) for i in under_way), default=0),
            max((-rows.before[i] for i in under_way), default=-(2**31)),
        )
        if not end:
            return None
        self._grow(end)
        columns = rows.token, rows.before, rows.drawn, rows.tokens_left
        token_B, before_B, *others = (place_rows(np.array(c, np.int32)) for c in columns)
        new, tokens_BC, logp_BC, count_B = decode_chunk(
            self.model,
            self.params,
            self.pages[: self._needed(max(longest, 1))],
            token_B,
            before_B,
            *others,
            keys_B,
            np.float32(sampling.temperature),
            *self._places(rows.shift),
            chunk=chunk,
            stop_ids=stop_ids,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        each = place_rows(np.tile(np.arange(self.rows, dtype=np.int32), self.shards))
        self._fold(new, before_B, count_B, each, -least, end)
        return read_rows(tokens_BC), read_rows(logp_BC), read_rows(count_B)

    def _fold(
        self,
        new: Page,
        start_R: Array,
        count_R: Array,
        reader_B: Array,
        least: int,
        end: int,
    ) -> None:
        """`fold` into the pages that have positions from `least` to `end`."""
        first = 0
        for index, size in enumerate(self.lengths):
            if first < end and first + size > least:
                page = self.pages[index]
                self.pages[index] = fold(page, new, np.int32(first), start_R, count_R, reader_B)
            first += size

    def _needed(self, positions: int) -> int:
        """How many pages have the first so many positions of a row."""
        starts = itertools.accumulate(self.lengths[:-1], initial=0)
        return sum(start < positions for start in starts) if self.lengths else 0

    def _grow(self, positions: int) -> None:
        while sum(self.lengths) < positions:
            size = next(self.to_come)
            page = empty_page(self.model, self.params, rows=self.count * self.rows, positions=size)
            self.pages.append(page)
            self.lengths.append(size)
