"""Gradients of the loss's parts over groups of low and of high reward variance.

RAGEN-2, sections 3 and 5 and appendices H and K: if a prompt's returns hardly differ, the task's
gradient is small and noisy while the regularisers keep their full strength. Here the groups of a
batch are put into buckets by their reward variance. For each bucket, the gradients of these parts
are compared, with one forward pass of each row and one vjp per part:

    task      the policy term, with advantages R - mean of the group
    kl        kl_coef * KL(policy || reference)
    balance   balance_coef * the load-balancing loss of a mixture of experts
    entropy   -entropy_coef * H, on every token, regardless of algorithm.entropy_on and entropy_gate

The advantages are those of appendix H, regardless of the training algorithm: a division by the
group's standard deviation would hide the differences between buckets. Parts whose coefficient is 0
are left out, as is a KL that is part of the reward.

All figures are computed from inner products of the gradients (`figures`), so nothing as large as
the parameters leaves the device.

Axes: B rows, T tokens, G groups of the batch, K episodes a group, N groups of a bucket, A
micro-batches of a group, P parts.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.advantage import (
    ZERO_VARIANCE,
    comparable_members,
    deviations,
    reward_unit,
    sample_variance,
)
from ragen_jax.algorithm.filter import round_scores
from ragen_jax.core.progress import begin_count
from ragen_jax.core.types import Array, Batch, Metrics, Params
from ragen_jax.update import optimize
from ragen_jax.update.learner import Learner
from ragen_jax.update.micro_batches import build_arrays, place_groups, split_rows
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import Loss, PolicyLoss, rounding_decides
from ragen_jax.update.state import TrainState

ZERO = -1  # bucket of groups without variance
LOST = -2  # bucket of groups with too few sound members, which is not measured


def variance_buckets(
    variance_G: np.ndarray,
    *,
    buckets: int = 6,
    edges: Sequence[float] = (),
    unit_G: np.ndarray | float = 1.0,
) -> np.ndarray:
    """Return the bucket of each group, by increasing reward variance.

    Args:
      variance_G: sample variance of each group's returns, >= 0.
      buckets: number of buckets of equal size, if `edges` is empty. Sizes differ by at most one,
        and lower buckets are larger; of equal variances, the lower index comes first. With fewer
        groups than buckets, the upper buckets stay empty.
      edges: increasing variances above 0; bucket i holds edges[i - 1] <= variance < edges[i].
      unit_G: size of the rewards (`advantage.reward_unit`).

    Returns:
      int [G]: 0 for the lowest; ZERO for a group without variance, as in `advantage.has_variance`.

    Raises:
      ValueError: fewer than one bucket; edges that do not increase from above 0.
    """
    if buckets < 1:
        raise ValueError(f"buckets is {buckets}; it must be at least 1")
    check_edges(edges, "edges")
    variance_G = np.asarray(round_scores(variance_G, np.square(unit_G)))
    bucket_G = np.full(len(variance_G), ZERO)
    varied_N = np.flatnonzero(variance_G > ZERO_VARIANCE * np.square(unit_G))
    if len(edges):
        bucket_G[varied_N] = np.searchsorted(edges, variance_G[varied_N], side="right")
    else:
        order_N = varied_N[np.argsort(variance_G[varied_N], kind="stable")]
        for bucket, groups in enumerate(np.array_split(order_N, buckets)):
            bucket_G[groups] = bucket
    return bucket_G


def check_edges(edges: Sequence[float], name: str) -> None:
    """Raise ValueError if the edges of buckets do not increase from above 0."""
    if any(low >= high for low, high in itertools.pairwise((0, *edges))):
        raise ValueError(f"{name} is {tuple(edges)}; it must be increasing variances above 0")


def part_names(loss: Loss) -> tuple[str, ...]:
    """Return the names of a loss's parts, in the order of every P axis."""
    coefs = {"kl": loss.kl_coef, "entropy": loss.entropy_coef, "balance": loss.balance_coef}
    return ("task", *(name for name, coef in coefs.items() if coef))


def part_gradients(
    loss: PolicyLoss, params: Params, pieces: dict[str, Any], count: jax.Array
) -> Params:
    """Return the gradient of sum(weight * part) over rows for each part.

    The gradients of the parts sum to the gradient of the loss.

    Args:
      pieces: as in `PolicyLoss.parts`, each [A, ...].
      count: scalar int32, at least 1: the first `count` micro-batches are run.

    Returns:
      Tree like params, of arrays [P, ...] in the order of `part_names`.
    """
    names = part_names(loss.settings)
    unchanged = True if rounding_decides(loss.settings, loss.model.config.dtype) else None

    def parts(params, piece):
        terms, *_ = loss.parts(params, piece, unchanged)
        return jnp.stack([terms[name] for name in names])

    def micro(piece):
        _, pullback = jax.vjp(lambda params: parts(params, piece), params)
        # A loop, so that the backward pass is compiled once.
        return jax.lax.map(lambda unit_P: pullback(unit_P)[0], jnp.eye(len(names))), {}

    gradients, _ = optimize.accumulate(micro, pieces, count)
    return gradients


@jax.jit
def bucket_products(
    loss: PolicyLoss,
    params: Params,
    pieces: dict[str, Any],
    count_N: jax.Array,
    groups: jax.Array,
    direction: Params | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return inner products of `part_gradients` over a bucket's groups.

    For each part, a device holds about three trees like params: the gradients of the bucket, of
    the group and of a micro-batch.

    Args:
      pieces: as in `part_gradients`, each [N, A, ...], group after group.
      count_N: int32, number of a group's micro-batches that hold rows.
      groups: scalar int32, at most N: number of groups to run.
      direction: tree like params.

    Returns:
      (total_PP, group_PP, along_P): float32; with S_ip the gradient of part p over group i,
      total[p, q] = <sum_i S_ip, sum_i S_iq>, group[p, q] = sum_i <S_ip, S_iq> and
      along[p] = <sum_i S_ip, direction>, None without a direction.
    """
    P = len(part_names(loss.settings))

    def add_group(i, carry):
        sums, group_PP = carry
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), pieces)
        more = part_gradients(loss, params, piece, count_N[i])
        return jax.tree.map(jnp.add, sums, more), group_PP + inner_products(more)

    zero = jax.tree.map(lambda x: jnp.zeros((P, *x.shape), x.dtype), params)
    sums, group_PP = jax.lax.fori_loop(0, groups, add_group, (zero, jnp.zeros((P, P))))
    if direction is None:
        return inner_products(sums), group_PP, None
    along = jax.tree.map(
        lambda x, d: jnp.tensordot(x, d, axes=d.ndim, precision="highest"), sums, direction
    )
    return inner_products(sums), group_PP, sum(jax.tree.leaves(along))


def inner_products(tree: Params) -> jax.Array:
    """Return <x_p, x_q> over a tree of arrays [P, ...], float32 [P, P]."""

    def products(x):
        axes = tuple(range(1, x.ndim))
        return jnp.tensordot(x, x, axes=(axes, axes), precision="highest")

    return sum(jax.tree.leaves(jax.tree.map(products, tree)))


def figures(
    total_PP: Array,
    group_PP: Array,
    names: Sequence[str],
    *,
    weight: float,
    along_P: Array | None = None,
    all_weight: float = 0.0,
    groups: float,
    tokens: float,
    episodes: float,
) -> Metrics:
    """Return a bucket's norms, cosines, signal and noise.

    S_i is the gradient of sum(weight * part) over group i of n, and W the sum of the bucket's
    weights:

    | name | formula |
    | --- | --- |
    | X_norm | norm of g = sum_i S_i / W, the mean per token with the token weights of the loss |
    | X_norm_per_episode | X_norm * tokens / episodes: per episode, summed over its tokens |
    | X_signal_squared | mean over pairs of groups i != j of <x_i, x_j>, with x_i = n S_i / W |
    | X_noise_squared | (sample variance of the x_i) / n: the variance of their mean, which is g |
    | snr | task_signal_squared / task_noise_squared |
    | cos_X_Y | cosine of two parts |
    | dominance | regulariser_norm / (task_norm + regulariser_norm) (RAGEN-2, appendix K) |
    | X_pull | -<sum_i S_i, direction> / W of the whole batch, which adds up over buckets |

    `direction` is the gradient of a quantity (drift.py). X_pull is the change of that quantity in
    a plain gradient step on X over the bucket's groups alone, per unit of learning rate.

    X is task, kl, entropy, regulariser (kl + entropy) or total; signal and noise are computed for
    task and regulariser only.

    Signal and noise: for two halves a, b with the same number of groups, E<g_a, g_b> is the squared
    norm of the expected gradient, and |g_a - g_b|^2 / 4 the variance of their mean, the bucket's
    gradient. The figures are the means of both over all ways to halve the bucket, at the cost of
    one: norm^2 = signal^2 + noise^2 is an identity. The squared signal is unbiased, so it can be
    below 0 if the signal is lost in the noise, and so can snr. Appendix H.3 bounds its square root.

    Args:
      total_PP, group_PP, along_P: as `bucket_products` returns them.
      names: names of the P parts.
      weight: W. all_weight: W of the whole batch, used with along_P.
      groups, tokens, episodes: their numbers in the bucket.

    Returns:
      Finite figures; undefined figures (the cosine of a zero gradient) are left out.
    """
    total_PP, group_PP = (np.asarray(x, np.float64) / weight**2 for x in (total_PP, group_PP))
    parts = {name: np.eye(len(names))[p] for p, name in enumerate(names)}
    vectors = dict(parts)
    if len(names) > 1:
        vectors["regulariser"] = sum(u for name, u in parts.items() if name != "task")
    vectors["total"] = np.ones(len(names))
    norm = {name: np.sqrt(max(u @ total_PP @ u, 0.0)) for name, u in vectors.items()}
    metrics = {}
    for name in vectors:
        metrics[f"{name}_norm"] = norm[name]
        metrics[f"{name}_norm_per_episode"] = norm[name] * tokens / episodes
    for a, b in itertools.combinations(parts, 2):
        if norm[a] and norm[b]:
            metrics[f"cos_{a}_{b}"] = parts[a] @ total_PP @ parts[b] / (norm[a] * norm[b])
    if groups > 1:
        for name in ("task", "regulariser"):
            if name in vectors:
                together, apart = (vectors[name] @ x @ vectors[name] for x in (total_PP, group_PP))
                metrics[f"{name}_signal_squared"] = (together - apart) * groups / (groups - 1)
                metrics[f"{name}_noise_squared"] = (groups * apart - together) / (groups - 1)
        if metrics["task_noise_squared"] > 0:
            metrics["snr"] = metrics["task_signal_squared"] / metrics["task_noise_squared"]
    if along_P is not None:
        for name, u in vectors.items():
            metrics[f"{name}_pull"] = -(u @ np.asarray(along_P, np.float64)) / all_weight
    regulariser_norm = norm.get("regulariser", 0.0)
    if norm["task"] + regulariser_norm:
        metrics["dominance"] = regulariser_norm / (norm["task"] + regulariser_norm)
    return {name: float(value) for name, value in metrics.items()}


def bucket_gradients(
    loss: PolicyLoss,
    params: Params,
    batch: Batch,
    advantage_BT: np.ndarray,
    bucket_G: np.ndarray,
    layout: optimize.MinibatchLayout,
    *,
    direction: Params | None = None,
) -> dict[int, Metrics]:
    """Return the `figures` of each bucket of a batch; run under the training mesh.

    All buckets, and all batches whose groups need the same sizes, use the same compiled program.

    Args:
      batch: on the host. advantage_BT: float32.
      bucket_G: int, as `variance_buckets` returns it, or LOST.
      layout: how the rows of a group, like those of a minibatch, are divided into micro-batches.
      direction: tree like params, for X_pull; None: without X_pull.

    Returns:
      {bucket: `figures`, groups, episodes and tokens} of the buckets that hold groups, the lowest
      first.
    """
    mask_BT = batch.mask_BT * batch.weight_B[:, None]
    settings = loss.settings
    weights = losses.minibatch_weights(
        mask_BT, settings.aggregation, norm_length=settings.norm_length
    )
    arrays: dict[str, Any] = {
        "logp": batch.logp_BT,
        "advantage": advantage_BT,
        "mask": mask_BT,
        "weights": jax.device_get(weights),
    }
    weight_BT = arrays["weights"].loss_BT
    rows, measured = token_rows(batch, replay=True), np.flatnonzero(bucket_G != LOST)
    group_rows = [
        np.flatnonzero((batch.group_B == group) & (batch.weight_B > 0)) for group in measured
    ]
    split = split_rows(group_rows, rows, layout.grouping, alike=True)
    piece_of = dict(zip(measured.tolist(), split.pieces, strict=True))
    by_bucket, count = {}, begin_count(len(measured), "groups")
    for bucket in np.unique(bucket_G[measured]).tolist():
        groups = np.flatnonzero(bucket_G == bucket)
        built = [build_arrays(*piece_of[group], rows, layout.grouping) for group in groups]
        count_N = np.zeros(len(bucket_G), np.int32)
        count_N[: len(groups)] = [one.count for one in built]
        *products, along_P = bucket_products(
            loss,
            params,
            place_groups(built, arrays, layout.mesh, size=len(bucket_G)),
            count_N,
            np.int32(len(groups)),
            direction,
        )
        inside_B = np.isin(batch.group_B, groups) & (batch.weight_B > 0)
        counts: Metrics = {
            "groups": len(groups),
            "episodes": len(np.unique(batch.episode_B[inside_B])),
            "tokens": float(mask_BT[inside_B].sum()),
        }
        weight = weight_BT[inside_B].sum(dtype=np.float64)
        by_bucket[bucket] = counts | figures(
            *jax.device_get(products),
            part_names(settings),
            weight=weight,
            along_P=along_P,
            all_weight=weight_BT.sum(dtype=np.float64),
            **counts,
        )
        count(len(groups))
    return by_bucket


def gradient_report(
    learner: Learner,
    state: TrainState,
    batch: Batch,
    return_GK: np.ndarray,
    *,
    group_rows: int,
    buckets: int,
    edges: Sequence[float],
    direction: Params | None = None,
    sound_GK: np.ndarray | None = None,
) -> Metrics:
    """Return the gradient/* metrics of a batch; run under the training mesh.

    Args:
      state: the state that sampled the batch.
      batch: rows of G * K episodes of one environment. return_GK: undiscounted returns, penalties
        included.
      group_rows, direction: as in `bucket_gradients`. buckets, edges: as in `variance_buckets`.
      sound_GK: bool, whether the environment of an episode did not break; None: all True. Other
        episodes are left out, as are groups of two or more with fewer than two sound members.

    Returns:
      gradient/zero/* for the groups without variance and gradient/bucket_<i>/* for the others:
      `figures`, groups, episodes, tokens and reward_variance, the mean over the bucket's groups.
    """
    if sound_GK is None:
        sound_GK = np.ones(return_GK.shape, bool)
    member_GK = np.asarray(comparable_members(sound_GK))
    inside_B = member_GK.reshape(-1)[batch.episode_B]
    batch = dataclasses.replace(batch, weight_B=batch.weight_B * inside_B)
    variance_G = np.asarray(sample_variance(return_GK, sound_GK=member_GK))
    judged_G = member_GK.any(1)
    bucket_G = np.full(len(return_GK), LOST)
    unit_G = np.asarray(reward_unit(return_GK, sound_GK=member_GK))
    bucket_G[judged_G] = variance_buckets(
        variance_G[judged_G], buckets=buckets, edges=edges, unit_G=unit_G[judged_G]
    )
    advantage_E = np.asarray(deviations(return_GK, sound_GK=member_GK)).reshape(-1)
    context = learner.forward_context(state.params, batch.tokens_BT)
    by_bucket = bucket_gradients(
        PolicyLoss(learner.model, learner.loss, learner.kl_reference, state.kl_scale, context),
        state.params,
        batch,
        advantage_E[batch.episode_B][:, None] * batch.mask_BT,
        bucket_G,
        optimize.MinibatchLayout(
            learner.mesh,
            len(bucket_G),
            learner.micro_batch,
            group_rows,
            learner.model.config.row_form,
        ),
        direction=direction,
    )
    metrics = {}
    for bucket, values in by_bucket.items():
        values["reward_variance"] = float(variance_G[bucket_G == bucket].mean())
        place = "zero" if bucket == ZERO else f"bucket_{bucket}"
        metrics |= {f"gradient/{place}/{name}": value for name, value in values.items()}
    return metrics
