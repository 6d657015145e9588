"""What an iteration learns from: the filter, advantages, then the critic's and policy's updates.

Sets up what training needs besides the model (`build_learner`), and takes a step with it.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax import losses
from ragen_jax.batch import make_batch
from ragen_jax.credit import Credit, assign_credit
from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.scopes import SCOPES
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.diagnostics.zscores import init_zscores
from ragen_jax.filter import group_scores, loss_scales, select_by_environment, select_members
from ragen_jax.objectives import mismatch_weights
from ragen_jax.randomness import Purpose, generator
from ragen_jax.rewards import adapt_kl_coef, add_rewards
from ragen_jax.rollout.play import length_bucket
from ragen_jax.rollout.pool import init_streaks
from ragen_jax.run.build import (
    build_adapters,
    build_credit,
    build_loss,
    build_optimizer,
    build_value_loss,
    step_rates,
)
from ragen_jax.run.sizes import (
    groups_of_environments,
    has_critic,
    minibatch_rows,
    of_environments,
    step_rows,
)
from ragen_jax.update.critic import ValueLoss, backbone_of, init_critic, update_critic
from ragen_jax.update.passes import over_rows, statistics, values
from ragen_jax.update.policy import Frozen, Loss, init_state, update_policy
from ragen_jax.zero_variance import zero_variance_advantage, zero_variance_signs


@dataclasses.dataclass(frozen=True)
class Learner:
    """All that stays the same from step to step."""

    config: object
    model: object
    mesh: object
    select: Callable  # (return_GK, length_GK, entropy_GK, value_E) -> (score_G, keep_GK)
    environment_G: np.ndarray  # int, the environment of each group of a step
    optimizer: object  # of policy and critic
    loss: Loss
    credit: Credit
    value_loss: ValueLoss
    reference: dict | None  # parameters of the KL reference, where they are held apart
    frozen: Frozen | None  # the base model of LoRA training


def build_learner(config, model, params, mesh):
    """(Learner, TrainState at step 0) of a config.

    Args:
      params: the initial policy on the mesh; the state takes them over (updates donate them).
    """
    c, loss = config, build_loss(config)
    frozen = reference = critic = None
    optimizer = build_optimizer(c)
    trained = params
    if c.model.lora.rank:
        frozen = Frozen(params, np.float32(c.model.lora.alpha / c.model.lora.rank))
        trained = build_adapters(c, model, mesh)
    elif c.algorithm.kl_coef:  # a copy, because the update donates the policy's parameters
        reference = jax.tree.map(jnp.copy, params)
    if has_critic(c):
        critic = init_critic(backbone_of(trained), model.config.width, optimizer, mesh)
    groups_E = groups_of_environments(c)
    learner = Learner(
        config=c,
        model=model,
        mesh=mesh,
        select=jax.jit(
            functools.partial(_select, c.filter.to_dict(), groups_E), static_argnames="value_E"
        ),
        environment_G=np.repeat(np.arange(len(groups_E)), groups_E),
        optimizer=optimizer,
        loss=loss,
        credit=build_credit(c),
        value_loss=build_value_loss(c),
        reference=reference,
        frozen=frozen,
    )
    environments = of_environments(c)
    labels = environments if len(environments) > 1 else ()
    scopes = [*SCOPES, *(f"{label}/{scope}" for label in labels for scope in SCOPES)]
    return learner, init_state(
        trained,
        optimizer,
        mesh,
        environments=environments,
        critic=critic,
        stopping=init_stopping(len(environments)),
        regimes=init_regimes(len(environments)),
        zscores=init_zscores(scopes),
        streak_P={name: init_streaks(c.env.pool) for name, c in environments.items() if c.env.pool},
    )


def rewarded_batch(config, episodes, *, format_penalty):
    """(`Batch` with the rewards of the config, return_GK), its rows padded to a bucket's length.

    Args:
      episodes: G * K episodes, group by group.
      format_penalty: one number, or one a group.
    """
    longest = max(len(t.prompt) + len(t.sampled) for e in episodes for t in e.turns)
    return add_rewards(
        make_batch(episodes, length=length_bucket(longest)),
        episodes,
        format_penalty=format_penalty,
        max_length=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer,
    )


def select_episodes(learner, return_GK, *, length_GK, entropy_GK=None, tighten_E=(1.0,)):
    """Which episodes the update reads; each environment's groups are selected by themselves.

    Args:
      return_GK: undiscounted returns, penalties included.
      length_GK: sampled tokens. entropy_GK: their mean entropy, for metrics that need it.
      tighten_E: multiplies filter.value, of each environment or of all.

    Returns:
      (score_G, keep_GK bool).
    """
    value_E = tuple(learner.config.filter.value * float(tighten) for tighten in tighten_E)
    return jax.device_get(learner.select(return_GK, length_GK, entropy_GK, value_E=value_E))


def filter_metrics(score_G, keep_GK):
    """filter/* figures of what `select_episodes` says."""
    return {
        "filter/kept_ratio": keep_GK.mean(),
        "filter/score_mean": score_G.mean(),
        "filter/score_max": score_G.max(),
        "filter/zero_groups": (np.abs(score_G) <= 1e-10).mean(),
        "filter/empty": float(not keep_GK.any()),
    }


def _select(settings, groups_E, return_GK, length_GK, entropy_GK, value_E):
    """(score_G, keep_GK); `settings` is the config's filter section but for `value`, groups_E the
    groups of each environment."""
    s = settings
    score_G = group_scores(return_GK, s["metric"], entropy_GK=entropy_GK, length_GK=length_GK)
    keep_G = select_by_environment(
        score_G,
        groups_E,
        strategy=s["strategy"],
        value=value_E,
        mode=s["mode"],
        keep=s["keep"],
        include_zero=s["include_zero"],
        eps=s["eps"],
    )
    keep_GK = jnp.broadcast_to(keep_G[:, None], return_GK.shape)
    if s["top_members"] + s["bottom_members"]:
        keep_GK &= select_members(return_GK, top=s["top_members"], bottom=s["bottom_members"])
    return score_G, keep_GK


def needs_statistics(config):
    """Whether a step reads its rows again with the policy before it learns."""
    a = config.algorithm
    kl_in_reward = a.kl_coef > 0 and a.kl_in == "reward"
    by_entropy = "entropy" in config.filter.metric
    return by_entropy or kl_in_reward or a.mismatch_cap > 0 or a.zvp_coef > 0


def policy_statistics(learner, state, batch):
    """(logp_BT, entropy_BT) of all rows under the policy that is about to be updated."""
    rows_B = np.flatnonzero(batch.weight_B > 0)
    return _pass(
        learner, statistics, _whole(learner, state.params), batch, rows_B, _temperature(learner)
    )


def token_advantages(
    learner, state, batch, keep_GK, return_GK, success_GK, *, logp_BT=None, entropy_BT=None
):
    """What the kept episodes' tokens are credited with, before any loss scale.

    Args: as in `learn`.

    Returns:
      (advantage_BT, target_BT and value_BT of the critic or None, update/* metrics), on the host.
    """
    a = learner.config.algorithm
    kept_B = _rows_of(keep_GK, batch)
    metrics = {}
    value_BT = kl_BT = None
    if state.critic is not None:
        (value_BT,) = _pass(learner, values, state.critic.params, batch, kept_B, learner.frozen)
    if a.kl_coef and a.kl_in == "reward":
        reference = learner.reference if learner.frozen is None else learner.frozen.params
        # A group is compared with all its members: what is kept of it with what is not.
        compared_GK = np.broadcast_to(keep_GK.any(1, keepdims=True), keep_GK.shape)
        rows_B = _rows_of(compared_GK, batch)
        ref_BT, _ = _pass(learner, statistics, reference, batch, rows_B, _temperature(learner))
        # Not the sampler's log-probs: its rounding would be a KL of a policy that is its own
        # reference, and a group of equal returns is blown up by whatever tells its members apart.
        kl_BT = np.array(losses.kl(logp_BT, ref_BT, a.kl_kind))
        kl_BT[np.setdiff1d(np.arange(len(kl_BT)), rows_B)] = 0.0  # ref_BT was not read there
        inside = batch.mask_BT[kept_B] > 0
        metrics["update/kl"] = float(kl_BT[kept_B][inside].mean()) if inside.any() else np.nan
    advantage_BT, target_BT = jax.device_get(
        assign_credit(
            learner.credit,
            batch,
            keep_GK,
            return_GK,
            value_BT=value_BT,
            kl_BT=kl_BT,
            kl_coef=a.kl_coef * float(state.kl_scale),
            environment_G=learner.environment_G,
        )
    )
    if a.zvp_coef:
        sign_B = np.asarray(zero_variance_signs(return_GK, success_GK))[batch.group_B]
        shaped_BT = np.asarray(
            zero_variance_advantage(entropy_BT, batch.mask_BT, sign_B, coef=a.zvp_coef)
        )
        advantage_BT = advantage_BT.copy()
        advantage_BT[kept_B] += shaped_BT[kept_B]
    return advantage_BT, target_BT, value_BT, metrics


def _rows_of(keep_GK, batch):
    """Indices of the rows that hold the episodes of a mask."""
    return np.flatnonzero(keep_GK.reshape(-1)[batch.episode_B] & (batch.weight_B > 0))


def learn(
    learner, state, batch, keep_GK, return_GK, success_GK, *, step, logp_BT=None, entropy_BT=None
):
    """An iteration's updates.

    Args:
      state: `TrainState`, donated.
      batch: `Batch` with rewards, padded to sizes.step_rows.
      keep_GK: bool, the episodes to learn from.
      return_GK: as in select_episodes. success_GK: bool.
      step: number of the iteration, for the order of rows.
      logp_BT, entropy_BT: `policy_statistics`, where it `needs_statistics`.

    Returns:
      (TrainState, update/* and critic/* metrics, advantage_BT).
    """
    c, mesh = learner.config, learner.mesh
    a = c.algorithm
    advantage_BT, target_BT, value_BT, metrics = token_advantages(
        learner,
        state,
        batch,
        keep_GK,
        return_GK,
        success_GK,
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
    )
    rows_B = _rows_of(keep_GK, batch)
    loss_scale, advantage_scale = loss_scales(keep_GK.mean(), c.filter.loss_scale)
    advantage_BT = advantage_scale * advantage_BT
    if a.mismatch_cap:
        # A weight of at least 0 may as well multiply the advantage: every objective is linear in
        # it on either side of 0.
        weight_BT = mismatch_weights(
            logp_BT, batch.logp_BT, batch.mask_BT, cap=a.mismatch_cap, level=a.mismatch_level
        )
        advantage_BT = advantage_BT * np.asarray(weight_BT)
        # The update itself will compare the policy with `logp_BT`, that is, with itself.
        metrics["update/logp_gap"] = float((batch.mask_BT * abs(logp_BT - batch.logp_BT)).max())
        batch = batch.replace(logp_BT=(batch.mask_BT * logp_BT).astype(np.float32))

    settings = dict(
        mesh=mesh,
        minibatches=c.optimizer.minibatches,
        micro_batch=c.optimizer.micro_batch,
        minibatch_rows=minibatch_rows(c),
        loss_scale=loss_scale,
        frozen=learner.frozen,
    )
    policy_rates, critic_rates = step_rates(c, step)
    if state.critic is not None:
        critic, found = update_critic(
            learner.model,
            learner.optimizer,
            learner.value_loss,
            state.critic,
            batch,
            value_BT,
            target_BT,
            rows_B,
            rng=generator(Purpose.CRITIC_ORDER, c.seed, step),
            rates=critic_rates,
            **settings,
        )
        state = state.replace(critic=critic)
        metrics |= found
    found = {"update/count": 0}
    if state.critic is None or step > c.critic.warmup_steps:
        state, found = update_policy(
            learner.model,
            learner.optimizer,
            learner.loss,
            state,
            learner.reference,
            batch,
            advantage_BT,
            rows_B,
            rng=generator(Purpose.POLICY_ORDER, c.seed, step),
            rates=policy_rates,
            **settings,
        )
    metrics = found | metrics
    if a.kl_target and np.isfinite(metrics.get("update/kl", np.nan)):
        kl_scale = adapt_kl_coef(
            state.kl_scale, metrics["update/kl"], target=a.kl_target, gain=a.kl_gain
        )
        state = state.replace(kl_scale=jax.device_put(kl_scale, state.kl_scale.sharding))
        metrics["update/kl_coef"] = a.kl_coef * float(kl_scale)
    return state, metrics, advantage_BT


def _whole(learner, trained):
    """Trained parameters as the model runs with them."""
    return trained if learner.frozen is None else learner.frozen.attach(trained)


def _temperature(learner):
    """The temperature at which training reads log-probs."""
    return np.float32(learner.config.rollout.temperature)


def _pass(learner, function, params, batch, rows_B, extra):
    """`over_rows` with the shapes of an update."""
    c = learner.config
    micro = c.optimizer.micro_batch
    return over_rows(
        function,
        learner.model,
        params,
        batch,
        rows_B,
        extra,
        mesh=learner.mesh,
        micro_batch=micro,
        size=-(-step_rows(c) // micro) * micro,
    )
