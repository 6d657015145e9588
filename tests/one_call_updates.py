"""Run the updates of an iteration in one call: plan the minibatches, then update on them."""

from ragen_jax.update import critic, policy
from ragen_jax.update.optimize import MinibatchLayout


def _layout(settings):
    names = ("mesh", "minibatches", "micro_batch", "minibatch_rows")
    return MinibatchLayout(**{name: settings.pop(name) for name in names})


def update_policy(model, optimizer, loss, state, ref, batch, advantage_BT, rows_B, **settings):
    """Run `policy.update_policy` on the rows `rows_B`; `settings` are of the plan and the
    update."""
    layout, rng = _layout(settings), settings.pop("rng")
    bonus_BT = settings.pop("bonus_BT", None)
    plan = policy.plan_policy(loss, batch, advantage_BT, rows_B, layout, rng=rng, bonus_BT=bonus_BT)
    return policy.update_policy(model, optimizer, loss, state, plan, ref_params=ref, **settings)


def update_critic(model, optimizer, loss, state, batch, value_BT, target_BT, rows_B, **settings):
    """Run `critic.update_critic` on the rows `rows_B`."""
    layout, rng = _layout(settings), settings.pop("rng")
    plan = critic.plan_critic(loss, batch, value_BT, target_BT, rows_B, layout, rng=rng)
    return critic.update_critic(model, optimizer, loss, state, plan, **settings)
