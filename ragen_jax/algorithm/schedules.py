"""Learning rates over the updates of a run."""

import jax
import jax.numpy as jnp
import optax

from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Array

# Schedules after the warm-up: (learning rate, number of updates) -> schedule.
SCHEDULES = {
    "constant": lambda rate, updates: optax.constant_schedule(rate),
    "linear": lambda rate, updates: optax.linear_schedule(rate, 0.0, updates),
    "cosine": lambda rate, updates: optax.cosine_decay_schedule(rate, updates),
}


def learning_rates(
    *, learning_rate: float, schedule: str, warmup_updates: int, total_updates: int
) -> optax.Schedule:
    """Return a schedule: 0-based update of a run -> its learning rate. Skipped updates count.

    Args:
      learning_rate: the largest rate. The warm-up rises to it linearly from 0 over
        `warmup_updates`.
      schedule: a key of SCHEDULES; linear and cosine fall to 0 at `total_updates`.
    """
    after = SCHEDULES[schedule](learning_rate, max(total_updates - warmup_updates, 1))
    if warmup_updates:
        start = learning_rate / warmup_updates
        rising = optax.linear_schedule(start, learning_rate, max(warmup_updates - 1, 1))
        after = optax.join_schedules([rising, after], [warmup_updates])
    return after


@stored(static_argnames=("learning_rate", "schedule", "warmup_updates", "total_updates"))
def rates_at(
    updates: Array,
    *,
    learning_rate: float,
    schedule: str,
    warmup_updates: int,
    total_updates: int,
) -> jax.Array:
    """Return the learning rates of some updates, in one program instead of one per operation.

    Args:
      updates: int [N], 0-based.
      learning_rate, schedule, warmup_updates, total_updates: as in `learning_rates`.

    Returns:
      float32 [N].
    """
    rate = learning_rates(
        learning_rate=learning_rate,
        schedule=schedule,
        warmup_updates=warmup_updates,
        total_updates=total_updates,
    )
    return jnp.broadcast_to(jnp.asarray(rate(updates), jnp.float32), jnp.shape(updates))
