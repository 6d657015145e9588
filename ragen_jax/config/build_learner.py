"""Build what a config says about learning: sampling, rewards, losses, the learner."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.algorithm.algorithms import Credit
from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.algorithm.schedules import rates_at
from ragen_jax.config.build_model import build_adapters, has_reference
from ragen_jax.config.per_task import (
    has_critic,
    minibatch_rows,
    per_task_configs,
    per_task_groups,
    row_tokens,
    step_rows,
)
from ragen_jax.configs.base import Algorithm, Config, Eval, Optimizer, Reward, Rollout
from ragen_jax.core.sharding import in_memory
from ragen_jax.core.task_shares import Part
from ragen_jax.core.types import Params
from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.scopes import SCOPES
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.diagnostics.zscores import init_zscores
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.pool import init_streaks, init_tallies
from ragen_jax.rollout.task import CollectSettings
from ragen_jax.update import critic
from ragen_jax.update.learner import Learner, copy_sampler, sampling_policy
from ragen_jax.update.optimize import AdamW
from ragen_jax.update.policy import ForwardContext, Loss, init_state
from ragen_jax.update.state import AheadState, TrainState


def build_optimizer(settings: Optimizer) -> AdamW:
    """Build the optimizer of policy and critic, with learning rate 1."""
    o = settings
    return AdamW(
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
    )


def step_rates(config: Config, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (policy's, critic's) float32 learning rates of a step's minibatches; no critic: none.

    They depend only on the step number, not on dropped groups or skipped updates. The policy's
    schedule begins after the steps in which only the critic is trained.
    """
    o, critic = config.optimizer, has_critic(config.algorithm)

    def rates(largest, start):
        updates = (step - 1 - start) * o.minibatches + np.arange(o.minibatches)
        rates_of_updates = rates_at(
            np.maximum(updates, 0),
            learning_rate=largest,
            schedule=o.schedule,
            warmup_updates=o.warmup_updates,
            total_updates=(config.steps - start) * o.minibatches,
        )
        return np.asarray(rates_of_updates)

    if not critic:
        return rates(o.learning_rate, 0), np.zeros(0, np.float32)
    return rates(o.learning_rate, config.critic.warmup_steps), rates(config.critic.learning_rate, 0)


def build_loss(config: Config, reference_model: Qwen | None = None) -> Loss:
    """Build the config's `policy.Loss`; reference_model: that of algorithm.kl_reference, if any."""
    a = config.algorithm
    return Loss(
        temperature=config.rollout.temperature,
        objective=a.objective,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        clip_c=a.clip_c or None,
        aggregation=a.aggregation,
        norm_length=row_tokens(config),
        kl_kind=a.kl_kind,
        kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
        entropy_coef=a.entropy_coef,
        balance_coef=a.balance_coef,
        reference_model=reference_model,
    )


def build_credit(algorithm: Algorithm, reward: Reward) -> Credit:
    """Build the config's `algorithms.Credit`."""
    a, r = algorithm, reward
    return Credit(
        name=a.name,
        gamma=a.gamma,
        lam=a.lam,
        bi_level=a.bi_level,
        turn_gamma=a.turn_gamma,
        soft_weights=a.soft_weights,
        level=r.level,
        normalize=r.normalize,
        grouping=r.grouping,
    )


def build_value_loss(config: Config) -> critic.ValueLoss:
    """Build the config's `critic.ValueLoss`."""
    return critic.ValueLoss(
        clip=config.critic.clip,
        aggregation=config.algorithm.aggregation,
        norm_length=row_tokens(config),
    )


def build_collecting(config: Config) -> CollectSettings:
    """Build the config's `CollectSettings`."""
    groups, pool = config.rollout.groups, config.env.pool
    return CollectSettings(groups=groups, pool=pool, seed=config.seed, **config.collect.to_dict())


def build_penalties(config: Config) -> Penalties:
    """Build the config's `Penalties`."""
    return Penalties(
        format_penalty=config.env.format_penalty,
        max_length=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer,
    )


def build_sampling(rollout: Rollout) -> Sampling:
    """Build the `Sampling` of training."""
    return Sampling(temperature=rollout.temperature)


def build_eval_sampling(settings: Eval) -> Sampling:
    """Build the `Sampling` of evaluation."""
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def needs_statistics(config: Config) -> bool:
    """Return whether a step recomputes its rows with the policy before the update."""
    a = config.algorithm
    kl_in_reward = a.kl_coef > 0 and a.kl_in == "reward"
    by_entropy = "entropy" in config.filter.metric
    return by_entropy or kl_in_reward or a.mismatch_cap > 0 or a.zvp_coef > 0


def build_learner(
    config: Config,
    model: Qwen,
    params: Params,
    mesh: Mesh,
    sampling_mesh: Mesh | None = None,
    images: ImageSource = NO_IMAGES,
    teacher: tuple[Qwen, Params] | None = None,
) -> tuple[Learner, TrainState]:
    """Return (`Learner`, `TrainState` at step 0) for a config.

    Args:
      params: the initial policy on the mesh; the state takes ownership (updates donate them).
      sampling_mesh: None for the training mesh.
      images: the images that rows show.
      teacher: the model of algorithm.kl_reference, if the config names one.
    """
    c, a, o = config, config.algorithm, config.optimizer
    frozen = reference = critic_state = None
    optimizer = build_optimizer(c.optimizer)
    trained = params
    if c.model.lora.rank:
        # Frozen parameters keep the precision in which they are read.
        base = sampling_params(params, model, mesh)
        frozen = ForwardContext(base, np.float32(c.model.lora.alpha / c.model.lora.rank))
        trained = build_adapters(c, model, mesh)
    if teacher is not None:
        reference = sampling_params(teacher[1], teacher[0], mesh)
    elif has_reference(c):
        # A copy of every array, because the update donates the policy's parameters.
        reference = jax.tree.map(
            lambda x, own: jnp.copy(x) if x is own else x,
            sampling_params(params, model, mesh),
            params,
        )
    if reference is not None and a.kl_memory == "host":
        reference = in_memory(reference, "host")
    if has_critic(c.algorithm):
        backbone = critic.backbone_of(trained)
        critic_state = critic.init_critic(backbone, model.config.width, optimizer, mesh)
    environments = per_task_configs(c)
    labels = environments if len(environments) > 1 else ("",)
    learner = Learner(
        model=model,
        mesh=mesh,
        sampling_mesh=sampling_mesh or mesh,
        parts=tuple(map(Part, labels, per_task_groups(c))),
        filter=c.filter,
        reads_policy=needs_statistics(c),
        credit=build_credit(c.algorithm, c.reward),
        kl_in_reward=(a.kl_coef, a.kl_kind) if a.kl_coef and a.kl_in == "reward" else None,
        kl_control=(a.kl_target, a.kl_gain) if a.kl_target else None,
        kl_coef=a.kl_coef,
        zvp_coef=a.zvp_coef,
        virtual_rewards=a.virtual_rewards,
        mi_coef=a.mi_coef,
        ahead=c.rollout.ahead,
        entropy_on=a.entropy_on,
        entropy_gate=a.entropy_gate,
        mismatch=(a.mismatch_cap, a.mismatch_level) if a.mismatch_cap else None,
        sampler_noise=c.lab.sampler_noise,
        optimizer=optimizer,
        loss=build_loss(c, teacher[0] if teacher else None),
        value_loss=build_value_loss(c),
        rates=functools.partial(step_rates, c),
        critic_alone=c.critic.warmup_steps,
        seed=c.seed,
        minibatches=o.minibatches,
        micro_batch=o.micro_batch,
        step_rows=step_rows(c),
        minibatch_rows=minibatch_rows(c),
        reference=reference,
        frozen=frozen,
        images=images,
    )
    scopes = [f"{label}/{scope}" for label in labels if label for scope in SCOPES]
    state = init_state(
        trained,
        optimizer,
        mesh,
        environments=environments,
        critic=critic_state,
        stopping=init_stopping(len(environments)),
        regimes=init_regimes(len(environments)),
        zscores=init_zscores([*SCOPES, *scopes]),
        streak_P={name: init_streaks(c.env.pool) for name, c in environments.items() if c.env.pool},
        tally_P=(
            {name: init_tallies(c.env.pool) for name, c in environments.items()}
            if c.collect.allocate
            else None
        ),
    )
    if c.rollout.ahead:
        sampler = copy_sampler(learner, sampling_policy(learner, state), state)
        state = AheadState(**vars(state), samplers=(sampler,) * c.rollout.ahead)
    return learner, state
