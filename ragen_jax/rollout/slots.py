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
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np

from ragen_jax.core.sharding import max_over_processes, row_shards, shards_are_shared
from ragen_jax.core.types import Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.env_calls import Clock
from ragen_jax.rollout.episode import (
    Play,
    PlaySettings,
    Room,
    Sampling,
    act_on,
    begin_turns,
)
from ragen_jax.rollout.pages import Cache, DecodeBatch, PendingRead, cache_sizes
from ragen_jax.rollout.sample import episode_keys

NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class _Slot:
    """A row of the cache, and the episode that it plays."""

    play: Play | None = None
    awaiting_env: bool = False  # for its environment
    cached_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: NOTHING
    )  # tokens in the cache
    token: int = 0  # the one behind them
    shift: int = 0  # of `Album.shift`, of the tokens in the cache
    tokens_left: int = 0  # tokens that its reply may still have; 0: none is under way
    sampled: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING)
    logp: np.ndarray = dataclasses.field(default_factory=lambda: NOTHING.astype(np.float32))


def play_in_slots(
    model: Qwen,
    params: Params,
    settings: PlaySettings,
    plays: Sequence[Play],
    *,
    key: jax.Array,
    clock: Clock | None,
) -> None:
    """Plays every episode to its end.

    Several processes play the episodes of their own shards, and decode chunks together.

    Args:
      plays: that have just been started, in the order in which they are taken; the same in all
        processes, of which each plays its own.
      The others: as in play.rollout.

    Raises:
      PromptError: as in play.rollout.
    """
    chat, budgets, limits = settings.chat, settings.budgets, settings.limits
    firsts = {play.group: play for play in reversed(plays)}
    room = Room(model.config.max_positions, budgets.max_new_tokens)
    begin_turns(list(firsts.values()), chat, settings.album, room)
    prompt = max(len(play.prompt) for play in firsts.values())
    sizes = cache_sizes(
        slots=settings.slots,
        chunk=settings.chunk,
        episodes=len(plays),
        prompt=settings.first_prompt or prompt,
        max_new_tokens=budgets.max_new_tokens,
        compact=settings.compact,
    )
    cache = Cache(model, params, sizes, settings.album)
    table = [_Slot() for _ in range(cache.shards * cache.rows)]
    count, mine = row_shards()
    share = -(-len(plays) // count)
    waiting = collections.deque(p for i in mine for p in plays[i * share : (i + 1) * share])

    def decode():
        return _decode(cache, table, chat, key=key, sampling=settings.sampling)

    def act(stopped):
        replies = [(slot.play, slot.sampled, slot.logp) for slot in stopped]
        act_on(replies, settings.environment, chat, budgets.max_actions, limits, clock)

    def next_turn(stopped):
        for slot in stopped:
            slot.awaiting_env = False
            if slot.play.over or len(slot.play.turns) == budgets.max_turns:
                slot.play = None

    # Processes that hold one shard must do the same with it, however long their threads take.
    beside = bool(limits.time_limit) and not shards_are_shared()
    with _acting(act, next_turn, beside=beside) as acting:
        while True:
            for slot in table:
                if slot.play is None and waiting:
                    slot.play = waiting.popleft()
            live = [
                [row for row in range(cache.rows) if table[shard * cache.rows + row].play]
                for shard in range(cache.shards)
            ]
            most, to_come = max_over_processes(max(map(len, live)), len(waiting))
            if not most:
                return
            kept = cache.compact(live, most) if settings.compact and not to_come else None
            if kept:
                before = len(table) // cache.shards
                table = [table[i * before + row] for i, part in enumerate(kept) for row in part]
            cache.read(_begin(table, cache, chat, room))
            acting(decode(), table)


@contextlib.contextmanager
def _acting(
    act: Callable[[list[_Slot]], None], go_on: Callable[[list[_Slot]], None], *, beside: bool
) -> Generator[Callable[..., None]]:
    """A function that has the environments of stopped slots step, here or in a thread beside.

    In a thread one call of `act` is under way at a time; what stops meanwhile is the next one.
    """
    if not beside:

        def at_once(stopped, table):
            act(stopped)
            go_on(stopped)

        yield at_once
        return
    stopped_since: list[_Slot] = []
    under_way: list[_Slot] = []
    future: concurrent.futures.Future[None] | None = None
    with concurrent.futures.ThreadPoolExecutor(1) as thread:

        def in_thread(stopped, table):
            nonlocal stopped_since, under_way, future
            (replying,) = max_over_processes(int(any(slot.tokens_left for slot in table)))
            stopped_since += stopped
            if future is not None and (future.done() or not replying):
                future.result()
                go_on(under_way)
                under_way, future = [], None
            if future is None and stopped_since:
                under_way, stopped_since = stopped_since, []
                future = thread.submit(act, under_way)

        yield in_thread


def _begin(table: Sequence[_Slot], cache: Cache, chat: Chat, room: Room) -> list[list[PendingRead]]:
    """Begin the turns that are due and return what has to be read for them, shard by shard.

    The slot of an episode whose next prompt cannot be used is freed.
    """
    news: list[list[PendingRead]] = [[] for _ in range(cache.shards)]
    same: dict[tuple[int, bytes], PendingRead] = {}  # the first prompt of a group's members
    begun = [
        (index, slot, slot.play)
        for index, slot in enumerate(table)
        if slot.play is not None and not slot.awaiting_env and not slot.tokens_left
    ]
    begin_turns([play for *_, play in begun], chat, cache.album, room)
    for index, slot, play in begun:
        if play.over:
            slot.play = None
            continue
        before = play.prompt[:-1]
        start = common(slot.cached_ids, before)
        slot.cached_ids, slot.token, slot.tokens_left = (
            before,
            int(play.prompt[-1]),
            room.max_new_tokens,
        )
        slot.sampled, slot.logp = NOTHING, np.zeros(0, np.float32)
        slot.shift = cache.shift(before)
        shard, row = divmod(index, cache.rows)
        if start == len(before):
            continue
        if cache.sizes.pieces[-1] >= len(before) and (
            cache.sizes.piece(len(before)) == cache.sizes.piece(len(before) - start)
        ):
            start = 0  # as fast, since nothing that is held has to be attended to
        if start == 0 and (shard, before.tobytes()) in same:
            same[shard, before.tobytes()].rows.append(row)
            continue
        found = PendingRead([row], start, before[start:], cache.shift(before[:start]))
        news[shard].append(found)
        if start == 0:
            same[shard, before.tobytes()] = found
    return news


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens two rows have in common."""
    size = min(len(a), len(b))
    apart = np.flatnonzero(a[:size] != b[:size])
    return int(apart[0]) if len(apart) else size


def _decode(
    cache: Cache, table: Sequence[_Slot], chat: Chat, *, key: jax.Array, sampling: Sampling
) -> list[_Slot]:
    """A chunk of every reply under way -> the slots whose reply has ended."""
    plays = [slot.play if slot.tokens_left else None for slot in table]
    keys_B = episode_keys(
        key,
        [play.seed if play else 0 for play in plays],
        [play.member if play else 0 for play in plays],
        [len(play.turns) if play else 0 for play in plays],
    )
    replying = DecodeBatch(
        token=[slot.token for slot in table],
        before=[len(slot.cached_ids) for slot in table],
        drawn=[len(slot.sampled) for slot in table],
        tokens_left=[slot.tokens_left for slot in table],
        shift=[slot.shift for slot in table],
    )
    found = cache.decode(replying, keys_B, sampling, chat.stop_ids)
    if found is None:
        return []
    tokens_BC, logp_BC, count_B = found
    stopped = []
    for slot, tokens_C, logp_C, count in zip(table, tokens_BC, logp_BC, count_B, strict=True):
        if not slot.tokens_left:
            continue
        new, last = tokens_C[:count], int(tokens_C[count - 1])
        slot.cached_ids = np.concatenate([slot.cached_ids, [slot.token], new[:-1]]).astype(np.int32)
        slot.sampled = np.concatenate([slot.sampled, new])
        slot.logp = np.concatenate([slot.logp, logp_C[:count]])
        slot.token = last
        slot.tokens_left = 0 if last in chat.stop_ids else slot.tokens_left - int(count)
        if not slot.tokens_left:
            slot.awaiting_env = True
            stopped.append(slot)
    return stopped
