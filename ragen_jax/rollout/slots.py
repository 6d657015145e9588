"""Play episodes in slots: no row waits for the reply or the environment of another row.

    begin    a free slot takes the next episode; its row reads the new part of the prompt
    decode   sample a chunk of every running reply
    act      step the environments of the stopped replies; their episodes continue in their slots

A row of the cache keeps the tokens that it has read. Only the part of the next prompt after the
common prefix is read. The prefix may be the history that the next turn repeats, or the rules with
which all episodes begin. Random draws are keyed by episode, turn and token, the chunks of a reply
are counted from its first token, and the cache grows by pages. The episodes therefore do not depend
on which rows are processed together.

Environments without a time limit step immediately. Environments with a time limit may wait for
something; they run in threads while the device decodes the next chunks of the other rows.
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
from ragen_jax.rollout.chunks import DecodeBatch
from ragen_jax.rollout.env_calls import Clock
from ragen_jax.rollout.episode import (
    Play,
    PlaySettings,
    Room,
    Sampling,
    act_on,
    begin_turns,
)
from ragen_jax.rollout.pages import Cache, PendingRead, cache_sizes
from ragen_jax.rollout.sample import episode_keys

NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class _Slot:
    """A row of the cache, and the episode that it plays."""

    play: Play | None = None  # None: the slot is free
    awaiting_env: bool = False  # whether its environment has not finished the step yet
    cached_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: NOTHING
    )  # tokens in the cache
    token: int = 0  # the next token, not in the cache yet
    shift: int = 0  # `ImageTable.shift` of the tokens in the cache
    tokens_left: int = 0  # tokens that its reply may still get; 0: no reply is running
    stop_state: int = 0  # state of the stop strings after the sampled tokens
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
    """Play every episode to its end.

    With several processes, each plays the episodes of its shards, and all decode chunks together.

    Args:
      plays: newly started plays, in the order in which slots take them. All processes pass the
        same list, and each plays its part.
      The others: as in play.rollout.

    Raises:
      PromptError: as in play.rollout.
    """
    chat, budgets, limits = settings.chat, settings.budgets, settings.limits
    firsts = {play.group: play for play in reversed(plays)}
    room = Room(model.config.max_positions, budgets.max_new_tokens)
    begin_turns(list(firsts.values()), chat, room)
    prompt = max(len(play.prompt) for play in firsts.values())
    sizes = cache_sizes(
        slots=settings.slots,
        chunk=settings.chunk,
        episodes=len(plays),
        prompt=settings.first_prompt or prompt,
        max_new_tokens=budgets.max_new_tokens,
        compact=settings.compact,
    )
    cache = Cache(model, params, sizes, chat.images)
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

    # Processes that share a shard must do the same with it, so they cannot depend on thread timing.
    in_parallel = bool(limits.time_limit) and not shards_are_shared()
    with _acting(act, next_turn, in_parallel=in_parallel) as acting:
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
    act: Callable[[list[_Slot]], None], go_on: Callable[[list[_Slot]], None], *, in_parallel: bool
) -> Generator[Callable[..., None]]:
    """Yield a function that steps the environments of stopped slots, here or in another thread.

    The thread runs one call of `act` at a time; slots that stop meanwhile wait for the next call.

    Args:
      act: steps the environments of the given slots.
      go_on: called in this thread with the same slots after their step.
      in_parallel: whether to use a thread.
    """
    if not in_parallel:

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
    """Begin the turns that are due and return the tokens to read for them, shard by shard.

    The slot of an episode whose next prompt cannot be used is freed.
    """
    news: list[list[PendingRead]] = [[] for _ in range(cache.shards)]
    # (shard, prompt) -> its read, which the members of a group share in their first turn
    same: dict[tuple[int, bytes], PendingRead] = {}
    begun = [
        (index, slot, slot.play)
        for index, slot in enumerate(table)
        if slot.play is not None and not slot.awaiting_env and not slot.tokens_left
    ]
    begin_turns([play for *_, play in begun], chat, room)
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
        slot.stop_state = 0
        slot.shift = chat.images.shift(before)
        shard, row = divmod(index, cache.rows)
        if start == len(before):
            continue
        if cache.sizes.pieces[-1] >= len(before) and (
            cache.sizes.piece(len(before)) == cache.sizes.piece(len(before) - start)
        ):
            start = 0  # reading all is as fast, since there is no cache to attend to
        if start == 0 and (shard, before.tobytes()) in same:
            same[shard, before.tobytes()].rows.append(row)
            continue
        found = PendingRead([row], start, before[start:], chat.images.shift(before[:start]))
        news[shard].append(found)
        if start == 0:
            same[shard, before.tobytes()] = found
    return news


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix of two rows of tokens."""
    size = min(len(a), len(b))
    apart = np.flatnonzero(a[:size] != b[:size])
    return int(apart[0]) if len(apart) else size


def _decode(
    cache: Cache, table: Sequence[_Slot], chat: Chat, *, key: jax.Array, sampling: Sampling
) -> list[_Slot]:
    """Decode a chunk of every running reply and return the slots whose reply has ended."""
    plays = [slot.play if slot.tokens_left else None for slot in table]
    keys_B = episode_keys(
        key,
        [play.seed if play else 0 for play in plays],
        [play.member if play else 0 for play in plays],
        [len(play.turns) if play else 0 for play in plays],
    )
    shift_B = np.array([slot.shift for slot in table], np.int32)
    stop_B = np.array([slot.stop_state for slot in table], np.int32)
    batch = DecodeBatch(
        token_B=np.array([slot.token for slot in table], np.int32),
        length_B=np.array([len(slot.cached_ids) for slot in table], np.int32),
        drawn_B=np.array([len(slot.sampled) for slot in table], np.int32),
        budget_B=np.array([slot.tokens_left for slot in table], np.int32),
        keys_B=keys_B,
        shift_B=None if chat.images.tower is None else shift_B,
        stop_B=stop_B if chat.stops else None,
    )
    found = cache.decode(batch, sampling, chat.stop_ids, chat.stops)
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
        ended = last in chat.stop_ids
        if chat.stops:
            slot.stop_state = chat.stops.advance(slot.stop_state, new)
            ended |= slot.stop_state == chat.stops.ended
        slot.tokens_left = 0 if ended else slot.tokens_left - int(count)
        if not slot.tokens_left:
            slot.awaiting_env = True
            stopped.append(slot)
    return stopped
