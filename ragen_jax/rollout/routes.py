"""Records of experts: which experts sampling used for each token, for training to use them again.

With rounded weights or keys, or by rounding alone, a router may choose other experts for a token in
training than in sampling, and the token's log-probability then jumps. With rollout.replay_experts,
the programs of sampling return the experts of the tokens that they read (`by_token`), the host
keeps them next to the tokens of a row of the cache, and each turn carries those of its tokens
(`Turn.experts`) to the passes and the update, which leave the choice to the record and only weigh
the experts (model/experts.py, `route`).

A record has an entry for each token but the last of a reply, which sampling draws without reading.
The prompt that a group's members share has one record, if it was read once. If slots read it in
several calls, whose rounding differs, members may have different records of it; a prefix tree then
takes those of the member that comes first in it, as it computes these positions once.

Axes: B rows, T tokens, L layers, k experts of a token, X = L * k.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.types import Turn
from ragen_jax.model.experts import Routing
from ragen_jax.model.qwen import Qwen


def by_token(routing: Routing) -> jax.Array:
    """Return the experts [L, B, T, k] as int16 [B, T, X]."""
    experts_BTLk = jnp.moveaxis(routing.index, 0, 2).astype(jnp.int16)
    return experts_BTLk.reshape(*experts_BTLk.shape[:2], -1)


def no_experts(model: Qwen, B: int, T: int) -> jax.Array | None:
    """Return zeros for the experts of T tokens of B rows; None if the model does not keep them."""
    c = model.config
    if not c.keep_experts or c.experts is None:
        return None
    return jnp.zeros((B, T, c.layers * c.experts.chosen), jnp.int16)


def put_experts(
    kept_BTX: jax.Array | None, new_B1X: jax.Array | None, index: jax.Array
) -> jax.Array | None:
    """Write the experts of one token per row at position `index`, if they are kept."""
    if kept_BTX is None or new_B1X is None:
        return None
    return jax.lax.dynamic_update_slice_in_dim(kept_BTX, new_B1X, index, axis=1)


def join(*parts: np.ndarray | None) -> np.ndarray | None:
    """Return the records of consecutive tokens as one; None: nothing was kept."""
    kept = [part for part in parts if part is not None and len(part)]
    return np.concatenate(kept) if kept else None


def continues(before: Turn, prompt: np.ndarray) -> bool:
    """Return whether a prompt begins with the prompt and the reply of a turn."""
    end = len(before.prompt)
    return (
        len(prompt) >= end + len(before.sampled)
        and np.array_equal(prompt[:end], before.prompt)
        and np.array_equal(prompt[end : end + len(before.sampled)], before.sampled)
    )


def new_part(
    turns: Sequence[Turn], prompt: np.ndarray, experts: np.ndarray | None
) -> np.ndarray | None:
    """Return `Turn.experts` of a turn: its record without the tokens of which the last turn has it.

    Args:
      turns: the turns before it.
      experts: int16 [T, X], of its prompt and reply, but for the last token.
    """
    if experts is None or not turns or turns[-1].experts is None:
        return experts
    last = turns[-1]
    if not continues(last, prompt):
        return experts
    return experts[len(last.prompt) + len(last.sampled) - 1 :]
