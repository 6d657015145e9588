"""Play episodes in slots: no row waits for another one's reply, nor for another's environment.

    begin    a free slot takes the next episode; its prompt is read behind what the slot's row has
    decode   a chunk of every reply under way
    act      the environments of the replies that have stopped, whose episodes go on in their slots

A row of the cache keeps what it has read: of the next prompt only what differs from that is new,
be it the next turn of an episode that shows its history, or the rules that all episodes begin
with. Draws are keyed by what they are for, a row's reply is cut into chunks from its own first
token on, and the cache grows by pages: which rows are served together changes no episode.

Environments without a time limit step at once. Where there is one, because they wait for something,
their pool works while the device decodes the next chunks of the other rows.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence

import jax
import numpy as np

from ragen_jax.envs.types import Environment
from ragen_jax.model.qwen import Qwen
from ragen_jax.padding import length_bucket, row_bucket
from ragen_jax.rollout.acting import Clock, Limits
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.chunks import Page, decode_chunk, empty_page, fold, keep_rows, read
from ragen_jax.rollout.episode import (
    Budgets,
    Play,
    Sampling,
    act_on,
    check_positions,
    next_prompt,
)
from ragen_jax.rollout.sample import episode_keys
from ragen_jax.sharding import place_rows, processes, read_rows, row_shards
from ragen_jax.types import Params

PIECE = 512  # tokens of a row that are read at a time, at most
FIRST_PAGE = (128, 512)  # its positions, at least and at most
LARGEST_PAGE = 1024
NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class _Slot:
    """A row of the cache, and the episode that it plays."""

    play: Play | None = None
    waits: bool = False  # for its environment
    held: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)  # tokens in the cache
    token: int = 0  # the one behind them
    left: int = 0  # tokens that its reply may still have; 0: none is under way
    sampled: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    logp: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING.astype(np.float32))


@dataclasses.dataclass
class _News:
    """Tokens to be read behind the first `start` ones of some rows of a shard."""

    rows: list[int]
    start: int
    tokens: np.ndarray


def chunk_length(chunk: int, max_new_tokens: int) -> int:
    """Tokens of a decode chunk: `chunk`, or for 0 an eighth of a reply, at least 8."""
    return min(chunk or max(-(-max_new_tokens // 8), 8), max_new_tokens)


def page_lengths(max_new_tokens: int) -> Iterator[int]:
    """Positions of the cache's first page, of its second, ...: it doubles, up to `LARGEST_PAGE`."""
    least, most = FIRST_PAGE
    size = held = min(length_bucket(max_new_tokens, least=least, parts=1), most)
    while True:
        yield size
        size = min(held, LARGEST_PAGE)
        held += size


def slot_rows(slots: int, episodes: int, *, compact: bool = True) -> int:
    """Rows a shard of the cache that plays so many episodes.

    Args:
      slots: of all shards; 0: as many as episodes.
      compact: whether few episodes may have fewer rows.
    """
    shards, _ = row_shards()
    rows = -(-(slots or episodes) // shards)
    return row_bucket(-(-episodes // shards), rows) if compact else rows


def rows_at_a_time(rows: int) -> int:
    """Rows a shard that are read at a time, of so many."""
    return min(rows, max(-(-rows // 8), 8))


def play_in_slots(
    model: Qwen,
    params: Params,
    chat: Chat,
    environment: Environment,
    plays: Sequence[Play],
    *,
    slots: int,
    chunk: int,
    key: jax.Array,
    budgets: Budgets,
    sampling: Sampling,
    compact: bool,
    limits: Limits,
    clock: Clock | None,
) -> None:
    """Plays every episode to its end.

    Args:
      plays: that have just been started, in the order in which they are taken.
      slots: how many are played at a time; 0: all. chunk: of `chunk_length`.
      The others: as in play.rollout.

    Raises:
      ValueError: there are several processes, or a prompt does not fit (check_positions).
    """
    if processes() > 1:
        raise ValueError(
            f"rollout.slots={slots} and chunk={chunk} play in one process, but there are "
            f"{processes()}: give rollout.slots=0 and rollout.chunk=0"
        )
    chunk = chunk_length(chunk, budgets.max_new_tokens)
    rows = slot_rows(slots, len(plays), compact=compact)
    cache = _Cache(model, params, rows=rows, lengths=page_lengths(budgets.max_new_tokens))
    table = [_Slot() for _ in range(cache.shards * rows)]
    waiting = collections.deque(plays)

    def decode():
        return _decode(cache, table, chat, chunk=chunk, key=key, budgets=budgets, sampling=sampling)

    def act(stopped):
        replies = [(slot.play, slot.sampled, slot.logp) for slot in stopped]
        act_on(replies, environment, chat, budgets.max_actions, limits, clock)

    def go_on(stopped):
        for slot in stopped:
            slot.waits = False
            if slot.play.over or len(slot.play.turns) == budgets.max_turns:
                slot.play = None

    with _acting(act, go_on, beside=bool(limits.time_limit)) as acting:
        while waiting or any(slot.play for slot in table):
            for slot in table:
                if slot.play is None and waiting:
                    slot.play = waiting.popleft()
            if compact and not waiting:
                table = cache.compact(table, rows)
            cache.read(table, _begin(table, cache.shards, chat, budgets, model))
            acting(decode(), idle=not any(slot.left for slot in table))


@contextlib.contextmanager
def _acting(
    act: Callable[[list[_Slot]], None], go_on: Callable[[list[_Slot]], None], *, beside: bool
) -> Generator[Callable[..., None]]:
    """A function that has the environments of stopped slots step, here or in a thread beside.

    In a thread one call of `act` is under way at a time; what stops meanwhile is the next one.
    """
    if not beside:

        def at_once(stopped, idle):
            act(stopped)
            go_on(stopped)

        yield at_once
        return
    stopped_since: list[_Slot] = []
    under_way: list[_Slot] = []
    future: concurrent.futures.Future[None] | None = None
    with concurrent.futures.ThreadPoolExecutor(1) as thread:

        def in_thread(stopped, idle):
            nonlocal stopped_since, under_way, future
            stopped_since += stopped
            if future is not None and (future.done() or idle):
                future.result()
                go_on(under_way)
                under_way, future = [], None
            if future is None and stopped_since:
                under_way, stopped_since = stopped_since, []
                future = thread.submit(act, under_way)

        yield in_thread


def _begin(
    table: Sequence[_Slot], shards: int, chat: Chat, budgets: Budgets, model: Qwen
) -> list[list[_News]]:
    """Begins the turns that are to begin -> what has to be read for them, shard by shard."""
    news: list[list[_News]] = [[] for _ in range(shards)]
    rows = len(table) // shards
    same: dict[tuple[int, bytes], _News] = {}  # the first prompt of a group's members
    for index, slot in enumerate(table):
        play = slot.play
        if play is None or slot.waits or slot.left:
            continue
        play.message, play.prompt = next_prompt(play, chat)
        needed = len(play.prompt) + budgets.max_new_tokens
        check_positions(needed, len(play.turns), model.config.max_positions)
        before = play.prompt[:-1]
        start = _common(slot.held, before)
        slot.held, slot.token, slot.left = before, int(play.prompt[-1]), budgets.max_new_tokens
        slot.sampled, slot.logp = NOTHING, np.zeros(0, np.float32)
        shard, row = divmod(index, rows)
        if start == len(before):
            continue
        if start == 0 and (shard, before.tobytes()) in same:
            same[shard, before.tobytes()].rows.append(row)
            continue
        found = _News([row], start, before[start:])
        news[shard].append(found)
        if start == 0:
            same[shard, before.tobytes()] = found
    return news


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens two rows have in common."""
    size = min(len(a), len(b))
    apart = np.flatnonzero(a[:size] != b[:size])
    return int(apart[0]) if len(apart) else size


def _decode(
    cache: "_Cache",
    table: Sequence[_Slot],
    chat: Chat,
    *,
    chunk: int,
    key: jax.Array,
    budgets: Budgets,
    sampling: Sampling,
) -> list[_Slot]:
    """A chunk of every reply under way -> the slots whose reply has ended."""
    replying = [slot for slot in table if slot.left]
    if not replying:
        return []
    plays = [slot.play if slot.left else None for slot in table]
    keys_B = episode_keys(
        key,
        [play.seed if play else 0 for play in plays],
        [play.member if play else 0 for play in plays],
        [len(play.turns) if play else 0 for play in plays],
    )
    tokens_BC, logp_BC, count_B = cache.decode(table, keys_B, chunk, sampling, chat.stop_ids)
    stopped = []
    for slot, tokens_C, logp_C, count in zip(table, tokens_BC, logp_BC, count_B, strict=True):
        if not slot.left:
            continue
        new, last = tokens_C[:count], int(tokens_C[count - 1])
        slot.held = np.concatenate([slot.held, [slot.token], new[:-1]]).astype(np.int32)
        slot.sampled = np.concatenate([slot.sampled, new])
        slot.logp = np.concatenate([slot.logp, logp_C[:count]])
        slot.token = last
        slot.left = 0 if last in chat.stop_ids else slot.left - int(count)
        if not slot.left:
            slot.waits = True
            stopped.append(slot)
    return stopped


class _Cache:
    """The pages of all slots' rows, shard by shard, and the programs that use them."""

    def __init__(self, model: Qwen, params: Params, *, rows: int, lengths: Iterator[int]) -> None:
        self.model, self.params = model, params
        self.shards, _ = row_shards()
        self.rows = rows  # of a shard
        self.at_a_time = rows_at_a_time(rows)
        self.pages: list[Page] = []
        self.lengths, self.positions = lengths, 0  # of the pages to come, of those that are there

    def grow(self, positions: int) -> None:
        """Has room for so many positions a row."""
        while self.positions < positions:
            size, rows = next(self.lengths), self.shards * self.rows
            self.pages.append(empty_page(self.model, self.params, rows=rows, positions=size))
            self.positions += size

    def compact(self, table: list[_Slot], most: int) -> list[_Slot]:
        """Drops free slots, if those that play fit a smaller `row_bucket` of `most` a shard."""
        parts = [table[i * self.rows : (i + 1) * self.rows] for i in range(self.shards)]
        kept = [[row for row, slot in enumerate(part) if slot.play] for part in parts]
        rows = row_bucket(max(map(len, kept)), most)
        if rows >= self.rows:
            return table
        for part, live in zip(parts, kept, strict=True):
            free = [row for row, slot in enumerate(part) if not slot.play]
            live += free[: rows - len(live)]
        rows_B = place_rows(np.concatenate(kept).astype(np.int32))
        for index, page in enumerate(self.pages):
            self.pages[index] = keep_rows(page, rows_B)
        self.rows = rows
        return [part[row] for part, live in zip(parts, kept, strict=True) for row in live]

    def read(self, table: Sequence[_Slot], news: list[list[_News]]) -> None:
        """Reads what is new, longest first, `at_a_time` rows of each shard in a call."""
        R, B = self.at_a_time, self.shards * self.rows
        if any(news):
            self.grow(max(n.start + len(n.tokens) for part in news for n in part))
            longest = max(len(n.tokens) for part in news for n in part)
            piece = min(length_bucket(longest, least=16), PIECE)
        while any(news):
            for part in news:
                part.sort(key=lambda n: -len(n.tokens))
            rows_R, start_R, count_R = (np.zeros(self.shards * R, np.int32) for _ in range(3))
            tokens_RE = np.zeros((self.shards * R, piece), np.int32)
            reader_B = np.full(B, R, np.int32)
            for shard, part in enumerate(news):
                for row, n in enumerate(part[:R]):
                    tokens, at = n.tokens[:piece], shard * R + row
                    rows_R[at], start_R[at], count_R[at] = n.rows[0], n.start, len(tokens)
                    tokens_RE[at, : len(tokens)] = tokens
                    reader_B[shard * self.rows + np.array(n.rows)] = row
                    n.start, n.tokens = n.start + len(tokens), n.tokens[len(tokens) :]
            history = self.pages if start_R.any() else []
            rows_R, start_R, tokens_RE, count_R, reader_B = map(
                place_rows, (rows_R, start_R, tokens_RE, count_R, reader_B)
            )
            new = read(self.model, self.params, history, rows_R, start_R, tokens_RE)
            self.pages = fold(self.pages, new, start_R, count_R, reader_B)
            news = [[n for n in part if len(n.tokens)] for part in news]

    def decode(
        self,
        table: Sequence[_Slot],
        keys_B: jax.Array,
        chunk: int,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens_BC, logp_BC, count_B) of a chunk of every reply under way."""
        self.grow(max(len(slot.held) + min(chunk, slot.left) for slot in table if slot.left))
        columns = (
            [slot.token for slot in table],
            [len(slot.held) for slot in table],
            [len(slot.sampled) for slot in table],
            [slot.left for slot in table],
        )
        self.pages, *found = decode_chunk(
            self.model,
            self.params,
            self.pages,
            *(place_rows(np.array(column, np.int32)) for column in columns),
            keys_B,
            np.float32(sampling.temperature),
            chunk=chunk,
            stop_ids=stop_ids,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        tokens_BC, logp_BC, count_B = map(read_rows, found)
        return tokens_BC, logp_BC, count_B
