"""Does the action follow the reasoning, and does it follow the input beyond the reasoning?

Mutual information between prompt x and reasoning z does not show whether z controls the action a.
Here log p(a | x, z), summed over the tokens inside <answer>, is compared with its value when z or
x is exchanged. The tokens between reasoning and action (the tags) are read, not scored.

Axes: M scored turns, A of them with an action, N scoring prompts, J reasonings per panel. The
figures are NumPy float64 on the host.

With L(a | x, z) = log p(a | x, z), all means over the A actions, own prompt and reasoning x, z:

    za_swap    = mean(L(a|x,z) - log mean_j p(a|x,z_j))   z_j sampled from other prompts
    xa_swap    = mean(L(a|x,z) - log mean_n p(a|x_n,z))   n over all N prompts
    za_given_x = mean(L(a|x,z) - log mean_j p(a|x,z_j))   z_j sampled from x; I(Z;A|X)
    xa_given_z = mean(L(a|x,z) - log sum_n w_n p(a|x_n,z))   w_n = p(x_n|z); I(X;A|Z)

The first and the third figure measure whether the action follows the reasoning, the second and the
fourth whether it follows the prompt beyond the reasoning.

w_n is the posterior of the prompt under a uniform prior over columns: softmax over n of
log p(z | x_n). The own reasoning is in its panel, and the own prompt is among the N. So a policy
that ignores the exchanged part gives exactly 0 (up to the rounding of its scores), and a single
action that is impossible after another reasoning cannot dominate the mean. Hence za_swap and
za_given_x are at most log J (J = PANEL = 4) and xa_swap at most log N: near these bounds, read them
as "at least". za_given_x is the multi-sample lower bound of I(Z;A|X) (Poole et al. 2019,
arXiv 1905.06922, equation 12) with its best critic, which is known here. The swap forms are
not mutual informations: the policy would not produce another prompt's z under x. So they may be
large where the conditional forms, which exchange only plausible alternatives, are small.

`<key>_ci95` is the half-width of a 95 % interval of the figure's mean over new batches with the
same numbers of groups and turns (intervals.py defines a group). Deleting one group at a time
(its actions, its columns and its reasonings in others' panels) gives

    t(0.975, G - 1) * sqrt((G - 1) / G * sum_g (f_g - mean f_g)^2)

For za_* this counts the joint effect of an action and a reasoning of its panel twice; the spread
over the actions' own groups (`intervals.grouped`) leaves out the effect of a group in the panels
of others. The half-width of za_* is the root mean square of the two.

Simulated coverage over trajectories of 8 rooms x 8 turns and 16 x 4 (24 cells of 1,000 batches, by
tests/diagnostics/test_trajectory_intervals.py): 0.92 to 0.98, for similar and for different rooms.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Metrics, Params, Turn
from ragen_jax.diagnostics.cross_scoring import Ids, ScoredReply, cross_score_actions
from ragen_jax.diagnostics.intervals import LEAST_GROUPS, grouped, jackknife
from ragen_jax.model.qwen import Qwen

PANEL = 4  # number of reasonings that an action is scored after, its own included


@dataclasses.dataclass(frozen=True)
class Panel:
    """Scores of each action after the reasonings of its panel, its own reasoning first."""

    logp_AJ: np.ndarray  # log p(a | x, z_j)
    prompt_AJ: np.ndarray  # int, column of the prompt that z_j was sampled from; -1: no z_j


def flow_metrics(
    score_AN: np.ndarray,
    action_AN: np.ndarray,
    prompt_A: np.ndarray,
    prompt_id_N: np.ndarray,
    *,
    others: Panel,
    siblings: Panel | None = None,
    group_N: np.ndarray | None = None,
) -> Metrics:
    """Return how much actions depend on reasonings and on prompts, in nats per action.

    The top of this file defines the four figures, their bounds and their intervals.

    Args:
      score_AN: log p(z_a | x_n).
      action_AN: log p(a | x_n, z_a).
      prompt_A: int, column of each action's own prompt.
      prompt_id_N: equal ids = same prompt.
      others, siblings: panels of reasonings from other prompts, and from the same prompt.
      group_N: the group that a prompt belongs to; None: each distinct prompt is a group.

    Returns:
      The figures and their intervals. A figure is left out if it is undefined: no action, no second
      prompt, no panel with a second reasoning. An interval is left out with fewer than three
      groups.

    Raises:
      ValueError: a score is not finite.
    """
    score_AN, action_AN = (np.asarray(x, np.float64) for x in (score_AN, action_AN))
    for name, x in (("score_AN", score_AN), ("action_AN", action_AN)):
        if not np.isfinite(x).all():
            raise ValueError(f"{name} holds {np.sum(~np.isfinite(x))} values that are not finite")
    prompt_A, prompt_id_N = np.asarray(prompt_A, int), np.asarray(prompt_id_N)
    group_N = prompt_id_N if group_N is None else np.asarray(group_N)
    if len(prompt_A) == 0 or len(np.unique(prompt_id_N)) < 2:
        return {}
    groups = np.unique(group_N)
    matched_A = action_AN[np.arange(len(prompt_A)), prompt_A]
    posterior_AN = np.exp(score_AN - score_AN.max(axis=1, keepdims=True))
    every_AN = np.broadcast_to(np.arange(len(group_N)), action_AN.shape)
    # name -> (swapped log-probs, their weights, their source columns, minimum number per row)
    swapped = {
        "xa_swap": (action_AN, np.ones_like(action_AN), every_AN, 1),
        "xa_given_z": (action_AN, posterior_AN, every_AN, 1),
    }
    for name, panel in (("za_swap", others), ("za_given_x", siblings)):
        if panel is not None:
            filled_AJ = (panel.prompt_AJ >= 0).astype(np.float64)
            swapped[name] = (panel.logp_AJ, filled_AJ, panel.prompt_AJ, 2)

    metrics = {}
    for name, (*columns, least) in swapped.items():
        contrasts = functools.partial(_remaining_contrasts, matched_A, prompt_A, *columns, least)
        value_A, own_A = contrasts(np.ones(len(group_N), bool))
        if len(value_A) == 0:
            continue
        metrics[name] = value_A.mean()
        deleted = [contrasts(group_N != group)[0] for group in groups]
        if len(groups) < LEAST_GROUPS or not all(map(len, deleted)):
            continue
        half = jackknife([value_A.mean() for value_A in deleted])
        if name in ("za_swap", "za_given_x"):
            half = np.hypot(half, grouped(value_A, group_N[own_A])) / np.sqrt(2)
        metrics[f"{name}_ci95"] = half
    return {name: float(value) for name, value in metrics.items()}


def _remaining_contrasts(
    matched_A: np.ndarray,
    prompt_A: np.ndarray,
    logp_AJ: np.ndarray,
    weight_AJ: np.ndarray,
    column_AJ: np.ndarray,
    least: int,
    keep_N: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (contrasts, own columns) of the actions that remain with only the columns `keep_N`.

    Args:
      column_AJ: int, the source column of each exchanged cell.
      least: an action with fewer weighted cells in its row is left out.
    """
    weight_AJ = weight_AJ * keep_N[column_AJ]
    rows_A = keep_N[prompt_A] & (np.sum(weight_AJ > 0, axis=1) >= least)
    return contrast(matched_A[rows_A], logp_AJ[rows_A], weight_AJ[rows_A]), prompt_A[rows_A]


def contrast(matched_A: np.ndarray, swapped_AJ: np.ndarray, weight_AJ: np.ndarray) -> np.ndarray:
    """Return matched - log(sum_j w_j exp(swapped_j) / sum_j w_j), float64 [A].

    Args:
      weight_AJ: at least 0, with at least one weight above 0 in each row.
    """
    with np.errstate(divide="ignore"):
        weight_AJ = np.log(weight_AJ)
    total_A = np.logaddexp.reduce(swapped_AJ + weight_AJ, axis=1)
    return matched_A - (total_A - np.logaddexp.reduce(weight_AJ, axis=1))


def draw_panels(
    rng: np.random.Generator, prompt_id_M: np.ndarray, acts_M: np.ndarray, *, same: bool
) -> list[np.ndarray]:
    """Draw PANEL - 1 random other turns for each turn with an action, or fewer if there are fewer.

    Args:
      prompt_id_M: equal ids = same prompt.
      acts_M: bool, whether a turn has an action.
      same: True: draw turns of the same prompt; False: of other prompts.

    Returns:
      A int arrays of indices into the M turns.
    """
    panels = []
    for m in np.flatnonzero(acts_M):
        fits_M = (prompt_id_M == prompt_id_M[m]) == same
        fits_M[m] = False
        fits = rng.permutation(np.flatnonzero(fits_M))
        panels.append(fits[: PANEL - 1])
    return panels


def score_flow(
    model: Qwen,
    params: Params,
    prompts: Sequence[Ids],
    turns: Sequence[Turn],
    prompt_M: np.ndarray,
    prompt_id_N: np.ndarray,
    *,
    siblings: bool,
    micro_batch: int,
    rng: np.random.Generator,
    group_N: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, Metrics]:
    """Return a scope's cross scores and, from the same pass, the flow figures of its actions.

    Args:
      prompts: N prompts.
      turns: M turns with a reasoning, each scored under every prompt.
      prompt_M: int, column of each turn's own prompt.
      prompt_id_N: equal ids = same prompt.
      siblings: whether to exchange reasonings of the same prompt as well.
      micro_batch: (prompt, reasoning) rows per device call.
      rng: generator for the panels.
      group_N: as in `flow_metrics`.

    Returns:
      (score_MN and length_M as `cross_score`, `flow_metrics`).
    """
    replies = [_scored_reply(turn) for turn in turns]
    acts_M = np.array([row.action > 0 for row in replies])
    own_A = np.flatnonzero(acts_M)
    kinds = {"others": False} | ({"siblings": True} if siblings else {})
    drawn = {
        kind: draw_panels(rng, prompt_id_N[prompt_M], acts_M, same=same)
        for kind, same in kinds.items()
    }
    swapped = [
        (prompt_M[m], _swapped_reply(turns[m], turns[j]))
        for panels in drawn.values()
        for m, panel in zip(own_A, panels, strict=True)
        for j in panel
    ]
    score_MN, action_MN, logp_R = cross_score_actions(
        model, params, prompts, replies, swapped, micro_batch=micro_batch
    )
    scored, r = {}, 0
    for kind, panels in drawn.items():
        logp_AJ = np.zeros((len(own_A), PANEL))
        prompt_AJ = np.full((len(own_A), PANEL), -1)
        for a, (m, panel) in enumerate(zip(own_A, panels, strict=True)):
            count = len(panel)
            logp_AJ[a, 0], prompt_AJ[a, 0] = action_MN[m, prompt_M[m]], prompt_M[m]
            logp_AJ[a, 1 : 1 + count] = logp_R[r : r + count]
            prompt_AJ[a, 1 : 1 + count] = prompt_M[panel]
            r += count
        scored[kind] = Panel(logp_AJ, prompt_AJ)
    metrics = flow_metrics(
        score_MN[own_A],
        action_MN[own_A],
        prompt_M[own_A],
        prompt_id_N,
        group_N=group_N,
        **scored,
    )
    return score_MN, np.array([row.reasoning for row in replies], np.int32), metrics


def _scored_reply(turn: Turn) -> ScoredReply:
    """Return the reasoning of a turn and, if it has an answer, all tokens to the answer's end."""
    (start, end), (first, last) = turn.reasoning, turn.answer
    return ScoredReply(turn.sampled[start : max(end, last)], end - start, last - first)


def _swapped_reply(turn: Turn, other: Turn) -> ScoredReply:
    """Return the action of a turn, with its tags, after the reasoning of another turn."""
    first, last = turn.answer
    reasoning = other.sampled[slice(*other.reasoning)]
    ending = turn.sampled[turn.reasoning[1] : last]
    return ScoredReply(np.concatenate([reasoning, ending]), 0, last - first)
