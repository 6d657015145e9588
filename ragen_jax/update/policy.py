"""The policy update: the loss of a micro-batch, its gradient, and the updates of an iteration.

Axes: B rows, T tokens, A micro-batches.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.objectives import OBJECTIVES
from ragen_jax.core.sharding import replicate
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Batch, Metrics, Params
from ragen_jax.model import lora
from ragen_jax.model.experts import balance, load_figures
from ragen_jax.model.likelihood import (
    entry_weights,
    packed_statistics,
    unpack,
    without_experts,
)
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.positions import Images
from ragen_jax.update import optimize
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.reading import minibatch_logps
from ragen_jax.update.state import TrainState

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Settings of the policy loss; see configs/base.py (algorithm)."""

    temperature: float
    objective: str
    clip_low: float
    clip_high: float
    clip_c: float | None
    aggregation: str
    norm_length: int  # see losses.token_weights
    kl_kind: str
    kl_coef: float
    entropy_coef: float
    balance_coef: float = 0.0
    reference_model: Qwen | None = None  # the KL reference's model; None: the policy's


@flax.struct.dataclass
class ForwardContext:
    """The inputs of a forward pass besides the trained parameters."""

    params: Params | None  # the base model of LoRA training; None: the model itself is trained
    scale: np.float32 | jax.Array = np.float32(1.0)  # scale of the adapters, alpha / rank
    images: Images | None = None  # images that the rows show
    # The images as embedded by the base model of LoRA training; None: same as `images`.
    base_images: Images | None = None

    def attach(self, trained: Params) -> Params:
        """Return the parameters that the model runs with.

        Args:
          trained: the trained parameters, possibly with the embeddings of images
            (`expose_image_embeddings`).
        """
        trained, images = {**trained}, self.images
        if "embeds" in trained and images is not None:
            images = dataclasses.replace(images, embed_ID=trained.pop("embeds"))
        whole = trained
        if self.params is not None:
            whole = lora.attach(self.params, trained, scale=self.scale)
        return add_images(whole, images)

    def reference(self, params: Params | None) -> Params | None:
        """Return the KL reference: `params` or, without, the base model of LoRA training."""
        whole = self.params if params is None else params
        images = self.images if self.base_images is None else self.base_images
        return None if whole is None else add_images(whole, images)


def add_images(params: Params, images: Images | None) -> Params:
    """Return the parameters with the images, and without the adapters of the vision tower."""
    if images is None:
        return params
    return {name: x for name, x in params.items() if name != "tower"} | {"images": images}


def expose_image_embeddings(adapters: Params, images: Images) -> Params:
    """Return the parameters to differentiate with respect to if the tower has adapters.

    They are the adapters of the language model and the image embeddings in float32. image_table.py
    continues the backward pass from these embeddings to the adapters of the tower.
    """
    language = {name: x for name, x in adapters.items() if name != "tower"}
    return language | {"embeds": jnp.asarray(images.embed_ID, jnp.float32)}


# Narrowest clip range that the float32 rounding of log-probs cannot exceed.
FLOAT32_CLIP = 1e-3


def rounding_decides(loss: Loss, dtype: str) -> bool:
    """Return whether rounding alone could clip a ratio of an unchanged policy.

    The sampler's log-probs differ from the update's by rounding. If this is True, the update
    computes ratios against log-probs from its own forward pass instead. It is True for activations
    below float32, ratios of whole sequences, or a clip range narrower than `FLOAT32_CLIP`, and
    False for an objective without ratios.

    Args:
      dtype: dtype of the model's activations.
    """
    if not OBJECTIVES[loss.objective].clips:
        return False
    narrow = min(loss.clip_low, loss.clip_high) < FLOAT32_CLIP
    return dtype != "float32" or OBJECTIVES[loss.objective].of_sequence or narrow


@flax.struct.dataclass
class PolicyLoss:
    """The loss of a piece of a minibatch as a function of the trained parameters."""

    model: Qwen = flax.struct.field(pytree_node=False)
    settings: Loss = flax.struct.field(pytree_node=False)
    # KL reference; None: none, or the base model that the adapters are for
    ref_params: Params | None
    kl_scale: jax.Array | float = 1.0  # multiplies kl_coef
    context: ForwardContext | None = None  # set if params are adapters or rows show images

    def parts(
        self,
        params: Params,
        piece: dict[str, Any],
        unchanged: jax.Array | bool | None = None,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        """Return the terms of the loss of a micro-batch of a minibatch, coefficients included.

        | part | value at each token |
        | --- | --- |
        | task | the objective's term (objectives.OBJECTIVES) |
        | kl | kl_coef * kl_scale * KL(policy || reference); absent if kl_coef is 0 |
        | entropy | -entropy_coef * H, times piece["bonus"] if present |
        | balance | balance_coef * `experts.balance` of the row; absent if the coefficient is 0 |

        Args:
          params: the trained parameters.
          piece: packed (`likelihood.PackedRows`), entry (see `likelihood.unpack`), and arrays
            [B, T] of the rows: logp (of the policy before the update), advantage, mask (1 on
            sampled tokens of real rows), weights (`losses.Weights` of the whole minibatch), and
            optionally bonus (`bonus.entropy_weights`).
          unchanged: scalar bool, whether params have not been updated yet, which makes all ratios
            exactly 1. None: ratios are computed against piece["logp"].

        Returns:
          (dict of the parts, dict of this piece's contributions to metrics averaged over the
          minibatch's tokens, largest |log-prob - piece["logp"]|), float32 scalars; in a model with
          experts, the metrics hold expert_counts, the number of trained tokens of each expert
          [layers, experts].
        """
        model, loss, ref_params = self.model, self.settings, self.ref_params
        if self.context is not None:
            params, ref_params = self.context.attach(params), self.context.reference(ref_params)
        rows, mask_BT, weights = piece["packed"], piece["mask"], piece["weights"]
        exact = loss.kl_coef and loss.kl_kind == losses.EXACT
        reference = None
        if loss.kl_coef:
            assert ref_params is not None
            reference = loss.reference_model or model, ref_params
        statistics = packed_statistics(
            model,
            params,
            rows,
            temperature=loss.temperature,
            reference=reference if exact else None,
            keep_routing=model.config.experts is not None,
        )
        counts, balance_BT = {}, None
        if model.config.experts is not None:
            *statistics, routing = statistics
            weight_PRE = entry_weights(mask_BT, piece["entry"], routing.index.shape[1:3])
            chosen = jax.nn.one_hot(routing.index, model.config.experts.count).sum(-2)
            counts["expert_counts"] = jnp.einsum("lpex,pre->lx", chosen, weight_PRE)
            if loss.balance_coef:
                weight_PRE /= jnp.maximum(weight_PRE.sum(-1, keepdims=True), 1)
                means = [
                    jnp.einsum("lpex,pre->lprx", x, weight_PRE)
                    for x in (chosen, routing.probability)
                ]
                balance_B = balance(*(x.reshape(len(x), -1, x.shape[-1]) for x in means))
                balance_BT = jnp.broadcast_to(balance_B[:, None], mask_BT.shape)
        logp_BT, entropy_BT, *exact_kl = (unpack(x, piece["entry"]) for x in statistics)
        old_BT = piece["logp"]
        if unchanged is not None:
            old_BT = jnp.where(unchanged, jax.lax.stop_gradient(logp_BT), old_BT)
        task, metrics = losses.policy_loss(
            logp_BT,
            old_BT,
            piece["advantage"],
            mask_BT,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            clip_c=loss.clip_c,
            aggregation=loss.aggregation,
            terms=OBJECTIVES[loss.objective].terms,
            weights=weights,
        )
        parts = {"task": task}
        further: dict[str, tuple[jax.Array | float, jax.Array]] = {
            "entropy": (-loss.entropy_coef, entropy_BT)
        }
        if balance_BT is not None:
            further["balance"] = loss.balance_coef, balance_BT
        factor = {"entropy": piece["bonus"]} if "bonus" in piece else {}
        if exact:
            further["kl"] = loss.kl_coef * self.kl_scale, exact_kl[0]
        elif reference is not None:
            others = rows if loss.reference_model is None else without_experts(rows)
            ref, _ = packed_statistics(*reference, others, temperature=loss.temperature)
            ref_BT = unpack(jax.lax.stop_gradient(ref), piece["entry"])
            kl_BT = losses.kl(logp_BT, ref_BT, loss.kl_kind)
            further["kl"] = loss.kl_coef * self.kl_scale, kl_BT
        for name, (coef, x_BT) in further.items():
            paid_BT = x_BT * factor[name] if name in factor else x_BT
            parts[name] = coef * losses.weighted_sum(paid_BT, mask_BT, weights.loss_BT)
            metrics[name] = losses.weighted_sum(x_BT, mask_BT, weights.mean_BT)
        gap = jnp.where(mask_BT > 0, jnp.abs(logp_BT - piece["logp"]), 0.0).max()
        return parts, metrics | {"policy_loss": task} | counts, gap


@stored(static_argnames=("model", "loss"), donate_argnames="grads")
def policy_gradient(
    model: Qwen,
    loss: Loss,
    params: Params,
    ref_params: Params | None,
    grads: Params | None,
    pieces: dict[str, Any],
    count: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    frozen: ForwardContext | None = None,
    unchanged: jax.Array | None = None,
) -> optimize.Added:
    """Add the gradient of micro-batches of equal sizes to the gradient of a minibatch's loss.

    Args:
      ref_params, unchanged: as in `PolicyLoss`.
      grads: the gradient so far, with the structure of params, or None; donated.
      pieces: as in `PolicyLoss.parts`, each [A, ...].
      count: scalar int32, at least 1: the first `count` micro-batches are run.
      scales: (scalar that multiplies the whole loss, kl_scale of `PolicyLoss`).
      frozen: set if params are adapters (ref_params is then not read) or rows show images.
    """
    loss_scale, kl_scale = scales
    policy_loss = PolicyLoss(model, loss, ref_params, kl_scale, frozen)

    def objective(params, piece):
        parts, metrics, gap = policy_loss.parts(params, piece, unchanged)
        return loss_scale * sum(parts.values()), (metrics, {"logp_gap": gap})

    return optimize.add_gradient(objective, params, grads, pieces, count)


def init_state(
    params: Params,
    optimizer: optimize.AdamW,
    mesh: Mesh,
    *,
    environments: Iterable[str] = (),
    **parts: Any,
) -> TrainState:
    """Return a `TrainState` at step 0, with its optimizer state sharded like the parameters.

    Args:
      environments: names of the run's environments.
      parts: optional fields of `TrainState`.
    """
    state = TrainState(
        params=params,
        opt_state=optimize.first_state(optimizer, params, mesh),
        step=replicate(np.int32(0), mesh),
        seed_cursor={name: replicate(np.uint32(0), mesh) for name in environments},
        kl_scale=replicate(np.float32(1.0), mesh),
        **parts,
    )
    return on_mesh(state, mesh)


def on_mesh(tree: Tree, mesh: Mesh) -> Tree:
    """Return the tree with every leaf that is not on a mesh yet replicated over this mesh."""
    return jax.tree.map(
        lambda x: (
            x if isinstance(getattr(x, "sharding", None), NamedSharding) else replicate(x, mesh)
        ),
        tree,
    )


def plan_policy(
    loss: Loss,
    batch: Batch,
    advantage_BT: np.ndarray,
    rows_B: np.ndarray,
    layout: optimize.MinibatchLayout,
    *,
    rng: np.random.Generator,
    bonus_BT: np.ndarray | None = None,
) -> optimize.MinibatchPlan:
    """Split the kept rows of a batch into minibatches for the policy update.

    Args:
      batch: arrays on the host.
      advantage_BT: float32.
      rows_B: indices of the kept rows; may be empty, then nothing is updated.
      rng: decides the order of the rows; see `optimize.plan_minibatches`.
      bonus_BT: the result of `bonus.entropy_weights`; None: every token gets the entropy bonus.
    """
    return optimize.plan_minibatches(
        token_rows(batch, replay=True),
        {
            "logp": batch.logp_BT,
            "advantage": advantage_BT,
            "mask": batch.mask_BT * batch.weight_B[:, None],
            **({} if bonus_BT is None else {"bonus": bonus_BT}),
        },
        rows_B,
        layout,
        rng=rng,
        aggregation=loss.aggregation,
        norm_length=loss.norm_length,
    )


def update_policy(
    model: Qwen,
    optimizer: optimize.AdamW,
    loss: Loss,
    state: TrainState,
    plan: optimize.MinibatchPlan,
    *,
    rates: np.ndarray,
    loss_scale: float,
    ref_params: Params | None = None,
    frozen: ForwardContext | None = None,
    transform: optimize.ParamTransform | None = None,
) -> tuple[TrainState, Metrics]:
    """Update the policy on the minibatches of an iteration.

    Args:
      state: its params and opt_state are donated.
      plan: the result of `plan_policy`.
      rates: float32, the learning rate of each minibatch (schedules.learning_rates).
      ref_params: as in `PolicyLoss`.
      frozen: set if the state's parameters are LoRA adapters or rows show images.
      transform: as in `optimize.run_updates`.

    Returns:
      (TrainState, update/* metrics). The metrics are means over the minibatches, except that
      update/logp_gap and update/clip_fraction_first are those of the first minibatch,
      update/skipped and update/count are sums, and update/positions, update/shared and
      update/real_share are those of `pieces.Split`.
      A loss or gradient that is not finite leaves the parameters unchanged and is counted in
      update/skipped.
    """
    own = rounding_decides(loss, model.config.dtype)
    if own:
        read = state.params if transform is None else transform.forward(state.params)
        whole = read if frozen is None else frozen.attach(read)
        plan = minibatch_logps(plan, model, whole, temperature=loss.temperature)

    def gradient(state, grads, arrays, count, minibatch):
        return policy_gradient(
            model,
            loss,
            state.params,
            ref_params,
            grads,
            arrays,
            count,
            (np.float32(loss_scale), state.kl_scale),
            frozen,
            unchanged=np.bool_(minibatch == 0) if own else None,
        )

    state, history = optimize.run_updates(gradient, optimizer, state, plan, rates, transform)
    counts = [one.pop("expert_counts") for one in history if "expert_counts" in one]
    metrics = optimize.averaged(history, prefix="update")
    if counts and np.sum(counts) > 0:
        figures = load_figures(np.sum(counts, axis=0))
        metrics["update/expert_load"], metrics["update/expert_entropy"] = figures
    if history:
        metrics["update/positions"] = plan.split.positions
        metrics["update/shared"] = plan.split.shared
        metrics["update/real_share"] = plan.split.token_efficiency
        metrics["update/logp_gap"] = float(history[0]["logp_gap"])
        metrics["update/clip_fraction_first"] = float(history[0]["clip_fraction"])
    return state, metrics
