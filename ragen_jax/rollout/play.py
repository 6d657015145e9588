"""Play G groups of K episodes: environments on the host, tokens on the device.

All episodes of a step run in one batch, turn by turn, or on a CPU in several (lanes.py). Members of
a group share their first prompt, which is prefilled once; a long system message is prefilled once
for all prompts. A later turn extends the cache if its prompt continues the cached row, and
otherwise prefills the new prompt. Only the token ids decide this, not the context mode.

On a mesh (`jax.set_mesh`), the episodes are divided over its row shards, and each shard drops its
finished episodes separately. A process steps only the environments of its shards; at the end every
process gets every episode.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.core.padding import length_bucket, row_bucket
from ragen_jax.core.progress import begin_count
from ragen_jax.core.sharding import (
    gather_bytes,
    max_over_processes,
    place_rows,
    platform_of,
    process_count,
    read_rows,
    row_shards,
)
from ragen_jax.core.types import Episode, Params
from ragen_jax.envs.types import HarnessEnvironment, State
from ragen_jax.model.qwen import Qwen, with_cache
from ragen_jax.model.segments import LEAST_PREFIX, Segment
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.counted import decode_counted
from ragen_jax.rollout.env_calls import Clock, EnvFailure, begin, observe
from ragen_jax.rollout.episode import (
    Play,
    PlaySettings,
    Room,
    act_on,
    as_episode,
    begin_turns,
    start_plays,
)
from ragen_jax.rollout.lanes import Job, Lane, lane_count, take_turns
from ragen_jax.rollout.routes import join
from ragen_jax.rollout.sample import decode, episode_keys, extend, prefill, read_prefix
from ragen_jax.rollout.slots import play_in_slots
from ragen_jax.rollout.wire import from_bytes, to_bytes

# The play of each of this process's rows, shard by shard; None is padding.
Rows = list[Play | None]
# State that the next turn may extend: (KV cache of the prompts, KV cache of the replies, rows).
Cache = tuple[Segment, Segment, Rows]


def rollout(
    model: Qwen,
    params: Params,
    settings: PlaySettings,
    seeds_G: Sequence[int],
    states_G: Sequence[State | EnvFailure],
    *,
    group_size: int,
    key: jax.Array,
    rows: int | None = None,
    clock: Clock | None = None,
) -> list[Episode]:
    """Play `group_size` episodes of each initial state.

    An episode ends with an `Episode.error` if its environment breaks or its prompt cannot be used,
    for example because it leaves no room for a reply; the others continue. If this happens before
    the first observation, a reply to an empty observation is sampled and its actions are not run,
    so that every episode has at least one turn.

    Args:
      model, params: the policy.
      seeds_G, states_G: environment seeds and their initial states.
      key: typed PRNG key of the run and purpose; draws fold in seed, member, turn, token index.
      rows: the most episodes at a time, as far as whole groups allow; None: all. With slots or a
        chunk, the number of slots if settings.slots is 0: an episode starts as soon as one is free.
      clock: adds up the time spent in environments.

    Returns:
      The episodes, group by group, member by member.

    Raises:
      PromptError: the prompt of an empty observation (the rules alone) cannot be used either.
    """
    harness = isinstance(settings.environment, HarnessEnvironment)
    model = with_cache(
        model,
        cache_dtype=settings.cache_dtype,
        cache_kernel=settings.cache_kernel,
        platform=platform_of(params),
        keep_experts=settings.replay_experts and not harness,
    )
    environment, groups = settings.environment, len(states_G)

    def start(part: slice) -> list[Play]:
        shown = observe(environment, states_G[part], settings.limits, clock)
        return start_plays(seeds_G[part], states_G[part], shown, group_size, key, first=part.start)

    everything = slice(0, groups)
    if settings.slots or settings.chunk:
        settings = dataclasses.replace(settings, slots=settings.slots or rows or 0)
        rows = None
    at_a_time = groups if rows is None else min(groups, max(1, rows // group_size))
    if isinstance(environment, HarnessEnvironment):
        # Imported here: the endpoint imports from this package, and its library is an extra.
        from ragen_jax.serving.play import play_sessions

        episodes = []
        for part in _parts(everything, at_a_time):
            plays = start(part)
            play_sessions(model, params, settings, plays, key=key, clock=clock)
            episodes += map(as_episode, plays)
        return episodes
    add = begin_count(groups * group_size, "episodes")
    if settings.slots or settings.chunk:
        count, plays = _counter(add), start(everything)
        play_in_slots(model, params, settings, plays, key=key, clock=clock, count=count)
        count(len(plays))
        return _everyone([as_episode(play) for play in plays if play.turns])
    shared = _Shared(model, params, settings, group_size, key, clock)
    if has_prefix(model, settings.chat):
        shared = shared.with_prefix(read_prefix(model, params, settings.chat.prefix_ids))
    most = 1 if settings.counted else lane_count(settings.lanes, at_a_time, group_size)
    lanes = [
        _play_turns(shared, functools.partial(start, part), _counter(add))
        for part in _parts(everything, at_a_time // most)
    ]
    return _everyone(list(itertools.chain.from_iterable(take_turns(lanes, most))))


def _parts(whole: slice, size: int) -> list[slice]:
    """Divide a slice into parts of `size`; the last one may be shorter."""
    starts = range(whole.start, whole.stop, max(1, size))
    return [slice(start, min(start + size, whole.stop)) for start in starts]


@dataclasses.dataclass(frozen=True)
class _Shared:
    """What all lanes of a rollout share."""

    model: Qwen
    params: Params
    settings: PlaySettings
    group_size: int
    key: jax.Array
    clock: Clock | None
    prefix: Segment | None = None  # cache of the tokens that all prompts begin with
    common: np.ndarray | None = None  # the experts of these tokens

    def with_prefix(self, prefix: Segment) -> "_Shared":
        """Return it with the result of `read_prefix`."""
        if not self.model.config.keep_experts:
            return dataclasses.replace(self, prefix=prefix)
        common = np.asarray(prefix.experts_NTX)[0]
        prefix = dataclasses.replace(prefix, experts_NTX=None)
        return dataclasses.replace(self, prefix=prefix, common=common)


def _play_turns(
    shared: _Shared, start: Callable[[], list[Play]], count: Callable[[int], None]
) -> Lane:
    """Play the episodes of a lane; yield the work on the device of each turn.

    Args:
      start: returns the plays, of whole groups.
      count: takes the number of the lane's episodes that are over.

    Returns:
      this process's episodes.
    """
    plays = start()
    model, settings, prefix = shared.model, shared.settings, shared.prefix
    chat, budgets = settings.chat, settings.budgets
    shard_count, mine = row_shards()
    per_shard = -(-len(plays) // shard_count)
    shards = [plays[i * per_shard : (i + 1) * per_shard] for i in mine]
    cache: Cache | None = None
    room = Room(model.config.max_positions, budgets.max_new_tokens)
    for turn in range(budgets.max_turns):
        shards = [[play for play in shard if not play.over] for shard in shards]
        live = [play for shard in shards for play in shard]
        begun = live if turn else plays  # `_read_groups` needs the first prompts of all groups
        begin_turns(begun, chat, room)
        shards = [[play for play in shard if not play.over] for shard in shards]
        live = [play for shard in shards for play in shard]
        new = [len(_news(play)) for play in live]
        most, longest, new, fresh = max_over_processes(
            max(map(len, shards)),
            max((len(play.prompt) for play in live), default=1),
            max(new, default=0),
            int(0 in new),
        )
        if not most:
            break
        rows = row_bucket(most, per_shard) if settings.compact and turn else per_shard
        placed: Rows = [play for shard in shards for play in shard + [None] * (rows - len(shard))]
        seen = chat.images.attach(shared.params, *(play.prompt for play in begun))
        if turn == 0 and len(plays) % shard_count == 0:
            firsts = plays[:: shared.group_size]
            read = functools.partial(_read_groups, model, seen, firsts, shared.group_size, prefix)
        elif fresh or cache is None:
            read = functools.partial(_read, model, seen, placed, longest, prefix)
        else:
            read = functools.partial(_continue, model, seen, cache, placed, longest, new)
        later = bool(turn) and not fresh and cache is not None
        counting = functools.partial(_count_ended, count, shard_count * rows - len(plays))
        sample = functools.partial(_sample_turn, shared, read, placed, turn, counting, later=later)
        sizes = len(placed), length_bucket(longest), length_bucket(new)
        name = _name_programs(shared, read, cache, *sizes)
        cache = None  # `read` has it if it continues it
        cache, replies = yield Job(name, sample)
        act_on(
            *(replies, settings.environment, chat, budgets.max_actions, settings.limits),
            shared.clock,
        )
        count(sum(play.over for play in plays))
    count(len(plays))
    return [as_episode(play) for play in plays if play.turns]


def _counter(add: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function of the number finished so far, which adds the newly finished."""
    counted = 0

    def count(finished: int) -> None:
        nonlocal counted
        finished = max(finished, counted)  # a process may know of the others' episodes later
        add(finished - counted)
        counted = finished

    return count


def _count_ended(count: Callable[[int], None], padding: int, ended: int) -> None:
    """Count the episodes of a single turn whose rows have ended; padding rows are none of them."""
    count(ended - padding)


def _name_programs(
    shared: _Shared, read: functools.partial[Any], cache: Cache | None, *sizes: int
) -> Hashable:
    """Return a name of the programs of a turn: the same for the same programs."""
    settings = shared.settings
    shapes = tuple(x.shape for x in jax.tree.leaves(cache[:2] if cache else None))
    drawing = dataclasses.replace(settings.sampling, temperature=1.0)
    return read.func, shared.model, drawing, settings.budgets.max_new_tokens, shapes, sizes


def _sample_turn(
    shared: _Shared,
    read: Callable[[], tuple[Segment, jax.Array]],
    placed: Rows,
    turn: int,
    count: Callable[[int], None],
    *,
    later: bool,
) -> tuple[Cache, list[tuple[Play, np.ndarray, np.ndarray]]]:
    """Read the prompts of a turn and sample its replies.

    Args:
      read: returns the cache of the prompts and the logits after them.
      count: as in `decode_counted`.
      later: whether the prompts continue those of which the plays have the experts.

    Returns:
      (the cache for the next turn, (play, sampled ids, log-probs) of each reply).
    """
    model, params, settings = shared.model, shared.params, shared.settings
    segment, logits = read()
    if model.config.keep_experts:
        segment = _note_prompts(segment, placed, shared.common, later=later)
    tokens_BT, logp_BT, count_B, reply = _sample_replies(
        model, params, segment, logits, placed, turn, shared.key, settings, count
    )
    replies = [
        (play, tokens_BT[row, : count_B[row]], logp_BT[row, : count_B[row]])
        for row, play in enumerate(placed)
        if play is not None
    ]
    if model.config.keep_experts:
        reply = _note_replies(reply, placed, count_B)
    return (segment, reply, placed), replies


def _sample_replies(
    model: Qwen,
    params: Params,
    segment: Segment,
    logits: jax.Array,
    placed: Rows,
    turn: int,
    key: jax.Array,
    settings: PlaySettings,
    count: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Segment]:
    """Return (tokens_BT, logp_BT, count_B, reply).

    The arrays cover this process's rows; `reply` has the keys and values of all rows.

    Args:
      count: as in `decode_counted`; called with `settings.counted`.
    """
    sampling, max_new_tokens = settings.sampling, settings.budgets.max_new_tokens
    real = [play is not None for play in placed]
    keys_B = episode_keys(
        key,
        [play.seed if play else 0 for play in placed],
        [play.member if play else 0 for play in placed],
        turn,
    )
    budget_B = place_rows(np.where(real, max_new_tokens, 0).astype(np.int32))
    arguments = (model, params, segment, logits, keys_B, budget_B, np.float32(sampling.temperature))
    decoding = sampling.decode_settings(settings.chat.stop_ids, max_new_tokens, settings.chat.stops)
    if settings.counted:
        sampled = decode_counted(*arguments, settings=decoding, count=count)
    else:
        sampled = decode(*arguments, settings=decoding)
    tokens_BT, logp_BT = read_rows(sampled.tokens_BT), read_rows(sampled.logp_BT)
    return tokens_BT, logp_BT, read_rows(sampled.count_B), sampled.reply


def _note_prompts(
    segment: Segment, placed: Rows, common: np.ndarray | None, *, later: bool
) -> Segment:
    """Give each play the experts of the tokens read for its prompt; return the cache without them.

    Args:
      common: the experts of the tokens that all first prompts begin with, or None.
      later: whether the tokens continue those of which the play has a record.
    """
    assert segment.experts_NTX is not None
    experts_NTX = read_rows(segment.experts_NTX)
    members = len(placed) // len(experts_NTX)
    for row, play in enumerate(placed):
        if play is not None:
            before = play.experts if later else common
            left = len(play.prompt) - (0 if before is None else len(before))
            play.experts = join(before, experts_NTX[row // members, :left])
    return dataclasses.replace(segment, experts_NTX=None)


def _note_replies(reply: Segment, placed: Rows, count_B: np.ndarray) -> Segment:
    """Give each play the experts of its reply; return the cache of the reply without them."""
    assert reply.experts_NTX is not None
    experts_BTX = read_rows(reply.experts_NTX)
    for row, play in enumerate(placed):
        if play is not None:
            play.experts = join(play.experts, experts_BTX[row, : count_B[row] - 1])
    return dataclasses.replace(reply, experts_NTX=None)


def _everyone(episodes: list[Episode]) -> list[Episode]:
    """Return the episodes of all processes, group by group, member by member."""
    if process_count() == 1:
        return episodes
    by_place = {}  # (group, member) -> episode; processes that share a shard send the same episodes
    for data in gather_bytes(to_bytes(episodes)):
        by_place |= {(episode.group, episode.member): episode for episode in from_bytes(data)}
    return [by_place[place] for place in sorted(by_place)]


def compile_ahead(
    model: Qwen, params: Params, settings: PlaySettings, seed: int, *, rows: int, key: jax.Array
) -> None:
    """Compile prefill and decode for every number of rows that compaction can leave.

    For each number of rows n, this plays one turn of n copies of a problem. Otherwise a program
    would be compiled in the middle of a run, when the batch first shrinks to n rows. With slots,
    only the programs of the full batch are compiled.

    Args:
      model, params, settings, key: as in `rollout`.
      seed: environment seed of the problem.
      rows: number of episodes in a full batch.
    """
    shards, _ = row_shards()
    rows = -(-rows // shards)  # rows per shard
    (state,) = begin(settings.environment, [seed], settings.limits)
    sizes = {shards * row_bucket(live, rows) for live in range(1, rows + 1)}
    budgets = dataclasses.replace(settings.budgets, max_turns=1)
    one_turn = dataclasses.replace(settings, budgets=budgets)
    for size in [shards * rows] if settings.slots or settings.chunk else sorted(sizes):
        rollout(model, params, one_turn, [seed] * size, [state] * size, group_size=1, key=key)


def _news(play: Play) -> np.ndarray:
    """Return the tokens that a play's prompt adds to its cached row.

    The last sampled token comes first, because it is not in the cache yet. The result is empty if
    the prompt does not continue the cached row.
    """
    if not play.turns:
        return play.prompt[:0]
    last = play.turns[-1]
    start = len(last.prompt) + len(last.sampled)
    if (
        len(play.prompt) > start
        and np.array_equal(play.prompt[: len(last.prompt)], last.prompt)
        and np.array_equal(play.prompt[len(last.prompt) : start], last.sampled)
    ):
        return play.prompt[start - 1 :]
    return play.prompt[:0]


def has_prefix(model: Qwen, chat: Chat) -> bool:
    """Return whether the system message is read once for all prompts.

    The attention kernels of accelerators cannot read an earlier segment, so they read whole
    prompts.
    """
    return model.config.attention == "xla" and len(chat.prefix_ids) >= LEAST_PREFIX


def _pad(
    rows: Sequence[Sequence[int] | np.ndarray], width: int, prefix: Segment | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (int32 [rows, length bucket], right-padded; lengths) after the prefix of the rows.

    An empty row gets length 1.
    """
    start = 0 if prefix is None else jax.tree.leaves(prefix.k)[0].shape[-2]
    tokens = np.zeros((len(rows), length_bucket(max(width - start, 1))), np.int32)
    for tokens_T, row in zip(tokens, rows, strict=True):
        tokens_T[: max(len(row) - start, 0)] = row[start:]
    return tokens, np.array([max(len(row) - start, 1) for row in rows], np.int32)


def _read(
    model: Qwen, params: Params, placed: Rows, longest: int, prefix: Segment | None
) -> tuple[Segment, jax.Array]:
    """Prefill the prompt of every row."""
    prompts = [() if play is None else play.prompt for play in placed]
    return prefill(model, params, *map(place_rows, _pad(prompts, longest, prefix)), prefix)


def _read_groups(
    model: Qwen,
    params: Params,
    firsts: Sequence[Play],
    members: int,
    prefix: Segment | None,
) -> tuple[Segment, jax.Array]:
    """Prefill the first turn, one prompt per group.

    If the groups do not divide evenly over the row shards, every device reads all prompts and the
    result is repeated for the members.

    Args:
      firsts: first member of each group, over all processes, after `begin_turns`.
      prefix: the cache of the tokens that all prompts begin with, or None.
    """
    prompts = [play.prompt for play in firsts]
    tokens_NP, length_N = _pad(prompts, max(map(len, prompts)), prefix)
    count, mine = row_shards()
    if len(prompts) % count:
        return prefill(model, params, tokens_NP, length_N, prefix, members=members)
    size = len(prompts) // count
    here = np.concatenate([np.arange(i * size, (i + 1) * size) for i in mine])
    return prefill(model, params, place_rows(tokens_NP[here]), place_rows(length_N[here]), prefix)


def _continue(
    model: Qwen, params: Params, cache: Cache, placed: Rows, longest: int, new: int
) -> tuple[Segment, jax.Array]:
    """Extend the cache of the previous turn for the episodes of `placed`."""
    segment, reply, before = cache
    _, mine = row_shards()
    size = len(before) // len(mine)
    row_of = {id(play): row % size for row, play in enumerate(before)}
    # Padding rows reuse the cache of their shard's first row.
    rows_B = np.array([0 if play is None else row_of[id(play)] for play in placed], np.int32)
    tokens_BE, count_B = _pad([() if play is None else _news(play) for play in placed], new)
    return extend(
        model,
        params,
        segment,
        reply,
        *map(place_rows, (rows_B, tokens_BE, count_B)),
        capacity=length_bucket(longest),
    )
