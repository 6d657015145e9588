"""A mixture of experts: a router sends each token to a few of many MLPs (arXiv 1701.06538).

With router probabilities p = softmax(x R), the k experts of largest p, and their weights w (these
p, divided by their sum if `Experts.normalized`), the result is sum_e w_e down_e(act(gate_e x) *
up_e x). No token is dropped, whatever an expert's load.

There are three forms of the products. "wide" runs all experts on all tokens, as one MLP whose
hidden units are multiplied by the weights. "ragged" sorts the tokens by expert and multiplies each
once per chosen expert, by a product that XLA expands to all experts on CPU. "blocks" does it on
CPU, by products of blocks of tokens that have the same expert.

On a mesh, each device works on the tokens of its rows with its part of every expert's hidden units
(axis `tensor`). Along the axis `expert`, devices have different experts: each first gathers the
tokens of all of them, then runs those of its experts, and the results are summed where the tokens
came from.

Axes: B rows, T tokens, N = B * T, D width, E experts, k experts of a token, F width of an
expert, M = N * k copies of tokens, J blocks of C copies.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ragen_jax.core.sharding import EXPERT, spec
from ragen_jax.model.shape import Experts

Activation = Callable[[jax.Array], jax.Array]
# (lora_a [E, inputs, r], lora_b [E, r, outputs]) of gate, up and down, where they have adapters
Adapters = tuple[tuple[jax.Array, jax.Array] | None, ...]
NO_ADAPTERS: Adapters = (None, None, None)
BLOCK = 64  # copies of tokens in a block, at least
SAVING = 1.25  # how many times as many products "wide" has, at least, where blocks are used


class Routing(NamedTuple):
    """The decisions of a router about some tokens."""

    index: jax.Array  # int32 [.., k], the experts of each token
    probability: jax.Array  # float32 [.., E]


def route(
    logits_NE: jax.Array, experts: Experts, replay_Nk: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (each token's experts, int32 [N, k]; their weights [N, k]; probabilities [N, E]).

    Args:
      replay_Nk: int, the experts that were chosen for the tokens in an earlier pass, which are used
        in place of those of largest probability; negative: no record of this token. Their weights
        are computed from the logits, with gradient (arXiv 2510.11370).
    """
    probability_NE = jax.nn.softmax(logits_NE.astype(jnp.float32), axis=-1)
    weight_Nk, index_Nk = jax.lax.top_k(probability_NE, experts.chosen)
    if replay_Nk is not None:
        index_Nk = jnp.where(replay_Nk < 0, index_Nk, replay_Nk.astype(index_Nk.dtype))
        weight_Nk = jnp.take_along_axis(probability_NE, index_Nk, axis=-1)
    if experts.normalized:
        weight_Nk = weight_Nk / weight_Nk.sum(-1, keepdims=True)
    return index_Nk, weight_Nk, probability_NE


def wide(
    x_ND: jax.Array,
    index_Nk: jax.Array,
    weight_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    adapters: Adapters = NO_ADAPTERS,
    *,
    act: Activation,
) -> jax.Array:
    """Return the sum over each token's experts, [N, D], by running all experts on all tokens.

    Args:
      index_Nk: int32; experts outside of 0..E - 1 are left out.
      weight_Nk: float32.
    """
    E, D, F = gate_EDF.shape
    chosen_NkE = index_Nk[..., None] == jnp.arange(E)
    weight_NE = jnp.where(chosen_NkE, weight_Nk[..., None], 0.0).sum(1).astype(x_ND.dtype)

    def of_all(w_EDX):
        return (x_ND @ w_EDX.swapaxes(0, 1).reshape(D, -1)).reshape(len(x_ND), E, -1)

    def inner(w_EDF, adapter):
        y_NEF = of_all(w_EDF)
        if adapter is not None:
            a_EDr, b_ErF = adapter
            y_NEF = y_NEF + jnp.einsum("ner,erf->nef", of_all(a_EDr), b_ErF)
        return y_NEF

    of_gate, of_up, of_down = adapters
    hidden = act(inner(gate_EDF, of_gate)) * inner(up_EDF, of_up) * weight_NE[..., None]
    y_ND = hidden.reshape(-1, E * F) @ down_EFD.reshape(E * F, D)
    if of_down is not None:
        a_EFr, b_ErD = of_down
        low_NEr = jnp.einsum("nef,efr->ner", hidden, a_EFr)
        y_ND = y_ND + low_NEr.reshape(len(x_ND), -1) @ b_ErD.reshape(-1, D)
    return y_ND


def ragged(
    x_ND: jax.Array,
    index_Nk: jax.Array,
    weight_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    adapters: Adapters = NO_ADAPTERS,
    *,
    act: Activation,
) -> jax.Array:
    """Return `wide` by products of the tokens of each expert, sorted by expert."""
    (N, k), E = index_Nk.shape, gate_EDF.shape[0]
    here_Nk = (index_Nk >= 0) & (index_Nk < E)
    expert_M = jnp.where(here_Nk, index_Nk, E).reshape(-1)  # those left out come last
    order_M = jnp.argsort(expert_M, stable=True)
    count_E = jnp.bincount(expert_M, length=E + 1)[:E].astype(jnp.int32)
    x_MD = x_ND[order_M // k]

    def product(x_MX, w_EXY, adapter):
        y_MY = jax.lax.ragged_dot(x_MX, w_EXY, count_E)
        if adapter is not None:
            a_EXr, b_ErY = adapter
            low_Mr = jax.lax.ragged_dot(x_MX, a_EXr, count_E)
            y_MY = y_MY + jax.lax.ragged_dot(low_Mr, b_ErY, count_E)
        return y_MY

    of_gate, of_up, of_down = adapters
    hidden = act(product(x_MD, gate_EDF, of_gate)) * product(x_MD, up_EDF, of_up)
    y_MD = product(hidden, down_EFD, of_down)
    y_NkD = y_MD[jnp.argsort(order_M)].reshape(N, k, -1)
    y_NkD = jnp.where(here_Nk[..., None], y_NkD, 0)  # after the last group, any value may be
    return (y_NkD * weight_Nk[..., None].astype(y_NkD.dtype)).sum(1)


def blocks_of(tokens: int, chosen: int, count: int, width: int) -> tuple[int, int] | None:
    """Return (number of blocks, copies of tokens per block); None: they would save too little.

    The blocks suffice for any load, because all blocks of an expert but its last are full. They are
    so large that their copies of the experts' matrices take no more memory than the hidden units
    of "wide".

    Args:
      tokens, chosen, count, width: N, k, E and D.
    """
    block = max(BLOCK, 1 << (width * chosen // count - 1).bit_length())
    number = (tokens * chosen + count * (block - 1)) // block
    worthwhile = SAVING * number * block <= tokens * count
    return (number, block) if worthwhile else None


def blocks(
    x_ND: jax.Array,
    index_Nk: jax.Array,
    weight_Nk: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    adapters: Adapters = NO_ADAPTERS,
    *,
    act: Activation,
) -> jax.Array:
    """Return `wide` by products of blocks of tokens with the same expert; few tokens: by `wide`."""
    (N, k), (E, D, _) = index_Nk.shape, gate_EDF.shape
    sizes = blocks_of(N, k, E, D)
    if sizes is None:
        return wide(x_ND, index_Nk, weight_Nk, gate_EDF, up_EDF, down_EFD, adapters, act=act)
    J, C = sizes
    place_M, expert_J = _places(index_Nk.reshape(-1), E, J, C)
    token_P = jnp.full(J * C, N).at[place_M].set(jnp.arange(N * k) // k, mode="drop")
    x_JCD = x_ND.at[token_P].get(mode="fill", fill_value=0).reshape(J, C, D)

    def product(x_JCX, w_EXY, adapter):
        y_JCY = x_JCX @ w_EXY[expert_J]
        if adapter is not None:
            a_EXr, b_ErY = adapter
            y_JCY = y_JCY + x_JCX @ a_EXr[expert_J] @ b_ErY[expert_J]
        return y_JCY

    of_gate, of_up, of_down = adapters
    hidden = act(product(x_JCD, gate_EDF, of_gate)) * product(x_JCD, up_EDF, of_up)
    y_PD = product(hidden, down_EFD, of_down).reshape(J * C, D)
    y_MD = y_PD.at[place_M].get(mode="fill", fill_value=0)  # 0 of experts that are left out
    return (y_MD.reshape(N, k, D) * weight_Nk[..., None].astype(y_MD.dtype)).sum(1)


def _places(index_M: jax.Array, E: int, J: int, C: int) -> tuple[jax.Array, jax.Array]:
    """Return (each copy's place in J blocks of C, each block's expert); J * C: it has no place."""
    expert_M = jnp.where((index_M >= 0) & (index_M < E), index_M, E)
    order_M = jnp.argsort(expert_M, stable=True)
    count_E = jnp.bincount(expert_M, length=E + 1)[:E]
    blocks_E = -(-count_E // C)
    end_E = jnp.cumsum(blocks_E)
    shift_E = (end_E - blocks_E) * C - (jnp.cumsum(count_E) - count_E)
    sorted_M = expert_M[order_M]
    place_M = jnp.arange(len(index_M)) + shift_E[jnp.minimum(sorted_M, E - 1)]
    place_M = jnp.where(sorted_M < E, place_M, J * C)
    expert_J = jnp.searchsorted(end_E, jnp.arange(J), side="right", method="compare_all")
    # Blocks after the last expert's have no copies, and may have any expert.
    return jnp.zeros_like(place_M).at[order_M].set(place_M), jnp.minimum(expert_J, E - 1)


def balance(chosen_LRE: jax.Array, probability_LRE: jax.Array) -> jax.Array:
    """Return the load-balancing loss of each row, float32 [R], a mean over the layers.

    It is E / k * sum_e f_e P_e, where f_e is the number of a row's tokens that chose expert e over
    the number of its tokens, and P_e the mean of their probability (arXiv 2101.03961, section 2.2;
    of each row as in arXiv 2412.19437, section 2.1.2, so that it does not depend on which rows
    share a micro-batch). It is 1 if a row's tokens are spread evenly. Its gradient flows through
    P only.

    Args:
      chosen_LRE: f of each row; sums to k.
      probability_LRE: P of each row.
    """
    (L, _, E), k = chosen_LRE.shape, jnp.maximum(chosen_LRE.sum(-1, keepdims=True), 1e-9)
    return E / L * jnp.einsum("lre,lre->r", jax.lax.stop_gradient(chosen_LRE / k), probability_LRE)


def load_figures(count_LE: np.ndarray) -> tuple[float, float]:
    """Return (load, entropy) of experts, means over the layers.

    The load is that of the fullest expert over the mean: 1 if all have the same, E if one has all.
    The entropy is that of the distribution over experts, divided by log E: 1 if it is uniform.

    Args:
      count_LE: number of tokens of each expert in each layer; no layer is without tokens.
    """
    share_LE = np.asarray(count_LE, np.float64) / count_LE.sum(-1, keepdims=True)
    E = count_LE.shape[-1]
    surprise_LE = -np.log(np.where(share_LE > 0, share_LE, 1.0))
    entropy_L = (share_LE * surprise_LE).sum(-1) / max(np.log(E), 1e-9)
    return float((share_LE.max(-1) * E).mean()), float(entropy_L.mean())


FORMS = {"wide": wide, "ragged": ragged, "blocks": blocks}


def best_form(platform: str) -> str:
    """Return "blocks" on CPU, "ragged" elsewhere."""
    return "blocks" if platform == "cpu" else "ragged"


class ExpertMLP(nn.Module):
    """The experts of a layer, given their router's logits."""

    experts: Experts
    form: str  # a key of FORMS
    act: Activation

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, logits_BTE: jax.Array, replay_BTk: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """Return (the result, [B, T, D]; the experts of each token); replay: as in `route`."""
        D, E, F = x_BTD.shape[-1], self.experts.count, self.experts.width

        def kernel(name, shape, axes):
            plain = nn.initializers.normal(shape[1] ** -0.5)
            # Typed as Any because it returns a boxed array, which `param` unboxes.
            init: Any = nn.with_logical_partitioning(plain, axes)
            kernels: jax.Array = self.param(name, init, shape)
            return kernels.astype(x_BTD.dtype)

        def adapter(name):
            names = [f"{name}_{leaf}" for leaf in ("lora_a", "lora_b")]
            if not self.has_variable("params", names[0]):
                return None
            return tuple(self.get_variable("params", x).astype(x_BTD.dtype) for x in names)

        kernels = (
            kernel("gate", (E, D, F), ("experts", "embed", "mlp")),
            kernel("up", (E, D, F), ("experts", "embed", "mlp")),
            kernel("down", (E, F, D), ("experts", "mlp", "embed")),
        )
        replay_Nk = None
        if replay_BTk is not None:
            replay_Nk = replay_BTk.reshape(-1, self.experts.chosen)
        adapters = tuple(map(adapter, ("gate", "up", "down")))
        index, weight, probability = route(logits_BTE.reshape(-1, E), self.experts, replay_Nk)
        index_BTk, weight_BTk, probability_BTE = (
            x.reshape(*x_BTD.shape[:2], -1) for x in (index, weight, probability)
        )
        form = functools.partial(FORMS[self.form], act=self.act)
        y_BTD = _by_shard(form, x_BTD, index_BTk, weight_BTk, kernels, adapters)
        return y_BTD, Routing(index_BTk, probability_BTE)


def _by_shard(
    form: Callable[..., jax.Array],
    x_BTD: jax.Array,
    index_BTk: jax.Array,
    weight_BTk: jax.Array,
    kernels: tuple[jax.Array, ...],
    adapters: Adapters,
) -> jax.Array:
    """Return form(tokens, kernels, adapters), [B, T, D]; see the module."""

    def run(x_BTD, index_BTk, weight_BTk, kernels, adapters):
        flat = (x.reshape(-1, x.shape[-1]) for x in (x_BTD, index_BTk, weight_BTk))
        return form(*flat, *kernels, adapters).reshape(x_BTD.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run(x_BTD, index_BTk, weight_BTk, kernels, adapters)
    (rows,) = spec(("rows",), x_BTD.shape[:1], mesh)
    experts, _, hidden = spec(("experts", None, "mlp"), kernels[0].shape, mesh)
    gathers = bool(experts and rows)  # devices with different experts have different rows

    def run_part(x_BTD, index_BTk, weight_BTk, kernels, adapters):
        tokens = x_BTD, index_BTk, weight_BTk
        if gathers:
            gather = functools.partial(jax.lax.all_gather, axis_name=EXPERT, axis=0, tiled=True)
            tokens = tuple(map(gather, tokens))
        x, index, weight = tokens
        if experts:
            index = index - jax.lax.axis_index(EXPERT) * kernels[0].shape[0]
        y = run(x, index, weight, kernels, adapters)
        y = jax.lax.psum(y, hidden) if hidden else y
        if gathers:
            return jax.lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True)
        return jax.lax.psum(y, EXPERT) if experts else y

    wide_in, wide_out = PartitionSpec(experts, None, hidden), PartitionSpec(experts, hidden, None)
    tokens, whole = PartitionSpec(rows, None, None), PartitionSpec(experts, None, None)
    of_adapters = tuple(
        None if adapter is None else split
        for adapter, split in zip(
            adapters, [(whole, wide_in), (whole, wide_in), (wide_out, whole)], strict=True
        )
    )
    return jax.shard_map(
        run_part,
        in_specs=(tokens, tokens, tokens, (wide_in, wide_in, wide_out), of_adapters),
        out_specs=tokens,
        check_vma=False,
    )(x_BTD, index_BTk, weight_BTk, kernels, adapters)
