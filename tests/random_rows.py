"""Rows of random tokens, and a loss, for tests of updates and gradients."""

import numpy as np

from ragen_jax.core.types import Batch
from ragen_jax.model.likelihood import token_logps
from ragen_jax.update.policy import Loss

V, T = 30, 12
LOSS = Loss(
    temperature=0.8,
    objective="ppo",
    clip_low=0.2,
    clip_high=0.28,
    clip_c=3.0,
    aggregation="token-mean",
    norm_length=T,
    kl_kind="k3",
    kl_coef=0.1,
    entropy_coef=0.05,
)


def random_batch(policy, rng, *, episode_B, group_B, weight_B):
    """Return a `Batch` whose log-probs differ a little from the policy's, so that some are clipped.

    Args:
      policy: (model, params).
    """
    B = len(episode_B)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    start, stop = rng.integers(2, 6, B), rng.integers(8, T + 1, B)
    inside = (np.arange(T) >= start[:, None]) & (np.arange(T) < stop[:, None])
    inside &= weight_B[:, None] > 0
    logp = np.asarray(token_logps(*policy, tokens, temperature=LOSS.temperature))
    logp = np.where(inside, logp + 0.2 * rng.normal(size=logp.shape), 0.0)
    return Batch(
        tokens_BT=tokens,
        mask_BT=inside.astype(np.float32),
        logp_BT=logp.astype(np.float32),
        turn_BT=np.where(inside, 0, -1).astype(np.int32),
        turn_end_BT=np.zeros((B, T), bool),
        span_BT=np.zeros((B, T), np.int8),
        reward_BT=np.zeros((B, T), np.float32),
        episode_B=episode_B.astype(np.int32),
        group_B=group_B.astype(np.int32),
        weight_B=weight_B.astype(np.float32),
    )
