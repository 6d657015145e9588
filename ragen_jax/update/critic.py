"""The critic: a value head on its own backbone, and the critic's updates.

The backbone is a copy of the policy's initial parameters or, if the policy trains LoRA adapters, a
second set of adapters on the same frozen base model. It is checkpointed and sharded like the
policy.

Axes: B rows, T tokens, D width, A micro-batches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.algorithm import losses
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Batch, Metrics, Params
from ragen_jax.model.likelihood import PackedRows, predicting_states, unpack
from ragen_jax.model.qwen import Qwen
from ragen_jax.update import optimize
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import ForwardContext, on_mesh
from ragen_jax.update.state import CriticState


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """Settings of the critic's loss; see configs/base.py (critic, algorithm)."""

    clip: float
    aggregation: str
    norm_length: int  # see losses.token_weights


def init_critic(backbone: Params, width: int, optimizer: optimize.AdamW, mesh: Mesh) -> CriticState:
    """Return a `CriticState` whose values are all 0.

    Args:
      backbone: parameters (an output head is not used) or adapters; not copied.
      width: D.
      mesh: the training mesh.
    """
    params = {"backbone": backbone, "value": jnp.zeros(width, jnp.float32)}
    return on_mesh(CriticState(params, optimize.first_state(optimizer, params, mesh)), mesh)


def backbone_of(params: Params) -> Params:
    """Copy a policy's parameters, except a separate output head and adapters of the vision tower.

    The critic reads the same image embeddings as the policy.
    """
    left = ("head", "tower")
    return jax.tree.map(jnp.copy, {name: x for name, x in params.items() if name not in left})


def packed_values(
    model: Qwen, params: Params, rows: PackedRows, frozen: ForwardContext | None = None
) -> jax.Array:
    """Return the value of the state in which each token is chosen: of the tokens before it.

    Args:
      params: `CriticState.params`.
      frozen: the base model if the backbone is adapters, and the images that the rows show.

    Returns:
      float32 [P, E], in units of reward, of the tokens that `rows` needs.
    """
    backbone = params["backbone"] if frozen is None else frozen.attach(params["backbone"])
    # With tied embeddings, the module needs no output head.
    body = Qwen(dataclasses.replace(model.config, tied=True))
    hidden_PED = predicting_states(body, backbone, rows)
    return jnp.einsum("ped,d->pe", hidden_PED.astype(jnp.float32), params["value"])


@stored(static_argnames=("model", "loss"), donate_argnames="grads")
def critic_gradient(
    model: Qwen,
    loss: ValueLoss,
    params: Params,
    grads: Params | None,
    pieces: dict[str, Any],
    count: jax.Array,
    loss_scale: jax.Array,
    frozen: ForwardContext | None = None,
) -> optimize.Added:
    """Add the gradient of micro-batches of one size; see `policy.policy_gradient`.

    Args:
      params: `CriticState.params`.
      grads: the gradient so far, like params, or None; donated.
      pieces: packed and entry as in `PolicyLoss.parts`; value (before the update), target, mask
        and weights of the rows, each [A, ...].
      loss_scale: scalar, multiplies the loss.
    """

    def objective(params, piece):
        value_BT = unpack(packed_values(model, params, piece["packed"], frozen), piece["entry"])
        total, metrics = losses.value_loss(
            value_BT,
            piece["value"],
            piece["target"],
            piece["mask"],
            clip=loss.clip,
            aggregation=loss.aggregation,
            weights=piece["weights"],
        )
        return loss_scale * total, (metrics, {})

    return optimize.add_gradient(objective, params, grads, pieces, count)


def plan_critic(
    loss: ValueLoss,
    batch: Batch,
    value_BT: np.ndarray,
    target_BT: np.ndarray,
    rows_B: np.ndarray,
    layout: optimize.MinibatchLayout,
    *,
    rng: np.random.Generator,
) -> optimize.MinibatchPlan:
    """Plan the critic's minibatches of the kept rows of a batch.

    Args:
      value_BT: float32, on the host: the values from which the advantages were computed.
      target_BT: float32, on the host: the targets of these values (`advantage.gae`).
      The others: as in `policy.plan_policy`.
    """
    mask_BT = batch.mask_BT * batch.weight_B[:, None]
    return optimize.plan_minibatches(
        token_rows(batch),
        {"value": value_BT, "target": target_BT, "mask": mask_BT},
        rows_B,
        layout,
        rng=rng,
        aggregation=loss.aggregation,
        norm_length=loss.norm_length,
    )


def update_critic(
    model: Qwen,
    optimizer: optimize.AdamW,
    loss: ValueLoss,
    critic: CriticState,
    plan: optimize.MinibatchPlan,
    *,
    rates: np.ndarray,
    loss_scale: float,
    frozen: ForwardContext | None = None,
) -> tuple[CriticState, Metrics]:
    """Update the critic on the minibatches of an iteration.

    Args:
      plan: the result of `plan_critic`. The others: as in `policy.update_policy`.

    Returns:
      (CriticState, critic/* metrics). The metrics are means over the minibatches, except that
      critic/explained_variance is of all rows before the update, and critic/skipped and
      critic/count are sums.
    """

    def gradient(critic, grads, arrays, count, minibatch):
        del minibatch  # a value has no ratio
        scale = np.float32(loss_scale)
        return critic_gradient(model, loss, critic.params, grads, arrays, count, scale, frozen)

    critic, history = optimize.run_updates(gradient, optimizer, critic, plan, rates)
    metrics = optimize.averaged(history, prefix="critic")
    value_BT, target_BT, mask_BT = (
        plan.arrays[name][plan.rows_B] for name in ("value", "target", "mask")
    )
    inside = mask_BT > 0
    if inside.any():
        metrics["critic/explained_variance"] = explained_variance(
            value_BT[inside], target_BT[inside]
        )
    return critic, metrics


def explained_variance(value_N: np.ndarray, target_N: np.ndarray) -> float:
    """Return 1 - Var(target - value) / Var(target): 1 for a perfect critic, 0 for a constant one.

    The result is nan if the targets do not vary; the log leaves it out.
    """
    spread = np.var(target_N)
    return float(1.0 - np.var(target_N - value_N) / spread) if spread > 0 else float("nan")
