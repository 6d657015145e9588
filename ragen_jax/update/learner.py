"""The learning part of a step: select episodes, assign credit to their tokens, update.

    select -> assign_credit -> update

`Learner` holds the settings that stay the same from step to step; config/build_learner.py builds it
from a config.

Axes: G groups, K episodes per group, B rows, T tokens, E environments.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.advantage import comparable_members
from ragen_jax.algorithm.algorithms import Credit, token_advantages
from ragen_jax.algorithm.bonus import entropy_weights
from ragen_jax.algorithm.filter import loss_scales
from ragen_jax.algorithm.objectives import mismatch_kl, mismatch_weights
from ragen_jax.algorithm.rewards import adapt_kl_coef
from ragen_jax.algorithm.zero_variance import (
    virtual_reward_advantage,
    zero_variance_advantage,
    zero_variance_signs,
)
from ragen_jax.configs.base import Filter
from ragen_jax.core.progress import begin_count
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.sharding import data_shards, in_memory, rests_on_host
from ragen_jax.core.task_shares import Part, measure_each, split_groups
from ragen_jax.core.types import Batch, Metrics, Params
from ragen_jax.model import lora
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource, ImageTable, NoImages
from ragen_jax.update.critic import ValueLoss, plan_critic, update_critic
from ragen_jax.update.optimize import AdamW, MinibatchLayout, ParamTransform
from ragen_jax.update.passes import Pass, over_rows, statistics, values
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import (
    ForwardContext,
    Loss,
    expose_image_embeddings,
    plan_policy,
    update_policy,
)
from ragen_jax.update.selection import eligible_members, select_episodes
from ragen_jax.update.state import Sampler, TrainState

Needed = TypeVar("Needed")


@dataclasses.dataclass(frozen=True)
class Learner:
    """Everything that learning needs besides a step's batch and the state; see configs/base.py."""

    model: Qwen
    mesh: Mesh  # for training
    sampling_mesh: Mesh
    parts: tuple[Part, ...]  # number of a step's groups for each environment
    filter: Filter
    reads_policy: bool  # whether a step computes the policy's log-probs before the update
    credit: Credit
    kl_in_reward: tuple[float, str] | None  # (coefficient, kind)
    kl_control: tuple[float, float] | None  # (target KL, gain) for adapting the coefficient
    kl_coef: float
    zvp_coef: float
    virtual_rewards: int  # per group without variance; 0: none
    mi_coef: float
    ahead: int  # steps by which rollouts run ahead of the updates
    entropy_on: str  # a key of bonus.ENTROPY_ON
    entropy_gate: float  # see bonus.entropy_gate; 0: no gate
    mismatch: tuple[float, str] | None  # (cap, level) of the importance weights
    sampler_noise: float  # standard deviation of noise on the sampler's log-probs, in nats
    optimizer: AdamW  # for policy and critic
    loss: Loss
    value_loss: ValueLoss
    # step -> learning rates of its minibatches: (policy's, critic's)
    rates: Callable[[int], tuple[np.ndarray, np.ndarray]]
    critic_alone: int  # number of first steps in which only the critic learns
    seed: int
    minibatches: int  # per step
    micro_batch: int  # rows per micro-batch
    step_rows: int  # maximum number of rows per step
    minibatch_rows: int  # maximum number of rows per minibatch
    # Parameters of the KL reference if they are kept separately, possibly in host memory.
    reference: Params | None
    frozen: ForwardContext | None  # the base model of LoRA training
    images: ImageSource = NO_IMAGES  # images that rows show

    @property
    def kl_reference(self) -> Params | None:
        """The KL reference in device memory.

        If the reference is stored on the host, each access makes a copy, which is released with
        its last use.
        """
        if self.reference is None or not rests_on_host(self.reference):
            return self.reference
        return in_memory(self.reference, "device")

    @functools.cached_property
    def frozen_policy(self) -> ForwardContext | None:
        """The base model of LoRA training as sampling reads it: placed once, never changed."""
        if self.frozen is None:
            return None
        params = sampling_params(_require(self.frozen.params), self.model, self.sampling_mesh)
        return ForwardContext(params, self.frozen.scale)

    def forward_context(self, params: Params, tokens_BT: np.ndarray) -> ForwardContext | None:
        """Return the inputs of a forward pass over these rows besides the trained parameters.

        Args:
          params: parameters of the state; the vision tower uses its adapters in them, if any.
        """
        if isinstance(self.images, NoImages):
            return self.frozen
        frozen, base_images = self.frozen or ForwardContext(None), None
        tower = tower_adapters(params, frozen)
        if tower is not None and self.kl_coef:
            base_images = self.images.table(tokens_BT)
        images = self.images.table(tokens_BT, adapters=tower)
        return dataclasses.replace(frozen, images=images, base_images=base_images)

    @property
    def environment_G(self) -> np.ndarray:
        """Index of the environment of each group of a step, int [G]."""
        return np.repeat(np.arange(len(self.parts)), [part.groups for part in self.parts])


def tower_adapters(params: Params, frozen: ForwardContext) -> Params | None:
    """Return the vision tower's adapters and their scale as lora.attach nests them, or None."""
    return {**params["tower"], "scale": frozen.scale} if "tower" in params else None


def through_tower(
    table: ImageTable, frozen: ForwardContext, tokens_BT: np.ndarray
) -> ParamTransform:
    """Return the transform by which an update trains the adapters of the vision tower.

    Args:
      tokens_BT: the rows of the update, which show the images.
    """

    def forward(params):
        images = table.table(tokens_BT, adapters=tower_adapters(params, frozen))
        return expose_image_embeddings(params, images)

    def backward(params, grads):
        language = {name: x for name, x in grads.items() if name != "embeds"}
        tower = _require(tower_adapters(params, frozen))
        return language | {"tower": table.gradient(tower, grads["embeds"], tokens_BT)}

    return ParamTransform(forward, backward)


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """The results of a step's episodes; arrays on the host."""

    return_GK: np.ndarray  # float32, undiscounted, penalties included
    length_GK: np.ndarray  # int, sampled tokens
    success_GK: np.ndarray | None  # bool; None: an environment does not define success
    # bool, whether the episode's environment broke: such episodes are never kept; None: none broke
    broken_GK: np.ndarray | None = None
    task_return_GK: np.ndarray | None = None  # as return_GK, without penalties; None: no penalties
    bonus_BT: np.ndarray | None = None  # float32, added to the algorithm's advantages
    gate_E: np.ndarray | None = None  # factor of the entropy bonus, 0 to 1 (bonus.py); None: 1
    # float32, entropy of the policy that sampled, on rows that RL-ZVP reads; None: the sampling
    # policy is the policy that is about to be updated (`Selection.entropy_BT`)
    sampled_entropy_BT: np.ndarray | None = None

    @property
    def sound_GK(self) -> np.ndarray | None:
        """bool: the sound members of groups with enough sound members to compare; None: all.

        It is None if no environment broke, so that such a step runs the programs without a mask.
        """
        if self.broken_GK is None or not self.broken_GK.any():
            return None
        return np.asarray(comparable_members(~self.broken_GK))


@dataclasses.dataclass(frozen=True)
class Selection:
    """The episodes that the update learns from, and the data used to choose them; on the host."""

    keep_GK: np.ndarray  # bool
    score_G: np.ndarray  # float32, the scores that decide keep_GK
    # Of the policy that is about to be updated; None unless `Learner.reads_policy`.
    logp_BT: np.ndarray | None = None
    entropy_BT: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class StepCredit:
    """The credit of the tokens of the kept episodes; arrays on the host."""

    advantage_BT: np.ndarray  # float32, scaled
    target_BT: np.ndarray | None  # targets of the critic
    value_BT: np.ndarray | None  # the critic's values before its update
    old_logp_BT: np.ndarray  # log-probs in the denominator of the policy's ratios
    loss_scale: float
    metrics: Metrics  # update/*
    gate_E: np.ndarray | None  # as in `Outcomes`


# ------------------------------------------------------------------------------ select


def select(
    learner: Learner, state: TrainState, batch: Batch, outcomes: Outcomes
) -> tuple[Selection, Metrics]:
    """Select the episodes to learn from, separately for each environment's groups.

    Args:
      state: its regime alarm may have tightened the filter.
      batch: with rewards, padded to learner.step_rows.

    Returns:
      (`Selection`, filter/* metrics).
    """
    logp_BT = entropy_BT = entropy_GK = None
    if learner.reads_policy:
        rows_B = np.flatnonzero(batch.weight_B > 0)
        context = learner.forward_context(state.params, batch.tokens_BT)
        params = state.params if context is None else context.attach(state.params)
        logp_BT, entropy_BT = _pass(
            learner, statistics, params, batch, rows_B, np.float32(learner.loss.temperature)
        )
        entropy_GK = episode_means(entropy_BT, batch).reshape(outcomes.return_GK.shape)
    sound_GK = outcomes.sound_GK
    scale_E = _require(state.regimes).filter_scale_E.tolist()
    score_G, keep_GK, zero_G = jax.device_get(
        select_episodes(
            learner.filter,
            tuple(part.groups for part in learner.parts),
            outcomes.return_GK,
            outcomes.length_GK,
            entropy_GK,
            value_E=tuple(learner.filter.value * x for x in scale_E),
            sound_GK=sound_GK,
            task_return_GK=outcomes.task_return_GK,
        )
    )
    if learner.filter.at_random:
        member_GK = np.asarray(eligible_members(learner.filter, outcomes.return_GK, sound_GK))
        keep_GK = deal_at_random(
            keep_GK, learner.parts, learner.seed, int(state.step), member_GK=member_GK
        )
    if sound_GK is None:
        sound_GK = np.ones_like(keep_GK)
    scored = score_G, zero_G, keep_GK, sound_GK
    metrics = filter_metrics(*scored)
    metrics |= measure_each(learner.parts, filter_metrics, *scored)
    return Selection(keep_GK, score_G, logp_BT, entropy_BT), metrics


def deal_at_random(
    keep_GK: np.ndarray,
    parts: Sequence[Part],
    seed: int,
    step: int,
    *,
    member_GK: np.ndarray | None = None,
) -> np.ndarray:
    """Return bool [G, K] with the same number of groups per environment as keep_GK, at random.

    Args:
      member_GK: bool, the members that an update learns from if their group is drawn; groups
        without any are not drawn. None: a drawn group gets the mask of the group that it replaces.
    """
    dealt_GK = np.zeros_like(keep_GK)
    eligible_G = np.ones(len(keep_GK), bool) if member_GK is None else np.any(member_GK, axis=1)
    for number, (_, of_part) in enumerate(split_groups(parts, np.arange(len(keep_GK)))):
        rng = generator(Purpose.RANDOM_GROUPS, seed, step, number)
        eligible = of_part[eligible_G[of_part]]
        dealt_GK[eligible] = keep_GK[rng.permutation(eligible)]
    if member_GK is None:
        return dealt_GK
    return dealt_GK.any(1, keepdims=True) & member_GK


def filter_metrics(
    score_G: np.ndarray,
    zero_G: np.ndarray,
    keep_GK: np.ndarray,
    sound_GK: np.ndarray | None = None,
) -> Metrics:
    """Return the filter/* metrics of the groups' scores and the kept episodes.

    Args:
      score_G: NaN for a group without any sound member; such groups enter no score metric.
      zero_G: bool, which scores count as 0.
      sound_GK: bool, `Outcomes.sound_GK`; None: all are sound.
    """
    scored_N = score_G[~np.isnan(score_G)]
    metrics = {
        "filter/kept_ratio": kept_ratio(keep_GK, sound_GK),
        "filter/empty": float(not keep_GK.any()),
    }
    if len(scored_N):
        metrics |= {
            "filter/score_mean": scored_N.mean(),
            "filter/score_max": scored_N.max(),
            "filter/score_std": scored_N.std(),
            "filter/zero_groups": zero_G[~np.isnan(score_G)].mean(),
        }
    return metrics


def kept_ratio(keep_GK: np.ndarray, sound_GK: np.ndarray | None = None) -> float:
    """Return the fraction of the sound episodes that are kept; 0 without sound episodes.

    Args:
      sound_GK: as in `filter_metrics`.
    """
    sound = keep_GK.size if sound_GK is None else sound_GK.sum()
    return float(keep_GK.sum() / max(sound, 1))


def episode_means(x_BT: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the mean of x over the sampled tokens of each episode, float64."""
    real = batch.weight_B > 0
    sums, tokens = (
        np.bincount(batch.episode_B[real], weights=(y * batch.mask_BT).sum(1)[real])
        for y in (x_BT, 1.0)
    )
    return sums / tokens


# ------------------------------------------------------------------------------ credit


def assign_credit(
    learner: Learner, state: TrainState, batch: Batch, selection: Selection, outcomes: Outcomes
) -> StepCredit:
    """Return the credit of the kept episodes' tokens; arguments as in `select`."""
    keep_GK, return_GK = selection.keep_GK, outcomes.return_GK
    kept_B = _rows_of(keep_GK, batch)
    metrics = {}
    context = learner.forward_context(state.params, batch.tokens_BT)
    value_BT = kl_BT = None
    kl_coef = 0.0
    if state.critic is not None:
        (value_BT,) = _pass(learner, values, state.critic.params, batch, kept_B, context)
    if learner.kl_in_reward:
        coef, kind = learner.kl_in_reward
        kl_coef = coef * float(state.kl_scale)
        reference = learner.kl_reference
        reference = _require(reference if context is None else context.reference(reference))
        # Advantages compare all members of a group, including those that are not kept.
        compared_GK = np.broadcast_to(keep_GK.any(1, keepdims=True), keep_GK.shape)
        rows_B = _rows_of(compared_GK, batch)
        temperature = np.float32(learner.loss.temperature)
        model = learner.loss.reference_model
        ref_BT, _ = _pass(learner, statistics, reference, batch, rows_B, temperature, model=model)
        # Not the sampler's log-probs: their rounding would give a KL above 0 to a policy that
        # equals its reference. In a group of equal returns, normalization would amplify it.
        kl_BT = np.array(losses.kl(_require(selection.logp_BT), ref_BT, kind))
        kl_BT[np.setdiff1d(np.arange(len(kl_BT)), rows_B)] = 0.0  # ref_BT was not read there
        inside = batch.mask_BT[kept_B] > 0
        metrics["update/kl"] = float(kl_BT[kept_B][inside].mean()) if inside.any() else np.nan
    advantage_BT, target_BT = jax.device_get(
        token_advantages(
            learner.credit,
            batch,
            keep_GK,
            return_GK,
            value_BT=value_BT,
            kl_BT=kl_BT,
            kl_coef=kl_coef,
            environment_G=learner.environment_G,
            sound_GK=outcomes.sound_GK,
        )
    )
    if learner.zvp_coef:
        entropy_BT = outcomes.sampled_entropy_BT
        if entropy_BT is None:
            entropy_BT = _require(selection.entropy_BT)
        shaped_BT = np.asarray(
            zero_variance_advantage(
                entropy_BT,
                batch.mask_BT,
                _zero_variance_signs(learner, outcomes)[batch.group_B],
                coef=learner.zvp_coef,
            )
        )
        advantage_BT = advantage_BT.copy()
        advantage_BT[kept_B] += shaped_BT[kept_B]
    if learner.virtual_rewards:
        virtual_GK = virtual_reward_advantage(
            return_GK,
            _zero_variance_signs(learner, outcomes),
            virtual=learner.virtual_rewards,
            sound_GK=outcomes.sound_GK,
        )
        virtual_B1 = np.asarray(virtual_GK).reshape(-1)[batch.episode_B][:, None]
        advantage_BT = advantage_BT.copy()
        advantage_BT[kept_B] += (batch.mask_BT * virtual_B1)[kept_B]
    if outcomes.bonus_BT is not None:
        advantage_BT = advantage_BT.copy()
        advantage_BT[kept_B] += outcomes.bonus_BT[kept_B]
    kept = kept_ratio(keep_GK, outcomes.sound_GK)
    loss_scale, advantage_scale = loss_scales(
        kept or 1.0,  # without kept episodes there is no update
        learner.filter.loss_scale,
        summed=learner.loss.aggregation in losses.SUMMED,
    )
    advantage_BT = advantage_scale * advantage_BT
    sampler_logp_BT = batch.logp_BT
    if learner.sampler_noise:
        rng = generator(Purpose.SAMPLER_NOISE, learner.seed, int(state.step) + 1)
        noise_BT = rng.normal(0.0, learner.sampler_noise, sampler_logp_BT.shape)
        sampler_logp_BT = (sampler_logp_BT + batch.mask_BT * noise_BT).astype(np.float32)
    old_logp_BT = sampler_logp_BT
    if learner.mismatch:
        cap, level = learner.mismatch
        logp_BT = _require(selection.logp_BT)
        # A weight >= 0 can multiply the advantage instead of the loss: every objective is linear
        # in the advantage on either side of 0.
        weight_BT = mismatch_weights(logp_BT, sampler_logp_BT, batch.mask_BT, cap=cap, level=level)
        advantage_BT = advantage_BT * np.asarray(weight_BT)
        # Measured here, since the update compares the policy with `old_logp_BT`, that is, itself.
        gap_BT = batch.mask_BT * abs(logp_BT - sampler_logp_BT)
        metrics["update/logp_gap"] = float(gap_BT.max())
        metrics["update/mismatch_kl"] = mismatch_kl(logp_BT, sampler_logp_BT, batch.mask_BT)
        old_logp_BT = (batch.mask_BT * logp_BT).astype(np.float32)
    return StepCredit(
        advantage_BT=advantage_BT,
        target_BT=target_BT,
        value_BT=value_BT,
        old_logp_BT=old_logp_BT,
        loss_scale=loss_scale,
        metrics=metrics,
        gate_E=outcomes.gate_E,
    )


def assign_imitation(
    learner: Learner, state: TrainState, batch: Batch, members: int
) -> tuple[Selection, StepCredit]:
    """Return the selection and credit with which `update` imitates a batch of demonstrations.

    Every token has the advantage 1 and, before the first update, the ratio 1, so that the policy
    loss has the gradient of the mean negative log-likelihood. The other terms of the loss stay.

    Args:
      batch: padded to learner.step_rows; its episodes fill groups of `members`.
    """
    rows_B = np.flatnonzero(batch.weight_B > 0)
    temperature = np.float32(learner.loss.temperature)
    params = state.params
    logp_BT, entropy_BT = _pass(learner, statistics, params, batch, rows_B, temperature)
    groups = sum(part.groups for part in learner.parts)
    selection = Selection(
        np.ones((groups, members), bool), np.zeros(groups, np.float32), logp_BT, entropy_BT
    )
    credit = StepCredit(
        advantage_BT=batch.mask_BT,
        target_BT=None,
        value_BT=None,
        old_logp_BT=(batch.mask_BT * logp_BT).astype(np.float32),
        loss_scale=1.0,
        metrics={},
        gate_E=None,
    )
    return selection, credit


def _zero_variance_signs(learner: Learner, outcomes: Outcomes) -> np.ndarray:
    """Return `zero_variance_signs`; raise ValueError if an environment does not define success."""
    if outcomes.success_GK is None:
        name = "zvp_coef" if learner.zvp_coef else "virtual_rewards"
        raise ValueError(
            f"algorithm.{name} is {getattr(learner, name):g}, but an environment does not define "
            "success; accepted: 0, or set env.options.success_reward=NUMBER"
        )
    sign_G = zero_variance_signs(
        outcomes.return_GK,
        outcomes.success_GK,
        environment_G=learner.environment_G,
        sound_GK=outcomes.sound_GK,
    )
    return np.asarray(sign_G)


def sampled_entropy(
    learner: Learner, policy: Params, batch: Batch, outcomes: Outcomes
) -> np.ndarray:
    """Return the entropy of the policy that sampled: float32 [B, T], 0 on rows RL-ZVP ignores.

    This is for rollouts ahead of the updates, which were not sampled by the policy that is about
    to be updated. It must run under the sampling mesh.

    Args:
      policy: the parameters that sampled. batch, outcomes: of the step.
    """
    sign_G = _zero_variance_signs(learner, outcomes)
    rows_B = np.flatnonzero((sign_G[batch.group_B] != 0) & (batch.weight_B > 0))
    policy = learner.images.attach(policy, batch.tokens_BT)
    shards = data_shards(learner.sampling_mesh)
    micro = -(-learner.micro_batch // shards) * shards
    _, entropy_BT = over_rows(
        statistics,
        learner.model,
        policy,
        token_rows(batch, replay=True),
        rows_B,
        np.float32(learner.loss.temperature),
        _pass_layout(learner, learner.sampling_mesh, micro),
    )
    return entropy_BT


# ------------------------------------------------------------------------------ update


def update(
    learner: Learner, state: TrainState, batch: Batch, selection: Selection, credit: StepCredit
) -> tuple[TrainState, Metrics]:
    """Update the critic, then the policy.

    Args:
      state: donated. The others: as in `assign_credit`.

    Returns:
      (`TrainState` of the next step, update/*, critic/* and rollout/logp_gap metrics).
    """
    step = int(state.step) + 1
    rows_B = _rows_of(selection.keep_GK, batch)
    read_BT = batch.tokens_BT[rows_B]
    transform = None
    if isinstance(learner.images, ImageTable) and "tower" in state.params:
        transform = through_tower(learner.images, _require(learner.frozen), read_BT)
    layout = MinibatchLayout(
        learner.mesh,
        learner.minibatches,
        learner.micro_batch,
        learner.minibatch_rows,
        learner.model.config.row_form,
    )
    frozen = learner.forward_context(state.params, read_BT)
    policy_rates, critic_rates = learner.rates(step)
    metrics: Metrics = {"update/count": 0}
    critic_metrics: Metrics = {}
    with_policy = state.critic is None or step > learner.critic_alone
    begin_count(len(rows_B) * (with_policy + (state.critic is not None)), "rows")
    if state.critic is not None:
        plan = plan_critic(
            learner.value_loss,
            batch,
            _require(credit.value_BT),
            _require(credit.target_BT),
            rows_B,
            layout,
            rng=generator(Purpose.CRITIC_ORDER, learner.seed, step),
        )
        critic, critic_metrics = update_critic(
            learner.model,
            learner.optimizer,
            learner.value_loss,
            state.critic,
            plan,
            rates=critic_rates,
            loss_scale=credit.loss_scale,
            frozen=frozen,
        )
        state = dataclasses.replace(state, critic=critic)
    if with_policy:
        plan = plan_policy(
            learner.loss,
            dataclasses.replace(batch, logp_BT=credit.old_logp_BT),
            credit.advantage_BT,
            rows_B,
            layout,
            rng=generator(Purpose.POLICY_ORDER, learner.seed, step),
            bonus_BT=entropy_weights(
                learner.entropy_on, batch, selection.score_G, learner.parts, credit.gate_E
            ),
        )
        state, metrics = update_policy(
            learner.model,
            learner.optimizer,
            learner.loss,
            state,
            plan,
            rates=policy_rates,
            loss_scale=credit.loss_scale,
            ref_params=None if learner.kl_in_reward else learner.kl_reference,
            frozen=frozen,
            transform=transform,
        )
    metrics |= critic_metrics | credit.metrics
    if credit.gate_E is not None:
        metrics["update/entropy_gate"] = credit.gate_E.mean()
    metrics["rollout/logp_gap"] = metrics.pop("update/logp_gap", np.nan)
    if learner.kl_control and np.isfinite(metrics.get("update/kl", np.nan)):
        target, gain = learner.kl_control
        kl_scale = adapt_kl_coef(state.kl_scale, metrics["update/kl"], target=target, gain=gain)
        placed = jax.device_put(kl_scale, state.kl_scale.sharding)
        state = dataclasses.replace(state, kl_scale=placed)
        metrics["update/kl_coef"] = learner.kl_coef * float(kl_scale)
    return dataclasses.replace(state, step=state.step + 1), metrics


def sampling_policy(learner: Learner, state: TrainState) -> Params:
    """Return the parameters that sampling and scoring read."""
    if learner.frozen is None:
        return sampling_params(state.params, learner.model, learner.sampling_mesh)
    adapters = lora.place_adapters(state.params, learner.model, learner.sampling_mesh)
    return _attached(learner, adapters)


def copy_sampler(learner: Learner, policy: Params, state: TrainState) -> Sampler:
    """Return the policy after all updates so far as a `Sampler`, which later updates leave alone.

    Args:
      policy: `sampling_policy` of the state; arrays that the updates will donate are copied.
    """
    with jax.set_mesh(learner.mesh):
        sampled_params = policy
        if learner.frozen is not None:
            sampled_params = lora.place_adapters(state.params, learner.model, learner.sampling_mesh)
        sampled_params = jax.tree.map(
            lambda x, own: jnp.copy(x) if x is own else x, sampled_params, state.params
        )
        return Sampler(sampled_params, state.step)


def sampler_policy(learner: Learner, sampler: Sampler) -> Params:
    """Return the parameters of a `Sampler` in the form that `sampling_policy` returns."""
    return sampler.params if learner.frozen is None else _attached(learner, sampler.params)


def _attached(learner: Learner, adapters: Params) -> Params:
    """Attach adapters that are on the sampling mesh to the base model of LoRA training."""
    with jax.set_mesh(learner.sampling_mesh):
        return _require(learner.frozen_policy).attach(adapters)


def _require(x: Needed | None) -> Needed:
    """Return x, which config/build_learner.py and `select` set whenever the settings need it.

    Raises:
      TypeError: x is None.
    """
    if x is None:
        raise TypeError("a value that the settings of this step need is None")
    return x


def _rows_of(keep_GK: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the indices of the rows that hold the episodes of a mask."""
    return np.flatnonzero(keep_GK.reshape(-1)[batch.episode_B] & (batch.weight_B > 0))


def _pass(
    learner: Learner,
    function: Pass,
    params: Params,
    batch: Batch,
    rows_B: np.ndarray,
    extra: Any,
    *,
    model: Qwen | None = None,
) -> tuple[np.ndarray, ...]:
    """Run `over_rows` with the shapes of an update; model: None for the policy's."""
    layout = _pass_layout(learner, learner.mesh, learner.micro_batch)
    rows = token_rows(batch, replay=function is statistics and model is None)
    return over_rows(function, model or learner.model, params, rows, rows_B, extra, layout)


def _pass_layout(learner: Learner, mesh: Mesh, micro_batch: int) -> MinibatchLayout:
    attention = learner.model.config.row_form
    return MinibatchLayout(mesh, 1, micro_batch, learner.step_rows, attention)
