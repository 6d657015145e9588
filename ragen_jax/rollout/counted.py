"""Decode in parts, so that the host can count the replies that have ended.

`sample.decode` returns when the last row of a batch has stopped. Where a rollout is a single turn
of long replies, that is the whole rollout, and a wait of minutes would show no fraction. The parts
draw the same tokens. Their state is donated from part to part, so they need the memory of `decode`,
which preflight plans in their place.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Array, Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.segments import Segment
from ragen_jax.rollout.sample import (
    Carry,
    DecodeSettings,
    Draws,
    Sampled,
    first_tokens,
    lay_out,
    more_tokens,
    replies,
)

PART = 64  # tokens of a part


def decode_counted(
    model: Qwen,
    params: Params,
    segment: Segment,
    logits_NV: jax.Array,
    keys_B: jax.Array,
    budget_B: Array,
    temperature: np.float32,
    *,
    settings: DecodeSettings,
    count: Callable[[int], None],
) -> Sampled:
    """Return the result of `decode`, and count the replies that have ended.

    Args:
      count: called after each part with the number of ended replies of all processes; padding rows
        count as ended.
      The others: as in `decode`.
    """
    draws = keys_B, budget_B, temperature
    carry = begin(model, segment, logits_NV, *draws, settings=settings)
    for limit in range(PART, settings.max_tokens + PART, PART):
        most = np.int32(min(limit, settings.max_tokens))
        carry, ended = resume(model, params, segment, carry, most, *draws, settings=settings)
        over = int(ended)  # waits for the part
        count(over)
        if over == len(keys_B):
            break
    return finish(carry)


@functools.partial(jax.jit, static_argnames=("model", "settings"))
def begin(
    model: Qwen,
    segment: Segment,
    logits_NV: jax.Array,
    keys_B: jax.Array,
    budget_B: Array,
    temperature: jax.Array,
    *,
    settings: DecodeSettings,
) -> Carry:
    """Draw the first token of every reply."""
    draws = Draws(keys_B, budget_B, temperature, settings)
    return _lay_out(first_tokens(model, segment, logits_NV, draws))


@functools.partial(jax.jit, static_argnames=("model", "settings"), donate_argnames=("carry",))
def resume(
    model: Qwen,
    params: Params,
    segment: Segment,
    carry: Carry,
    limit: jax.Array,
    keys_B: jax.Array,
    budget_B: jax.Array,
    temperature: jax.Array,
    *,
    settings: DecodeSettings,
) -> tuple[Carry, jax.Array]:
    """Draw up to `limit` tokens of every reply; return the number of ended replies as well."""
    draws = Draws(keys_B, budget_B, temperature, settings)
    carry = more_tokens(model, params, segment, carry, draws, limit)
    return _lay_out(carry), constrain(carry[2].sum())


finish = jax.jit(replies)


def _lay_out(carry: Carry) -> Carry:
    """Shard the rows of the values that are kept between two parts."""
    index, token_B, done_B, (k, v, states, kept), *rest = carry
    reply = lay_out(Segment(k=k, v=v, length_N=token_B, experts_NTX=kept, state=states))

    def rows(x):
        return constrain(x, "rows", *(None,) * (x.ndim - 1))

    return (
        index,
        rows(token_B),
        rows(done_B),
        (reply.k, reply.v, reply.state, reply.experts_NTX),
        *map(rows, rest),
    )
