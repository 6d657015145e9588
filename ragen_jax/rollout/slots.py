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
from ragen_jax.rollout.pages import Cache, PendingRead, cache_sizes
from ragen_jax.rollout.rows import Endings, Row, begin_replies, decode_rows
from ragen_jax.rollout.sample import episode_keys


@dataclasses.dataclass
class _Slot(Row):
    """A row of the cache, and the episode that it plays."""

    play: Play | None = None  # None: the slot is free
    awaiting_env: bool = False  # whether its environment has not finished the step yet


def play_in_slots(
    model: Qwen,
    params: Params,
    settings: PlaySettings,
    plays: Sequence[Play],
    *,
    key: jax.Array,
    clock: Clock | None,
    count: Callable[[int], None],
) -> None:
    """Play every episode to its end.

    With several processes, each plays the episodes of its shards, and all decode chunks together.

    Args:
      plays: newly started plays, in the order in which slots take them. All processes pass the
        same list, and each plays its part.
      count: called with the number of episodes that are over.
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
    shard_count, mine = row_shards()
    share = -(-len(plays) // shard_count)
    waiting = collections.deque(p for i in mine for p in plays[i * share : (i + 1) * share])

    def decode():
        return _decode(cache, table, chat, key=key, sampling=settings.sampling)

    def act(stopped):
        for slot in stopped:
            slot.play.experts = slot.experts
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
            count(sum(play.over for play in plays))


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
    begun = [
        (index, slot, slot.play)
        for index, slot in enumerate(table)
        if slot.play is not None and not slot.awaiting_env and not slot.tokens_left
    ]
    begin_turns([play for *_, play in begun], chat, room)
    prompts = []
    for index, slot, play in begun:
        if play.over:
            slot.play = None
        else:
            prompts.append((index, slot, play.prompt, room.max_new_tokens))
    return begin_replies(prompts, cache, chat.images)


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
    endings = Endings(chat.stop_ids, chat.stops)
    stopped = decode_rows(cache, table, keys_B, sampling, endings, chat.images)
    for slot in stopped:
        slot.awaiting_env = True
    return stopped
