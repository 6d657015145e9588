"""The direction in parameter space from the other reasoning styles to the grounded style.

RAGEN-2 (sections 3 and 5) attributes the drift into templates to the regularisers on prompts
without signal. With the log-odds of the grounded style at the first token of a reply,

    D = mean over replies of log p(grounded openings | x) - log p(other openings | x),

a gradient step along -g changes D by -lr <g, grad D> to first order, separately for every part of
the loss and every group of prompts (`gradients.figures`, X_pull).

Axes: B rows, T tokens, A micro-batches.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.core.types import Batch, Params
from ragen_jax.envs.styles import Style
from ragen_jax.model.qwen import Qwen, logits
from ragen_jax.rollout.chat import Chat
from ragen_jax.update import optimize
from ragen_jax.update.policy import ForwardContext

Openings = tuple[tuple[int, ...], tuple[int, ...]]  # first token ids: grounded style, other styles


def openings(styles: Mapping[str, Style], chat: Chat) -> Openings | None:
    """Return first tokens of the grounded style and of other styles; None if either is empty."""
    first, *others = (
        {int(chat.template.plain(text)[0]) for text in style.openings} for style in styles.values()
    )
    rest = set().union(*others) - first
    return (tuple(sorted(first)), tuple(sorted(rest))) if first and rest else None


def log_odds_gradient(
    model: Qwen,
    params: Params,
    batch: Batch,
    ids: Openings,
    *,
    mesh: Mesh,
    micro_batch: int,
    frozen: ForwardContext | None = None,
) -> tuple[Params, float]:
    """Return (grad D, D) over the first sampled token of every row; run under the training mesh.

    Args:
      params: the policy's parameters; with LoRA, its adapters. grad D has the same structure.
      ids: the result of `openings`.
    """
    rows_B = np.flatnonzero(batch.weight_B > 0)
    first_B = (batch.mask_BT > 0).argmax(1)
    arrays = {
        "tokens": batch.tokens_BT,
        "before": first_B.astype(np.int32) - 1,  # a prompt has at least one token
        "weight": (batch.weight_B / len(rows_B)).astype(np.float32),
    }
    size = -(-len(batch.weight_B) // micro_batch) * micro_batch
    pieces, count = optimize.micro_batches(
        arrays, rows_B, mesh=mesh, micro_batch=micro_batch, size=size
    )
    gradient, value = _log_odds_gradient(model, ids, params, pieces, count, frozen)
    return gradient, float(value)


@functools.partial(jax.jit, static_argnames=("model", "ids"))
def _log_odds_gradient(
    model: Qwen,
    ids: Openings,
    params: Params,
    pieces: dict[str, Any],
    count: jax.Array,
    frozen: ForwardContext | None,
) -> tuple[Params, jax.Array]:
    def log_odds(params, piece):
        params = params if frozen is None else frozen.attach(params)
        hidden_BTD, _ = model.apply({"params": params}, piece["tokens"])
        hidden_BD = jnp.take_along_axis(hidden_BTD, piece["before"][:, None, None], axis=1)[:, 0]
        logits_BV = logits(params, hidden_BD)
        grounded_B, others_B = (
            jax.nn.logsumexp(logits_BV[:, jnp.array(kind)], axis=-1) for kind in ids
        )
        return (piece["weight"] * (grounded_B - others_B)).sum()

    def micro(piece):
        return jax.value_and_grad(log_odds)(params, piece)[::-1], {}

    (gradient, value), _ = optimize.accumulate(micro, pieces, count)
    return gradient, value
