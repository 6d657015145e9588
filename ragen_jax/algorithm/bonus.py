"""Bonuses in addition to the task's reward: weights of the entropy bonus, a bonus on information.

RAGEN-2 explains the loss of information by regularisers that act equally on every prompt while the
task's signal is weak on some prompts. These bonuses test that explanation: an entropy bonus on a
subset of the tokens, an entropy bonus that fades as information falls, and a bonus on information.

Axes: B rows, T tokens, G groups, E environments; M replies, N groups (their first prompts).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragen_jax.core.task_shares import Part, split_groups
from ragen_jax.core.types import ACTION, REASONING, Batch


def _actions(batch: Batch, upper_G: np.ndarray) -> np.ndarray:
    return batch.span_BT == ACTION


def _upper_groups(batch: Batch, upper_G: np.ndarray) -> np.ndarray:
    return np.broadcast_to(upper_G[batch.group_B, None], batch.mask_BT.shape)


def _lower_groups(batch: Batch, upper_G: np.ndarray) -> np.ndarray:
    return ~_upper_groups(batch, upper_G)


# algorithm.entropy_on -> (batch, whether a group's score is in the upper half) -> bool [B, T]
ENTROPY_ON: dict[str, Callable[[Batch, np.ndarray], np.ndarray] | None] = {
    "all": None,  # every sampled token
    "actions": _actions,  # tokens inside <answer>, without the reasoning
    # Tokens of the half of an environment's groups with larger, or smaller, filter scores.
    "upper_groups": _upper_groups,
    "lower_groups": _lower_groups,
}


def entropy_gate(share_E: np.ndarray, least: float) -> np.ndarray:
    """Return the factor of each environment's entropy bonus, float64 [E] from 0 to 1.

    The factor is linear in the information as a fraction of its reference level (share_E): 0 at
    `least` and below, 1 at the reference level and above. It is 1 while the fraction is unknown
    (NaN).
    """
    return np.where(np.isnan(share_E), 1.0, np.clip((share_E - least) / (1 - least), 0, 1))


def weighs_entropy(algorithm: Any) -> bool:
    """Return whether the config's algorithm section weights the entropy bonus token by token."""
    return algorithm.entropy_on != "all" or bool(algorithm.entropy_gate)


def entropy_weights(
    on: str,
    batch: Batch,
    score_G: np.ndarray,
    parts: Sequence[Part],
    gate_E: np.ndarray | None = None,
) -> np.ndarray | None:
    """Return the factor of the entropy bonus at each token, float32 [B, T]; None: 1 everywhere.

    Args:
      on: a key of ENTROPY_ON.
      score_G: the groups' scores by filter.metric.
      parts: the groups of each environment.
      gate_E: the result of `entropy_gate`; None: no gate.
    """
    weight_BT = _where(on, batch, score_G, parts)
    if gate_E is None:
        return weight_BT
    gate_G = np.repeat(gate_E, [part.groups for part in parts])
    gate_BT = np.broadcast_to(gate_G[batch.group_B, None], batch.mask_BT.shape)
    return (gate_BT if weight_BT is None else gate_BT * weight_BT).astype(np.float32)


def _where(on: str, batch: Batch, score_G: np.ndarray, parts: Sequence[Part]) -> np.ndarray | None:
    """Return 1 on tokens with the bonus and 0 elsewhere, float32 [B, T]; None: every token."""
    where = ENTROPY_ON[on]
    if where is None:
        return None
    halves = []
    for _, score_P in split_groups(parts, score_G):
        # Groups without a score (NaN) are sorted last. They are never kept, so their half does not
        # matter.
        rank_P = np.argsort(np.argsort(score_P, kind="stable"))
        halves.append(rank_P >= np.sum(~np.isnan(score_P)) // 2)
    return where(batch, np.concatenate(halves)).astype(np.float32)


def pointwise_information(
    own_M: np.ndarray, score_MN: np.ndarray, group_M: np.ndarray
) -> np.ndarray:
    """Return log p(z | x) - log mean_n p(z | x_n) of each reasoning z, float64 [M], in nats.

    Its mean is `mi_seq` (diagnostics/information.py). Its mean plus the entropy of z given x is the
    entropy of z over all prompts, H(Z). A bonus with the same coefficient on both is therefore a
    bonus on H(Z), which is no larger for reasoning that ignores its prompt.

    Args:
      own_M: log p(z_m | x_m), under the prompt that z_m was sampled for.
      score_MN: log p(z_m | x_n) under the groups' first prompts.
      group_M: int, the column of the reply's group, which is replaced by own_M.
    """
    score_MN = np.array(score_MN, np.float64)
    score_MN[np.arange(len(own_M)), group_M] = own_M
    return own_M - (np.logaddexp.reduce(score_MN, axis=1) - np.log(score_MN.shape[1]))


def scatter_to_reasoning(value_EU: np.ndarray, batch: Batch) -> np.ndarray:
    """Put each turn's value on the tokens that it depends on: float32 [B, T], 0 elsewhere.

    These tokens are the reasoning and the next token, which closes it: with another token there,
    the reasoning would have continued. (If the closing tag has several tokens, it is the first.)
    """
    here_BT = batch.span_BT == REASONING
    same_turn_BT = batch.turn_BT[:, 1:] == batch.turn_BT[:, :-1]
    here_BT[:, 1:] |= here_BT[:, :-1] & same_turn_BT
    return np.where(here_BT, value_EU[batch.episode_B[:, None], batch.turn_BT], 0).astype("f4")
