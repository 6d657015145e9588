"""The direction in parameter space from the other reasoning styles to the grounded style.

RAGEN-2 (sections 3 and 5) attributes the drift into templates to the regularisers on prompts
without signal. With the log-odds of the grounded style at the first token of a reply,

    D = mean over replies of log p(grounded openings | x) - log p(other openings | x),

a gradient step along -g changes D by -lr <g, grad D> to first order, separately for every part of
the loss and every group of prompts (`gradients.figures`, X_pull).

Axes: B rows, T tokens, A micro-batches, P shards of rows, E predictions, V vocabulary.
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
from ragen_jax.model.likelihood import predicting_states, unpack
from ragen_jax.model.qwen import Qwen, logits
from ragen_jax.rollout.chat import Chat
from ragen_jax.update import optimize
from ragen_jax.update.micro_batches import split_rows
from ragen_jax.update.pieces import TokenRows, token_rows
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
    rows = token_rows(batch)
    first_B = rows.read_BT.argmax(1)
    read_BT = rows.read_BT & (np.arange(rows.read_BT.shape[1]) == first_B[:, None])
    rows_B = np.flatnonzero(read_BT.any(1))
    layout = optimize.MinibatchLayout(
        mesh, 1, micro_batch, len(batch.weight_B), model.config.row_form
    )
    first = TokenRows(rows.tokens_BT, read_BT)
    ((piece,),) = split_rows([rows_B], first, layout.grouping, alike=True).pieces
    weight_BT = (read_BT / len(rows_B)).astype(np.float32)
    pieces, count = optimize.micro_batches(piece, first, layout, {"weight": weight_BT})
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
        logits_PEV = logits(params, predicting_states(model, params, piece["packed"]))
        grounded_PE, others_PE = (
            jax.nn.logsumexp(logits_PEV[..., jnp.array(kind)], axis=-1) for kind in ids
        )
        return (piece["weight"] * unpack(grounded_PE - others_PE, piece["entry"])).sum()

    def micro(piece):
        return jax.value_and_grad(log_odds)(params, piece)[::-1], {}

    (gradient, value), _ = optimize.accumulate(micro, pieces, count)
    return gradient, value
