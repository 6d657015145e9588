"""What policy and critic share: optimizers, minibatches, gradients summed over micro-batches.

A minibatch is one program: a loop over as many micro-batches as its rows need adds up gradients of
sum(weight * term), with token weights fixed on the whole minibatch, so the micro-batch size cannot
change the result.

Axes: B rows, T tokens, A micro-batches.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ragen_jax import losses
from ragen_jax.sharding import shard_micro_batches
from ragen_jax.types import Metrics, Params

State = TypeVar("State")
# Micro-batches on the mesh, and how many of them hold any rows.
Minibatch = tuple[dict[str, Any], np.int32]

# What follows the warm-up, of a learning rate over so many updates.
SCHEDULES = {
    "constant": lambda rate, updates: optax.constant_schedule(rate),
    "linear": lambda rate, updates: optax.linear_schedule(rate, 0.0, updates),
    "cosine": lambda rate, updates: optax.cosine_decay_schedule(rate, updates),
}
NOT_DECAYED = ("scale", "bias")  # parameters' own names: of norms, and of what is added


@functools.cache  # the optimizer is a static argument: equal settings should compile once
def make_optimizer(
    *, b1: float, b2: float, eps: float, weight_decay: float, max_grad_norm: float
) -> optax.GradientTransformation:
    """AdamW of learning rate 1 behind a global-norm clip; norms and biases do not decay.

    `apply_gradient` multiplies its step by the rate: a schedule that the optimizer counted itself
    would stand still with every update that is left out.
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(1.0, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decayed),
    )


def _decayed(params: Params) -> Params:
    """Tree of bools: whether weight decay is for a parameter."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in NOT_DECAYED, params)


def learning_rates(
    *, learning_rate: float, schedule: str, warmup_updates: int, total_updates: int
) -> optax.Schedule:
    """update -> learning rate of the 0-based update of a run, which need not have taken place.

    Args:
      learning_rate: the largest, reached at the end of the warm-up, which is linear from 0 over
        `warmup_updates`.
      schedule: a key of SCHEDULES; linear and cosine fall to 0 at `total_updates`.
    """
    after = SCHEDULES[schedule](learning_rate, max(total_updates - warmup_updates, 1))
    if warmup_updates:
        start = learning_rate / warmup_updates
        rising = optax.linear_schedule(start, learning_rate, max(warmup_updates - 1, 1))
        after = optax.join_schedules([rising, after], [warmup_updates])
    return after


def weighted(minibatch: dict[str, jax.Array], aggregation: str, norm_length: int) -> dict[str, Any]:
    """A minibatch of [A, micro_batch, T] arrays with the `losses.Weights` of its mask."""
    mask = minibatch["mask"]
    mask_BT = mask.reshape(-1, mask.shape[-1])
    weights = losses.minibatch_weights(mask_BT, aggregation, norm_length=norm_length)
    return {**minibatch, "weights": jax.tree.map(lambda x: x.reshape(mask.shape), weights)}


def summed(
    function: Callable[[Any], tuple[Any, Any]], pieces: Any, count: jax.Array
) -> tuple[Any, Any]:
    """function(micro-batch) -> (tree to be added up, tree of which the largest counts), over the
    first `count` micro-batches.

    Args:
      pieces: tree of arrays [A, ...]. count: scalar int32, at least 1.

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
        return at(0)
    sums, maxima = jax.eval_shape(at, 0)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    lowest = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    return jax.lax.fori_loop(0, count, micro, (zero, lowest))


def summed_gradient(
    objective: Callable[[Params, Any], tuple[jax.Array, tuple[Any, Any]]],
    params: Params,
    pieces: Any,
    count: jax.Array,
) -> tuple[jax.Array, Params, dict[str, jax.Array], dict[str, jax.Array]]:
    """The objective and its gradient, summed over the first `count` micro-batches.

    Args:
      objective: (params, micro-batch) -> (scalar, (dict of scalars to be added up, dict of scalars
        of which the largest counts)).
      pieces, count: as in `summed`.

    Returns:
      (value, gradient, sums, maxima).
    """

    def gradient(piece):
        (value, (sums, maxima)), grads = jax.value_and_grad(objective, has_aux=True)(params, piece)
        return (value, grads, sums), maxima

    added, largest = summed(gradient, pieces, count)
    return *added, largest


def apply_gradient(
    optimizer: optax.GradientTransformation,
    rate: jax.Array,
    params: Params,
    opt_state: Any,
    value: jax.Array,
    grads: Params,
) -> tuple[Params, Any, dict[str, jax.Array]]:
    """One optimizer step times `rate`, left out where the objective or its gradient is not finite.

    Returns:
      (params, opt_state, {grad_norm, update_norm, learning_rate, skipped}).
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    updates = jax.tree.map(lambda x: (rate * x).astype(x.dtype), updates)
    new_params = optax.apply_updates(params, updates)

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    metrics = {
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "learning_rate": jnp.asarray(rate, jnp.float32),
        "skipped": (~finite).astype(jnp.float32),
    }
    return keep(new_params, params), keep(new_opt_state, opt_state), metrics


def micro_batches(
    arrays: dict[str, Any], rows: np.ndarray, *, mesh: Mesh, micro_batch: int, size: int
) -> Minibatch:
    """Chosen rows of [B, ...] arrays as [A, micro_batch, ...] on the mesh, and how many hold any.

    Padding is zero: an array of masks or weights must be among them for it not to count.

    Args:
      arrays: tree of arrays on the host.
      size: A * micro_batch, at least the number of rows.
    """

    def lay_out(x):
        out = np.zeros((size, *x.shape[1:]), x.dtype)
        out[: len(rows)] = x[rows]
        return out.reshape(-1, micro_batch, *x.shape[1:])

    placed = jax.tree.map(lay_out, arrays)
    return shard_micro_batches(placed, mesh), np.int32(-(-len(rows) // micro_batch))


def minibatches(
    arrays: dict[str, np.ndarray],
    rows_B: np.ndarray,
    *,
    mesh: Mesh,
    rng: np.random.Generator,
    minibatches: int,
    micro_batch: int,
    minibatch_rows: int,
) -> Iterator[Minibatch]:
    """The rows shuffled and dealt to a fixed number of minibatches, each padded to one shape.

    Filtering makes minibatches smaller, not updates fewer (RAGEN-2, section 3.3). Padding costs
    nothing, since only micro-batches with real rows are run.

    Args:
      arrays: [B, T], on the host.
      rows_B: indices of the rows to be learnt from; may be empty.
      rng: of the order.
      minibatch_rows: the most rows a minibatch can have.

    Yields:
      `micro_batches` of a minibatch; none for one without rows.
    """
    order = rng.permutation(len(rows_B))  # on the host: the number of rows changes every step
    size = -(-minibatch_rows // micro_batch) * micro_batch
    for rows in np.array_split(np.asarray(rows_B)[order], minibatches):
        if len(rows):  # none where there are fewer rows than minibatches
            yield micro_batches(arrays, rows, mesh=mesh, micro_batch=micro_batch, size=size)


def run_updates(
    step: Callable[[State, dict[str, Any], np.int32, np.float32], tuple[State, Any]],
    state: State,
    batches: Iterable[Minibatch],
    rates: np.ndarray,
) -> tuple[State, list[Metrics]]:
    """step(state, arrays, count, rate) -> (state, metrics) over `minibatches`, one after the other.

    Args:
      rates: float32, the learning rate of each minibatch; there may be more of them.

    Returns:
      (state, the metrics of each minibatch, on the host).
    """
    history = []
    layout = jax.tree.map(lambda x: x.sharding, state)
    for (arrays, count), rate in zip(batches, rates, strict=False):
        if history:  # XLA's CPU backend allots a call's temporaries at once, though it must wait
            history[-1] = jax.device_get(history[-1])
        state, metrics = step(state, arrays, count, rate)
        # XLA may call the same layout by another name (P() for P(None)), for which the next call
        # would be compiled again. Nothing is copied where only the name differs.
        state = jax.device_put(state, layout)
        history.append(metrics)
    return state, jax.device_get(history)


def averaged(
    history: Sequence[Metrics], *, prefix: str, sums: Collection[str] = ("skipped",)
) -> Metrics:
    """Metrics of an iteration's updates: their mean, the sum of those in `sums`, and the count.

    Args:
      history: of `run_updates`; may be empty.
    """
    if not history:
        return {f"{prefix}/count": 0}
    metrics = {
        f"{prefix}/{name}": float((np.sum if name in sums else np.mean)([m[name] for m in history]))
        for name in history[0]
    }
    return metrics | {f"{prefix}/count": len(history)}
