"""Code shared by policy and critic: optimizers, minibatches, gradient accumulation.

A minibatch is split into pieces, which are micro-batches of one size (pieces.py). One program
per size loops over the micro-batches that hold rows and adds the gradient of
sum(weight * term) to the sum of the earlier pieces; another program takes the optimizer step.
Token weights are computed on the whole minibatch, so that the split cannot change the result.

Axes: B rows, T tokens, L tokens of a piece, A micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ragen_jax.algorithm import losses
from ragen_jax.core.progress import advance
from ragen_jax.core.sharding import data_shards
from ragen_jax.core.stored_programs import storable, stored
from ragen_jax.core.types import Metrics, Params
from ragen_jax.update.micro_batches import build_arrays, place, split_rows
from ragen_jax.update.pieces import Grouping, Piece, Split, TokenRows
from ragen_jax.update.state import CriticState, TrainState

State = TypeVar("State", TrainState, "CriticState")
# (micro-batches on the mesh, number of them that hold any rows)
MicroBatches = tuple[dict[str, Any], np.int32]
# Result of one piece: (gradient so far plus the piece's gradient, the piece's part of the
# objective, scalars to be summed over pieces, scalars of which the maximum is taken).
Added = tuple[Params, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]

NOT_DECAYED = ("scale", "bias")  # last name in the path of a norm's scale or of a bias


# Classes of the optimizer's state; programs that return them are stored.
for kind in (optax.EmptyState, optax.MaskedState, optax.ScaleByAdamState):
    storable(kind)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW with learning rate 1 after a global-norm clip; norms and biases do not decay.

    It has the methods of an optax transformation. Programs have it as a static argument, and its
    fields describe it: equal ones share a program, which can be stored.

    Its update takes the norm of the whole gradient, `grad_norm`, since `apply_gradient` computes it
    for one parameter at a time as well. `apply_gradient` multiplies the optimizer's step by the
    rate. A schedule that counts inside the optimizer would not advance when an update is skipped.
    """

    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_grad_norm: float

    def init(self, params: optax.Params) -> optax.OptState:
        """Return the state before the first step."""
        return self._transformation().init(params)

    def update(
        self, grads: Params, state: optax.OptState, params: Params, *, grad_norm: jax.Array
    ) -> tuple[optax.Updates, optax.OptState]:
        """Return (the step to be added to the parameters, the next state)."""
        return self._transformation().update(grads, state, params, grad_norm=grad_norm)

    def _transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            _clip(self.max_grad_norm),
            optax.adamw(
                1.0,
                b1=self.b1,
                b2=self.b2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mask=_decayed,
            ),
        )


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return optax.clip_by_global_norm with the norm as an argument of its update."""

    def update(updates, state, params=None, **given):
        del params
        norm = given["grad_norm"]

        # As optax writes it. A factor for all parameters would save a tree like params, but resumed
        # runs then differed in the last digits.
        def clip(x):
            return jnp.where(norm < max_norm, x, x / norm.astype(x.dtype) * max_norm)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _decayed(params: Params) -> Params:
    """Return a tree of bools: whether weight decay applies to each parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)


def accumulate(
    function: Callable[[Any], tuple[Any, Any]],
    pieces: Any,
    count: jax.Array,
    start: dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Accumulate `function` over the first `count` micro-batches.

    Args:
      function: micro-batch -> (tree to be summed, tree of which the maximum is taken).
      pieces: tree of arrays [A, ...]. count: scalar int32, at least 1.
      start: initial values of some entries of the first tree, which then is a dict.

    Returns:
      (sums, maxima).
    """

    def at(a):
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, a, 0, False), pieces)
        return function(piece)

    def micro(a, carry):
        sums, maxima = carry
        more, larger = at(a)
        return jax.tree.map(jnp.add, sums, more), jax.tree.map(jnp.maximum, maxima, larger)

    if len(jax.tree.leaves(pieces)[0]) == 1:  # no second copy of the sums
        sums, maxima = at(0)
        if start:
            sums |= {name: jax.tree.map(jnp.add, x, sums[name]) for name, x in start.items()}
        return sums, maxima
    sums, maxima = jax.eval_shape(at, 0)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    lowest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    if start:
        zero |= start
    return jax.lax.fori_loop(0, count, micro, (zero, lowest))


def add_gradient(
    objective: Callable[[Params, Any], tuple[jax.Array, tuple[Any, Any]]],
    params: Params,
    grads: Params | None,
    pieces: Any,
    count: jax.Array,
) -> Added:
    """Add the gradient of the first `count` micro-batches to `grads`; return `Added`.

    Args:
      objective: (params, micro-batch) -> (scalar, (dict of scalars to be summed, dict of scalars
        of which the maximum is taken)).
      grads: the gradient so far, like params; None: start from nothing (`needs_start`).
      pieces, count: as in `accumulate`.
    """

    def gradient(piece):
        (value, (sums, maxima)), more = jax.value_and_grad(objective, has_aux=True)(params, piece)
        return {"grads": more, "value": value, "sums": sums}, maxima

    start = None if grads is None else {"grads": grads}
    added, largest = accumulate(gradient, pieces, count, start)
    return added["grads"], added["value"], added["sums"], largest


def needs_start(micro_batches: int, mesh: Mesh) -> bool:
    """Return whether a minibatch's gradient starts from zeros sharded like the parameters.

    A single micro-batch on one device needs no zeros: zeroing 2 GB and adding to them takes a
    second.

    Args:
      micro_batches: maximum number per minibatch.
    """
    return micro_batches > 1 or mesh.size > 1


def no_gradient(params: Params) -> Params:
    """Return zeros with the parameters' shapes and shardings: the start of a gradient sum."""
    leaves, tree = jax.tree.flatten(params)
    return _zeros(tree, tuple((x.shape, x.dtype, x.sharding) for x in leaves))()


@functools.lru_cache(maxsize=8)  # one program for the policy and one for the critic, compiled once
def _zeros(tree: Any, leaves: tuple[tuple[Any, Any, Any], ...]) -> Callable[[], Params]:
    def make():
        return tree.unflatten([jnp.zeros(shape, dtype) for shape, dtype, _ in leaves])

    return jax.jit(make, out_shardings=tree.unflatten([sharding for *_, sharding in leaves]))


def first_state(optimizer: AdamW, params: Params, mesh: Mesh) -> optax.OptState:
    """Return the optimizer's state before the first step, sharded like the parameters.

    On one device it is made by a program. Its zeros do not depend on the parameters, so that on
    several devices a program would not shard them alike; JAX's operations do, one by one.
    """
    if mesh.size > 1:
        return optimizer.init(params)
    state = _init(optimizer, params)
    shardings = optax.tree.map_params(
        optimizer,
        lambda x, like: like.sharding,
        state,
        params,
        transform_non_params=lambda x: x.sharding,
    )
    return jax.device_put(state, shardings)  # on one device, only their names differ


@stored(static_argnames="optimizer")
def _init(optimizer: AdamW, params: Params) -> optax.OptState:
    return optimizer.init(params)


@stored(static_argnames="optimizer", donate_argnames=("params", "opt_state"))
def apply_gradient(
    optimizer: AdamW,
    rate: jax.Array,
    params: Params,
    opt_state: Any,
    value: jax.Array,
    grads: Params,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """Apply one optimizer step times `rate`.

    The step is skipped if the step itself, the objective or the gradient is not finite.

    The step is computed twice. The first time, one parameter after the other, it is only summed up
    to its norm, which decides whether it is taken; the second time it is written over params and
    opt_state. If it were kept until its norm is known, three more trees like params would be held
    beside the clipped gradient (XLA on CPU).

    Args:
      rate: scalar.
      params, opt_state: donated.
      value, grads: the objective of a minibatch and its gradient.

    Returns:
      (params, opt_state, {grad_norm, update_norm, learning_rate, skipped}).
    """
    grad_norm = optax.tree.norm(grads)

    def step(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params, grad_norm=grad_norm)
        return jax.tree.map(lambda x: (rate * x).astype(x.dtype), updates), opt_state

    def square(leaf):
        updates, _ = step(*(_only(leaf, params, tree) for tree in (params, opt_state, grads)))
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(updates))

    total = jnp.zeros(())
    for leaf in range(len(jax.tree.leaves(params))):
        # A branch of its own for each: XLA on CPU would otherwise write the constants of equally
        # large parameters to memory, to use them again.
        total += jax.lax.cond(jnp.isfinite(total), functools.partial(square, leaf), lambda: jnp.nan)
    update_norm = jnp.sqrt(total)
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)

    def take():
        updates, new_opt_state = step(params, opt_state, grads)
        return optax.apply_updates(params, updates), new_opt_state

    new_params, new_opt_state = jax.lax.cond(finite, take, lambda: (params, opt_state))
    return (
        new_params,
        new_opt_state,
        {
            "grad_norm": grad_norm,
            "update_norm": update_norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            "skipped": (~finite).astype(jnp.float32),
        },
    )


def _only(leaf: int, params: Params, tree: Any) -> Any:
    """Return a tree whose parts like params hold nothing but one leaf, under its own name.

    Args:
      leaf: index into the leaves of params.
    """
    (path, _), treedef = jax.tree.flatten_with_path(params)[0][leaf], jax.tree.structure(params)

    def like_params(x):
        return jax.tree.structure(x) == treedef

    def pick(x):
        return {path[-1].key: jax.tree.leaves(x)[leaf]} if like_params(x) else x

    return jax.tree.map(pick, tree, is_leaf=like_params)


@dataclasses.dataclass(frozen=True)
class MinibatchLayout:
    """How the rows of an iteration are divided into minibatches and micro-batches."""

    mesh: Mesh
    minibatches: int  # updates per iteration
    micro_batch: int  # rows per forward and backward pass
    minibatch_rows: int  # maximum number of rows per minibatch
    attention: str = "xla"  # ModelConfig.row_form

    @property
    def grouping(self) -> Grouping:
        """How the rows of a minibatch are divided over micro-batches and devices."""
        shards = data_shards(self.mesh)
        return Grouping(self.micro_batch, shards, self.minibatch_rows, self.attention)


@dataclasses.dataclass(frozen=True)
class MinibatchPlan:
    """The minibatches of an iteration, split into pieces."""

    rows: TokenRows  # of the batch
    arrays: dict[str, np.ndarray]  # [B, T], on the host; includes "mask"
    rows_B: np.ndarray  # indices of the rows that the update learns from
    split: Split  # minibatches without rows are left out
    layout: MinibatchLayout
    aggregation: str
    norm_length: int  # see losses.token_weights

    def minibatches(self) -> Iterator[Iterator[MicroBatches]]:
        """Yield the `MicroBatches` of each minibatch, length by length.

        They include "weights", the `losses.Weights` of the tokens in the whole minibatch.
        """
        for pieces in self.split.pieces:
            yield self._laid_out(pieces)

    def _laid_out(self, pieces: Sequence[Piece]) -> Iterator[MicroBatches]:
        mask_BT = np.zeros_like(self.arrays["mask"])
        for piece in pieces:
            mask_BT[piece.rows] = self.arrays["mask"][piece.rows]
        weights = jax.device_get(_weights(mask_BT, self.aggregation, norm_length=self.norm_length))
        arrays = {**self.arrays, "weights": weights}
        for piece in pieces:
            yield micro_batches(piece, self.rows, self.layout, arrays)


def micro_batches(
    piece: Piece, rows: TokenRows, layout: MinibatchLayout, arrays: dict[str, Any]
) -> MicroBatches:
    """Return the micro-batches of a piece on the mesh, with arrays [B, T] of the batch's rows."""
    built = build_arrays(piece, rows, layout.grouping)
    return place(built, arrays, layout.mesh), built.count


_weights = stored(static_argnames=("aggregation", "norm_length"))(losses.minibatch_weights)


def plan_minibatches(
    rows: TokenRows,
    arrays: dict[str, np.ndarray],
    rows_B: np.ndarray,
    layout: MinibatchLayout,
    *,
    rng: np.random.Generator,
    aggregation: str,
    norm_length: int,
) -> MinibatchPlan:
    """Shuffle the rows, divide them into a fixed number of minibatches and split these by length.

    Filtering makes minibatches smaller; it does not reduce the number of updates (RAGEN-2,
    section 3.3). Empty micro-batches cost nothing: only those with real rows are run.

    Args:
      arrays: [B, T], on the host, with "mask": 1 on the tokens that enter the loss.
      rows_B: indices of the rows to learn from; may be empty.
      rng: decides the order of the rows.
      aggregation, norm_length: see losses.token_weights.
    """
    order = rng.permutation(len(rows_B))  # on the host: the number of rows changes every step
    dealt = np.array_split(np.asarray(rows_B)[order], layout.minibatches)
    # With fewer rows than minibatches, some are empty.
    split = split_rows([some for some in dealt if len(some)], rows, layout.grouping)
    return MinibatchPlan(
        rows=rows,
        arrays=arrays,
        rows_B=np.asarray(rows_B),
        split=split,
        layout=layout,
        aggregation=aggregation,
        norm_length=norm_length,
    )


@dataclasses.dataclass(frozen=True)
class ParamTransform:
    """A map from the trained parameters to those that pieces are differentiated with respect to.

    Each direction runs once per minibatch, independent of the number of pieces.
    """

    forward: Callable[[Params], Params]  # trained parameters -> parameters that the pieces read
    # (trained parameters, gradient by the parameters that the pieces read)
    # -> gradient by the trained parameters
    backward: Callable[[Params, Params], Params]


def run_updates(
    gradient: Callable[[State, Params | None, dict[str, Any], np.int32, int], Added],
    optimizer: AdamW,
    state: State,
    plan: MinibatchPlan,
    rates: np.ndarray,
    transform: ParamTransform | None = None,
) -> tuple[State, list[Metrics]]:
    """Take an optimizer step on each minibatch in turn; count the finished rows (progress.advance).

    Args:
      gradient: (state, gradient so far, micro-batches of one length, number of them that hold rows,
        index of the minibatch) -> `Added`; its second argument is donated.
      state: its params and opt_state are donated.
      rates: float32, the learning rate of each minibatch; may be longer than the minibatches.
      transform: `gradient` gets the state with the transformed parameters; None: it gets the state
        unchanged.

    Returns:
      (state, the metrics of each minibatch, on the host).
    """
    history: list[Metrics] = []
    # XLA may return the same sharding under another name (P() for P(None)), and the next call would
    # then be compiled again. Nothing is copied if only the name differs.
    layout = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    start = needs_start(plan.layout.grouping.micro_batches, plan.layout.mesh)
    for minibatch, (pieces, rate) in enumerate(zip(plan.minibatches(), rates, strict=False)):
        read, found = state, []
        if transform is not None:
            read = dataclasses.replace(state, params=transform.forward(state.params))
        read_layout = jax.tree.map(lambda x: x.sharding, read.params)
        grads = no_gradient(read.params) if start else None
        rows_of = [len(piece.rows) for piece in plan.split.pieces[minibatch]]
        for number, (arrays, count) in enumerate(pieces):
            # XLA's CPU backend allocates a call's temporaries immediately, even if the call must
            # wait for an earlier one.
            if found:
                found[-1] = jax.device_get(found[-1])
                advance(rows_of[number - 1])
            elif history:
                history[-1] = jax.device_get(history[-1])
            grads, *rest = gradient(read, grads, arrays, count, minibatch)
            grads = jax.device_put(grads, read_layout)
            found.append(rest)
        if transform is not None:
            whole = transform.backward(
                state.params, cast(Params, grads)
            )  # set by at least one piece
            grads = jax.device_put(whole, layout[0])
        values, sums, maxima = zip(*jax.device_get(found), strict=True)
        advance(rows_of[-1])
        value = np.sum(values, dtype=np.float32)
        params, opt_state, metrics = apply_gradient(
            optimizer, rate, state.params, state.opt_state, value, grads
        )
        params, opt_state = jax.device_put((params, opt_state), layout)
        state = dataclasses.replace(state, params=params, opt_state=opt_state)
        metrics |= {name: np.sum([one[name] for one in sums], axis=0) for name in sums[0]}
        metrics |= {name: np.max([one[name] for one in maxima]) for name in maxima[0]}
        history.append(metrics | {"loss": value})
    return state, jax.device_get(history)


def averaged(
    history: Sequence[Metrics], *, prefix: str, sums: Collection[str] = ("skipped",)
) -> Metrics:
    """Return the metrics of an iteration: means over its updates, sums of those in `sums`, count.

    Args:
      history: the metrics that `run_updates` returns; may be empty.
    """
    if not history:
        return {f"{prefix}/count": 0}
    metrics = {
        f"{prefix}/{name}": float((np.sum if name in sums else np.mean)([m[name] for m in history]))
        for name in history[0]
    }
    return metrics | {f"{prefix}/count": len(history)}
