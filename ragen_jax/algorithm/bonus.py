"""What is paid besides the task: where the entropy bonus lies, and a bonus on information.

RAGEN-2 explains the loss of information by regularisers that pull alike on every prompt while the
task's signal is weak on some. What is here takes the explanation at its word: an entropy bonus on
some tokens alone, one that fades as information does, and a bonus on information.

Axes: B rows, T tokens, G groups, E environments; M replies, N groups' first prompts.
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
    "actions": _actions,  # those inside <answer> alone, none of the reasoning
    # Of the half of an environment's groups with the larger filter score, and of the other.
    "upper_groups": _upper_groups,
    "lower_groups": _lower_groups,
}


def entropy_gate(share_E: np.ndarray, least: float) -> np.ndarray:
    """float64 [E]: what is left of the entropy bonus where information stands at a share of its
    level: all of it at the level and above, nothing at `least`, on a straight line in between; all
    where the share is not known yet (NaN).
    """
    return np.where(np.isnan(share_E), 1.0, np.clip((share_E - least) / (1 - least), 0, 1))


def weighs_entropy(algorithm: Any) -> bool:
    """Whether the bonus is weighed token by token, of the config's algorithm section."""
    return algorithm.entropy_on != "all" or bool(algorithm.entropy_gate)


def entropy_weights(
    on: str,
    batch: Batch,
    score_G: np.ndarray,
    parts: Sequence[Part],
    gate_E: np.ndarray | None = None,
) -> np.ndarray | None:
    """float32 [B, T], what the entropy bonus is multiplied by; None: by one on every token.

    Args:
      on: a key of ENTROPY_ON. score_G: the groups' scores of filter.metric.
      parts: the environments' shares of the groups. gate_E: of `gates`; None: there are none.
    """
    weight_BT = _where(on, batch, score_G, parts)
    if gate_E is None:
        return weight_BT
    gate_G = np.repeat(gate_E, [part.groups for part in parts])
    gate_BT = np.broadcast_to(gate_G[batch.group_B, None], batch.mask_BT.shape)
    return (gate_BT if weight_BT is None else gate_BT * weight_BT).astype(np.float32)


def _where(on: str, batch: Batch, score_G: np.ndarray, parts: Sequence[Part]) -> np.ndarray | None:
    """float32 [B, T], 1 where the bonus lies and 0 elsewhere; None: it lies on every token."""
    where = ENTROPY_ON[on]
    if where is None:
        return None
    halves = []
    for _, score_P in split_groups(parts, score_G):
        # Groups without a score (NaN) are sorted last. They are never kept, so that their half does
        # not matter.
        rank_P = np.argsort(np.argsort(score_P, kind="stable"))
        halves.append(rank_P >= np.sum(~np.isnan(score_P)) // 2)
    return where(batch, np.concatenate(halves)).astype(np.float32)


def pointwise_information(
    own_M: np.ndarray, score_MN: np.ndarray, group_M: np.ndarray
) -> np.ndarray:
    """log p(z | x) - log mean_n p(z | x_n) of each reasoning, float64 [M], in nats.

    Its mean is `mi_seq` (diagnostics/information.py); with the entropy of z given x it makes up
    that of z over all prompts: a bonus of the same coefficient on both is one on H(Z), which
    reasoning that ignores its prompt has no more of than reasoning that does not.

    Args:
      own_M: log p(z_m | x_m), under the prompt that it was sampled for.
      score_MN: log p(z_m | x_n) under the groups' first prompts.
      group_M: int, the column of the reply's own group, in whose place its own prompt stands.
    """
    score_MN = np.array(score_MN, np.float64)
    score_MN[np.arange(len(own_M)), group_M] = own_M
    return own_M - (np.logaddexp.reduce(score_MN, axis=1) - np.log(score_MN.shape[1]))


def scatter_to_reasoning(value_EU: np.ndarray, batch: Batch) -> np.ndarray:
    """float32 [B, T]: the value of each episode's turn on the tokens that it depends on, else 0.

    These are the reasoning and the next token, which closes it: had another one been sampled there,
    the reasoning would have gone on. (Of a closing tag of several tokens it is the first.)
    """
    here_BT = batch.span_BT == REASONING
    same_turn_BT = batch.turn_BT[:, 1:] == batch.turn_BT[:, :-1]
    here_BT[:, 1:] |= here_BT[:, :-1] & same_turn_BT
    return np.where(here_BT, value_EU[batch.episode_B[:, None], batch.turn_BT], 0).astype("f4")
