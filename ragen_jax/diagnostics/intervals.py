"""How far a step's information figures are to be trusted: the half-widths of 95 % intervals.

Axes as in information.py: M scored reasonings, N scoring prompts, D distinct prompts; G groups.
NumPy float64 on the host, some milliseconds.

A *group* is what is drawn independently: an environment seed, that is, a room or a problem. Among
the turns of the trajectory scope are several of one room, under different prompts.

**What is estimated**: a figure f's mean over batches of as many groups, prompts and reasonings,
drawn anew from the same environment and policy. That of `mi_seq` is at most log N, and grows
with N: an interval says nothing about the information among more prompts.

**Jackknife**, for entropies and information. Groups are the independent draws: prompts of one
room resemble each other, rooms differ in how much reasonings depend on what is seen, and a
prompt is in the marginal of all reasonings. So what is deleted is a whole group g, its columns
and the reasonings sampled from them, which leaves

    f_g = f of the remaining scores; log N becomes log(N - columns of g)
    se  = sqrt((G - 1) / G * sum over g of (f_g - mean of all f_g)^2)
    half-width = t * sqrt(se^2 + floor^2) + rounding, t the 0.975 quantile of Student's t, G - 1

f_g is about fewer prompts than f, which shifts all f_g alike; the interval takes only their
spread and stays centred at f. Deleting a group that no reasoning was sampled from counts, too.
Groups are deleted one by one even where two of them by chance show the same prompt: they were
drawn independently, and a batch drawn anew may hold such a pair or none.

**Floor** of information. Where every prompt is told from all others, no f_g differs and se is
0, though a few prompts of the next batch may well be confused: a batch without failures does
not say that there are none, and one with few not how many there are. So what half a prompt
answered at chance would shift is added as an error of its own (the half observation that
Jeffreys' prior adds to a proportion): floor = |mi| / (2 D). Half a group would be more than
failures of single turns call for, and gave a coverage of 1.

**Rounding**, for entropies and information: a score is a float32, so a figure may be off by
2^-23 of h_cond_seq (per token: of h_cond). That is the width left to reasonings that ignore the
prompt altogether.

**Retrieval** is a proportion. Deleting a group hands the first rank to reasonings of others
that were mistaken for one of its prompts; a reasoning and the prompt it is mistaken for are
both in that, so that the jackknife counts them twice and its interval covers too much. What
differs from group to group is their own first ranks h_m = P(own answer ranks first):

    se = sqrt(G / (G - 1) * sum over g of (sum over m in g of (h_m - mean h))^2) / M
    half-width = t * sqrt(se^2 + floor^2),   floor = t / (2 (n + t^2))

over the groups with a reasoning. The floor alone is the half-width of Wilson's interval (1927)
for n observations without a failure, or without a success. Reasonings of one prompt may fail
together or not: n = sqrt(M * distinct own prompts) stands between the two.

**Simulated coverage** (tests/diagnostics/, test_intervals.py and test_trajectory_intervals.py;
batches of rooms, prompts and reasonings drawn anew, scores their true likelihoods). Trajectories
of 8 rooms x 8 turns and 16 x 4, two policies at four and six strengths, 1,000 batches each (of
mi_released 200, at one strength): 0.93 to 0.98 where rooms are alike. Where they differ in how
much their reasonings say (log-normal, 0.6), 0.91 to 0.97, mi_seq lowest near its bound;
retrieval_acc 0.90 to 0.97 (the lowest, 8 x 8 at strength 6, 0.904 of 4,000 batches, 0.89 of its
first 1,000). There, deleting single prompts had covered 0.65 to 0.93.
"""

from collections.abc import Sequence

import chex
import numpy as np
from scipy.special import stdtrit

from ragen_jax.diagnostics.information import checked_scores, first_ranks, own_margins, parts
from ragen_jax.types import Array, Metrics

# Below three groups, deleting one leaves a single one, which may be all alike.
LEAST_GROUPS = 3


def confidence_intervals(
    score_MN: Array,
    length_M: Array,
    prompt_M: Array,
    *,
    prompt_id_N: np.ndarray | None = None,
    group_N: np.ndarray | None = None,
    part_N: np.ndarray | None = None,
) -> Metrics:
    """Half-widths of 95 % intervals of a step's information figures: figure +- half-width.

    What they are intervals of, how, and how often they hold: at the top of this file.

    Args:
      score_MN, length_M, prompt_M, prompt_id_N: as `information_metrics`.
      group_N: integers or strings, the group that a prompt belongs to; None: each distinct prompt
        is one.
      part_N: the parts of `within_metrics`, whose figures the intervals are then of; None: one.

    Returns:
      Python floats mi_ci95, mi_seq_ci95, mi_released_ci95, own_margin_ci95, h_cond_ci95,
      h_cond_seq_ci95, h_marginal_ci95, h_marginal_seq_ci95, retrieval_acc_ci95. Empty where nothing
      can be said: fewer than three groups, or nothing to tell apart when one of them is gone.

    Raises:
      ValueError, AssertionError: as `information_metrics` does.
    """
    score_MN, length_M, own_M, prompt_id_N = checked_scores(
        score_MN, length_M, prompt_M, prompt_id_N
    )
    N = score_MN.shape[1]
    group_N = prompt_id_N if group_N is None else np.asarray(group_N)
    part_N = np.zeros(N, int) if part_N is None else np.asarray(part_N)
    chex.assert_shape([group_N, part_N], (N,))

    def left(keep_N):
        """Mean entropies and information of the columns that are kept; {} where there are none."""
        of_parts = []
        for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N, keep_N):
            score = score_MN[np.ix_(rows, columns)]
            matched = score[np.arange(len(rows)), own_columns]
            marginal = np.logaddexp.reduce(score, axis=1) - np.log(len(columns))
            by_token = score / length_M[rows, None]
            released = np.logaddexp.reduce(by_token, axis=1) - np.log(len(columns))
            margin = own_margins(score, own_columns, prompt_id_N[columns])
            of_parts.append((matched, marginal, released, margin, length_M[rows]))
        if not of_parts:
            return {}
        matched_M, marginal_M, released_M, margin_M, tokens_M = np.concatenate(of_parts, axis=1)
        means = {
            "mi_released": np.mean(matched_M / tokens_M - released_M),
            "own_margin": np.mean(margin_M),
        }
        for suffix, unit_M in (("", tokens_M), ("_seq", 1.0)):
            means["mi" + suffix] = np.mean((matched_M - marginal_M) / unit_M)
            means["h_cond" + suffix] = -np.mean(matched_M / unit_M)
            means["h_marginal" + suffix] = -np.mean(marginal_M / unit_M)
        return means

    groups = np.unique(group_N)
    deleted = [left(group_N != group) for group in groups]
    if len(groups) < LEAST_GROUPS or not all(deleted):
        return {}
    hits, of_groups, D, asked = [], [], 0, 0
    for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N):
        ids = prompt_id_N[columns]
        hits.append(first_ranks(score_MN[np.ix_(rows, columns)], own_columns, ids))
        of_groups.append(group_N[own_M[rows]])
        D, asked = D + len(np.unique(ids)), asked + len(np.unique(ids[own_columns]))

    half = {}
    full = left(np.ones(N, bool))
    for name, value in full.items():
        sums = name.endswith("_seq") or name == "own_margin"
        matched = full["h_cond_seq" if sums else "h_cond"]
        floor = abs(value) / (2 * D) if name.startswith("mi") else 0.0
        rounding = np.finfo(np.float32).eps * abs(matched)
        half[name] = jackknife([means[name] for means in deleted], floor) + rounding
    hit_M, group_M = np.concatenate(hits), np.concatenate(of_groups)
    n, t = np.sqrt(len(hit_M) * asked), t_quantile(len(np.unique(group_M)))
    half["retrieval_acc"] = grouped(hit_M, group_M, floor=t / (2 * (n + t**2)))
    return {name + "_ci95": float(value) for name, value in half.items()}


def jackknife(deleted_G: Sequence[float] | np.ndarray, floor: float = 0.0) -> float:
    """Half-width of the 95 % interval of a figure, of which `deleted_G` are the figures without
    each group: t(0.975, G - 1) * sqrt(floor^2 + (G - 1) / G * sum_g (f_g - mean f_g)^2).

    NaN stays NaN.
    """
    deleted_G = np.asarray(deleted_G)
    G = len(deleted_G)
    se = np.sqrt((G - 1) / G * np.sum((deleted_G - np.mean(deleted_G)) ** 2))
    return t_quantile(G) * np.hypot(se, floor)


def rate_with_interval(name: str, part_G: np.ndarray, whole_G: np.ndarray) -> Metrics:
    """A rate over all groups, sum(part) / sum(whole), and the half-width of its 95 % interval.

    The jackknife deletes a group at a time: members of a group resemble each other.

    Args:
      name: of the figure.
      part_G, whole_G: what is counted, and out of how much, in each group.

    Returns:
      {name: rate, name_ci95: half-width}: no interval where fewer than three groups hold anything,
      nothing at all where none does.
    """
    here_G = np.asarray(whole_G) > 0
    part_G, whole_G = np.asarray(part_G, float)[here_G], np.asarray(whole_G, float)[here_G]
    if not len(whole_G):
        return {}
    metrics = {name: part_G.sum() / whole_G.sum()}
    if len(whole_G) >= LEAST_GROUPS:
        deleted_G = (part_G.sum() - part_G) / (whole_G.sum() - whole_G)
        metrics[f"{name}_ci95"] = jackknife(deleted_G)
    return metrics


def grouped(x_M: np.ndarray, group_M: np.ndarray, floor: float = 0.0) -> float:
    """Half-width of the 95 % interval of mean(x_M), of which those of a group belong together:
    t(0.975, G - 1) * sqrt(floor^2 + G / (G - 1) * sum_g (sum_{m in g} (x_m - mean x))^2 / M^2).

    NaN where all are of one group.
    """
    _, group_M = np.unique(group_M, return_inverse=True)
    from_mean_G = np.bincount(group_M, np.asarray(x_M) - np.mean(x_M))
    G = len(from_mean_G)
    if G < 2:
        return np.nan
    se = np.sqrt(G / (G - 1) * np.sum(from_mean_G**2)) / len(group_M)
    return t_quantile(G) * np.hypot(se, floor)


def t_quantile(G: float) -> float:
    """0.975 quantile of Student's t with G - 1 degrees of freedom."""
    return stdtrit(G - 1, 0.975)
