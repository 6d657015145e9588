"""Sampling from the model with a key-value cache: prefill, extend, decode.

    read_prefix   the tokens that all prompts begin with -> cache of one row
    prefill       prompts (the tokens after the prefix) -> cache (one row per prompt), logits
    extend        cache + the turn just sampled + the next observation -> longer cache, logits
    decode        cache + logits -> sampled tokens, one on-device loop until every row has stopped

Decode never writes to the cache: the tokens of the turn go to a small buffer of
`max_new_tokens` positions, at the same position for every row. In a group's first turn the
cache has one row per prompt, which all members read.

On a mesh (`jax.set_mesh`), rows are sharded over its data and fsdp axes; a row never leaves its
shard.

Axes: N cache rows, B sampled rows (N divides B), T sampled tokens, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import by_shard, constrain, place_rows
from ragen_jax.core.stored_programs import storable, stored
from ragen_jax.core.types import Array, Params
from ragen_jax.model.delta_rule import repeat_rows
from ragen_jax.model.qwen import Qwen, separate_layers
from ragen_jax.model.qwen import logits as output_logits
from ragen_jax.model.segments import Layers, Segment, as_segment, prepend
from ragen_jax.model.vision.positions import next_positions, of_params, token_positions
from ragen_jax.model.window_cache import append_turn, keep_windows, without_last
from ragen_jax.rollout.drawing import draw_tokens, truncate
from ragen_jax.rollout.routes import by_token, no_experts, put_experts
from ragen_jax.rollout.stops import Stops


@storable
@flax.struct.dataclass
class Sampled:
    """Replies of one turn, and their keys and values."""

    tokens_BT: jax.Array  # int32, 0 after the end
    logp_BT: jax.Array  # float32, under the distribution sampled from; 0 after the end
    count_B: jax.Array  # int32, sampled tokens, the stop token or stop string included
    reply: Segment  # keys and values of all sampled tokens but the last


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """Settings of a decoding loop; a program is compiled for each value."""

    max_tokens: int  # largest number of tokens that a call samples in a row
    stop_ids: tuple[int, ...]  # ids that end a reply
    stops: Stops | None = None  # texts that end a reply; None: no such texts
    top_k: int = 0  # these three: see `truncate`
    top_p: float = 1.0
    min_p: float = 0.0

    def follow(self, state_B: jax.Array, token_B: jax.Array, V: int) -> tuple[Array, Array]:
        """Return (state of the stop strings after a token, whether the token ends its reply)."""
        # Use a table: some tokenizers have hundreds of stop ids, too many to compare with each.
        done_B = jnp.asarray(np.isin(np.arange(V), self.stop_ids))[token_B]
        if self.stops is None:
            return state_B, done_B
        state_B = jnp.asarray(self.stops.table(V))[state_B, token_B].astype(jnp.int32)
        return state_B, done_B | (state_B == self.stops.ended)

    def filter_logits(self, logits_BV: jax.Array) -> jax.Array:
        """Set logits outside the kept set to -inf."""
        return truncate(logits_BV, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


def episode_keys(
    run_key: jax.Array, seed_B: Sequence[int], member_B: Sequence[int], turn_B: Sequence[int] | int
) -> jax.Array:
    """Return one key per row: fold_in over (environment seed, member, turn).

    `drawing.noise` then folds in the token index, so that a draw does not depend on the row's
    position, its neighbours or the batch's size.

    Args:
      run_key: typed key of the run and of the purpose (training, evaluation).
      seed_B: environment seeds of this process's rows, below 2**63.
      member_B: indices of the episodes within their groups.
      turn_B: from 0; a single number if it is the same for all rows.
    """
    # Pass the key's data: a typed key created under another mesh would compile another program.
    return _episode_keys(
        str(jax.random.key_impl(run_key)),
        np.asarray(jax.random.key_data(run_key)),
        place_rows(np.asarray([seed >> 32 for seed in seed_B], np.uint32)),
        place_rows(np.asarray([seed & 0xFFFFFFFF for seed in seed_B], np.uint32)),
        place_rows(np.asarray(member_B, np.uint32)),
        place_rows(np.full(len(seed_B), turn_B, np.uint32)),
    )


@stored(static_argnames="impl")
def _episode_keys(
    impl: str,
    words: jax.Array,
    high_B: jax.Array,
    low_B: jax.Array,
    member_B: jax.Array,
    turn_B: jax.Array,
) -> jax.Array:
    run_key = jax.random.wrap_key_data(words, impl=impl)

    def row_key(*words):
        key = run_key
        for word in words:
            key = jax.random.fold_in(key, word)
        return key

    return jax.vmap(row_key)(high_B, low_B, member_B, turn_B)


@stored(static_argnames="model")
def read_prefix(model: Qwen, params: Params, tokens_P: jax.Array) -> Segment:
    """Return the cache of tokens that all prompts begin with, without images: one row."""
    _, kept, experts = read_tokens(model, params, tokens_P[None])
    segment = as_segment(kept, jnp.full(1, tokens_P.shape[0], jnp.int32))
    return lay_out(dataclasses.replace(segment, experts_NTX=experts))


@stored(static_argnames=("model", "members"))
def prefill(
    model: Qwen,
    params: Params,
    tokens_NP: jax.Array,
    length_N: jax.Array,
    prefix: Segment | None = None,
    *,
    members: int = 1,
) -> tuple[Segment, jax.Array]:
    """Read prompts. tokens_NP int32 right-padded, length_N int32 -> (Segment, logits_NV).

    Every prompt is read once, and its result is repeated for `members` rows. With a prefix
    (`read_prefix`), tokens_NP and length_N are those after it.

    The last token is run again separately, after the others. The pass over the whole prompt then
    needs only keys and values, so that XLA drops its last layer's attention and MLP. This works if
    the layers are not a scan; a scanned model pays one additional decode step.
    """
    start_N, memory = None, ()
    if prefix is not None:
        start_N = jnp.broadcast_to(prefix.length_N, length_N.shape)
        memory = token_positions(params, tokens_NP, start_N), (prefix,)
    new = read_tokens(model, params, tokens_NP, *memory, count_B=length_N)
    whole, (k, v, *state), experts = new
    last_N1 = jnp.take_along_axis(tokens_NP, (length_N - 1)[:, None], 1)
    next_N, count_N = next_positions(params, tokens_NP, length_N, start_N), length_N
    if prefix is not None:
        k, v = prepend(prefix, k, v)
        length_N = prefix.length_N + length_N
    before = as_segment((k, v, *state), length_N - 1)
    last_ND, experts = _read_last(
        model, params, whole, experts, count_N, last_N1, (next_N - 1)[:, None], (before,)
    )
    before = dataclasses.replace(before, experts_NTX=experts)
    segment = keep_windows(model.config, _cache_of(params, before, length_N, next_N))
    logits_NV = output_logits(params, last_ND)
    if members > 1:
        held_N = segment.window_N
        repeat = functools.partial(jnp.repeat, repeats=members, axis=-4)
        segment = _cache_of(
            params,
            Segment(
                k=jax.tree.map(repeat, segment.k),
                v=jax.tree.map(repeat, segment.v),
                length_N=length_N,
                experts_NTX=None if experts is None else jnp.repeat(experts, members, axis=0),
                window_N=None if held_N is None else jnp.repeat(held_N, members),
                state=jax.tree.map(repeat, segment.state),
            ),
            *(jnp.repeat(x, members) for x in (length_N, next_N)),
        )
        logits_NV = jnp.repeat(logits_NV, members, axis=0)
    return lay_out(segment), constrain(logits_NV, "rows", "vocab")


def read_tokens(
    model: Qwen, params: Params, *args: Any, count_B: jax.Array | None = None
) -> tuple[jax.Array, tuple[Any, ...], jax.Array | None]:
    """Run the model on new tokens; args: of `Qwen`.

    Args:
      count_B: number of tokens of each row that enter the state of linear-attention layers.

    Returns:
      (hidden states, (keys, values) and, with linear-attention layers, their state after each row's
      first `count_B` tokens, `Segment.experts_NTX` if the model keeps them, else None).
    """
    keep = model.config.keep_experts
    output: Any = model.apply(
        {"params": params}, *args, keep_kv=True, keep_routing=keep, count_B=count_B
    )
    hidden, kept, *routing = output
    return hidden, kept, by_token(routing[0]) if keep else None


def _read_last(
    model: Qwen,
    params: Params,
    whole_NTD: jax.Array,
    experts_NTX: jax.Array | None,
    count_N: jax.Array,
    *args: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """Run the last of each row's `count_N` new tokens again.

    The state of a model with linear-attention layers is past that token already, so that its hidden
    states of the pass over all new tokens are taken.

    Args:
      whole_NTD: hidden states of that pass.

    Returns:
      (hidden states [N, D], the experts of the new tokens with those of this pass for the last).
    """
    if model.config.has_state:
        return jnp.take_along_axis(whole_NTD, (count_N - 1)[:, None, None], 1)[:, 0], None
    if experts_NTX is None:
        hidden, _ = model.apply({"params": params}, *args)
        return hidden[:, 0], None
    output: Any = model.apply({"params": params}, *args, keep_routing=True)
    hidden, _, routing = output
    last_N = jnp.arange(experts_NTX.shape[0]), count_N - 1
    return hidden[:, 0], experts_NTX.at[last_N].set(by_token(routing)[:, 0])


def one_or_none(found: Sequence[Any]) -> Any:
    """Return the only entry, or None."""
    return found[0] if found else None


def _cache_of(params: Params, segment: Segment, length_N: jax.Array, next_N: jax.Array) -> Segment:
    """Return a cache of `length_N` tokens, with the next positions `next_N` if there are images.

    Without images, the next position equals the length.
    """
    position_N = None if of_params(params) is None else next_N
    return dataclasses.replace(segment, length_N=length_N, next_position_N=position_N)


def lay_out(segment: Segment) -> Segment:
    """Shard the rows and heads of a cache over the mesh in use."""

    def cache(x):
        return constrain(x, *(None,) * (x.ndim - 4), "rows", "kv_heads", None, None)

    next_N, experts, held_N = segment.next_position_N, segment.experts_NTX, segment.window_N
    return Segment(
        k=jax.tree.map(cache, segment.k),
        v=jax.tree.map(cache, segment.v),
        length_N=constrain(segment.length_N, "rows"),
        next_position_N=None if next_N is None else constrain(next_N, "rows"),
        experts_NTX=None if experts is None else constrain(experts, "rows", None, None),
        window_N=None if held_N is None else constrain(held_N, "rows"),
        state=jax.tree.map(cache, segment.state),
    )


@stored(static_argnames=("model", "capacity"))
def extend(
    model: Qwen,
    params: Params,
    segment: Segment,
    reply: Segment,
    rows_B: jax.Array,
    tokens_BE: jax.Array,
    count_B: jax.Array,
    *,
    capacity: int,
) -> tuple[Segment, jax.Array]:
    """Append the turn just sampled and the new tokens of the next prompt to the cache.

    Args:
      segment, reply: the cache that the turn was sampled from, and `Sampled.reply` of the turn.
      rows_B: int32 indices of the episodes that continue, among the rows of `reply` in their shard.
      tokens_BE: int32, right-padded: the last sampled token (it is not in the cache yet), then
        the prompt's new tokens.
      count_B: int32, number of real tokens in each row of tokens_BE.
      capacity: positions of the new cache, at least every row's new length.

    Returns:
      (Segment with the rows of rows_B, logits_BV after each row's last token).
    """
    grow = functools.partial(append_turn, model.config, capacity=capacity)
    history, k, v, count_reply_B = by_shard(_take_rows, segment, reply, rows_B)
    start_B, state = history.next_N + count_reply_B, history.state
    history = keep_windows(model.config, by_shard(grow, history, k, v, count_reply_B))
    history = dataclasses.replace(history, state=state)
    position_BE = token_positions(params, tokens_BE, start_B)
    new = read_tokens(model, params, tokens_BE, position_BE, (history,), count_B=count_B)
    whole, (k, v, *states), experts = new
    history = by_shard(grow, history, k, v, count_B)
    history = dataclasses.replace(history, state=one_or_none(states))
    # As in prefill, the last token is run separately.
    last_B1 = jnp.take_along_axis(tokens_BE, (count_B - 1)[:, None], 1)
    before = without_last(history)
    next_B = next_positions(params, tokens_BE, count_B, start_B)
    last_BD, experts = _read_last(
        model, params, whole, experts, count_B, last_B1, next_B[:, None] - 1, (before,)
    )
    logits_BV = output_logits(params, last_BD)
    history = keep_windows(model.config, _cache_of(params, history, history.length_N, next_B))
    history = dataclasses.replace(history, experts_NTX=experts)
    return lay_out(history), constrain(logits_BV, "rows", "vocab")


def _take_rows(
    segment: Segment, reply: Segment, rows_B: jax.Array
) -> tuple[Segment, Layers, Layers, jax.Array]:
    """Return (history, k, v, lengths of the reply) of the rows of `reply` with these indices.

    The history has the state after the reply.
    """
    shared_B = rows_B // (reply.length_N.shape[0] // segment.length_N.shape[0])
    kept = reply.k, reply.v, reply.state
    k, v, state = jax.tree.map(lambda x: jnp.take(x, rows_B, axis=-4), kept)
    history = Segment(
        k=jax.tree.map(lambda x: jnp.take(x, shared_B, axis=-4), segment.k),
        v=jax.tree.map(lambda x: jnp.take(x, shared_B, axis=-4), segment.v),
        length_N=jnp.take(segment.length_N, shared_B),
        next_position_N=None
        if segment.next_position_N is None
        else jnp.take(segment.next_position_N, shared_B),
        window_N=None if segment.window_N is None else jnp.take(segment.window_N, shared_B),
        state=state,
    )
    return history, k, v, jnp.take(reply.length_N, rows_B)


@stored(static_argnames=("model", "settings"))
def decode(
    model: Qwen,
    params: Params,
    segment: Segment,
    logits_NV: jax.Array,
    keys_B: jax.Array,
    budget_B: jax.Array,
    temperature: jax.Array,
    *,
    settings: DecodeSettings,
) -> Sampled:
    """Sample one reply per row.

    Args:
      segment, logits_NV: of prefill or extend; row b continues cache row b // (B / N).
      keys_B: the result of `episode_keys`.
      budget_B: int32 tokens a row may sample, at most settings.max_tokens; 0 on padding rows.
      temperature: traced scalar > 0.

    Returns:
      The replies; a reply without a stop token or stop string was truncated by its budget.
    """
    draws = Draws(keys_B, budget_B, temperature, settings)
    carry = first_tokens(model, segment, logits_NV, draws)
    return replies(more_tokens(model, params, segment, carry, draws, settings.max_tokens))


@dataclasses.dataclass(frozen=True)
class Draws:
    """The arguments of `decode` that decide on tokens."""

    keys_B: jax.Array
    budget_B: Array
    temperature: jax.Array
    settings: DecodeSettings

    def draw(
        self, index: jax.Array | int, logits_BV: jax.Array, done_B: jax.Array, state_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return (token_B, logp_B, done_B, state_B) of the token at `index`."""
        V = logits_BV.shape[1]
        scaled_BV = self.settings.filter_logits(logits_BV / self.temperature)
        token_B, logp_B = draw_tokens(scaled_BV, self.keys_B, index)
        alive_B = ~done_B
        token_B = jnp.where(alive_B, token_B, 0).astype(jnp.int32)
        next_B, stops_B = self.settings.follow(state_B, token_B, V)
        done_B = done_B | stops_B | (index + 1 >= self.budget_B)
        return token_B, jnp.where(alive_B, logp_B, 0.0), done_B, jnp.asarray(next_B)


# (index of the next token, token_B, done_B, (keys, values, states, experts) of the replies,
# tokens_BT, logp_BT, count_B, state_B of the stop strings)
Carry = tuple[Any, ...]


def first_tokens(model: Qwen, segment: Segment, logits_NV: jax.Array, draws: Draws) -> Carry:
    """Draw the first token of every reply of `decode`."""
    B, N, T = draws.keys_B.shape[0], logits_NV.shape[0], draws.settings.max_tokens
    done_B = jnp.asarray(draws.budget_B <= 0)
    count_B = (~done_B).astype(jnp.int32)
    logits_BV = jnp.repeat(logits_NV, B // N, axis=0)
    token_B, logp_B, done_B, state_B = draws.draw(0, logits_BV, done_B, jnp.zeros(B, jnp.int32))
    return (
        jnp.int32(1),
        token_B,
        done_B,
        (
            empty_reply(segment.k, B, T),
            empty_reply(segment.v, B, T),
            repeat_rows(segment.state, B),
            no_experts(model, B, T),
        ),
        jnp.zeros((B, T), jnp.int32).at[:, 0].set(token_B),
        jnp.zeros((B, T), jnp.float32).at[:, 0].set(logp_B),
        count_B,
        state_B,
    )


def more_tokens(
    model: Qwen, params: Params, segment: Segment, carry: Carry, draws: Draws, limit: Array | int
) -> Carry:
    """Continue the replies of `decode` until `limit` tokens are drawn or all replies have ended."""
    B, N = draws.keys_B.shape[0], segment.length_N.shape[0]
    start_B = jnp.repeat(segment.next_N, B // N, total_repeat_length=B)
    params = separate_layers(model.config, params)

    def body(carry):
        index, token_B, done_B, memory, tokens_BT, logp_BT, count_B, state_B = carry
        reply_k, reply_v, states, kept = memory
        length_B = jnp.full((B,), index - 1, jnp.int32)
        reply = Segment(k=reply_k, v=reply_v, length_N=length_B, state=states)
        hidden, (k, v, *new), experts = read_tokens(
            model, params, token_B[:, None], (start_B + index - 1)[:, None], (segment, reply)
        )
        reply_k, reply_v = put(reply_k, k, index - 1), put(reply_v, v, index - 1)
        # The last token of a reply does not enter the state.
        states = jax.tree.map(functools.partial(unless, done_B), states, one_or_none(new))
        memory = reply_k, reply_v, states, put_experts(kept, experts, index - 1)
        count_B = count_B + ~done_B
        logits_BV = output_logits(params, hidden[:, 0])
        token_B, logp_B, done_B, state_B = draws.draw(index, logits_BV, done_B, state_B)
        tokens_BT = jax.lax.dynamic_update_slice_in_dim(tokens_BT, token_B[:, None], index, axis=1)
        logp_BT = jax.lax.dynamic_update_slice_in_dim(logp_BT, logp_B[:, None], index, axis=1)
        return index + 1, token_B, done_B, memory, tokens_BT, logp_BT, count_B, state_B

    return jax.lax.while_loop(lambda c: (c[0] < limit) & ~c[2].all(), body, carry)


def replies(carry: Carry) -> Sampled:
    """Return the replies that have ended."""
    _, _, _, (reply_k, reply_v, states, kept), tokens_BT, logp_BT, count_B, _ = carry
    length_B = jnp.maximum(count_B - 1, 0)
    reply = Segment(k=reply_k, v=reply_v, length_N=length_B, experts_NTX=kept, state=states)
    return Sampled(
        tokens_BT=constrain(tokens_BT, "rows", None),
        logp_BT=constrain(logp_BT, "rows", None),
        count_B=constrain(count_B, "rows"),
        reply=lay_out(reply),
    )


def unless(done_B: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the old entries of the rows that are done, the new entries of the others."""
    return jnp.where(done_B[:, None, None, None], old, new)


def empty_reply(cache: Layers, B: int, T: int) -> Layers:
    """Return zeros for the keys or values of T tokens of B rows, otherwise shaped like `cache`."""

    def zeros(x):
        *layers, _, K, _, D = x.shape
        return jnp.zeros((*layers, B, K, T, D), x.dtype)

    if isinstance(cache, dict):  # stacks of layers by kind: those of a reply are in one stack
        stacks = [jax.tree.map(zeros, stack) for stack in cache.values()]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *stacks)
    return jax.tree.map(zeros, cache)


def put(cache: Layers, new: Layers, index: jax.Array) -> Layers:
    """Write the keys or values of one token per row into the cache at position `index`."""

    def write(x, y):
        return jax.lax.dynamic_update_slice_in_dim(x, y, index, axis=x.ndim - 2)

    return jax.tree.map(write, cache, new)
