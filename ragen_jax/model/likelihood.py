"""Log-probs of tokens, entropy of each token's distribution, and the exact KL to a reference.

`token_statistics` shifts logits and tokens against each other; `PackedRows` say which position
predicts which token. The vocabulary is read in chunks, so no [B, T, V] array exists, however large
V is. If devices share the head, each reads its part of the vocabulary, chunk by chunk, and only
sums are exchanged.

Axes: B rows, T tokens, N = B * T, D width, V vocabulary, C its chunk, S its shards; in packed rows
P shards of rows, E predictions of a shard, L positions of a sequence.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import constrain, vocabulary_shards
from ragen_jax.core.types import Array, Params
from ragen_jax.model.experts import Routing
from ragen_jax.model.qwen import Qwen, head
from ragen_jax.model.tree_attention import Tree, take_along_rows

VOCAB_CHUNK = 8192  # logits of one token held at a time


def _chunks(V: int) -> int:
    """Return the number of chunks of a vocabulary.

    Equal chunks are preferred, up to twice the least possible number, so that the head need not be
    padded (which copies it).
    """
    least = -(-V // VOCAB_CHUNK)
    return next((n for n in range(least, 2 * least + 1) if V % n == 0), least)


def _scaled_logits(
    hidden_ND: jax.Array, weight_CD: jax.Array, temperature: Array | float
) -> jax.Array:
    """Return float32 logits [N, C] of a chunk of C tokens, divided by the temperature."""
    logit = jnp.einsum(
        "nd,vd->nv",
        hidden_ND,
        weight_CD.astype(hidden_ND.dtype),
        preferred_element_type=jnp.float32,
    )
    return logit / temperature


class Sums(NamedTuple):
    """Sums over a part of the vocabulary for each token, float32 [N]; l are the logits."""

    top: jax.Array  # the largest l, without gradient
    total: jax.Array  # sum of e = exp(l - top)
    weighted: jax.Array  # sum of e * (l - top)
    picked: jax.Array  # the target's l, 0 if the target is in another part


class Gap(NamedTuple):
    """The same sums for a reference's logits r, and a sum over both."""

    top: jax.Array
    total: jax.Array
    gap: jax.Array  # sum of e * (l - r)


def vocabulary_statistics(
    hidden: jax.Array,
    head_VD: jax.Array,
    target: jax.Array,
    temperature: Array | float,
    reference: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Return log p(target) and the entropy of p = softmax(hidden @ head.T / temperature), in nats.

    Runs over the vocabulary in chunks with a running maximum (online log-sum-exp); the backward
    pass recomputes each chunk's logits. With q the reference's distribution and l_p, l_q the two
    logits, KL(p || q) = sum_v p_v (l_p - l_q) + log Z_q - log Z_p, with its full gradient.

    Args:
      hidden: [..., D].
      head_VD: [V, D].
      target: int32 [...].
      temperature: scalar > 0.
      reference: (hidden, head) of q over the same vocabulary, or None.

    Returns:
      (logp, entropy) or, with a reference, (logp, entropy, KL(p || q)), float32 [...].
    """
    V, D = head_VD.shape
    shape = target.shape
    # Products are taken on matrices; see Linear in model/qwen.py.
    hidden, target = hidden.reshape(-1, D), target.reshape(-1)
    others = ()
    if reference is not None:
        others = reference[0].reshape(target.shape[0], -1), reference[1]
    shards = vocabulary_shards(V)
    if shards == 1:
        sums, other = _read_part(hidden, target, temperature, 0, head_VD, *others)
    else:

        def split(weight_VD):
            return constrain(weight_VD.reshape(shards, V // shards, -1), "vocab", None, "embed")

        if others:
            others = others[0], split(others[1])
        parts = jax.vmap(
            functools.partial(_read_part, hidden, target, temperature),
            in_axes=(0, 0, *((None, 0) if others else ())),
        )(jnp.arange(shards) * (V // shards), split(head_VD), *others)
        sums, other = _together(*parts)
    log_total = jnp.log(sums.total)
    statistics = [sums.picked - sums.top - log_total, log_total - sums.weighted / sums.total]
    if other is not None:
        offset = (other.top - sums.top) + (jnp.log(other.total) - log_total)
        statistics.append(other.gap / sums.total + offset)
    return tuple(x.reshape(shape) for x in statistics)


def _read_part(
    hidden: jax.Array,
    target: jax.Array,
    temperature: Array | float,
    first: jax.Array | int,
    head_VD: jax.Array,
    reference_hidden: jax.Array | None = None,
    reference_head: jax.Array | None = None,
) -> tuple[Sums, Gap | None]:
    """Return the sums over a part of the vocabulary.

    Args:
      hidden: [N, D].
      target: int32 [N], ids in the whole vocabulary.
      first: the part's first id.
      head_VD, reference_head: the part's rows of each head.
    """
    V = head_VD.shape[0]
    chunks = _chunks(V)
    chunk = -(-V // chunks)

    def cut(weight_VD):
        padded = jnp.pad(weight_VD, ((0, chunks * chunk - V), (0, 0)))
        return padded.reshape(chunks, chunk, -1)

    zero = jnp.zeros(target.shape, jnp.float32)
    lowest = jnp.full(target.shape, -jnp.inf, jnp.float32)
    pieces, gap = [jnp.arange(chunks), cut(head_VD)], None
    if reference_head is not None:
        pieces.append(cut(reference_head))
        gap = Gap(lowest, zero, zero)
    target = target - first

    @jax.checkpoint
    def body(carry, piece):
        (top, total, weighted, picked), other = carry
        index, weight_CD, *other_weight = piece
        column = index * chunk + jnp.arange(chunk)
        logit = jnp.where(column < V, _scaled_logits(hidden, weight_CD, temperature), -jnp.inf)
        new_top = jax.lax.stop_gradient(jnp.maximum(top, logit.max(-1)))
        e = jnp.exp(logit - new_top[..., None])
        old = jnp.exp(top - new_top)
        # Correct sum of e * (logit - new_top) when the maximum moves by `shift`.
        shift = jnp.where(jnp.isfinite(top), top - new_top, 0.0)
        weighted = old * (weighted + shift * total)
        centred = jnp.where(column < V, logit - new_top[..., None], 0.0)
        weighted = weighted + (e * centred).sum(-1)
        total = old * total + e.sum(-1)
        inside = (target >= index * chunk) & (target < jnp.minimum((index + 1) * chunk, V))
        local = jnp.clip(target - index * chunk, 0, chunk - 1)
        here = jnp.take_along_axis(logit, local[..., None], -1)[..., 0]
        picked = jnp.where(inside, here, picked)
        if other is not None and reference_hidden is not None:
            ref_logit = _scaled_logits(reference_hidden, other_weight[0], temperature)
            ref_logit = jnp.where(column < V, ref_logit, -jnp.inf)
            new_ref_top = jax.lax.stop_gradient(jnp.maximum(other.top, ref_logit.max(-1)))
            ref_e = jnp.exp(ref_logit - new_ref_top[..., None])
            ref_total = jnp.exp(other.top - new_ref_top) * other.total + ref_e.sum(-1)
            # Subtract the two logits before weighting them; otherwise nearly equal policies would
            # lose precision.
            difference = jnp.where(column < V, logit - ref_logit, 0.0)
            other = Gap(new_ref_top, ref_total, old * other.gap + (e * difference).sum(-1))
        return (Sums(new_top, total, weighted, picked), other), None

    found, _ = jax.lax.scan(body, (Sums(lowest, zero, zero, zero), gap), tuple(pieces))
    return found


def _together(sums: Sums, gap: Gap | None) -> tuple[Sums, Gap | None]:
    """Combine the sums of the S parts, [S, N], into those over the whole vocabulary."""
    top = sums.top.max(0)
    factor = jnp.exp(sums.top - top)
    weighted = (factor * (sums.weighted + (sums.top - top) * sums.total)).sum(0)
    whole = Sums(top, (factor * sums.total).sum(0), weighted, sums.picked.sum(0))
    if gap is None:
        return whole, None
    ref_top = gap.top.max(0)
    ref_total = (jnp.exp(gap.top - ref_top) * gap.total).sum(0)
    return whole, Gap(ref_top, ref_total, (factor * gap.gap).sum(0))


@flax.struct.dataclass
class PackedRows:
    """Rows of tokens as a forward pass reads them, and the tokens whose probabilities are needed.

    The sequences of a shard of rows follow each other. Without a tree, each holds a row.
    """

    tokens_BL: Array  # int32, right-padded with any id
    source_PE: Array  # int32, among a shard's B / P * L positions: the one before the token
    target_PE: Array  # int32, the token
    tree: Tree | None = None
    # int16, the experts of each position in each layer, layer after layer, which the model then
    # uses; -1: the router chooses. None: it chooses everywhere.
    experts_BLX: Array | None = None


def without_experts(rows: PackedRows) -> PackedRows:
    """Return the rows as a model that was not sampled from reads them."""
    return dataclasses.replace(rows, experts_BLX=None)


def predicting_states(model: Qwen, params: Params, rows: PackedRows) -> jax.Array:
    """Return the final hidden states from which the tokens are predicted, [P, E, D]."""
    hidden_BLD, _ = model.apply(
        {"params": params}, rows.tokens_BL, tree=rows.tree, replay_BTX=rows.experts_BLX
    )
    return _predicting(hidden_BLD, rows)


def states_and_routing(model: Qwen, params: Params, rows: PackedRows) -> tuple[jax.Array, Routing]:
    """Return (`predicting_states`, the `Routing` of these positions, [layers, P, E])."""
    output: Any = model.apply(
        {"params": params},
        rows.tokens_BL,
        tree=rows.tree,
        keep_routing=True,
        replay_BTX=rows.experts_BLX,
    )
    hidden_BLD, _, routing = output
    of_layers = jax.vmap(lambda x: _predicting(x, rows))
    return _predicting(hidden_BLD, rows), jax.tree.map(of_layers, routing)


def _predicting(x_BLX: jax.Array, rows: PackedRows) -> jax.Array:
    """Return the values at the positions from which the tokens are predicted, [P, E, X]."""
    P, X = rows.source_PE.shape[0], x_BLX.shape[-1]
    x_PEX = take_along_rows(x_BLX.reshape(P, -1, X), rows.source_PE)
    return constrain(x_PEX, "rows", None, None)


def packed_statistics(
    model: Qwen,
    params: Params,
    rows: PackedRows,
    *,
    temperature: Array | float = 1.0,
    reference: tuple[Qwen, Params] | None = None,
    keep_routing: bool = False,
) -> tuple[Any, ...]:
    """Return (logp, entropy) of the tokens given those before them; KL with a reference.

    The vocabulary is read for these tokens alone. With `keep_routing`, that of
    `states_and_routing` comes last.

    Args:
      model, params, temperature: as in `token_statistics`.
      reference: (model, params) to which the KL is measured, with the same vocabulary, or None.
        It uses the experts of `rows` only if it is the same model.

    Returns:
      float32 [P, E] each.
    """
    if keep_routing:
        states, *routing = states_and_routing(model, params, rows)
    else:
        states, routing = predicting_states(model, params, rows), ()
    other = None
    if reference is not None:
        other_rows = rows if reference[0] is model else without_experts(rows)
        other = predicting_states(*reference, other_rows), head(reference[1])
    found = vocabulary_statistics(
        states, head(params), jnp.asarray(rows.target_PE), temperature, other
    )
    return *found, *routing


def entry_weights(weight_RT: Array, entry_RT: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return the weight of each of a shard's predictions in each of its rows, [P, R / P, E].

    Args:
      weight_RT: float32, of each token of a row.
      entry_RT, shape: as in `unpack`, and (P, E).
    """
    (P, E), T = shape, entry_RT.shape[1]
    weight_PRT = jnp.where(entry_RT < 0, 0.0, weight_RT).reshape(P, -1, T)
    entry_PRT = jnp.maximum(entry_RT, 0).reshape(P, -1, T)

    def spread(entry_T, weight_T):
        return jnp.zeros(E, jnp.float32).at[entry_T].add(weight_T)

    return jax.vmap(jax.vmap(spread))(entry_PRT, weight_PRT)


def unpack(x_PE: jax.Array, entry_RT: jax.Array) -> jax.Array:
    """Return what was computed for tokens [P, E] as an array of rows [R, T].

    Args:
      entry_RT: int32, the index of each token among those of its shard; -1: 0 is returned.
    """
    P, (R, T) = x_PE.shape[0], entry_RT.shape
    found = take_along_rows(x_PE, jnp.maximum(entry_RT, 0).reshape(P, -1))
    return jnp.where(entry_RT < 0, 0.0, found.reshape(R, T))


def token_statistics(
    model: Qwen,
    params: Params,
    tokens_BT: Array,
    *,
    temperature: Array | float = 1.0,
    reference: Params | None = None,
) -> tuple[jax.Array, ...]:
    """Return (logp_BT, entropy_BT) of each token given the preceding ones; KL_BT with a reference.

    Args:
      model, params: as `model.hf.load` returns them.
      tokens_BT: int32 [B, T], right-padded with any id.
      temperature: divisor of the logits, including the reference's.
      reference: parameters of the model to which the KL is measured, or None.

    Returns:
      float32 [B, T] each; entry 0 is 0.
    """
    tokens_BT = jnp.asarray(tokens_BT)

    def read(params):
        hidden, _ = model.apply({"params": params}, tokens_BT[:, :-1])
        return hidden, head(params)

    statistics = vocabulary_statistics(
        *read(params),
        tokens_BT[:, 1:],
        temperature,
        None if reference is None else read(reference),
    )
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in statistics)


@functools.partial(jax.jit, static_argnames="model")
def token_logps(
    model: Qwen, params: Params, tokens_BT: Array, *, temperature: Array | float = 1.0
) -> jax.Array:
    """Return the log-probabilities of tokens under the model.

    Args:
      model, params: as `model.hf.load` returns them.
      tokens_BT: int32 [B, T], right-padded with any id.
      temperature: divisor of the logits.

    Returns:
      float32 [B, T]: entry t is log p(token t | tokens before t); entry 0 is 0.
    """
    return token_statistics(model, params, tokens_BT, temperature=temperature)[0]
