"""How far a step's information figures are to be trusted: intervals, and a test of retrieval.

Axes as in information.py: M scored reasonings, N scoring prompts, D distinct prompts; R
permutations. Both are NumPy float64 on the host and cost a few milliseconds.
"""

import numpy as np
from scipy.special import stdtrit

from ragen_jax.diagnostics.information import checked_scores, join_columns

# Below three distinct prompts, deleting one leaves a single prompt, whose information is 0 always.
LEAST_PROMPTS = 3


def confidence_intervals(score_MN, length_M, prompt_M, *, prompt_id_N=None):
    """Half-widths of 95 % intervals of a step's information figures: figure +- half-width.

    **What is estimated**: a figure f's mean over batches of as many prompts and reasonings, drawn
    anew from the same environment and policy. That of `mi_seq` is at most log N, and grows with
    N: an interval says nothing about the information among more prompts.

    **Jackknife.** Prompts are the independent draws, reasonings come in groups of one prompt, and
    a prompt is in the marginal of all reasonings; so what is deleted is a whole prompt d: its
    columns (all columns of its id) and the reasonings sampled from it, which leaves

        f_d = f of the remaining scores; log N becomes log(N - columns of d)
        se  = sqrt((D - 1) / D * sum over d of (f_d - mean of all f_d)^2)
        half-width = t * sqrt(se^2 + floor^2) + rounding, t the 0.975 quantile of Student's t, D - 1

    f_d is about fewer prompts than f, which shifts all f_d alike; the interval takes only their
    spread and stays centred at f. Deleting a prompt that no reasoning was sampled from counts, too.

    **Floor**, for mi, mi_seq and retrieval_acc. Where every prompt is told from all others, no f_d
    differs and se is 0, though a few prompts of the next batch may well be confused: a batch
    without failures does not say that there are none, and one with few not how many there are. So
    what half a prompt answered at chance would shift is added as an error of its own (the half
    observation that Jeffreys' prior adds to a proportion):

        floor = |mi| / (2 D);   (retrieval_acc - retrieval_chance) / (2 D)

    **Rounding**, for entropies and information: a score is a float32, so a figure may be off by
    2^-23 * mean |L[m, own]| (per token: of |L[m, own]| / |z|). That is the width left to reasonings
    that ignore the prompt altogether.

    **Simulated coverage** of mi and mi_seq (tests/test_intervals.py; 1,000 batches, prompts and
    reasonings drawn anew, scores their true likelihoods): 0.94 to 0.98 at 8 x 8, 8 x 64, 16 x 16
    and 64 x 64 (prompts x reasonings) while mi_seq is below 0.6 log N. Above, failures become too
    rare for a batch to tell how rare: 0.88 to 0.96 with one reasoning a prompt at 8 or 16 prompts,
    0.93 to 0.98 at 64, 0.98 to 1 at 8 x 64; and from about 0.95 log N the floor makes it 1. Were
    prompts held fixed, the interval would be too wide. A retrieval_acc of few reasonings at chance
    has too short an interval, since often nothing is retrieved and se is 0. Prompts count as
    independent, even turns of one episode that resemble each other.

    Args, errors: as `information_metrics`.

    Returns:
      dict of Python floats mi_ci95, mi_seq_ci95, h_cond_ci95, h_cond_seq_ci95, h_marginal_ci95,
      h_marginal_seq_ci95, retrieval_acc_ci95. Empty where a jackknife says nothing: fewer than
      three distinct prompts, or all reasonings from one.
    """
    score_MN, length_M, own_M, prompt_id_N = checked_scores(
        score_MN, length_M, prompt_M, prompt_id_N
    )
    M, N = score_MN.shape
    _, answer_N, columns_D = np.unique(prompt_id_N, return_inverse=True, return_counts=True)
    D = len(columns_D)
    own_answer_M = answer_N[own_M]
    stays_MD = own_answer_M[:, None] != np.arange(D)  # the reasoning survives deletion of d
    if D < LEAST_PROMPTS or not np.all(stays_MD.any(axis=0)):
        return {}

    def without(x_MD):
        """Mean over the remaining reasonings as each prompt is deleted, [D]."""
        return np.sum(stays_MD * x_MD, axis=0) / np.sum(stays_MD, axis=0)

    # ---- entropies and mutual information ----
    rows_M = np.arange(M)
    matched_M = score_MN[rows_M, own_M]
    answer_MD = join_columns(np.logaddexp, score_MN, answer_N)
    marginal_MD = _all_but_one(answer_MD) - np.log(N - columns_D)
    mi_M = matched_M - (np.logaddexp.reduce(score_MN, axis=1) - np.log(N))
    deleted, floor, rounding = {}, {}, {}
    for suffix, unit_M in (("", length_M), ("_seq", np.ones(M))):
        matched_M1 = (matched_M / unit_M)[:, None]
        marginal = marginal_MD / unit_M[:, None]
        deleted["mi" + suffix] = without(matched_M1 - marginal)
        deleted["h_cond" + suffix] = without(-matched_M1)
        deleted["h_marginal" + suffix] = without(-marginal)
        floor["mi" + suffix] = abs(np.mean(mi_M / unit_M)) / (2 * D)
        for name in ("mi", "h_cond", "h_marginal"):
            rounding[name + suffix] = np.finfo(np.float32).eps * np.mean(np.abs(matched_M1))

    # ---- retrieval: P(own answer ranks first), ties shared in proportion to columns ----
    best_MD = join_columns(np.maximum, score_MN, answer_N)
    own_best_M1 = best_MD[rows_M, own_answer_M][:, None]
    higher_MD = best_MD > own_best_M1
    tied_MD = (best_MD == own_best_M1) * columns_D  # columns; own is among them
    own_columns_M1 = columns_D[own_answer_M][:, None]

    def first(higher_M1, tied_M1):
        return (higher_M1 == 0) * own_columns_M1 / np.maximum(tied_M1, 1)

    higher_M1, tied_M1 = (np.sum(x, axis=1, keepdims=True) for x in (higher_MD, tied_MD))
    deleted["retrieval_acc"] = without(first(higher_M1 - higher_MD, tied_M1 - tied_MD))
    above_chance = np.mean(first(higher_M1, tied_M1)) - np.mean(own_columns_M1) / N
    floor["retrieval_acc"] = max(above_chance, 0.0) / (2 * D)

    return {
        name + "_ci95": float(jackknife(figure_D, floor.get(name, 0.0)) + rounding.get(name, 0.0))
        for name, figure_D in deleted.items()
    }


def jackknife(deleted_D, floor=0.0):
    """Half-width of the 95 % interval of a figure, of which `deleted_D` are the figures without
    each prompt: t(0.975, D - 1) * sqrt(floor^2 + (D - 1) / D * sum_d (f_d - mean f_d)^2).

    NaN stays NaN.
    """
    deleted_D = np.asarray(deleted_D)
    D = len(deleted_D)
    se = np.sqrt((D - 1) / D * np.sum((deleted_D - np.mean(deleted_D)) ** 2))
    return stdtrit(D - 1, 0.975) * np.hypot(se, floor)


def rate_with_interval(name, part_G, whole_G):
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
    found = {name: part_G.sum() / whole_G.sum()}
    if len(whole_G) >= LEAST_PROMPTS:
        deleted_G = (part_G.sum() - part_G) / (whole_G.sum() - whole_G)
        found[f"{name}_ci95"] = jackknife(deleted_G)
    return found


def retrieval_p(score_MN, prompt_M, *, prompt_id_N=None, rng, permutations=999):
    """Permutation p-value of retrieval: is the own prompt ranked better than luck would?

    **Null**: reasonings do not depend on the prompt that they were sampled from. They are then M
    independent draws from one distribution, and which of them came from which prompt is as good as
    a random assignment with the same number of reasonings to each prompt. So all M! ways to deal
    the labels prompt_M out over the rows of scores are equally likely, whatever a score depends on:
    some reasonings are likelier than others under all prompts (longer ones are less likely), some
    prompts favour all reasonings, and both stay what they are. Labels are dealt to single
    reasonings, not to groups of one prompt, since members of a group are sampled independently: if
    they resemble each other, they do depend on their prompt. Labels are distinct prompts; columns
    of equal ids count as their best one, as in `information_metrics`.

    **Statistic**: how many of the D distinct prompts rank below the own one, averaged over
    reasonings, when they are ranked by

        score of reasoning m under prompt d - mean of d's scores over all reasonings.

    Up to the subtraction it is recall@k averaged over all k. Whether the own prompt ranks first
    (retrieval_acc) is a weaker test, which found weak dependence two to five times as rarely: first
    ranks are few, and a prompt that favours all reasonings takes most of them. The mean score (a
    test of mi_seq) is a little stronger on normal noise and weaker on heavy tails.

        p = (1 + permutations with at least the observed mean) / (1 + permutations)

    Exact: P(p <= 0.05) is at most 0.05 under the null, and nearly that with the default number.
    One batch's p is about that batch; over many steps 5 % of a collapsed run's lie below 0.05.

    Args:
      score_MN, prompt_M, prompt_id_N: as in `information_metrics`.
      rng: np.random.Generator of the permutations.
      permutations: how many, R.

    Returns:
      float in 1 / (1 + R) .. 1; 1 where the labels are all the same.

    Raises:
      ValueError, AssertionError: as `information_metrics` does; permutations below 1.
    """
    ones_M = np.ones(len(score_MN))
    score_MN, _, own_M, prompt_id_N = checked_scores(score_MN, ones_M, prompt_M, prompt_id_N)
    if permutations < 1:
        raise ValueError(f"permutations is {permutations}; it must be at least 1")
    _, answer_N = np.unique(prompt_id_N, return_inverse=True)
    best_MD = join_columns(np.maximum, score_MN, answer_N)
    calibrated_MD = best_MD - np.mean(best_MD, axis=0)
    rank_MD = np.sum(calibrated_MD[:, :, None] > calibrated_MD[:, None, :], axis=2)

    own_answer_M = answer_N[own_M]
    rows_M = np.arange(len(own_M))
    dealt_RM = rng.permuted(np.tile(own_answer_M, (permutations, 1)), axis=1)
    observed = np.sum(rank_MD[rows_M, own_answer_M])
    as_good = np.sum(np.sum(rank_MD[rows_M, dealt_RM], axis=1) >= observed)
    return float((1 + as_good) / (1 + permutations))


def _all_but_one(x_MD):
    """Log-sum-exp over the columns other than d, for every d, [M, D].

    From the sums of the columns before d and behind d. Subtracting d from the sum of all would
    lose every digit where d dominates it, which is what an own prompt does.
    """
    none_M1 = np.full((len(x_MD), 1), -np.inf)
    before_MD = np.logaddexp.accumulate(x_MD[:, :-1], axis=1)
    behind_MD = np.logaddexp.accumulate(x_MD[:, :0:-1], axis=1)[:, ::-1]
    return np.logaddexp(np.hstack([none_M1, before_MD]), np.hstack([behind_MD, none_M1]))
