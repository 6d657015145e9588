"""Half-widths of 95 % intervals of a step's metrics.

Axes as in information.py: M scored reasonings, N scoring prompts, D distinct prompts; G groups.
NumPy float64 on the host, some milliseconds.

A *group* is an independent draw: an environment seed, that is, a room or a problem. The trajectory
scope has several turns of a room, under different prompts.

**The estimated quantity** is the mean of a figure f over new batches with the same numbers of
groups, prompts and reasonings, from the same environment and policy. The mean of `mi_seq` is at
most log N and grows with N: an interval says nothing about the information among more prompts.

**Jackknife**, for entropies and information. Groups are the independent draws: prompts of one
room resemble each other, rooms differ in how much reasonings depend on the observation, and a
prompt is in the marginal of all reasonings. So the jackknife deletes a whole group g, with its
columns and the reasonings sampled from them:

    f_g = f of the remaining scores; log N becomes log(N - columns of g)
    se  = sqrt((G - 1) / G * sum over g of (f_g - mean of all f_g)^2)
    half-width = t * sqrt(se^2 + floor^2) + rounding, t the 0.975 quantile of Student's t, G - 1

f_g is about fewer prompts than f, which shifts all f_g alike; the interval uses only their
spread and stays centred at f. Deleting a group that no reasoning was sampled from counts as well.
Groups are deleted one by one even if two of them show the same prompt by chance: they were drawn
independently, and a new batch may hold such a pair or not.

**Floor** of information. If every prompt is distinguished from all others, all f_g are equal and se
is 0, though a few prompts of the next batch may well be confused: a batch without failures does not
show that failures never happen, and a batch with few failures does not show how many to expect. So
the shift by half a prompt answered at chance is added as a separate error (as Jeffreys' prior adds
half an observation to a proportion): floor = |mi| / (2 D). Half a group would be too much for
failures of single turns, and gave a coverage of 1.

**Rounding**, for entropies and information: a score is a float32, so a figure may be off by
2^-23 of h_cond_seq (per token: of h_cond). Without this term, the interval would have no width for
reasonings that ignore the prompt altogether.

**Retrieval** is a proportion. If a group is deleted, reasonings of other groups that were mistaken
for one of its prompts gain the first rank. Both the group of such a reasoning and the group of the
prompt contain this effect, so the jackknife counts it twice and its interval is too wide. Instead,
the spread between groups of their own first ranks h_m = P(own answer ranks first) is used:

    se = sqrt(G / (G - 1) * sum over g of (sum over m in g of (h_m - mean h))^2) / M
    half-width = t * sqrt(se^2 + floor^2),   floor = t / (2 (n + t^2))

over the groups with a reasoning, and at most as much as reaches both 0 and 1. The floor alone is
the half-width of Wilson's interval (1927) for n observations without a failure, or without a
success. Reasonings of one prompt may fail together or independently: n = sqrt(M * distinct own
prompts) is between the two numbers.

**Simulated coverage** (tests/diagnostics/, test_intervals.py and test_trajectory_intervals.py; each
batch has new rooms, prompts and reasonings, and scores are the true likelihoods). Trajectories of
8 rooms x 8 turns and 16 x 4, two policies at four and six strengths, 1,000 batches each (for
mi_released 200, at one strength): 0.93 to 0.98 if rooms are alike. If rooms differ in how much
their reasonings say (log-normal, 0.6): 0.91 to 0.97, with mi_seq lowest near its bound;
retrieval_acc 0.90 to 0.97 (the lowest, 8 x 8 at strength 6, 0.904 of 4,000 batches, 0.89 of its
first 1,000). In these cases, deleting single prompts had covered 0.65 to 0.93.

**Rates of a step** (success, valid replies) are proportions with grouped trials. Their jackknife
has no width if all groups agree, and covered 0.09 to 0.94 for rates from 0.01 to 0.99.
`rate_with_interval` uses the Clopper-Pearson interval of an effective number of trials. Simulated
coverage (test_intervals.py; beta-binomial groups, 8 and 32 of 4, 16 and 80, correlations inside a
group from 0 to 0.9, rates from 0.01 to 0.99): 0.93 to 1; groups whose members copy a common draw:
0.94 to 1. Half-widths at a rate of 0.97, 8 groups of 80: 0.03 if members are independent, 0.13 with
a correlation of 0.1. Without a failure, or without a success, the data do not show how alike
members are: 8 groups of 80 give 0 to 0.31. Kinds of groups that are too rare to be among the drawn
groups are not covered: if 6 % of all groups fail altogether, 8 groups mostly have none of them.
Comparisons between steps should also use the differences of neighbouring steps (regimes.py).
"""

import math
import statistics
from collections.abc import Sequence

import chex
import numpy as np
from scipy.special import betaincinv, betaln, stdtrit

from ragen_jax.core.types import Array, Metrics
from ragen_jax.diagnostics.information import checked_scores, first_ranks, own_margins, parts

# With two groups, deleting one leaves a single group, whose prompts may all be the same.
LEAST_GROUPS = 3
# Correlations of two members of a group, densest near 0, and their prior, which is uniform over the
# correlation; `effective_trials` uses a quantile of their posterior.
ROOT_R = (np.arange(32) + 0.5) / 32
CORRELATION_R, PRIOR_R = ROOT_R**2, ROOT_R / ROOT_R.sum()
QUANTILE = 0.8


def confidence_intervals(
    score_MN: Array,
    length_M: Array,
    prompt_M: Array,
    *,
    prompt_id_N: np.ndarray | None = None,
    group_N: np.ndarray | None = None,
    part_N: np.ndarray | None = None,
) -> Metrics:
    """Return half-widths of 95 % intervals of a step's information figures.

    The top of this file describes the estimated quantities, the methods and the coverage.

    Args:
      score_MN, length_M, prompt_M, prompt_id_N: as in `information_metrics`.
      group_N: integers or strings, the group that a prompt belongs to; None: each distinct prompt
        is a group.
      part_N: the parts, for intervals of the figures of `within_metrics`; None: a single part.

    Returns:
      Python floats mi_ci95, mi_seq_ci95, mi_released_ci95, own_margin_ci95, h_cond_ci95,
      h_cond_seq_ci95, h_marginal_ci95, h_marginal_seq_ci95, retrieval_acc_ci95. Empty with
      fewer than three groups, or if deleting a group leaves no two distinct prompts.

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

    def remaining_figures(keep_N):
        """Return mean entropies and information of the kept columns; {} if they allow none."""
        part_values = []
        for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N, keep_N):
            score = score_MN[np.ix_(rows, columns)]
            matched = score[np.arange(len(rows)), own_columns]
            marginal = np.logaddexp.reduce(score, axis=1) - np.log(len(columns))
            by_token = score / length_M[rows, None]
            released = np.logaddexp.reduce(by_token, axis=1) - np.log(len(columns))
            margin = own_margins(score, own_columns, prompt_id_N[columns])
            part_values.append((matched, marginal, released, margin, length_M[rows]))
        if not part_values:
            return {}
        matched_M, marginal_M, released_M, margin_M, tokens_M = np.concatenate(part_values, axis=1)
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
    deleted = [remaining_figures(group_N != group) for group in groups]
    if len(groups) < LEAST_GROUPS or not all(deleted):
        return {}
    hits, hit_groups, D, own_prompts = [], [], 0, 0
    for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N):
        ids = prompt_id_N[columns]
        hits.append(first_ranks(score_MN[np.ix_(rows, columns)], own_columns, ids))
        hit_groups.append(group_N[own_M[rows]])
        D, own_prompts = D + len(np.unique(ids)), own_prompts + len(np.unique(ids[own_columns]))

    half = {}
    full = remaining_figures(np.ones(N, bool))
    for name, value in full.items():
        sums = name.endswith("_seq") or name == "own_margin"
        matched = full["h_cond_seq" if sums else "h_cond"]
        floor = abs(value) / (2 * D) if name.startswith("mi") else 0.0
        rounding = np.finfo(np.float32).eps * abs(matched)
        half[name] = jackknife([means[name] for means in deleted], floor) + rounding
    hit_M, group_M = np.concatenate(hits), np.concatenate(hit_groups)
    n, t = np.sqrt(len(hit_M) * own_prompts), t_quantile(len(np.unique(group_M)))
    hit_half = grouped(hit_M, group_M, floor=t / (2 * (n + t**2)))
    half["retrieval_acc"] = np.minimum(hit_half, max(hit_M.mean(), 1 - hit_M.mean()))
    return {name + "_ci95": float(value) for name, value in half.items()}


def log_margin(
    score_MN: Array,
    prompt_M: Array,
    *,
    prompt_id_N: np.ndarray | None = None,
    group_N: np.ndarray | None = None,
) -> Metrics:
    """Return the mean over groups of sign(x) log(1 + |x|), x the mean own_margin of a group.

    exp(own_margin_log) - 1 is a typical group's margin. Groups may differ by an order of magnitude
    in how much their reasonings say; own_margin then depends mostly on the few largest groups, and
    varies with the draw of the groups. The logarithm gives all groups a similar weight, so that a
    fall of all groups is clearer relative to that variation.

    Args:
      score_MN, prompt_M, prompt_id_N, group_N: as in `confidence_intervals`.

    Returns:
      own_margin_log and, with at least three groups with a reasoning, own_margin_log_ci95, the
      half-width of its 95 % interval over groups (Student's t).

    Raises:
      ValueError, AssertionError: as `information_metrics` does.
    """
    length_M = np.ones(len(np.asarray(prompt_M)), int)
    score_MN, _, own_M, prompt_id_N = checked_scores(score_MN, length_M, prompt_M, prompt_id_N)
    group_N = prompt_id_N if group_N is None else np.asarray(group_N)
    margin_M = own_margins(score_MN, own_M, prompt_id_N)
    _, group_M = np.unique(group_N[own_M], return_inverse=True)
    x_G = np.bincount(group_M, margin_M) / np.bincount(group_M)
    x_G = np.sign(x_G) * np.log1p(np.abs(x_G))
    metrics = {"own_margin_log": float(x_G.mean())}
    if len(x_G) >= LEAST_GROUPS:
        half = t_quantile(len(x_G)) * x_G.std(ddof=1) / np.sqrt(len(x_G))
        metrics["own_margin_log_ci95"] = float(half)
    return metrics


def jackknife(deleted_G: Sequence[float] | np.ndarray, floor: float = 0.0) -> float:
    """Return the half-width of a 95 % interval from the figures with each group deleted:
    t(0.975, G - 1) * sqrt(floor^2 + (G - 1) / G * sum_g (f_g - mean f_g)^2).

    NaN stays NaN.
    """
    deleted_G = np.asarray(deleted_G)
    G = len(deleted_G)
    se = np.sqrt((G - 1) / G * np.sum((deleted_G - np.mean(deleted_G)) ** 2))
    return t_quantile(G) * np.hypot(se, floor)


def rate_with_interval(name: str, part_G: np.ndarray, whole_G: np.ndarray) -> Metrics:
    """Return a proportion over all groups, sum(part) / sum(whole), and its 95 % half-width.

    The half-width is the distance to the farther end of `proportion_interval`, so that rate ±
    half-width contains that interval.

    Args:
      name: name of the figure.
      part_G, whole_G: successes and trials of each group, 0 <= part <= whole.

    Returns:
      {name: rate, name_ci95: half-width}; no interval with fewer than three groups that have
      trials, and {} without any trial.

    Raises:
      ValueError: a group with part < 0 or part > whole.
    """
    part_G, whole_G = _groups_with_trials(part_G, whole_G)
    if not len(whole_G):
        return {}
    rate = part_G.sum() / whole_G.sum()
    metrics = {name: rate}
    if len(whole_G) >= LEAST_GROUPS:
        low, high = proportion_interval(part_G, whole_G)
        metrics[f"{name}_ci95"] = max(high - rate, rate - low)
    return metrics


def mean_with_interval(name: str, sum_G: np.ndarray, count_G: np.ndarray) -> Metrics:
    """Return a mean over all groups, sum(sum_G) / sum(count_G), and its 95 % half-width.

    The half-width is by the jackknife. Use this for numbers without bounds, such as lengths, and
    `rate_with_interval` for proportions.

    Args:
      name: name of the figure.
      sum_G, count_G: sum and number of the values of each group.

    Returns:
      {name: mean, name_ci95: half-width}; no interval with fewer than three groups that have
      values, and {} without any value.
    """
    sum_G, count_G = _groups_with_trials(sum_G, count_G)
    if not len(count_G):
        return {}
    metrics = {name: sum_G.sum() / count_G.sum()}
    if len(count_G) >= LEAST_GROUPS:
        deleted_G = (sum_G.sum() - sum_G) / (count_G.sum() - count_G)
        metrics[f"{name}_ci95"] = jackknife(deleted_G)
    return metrics


def proportion_interval(part_G: np.ndarray, whole_G: np.ndarray) -> tuple[float, float]:
    """Return (lower, upper end) of the 95 % interval of a proportion with grouped trials.

    The Clopper-Pearson interval of `effective_trials` (Korn and Graubard 1998), with p the rate and
    n these trials: the 0.025 quantile of Beta(p n, n - p n + 1) to the 0.975 quantile of
    Beta(p n + 1, n - p n); 0 where p = 0, and 1 where p = 1.

    Args:
      part_G, whole_G: as in `rate_with_interval`; at least one group has trials.

    Raises:
      ValueError: a group with part < 0 or part > whole.
    """
    part_G, whole_G = _groups_with_trials(part_G, whole_G)
    if np.any(part_G < 0) or np.any(part_G > whole_G):
        g = int(np.argmax((part_G < 0) | (part_G > whole_G)))
        raise ValueError(
            f"a proportion needs 0 to whole successes in each group, got {part_G[g]:g} of "
            f"{whole_G[g]:g}; use mean_with_interval for other metrics"
        )
    rate = part_G.sum() / whole_G.sum()
    n = effective_trials(part_G, whole_G)
    failed = n - rate * n
    low = float(betaincinv(rate * n, failed + 1, 0.025)) if rate > 0 else 0.0
    high = float(betaincinv(rate * n + 1, failed, 0.975)) if rate < 1 else 1.0
    return low, high


def effective_trials(part_G: np.ndarray, whole_G: np.ndarray) -> float:
    """Return the number of independent trials with the information of grouped trials.

        (sum m)^2 / sum m (1 + (m - 1) r)

    with m the trials of the groups and r the correlation of two members of a group, so the number
    is between those of groups and of trials. r is the 0.8 quantile of its posterior: groups are
    beta-binomial around the rate, to which half a success and half a failure are added, and the
    prior is uniform. Few successes, or few failures, show little about r, which then stays large.

    Args:
      part_G, whole_G: successes and trials of each group, whole > 0.
    """
    part_1G, whole_1G = np.atleast_2d(part_G), np.atleast_2d(whole_G)
    rate = (part_1G.sum() + 0.5) / (whole_1G.sum() + 1)
    size_R1 = (1 / CORRELATION_R - 1)[:, None]  # a + b of the beta distribution
    a_R1, b_R1 = rate * size_R1, (1 - rate) * size_R1
    log_RG = betaln(a_R1 + part_1G, b_R1 + whole_1G - part_1G) - betaln(a_R1, b_R1)
    log_R = log_RG.sum(axis=1)
    posterior_R = PRIOR_R * np.exp(log_R - log_R.max())
    below_R = np.cumsum(posterior_R) / posterior_R.sum()
    r = CORRELATION_R[np.searchsorted(below_R, QUANTILE)]
    return float(whole_1G.sum() ** 2 / np.sum(whole_1G * (1 + (whole_1G - 1) * r)))


def _groups_with_trials(part_G: np.ndarray, whole_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both arrays as float64, without the groups whose whole is 0."""
    here_G = np.asarray(whole_G) > 0
    return np.asarray(part_G, float)[here_G], np.asarray(whole_G, float)[here_G]


def grouped(x_M: np.ndarray, group_M: np.ndarray, floor: float = 0.0) -> float:
    """Return the half-width of the 95 % interval of mean(x_M), with correlation within groups:
    t(0.975, G - 1) * sqrt(floor^2 + G / (G - 1) * sum_g (sum_{m in g} (x_m - mean x))^2 / M^2).

    NaN if all values are of one group.
    """
    _, group_M = np.unique(group_M, return_inverse=True)
    from_mean_G = np.bincount(group_M, np.asarray(x_M) - np.mean(x_M))
    G = len(from_mean_G)
    if G < 2:
        return np.nan
    se = np.sqrt(G / (G - 1) * np.sum(from_mean_G**2)) / len(group_M)
    return t_quantile(G) * np.hypot(se, floor)


def t_quantile(G: float) -> float:
    """Return the 0.975 quantile of Student's t with G - 1 degrees of freedom."""
    return stdtrit(G - 1, 0.975)


def paired_gain(
    before_N: Sequence[float] | np.ndarray, after_EN: Sequence[Sequence[float]] | list[np.ndarray]
) -> tuple[float, float]:
    """Return the gain in success over the same problems, with its 95 % half-width.

    The interval is that of Agresti and Min (2005) for paired proportions, with Student's t: half a
    problem is added to each of the four outcomes (failed or solved, before and after), that is, two
    problems with a mean difference of 0 and a mean square of 1/2. Without them, the interval would
    have no width if no problem changed, and too little if few did. The half-width reaches from the
    gain to the farther end of this interval.

    Simulated coverage (test_intervals.py): 0.91 to 1 for 4 to 256 problems, rates from 0.01 to
    0.99, independent or paired outcomes, and one or three later evaluations.

    Args:
      before_N: success of each problem in the first evaluation; NaN if its environment broke.
      after_EN: the same in E later evaluations; their mean without NaN is used. Problems without a
        number before or after are left out.

    Returns:
      (gain, half-width); NaN without any problem.
    """
    later_EN = np.asarray(after_EN, float)
    played_N = np.sum(~np.isnan(later_EN), 0)
    after_N = np.nansum(later_EN, 0) / np.where(played_N, played_N, np.nan)
    difference_N = after_N - np.asarray(before_N, float)
    difference_N = difference_N[~np.isnan(difference_N)]
    if not len(difference_N):
        return math.nan, math.nan
    gain, n = float(difference_N.mean()), len(difference_N) + 2
    centre = float(difference_N.sum()) / n
    variance = (float(np.sum(difference_N**2)) + 1) / n - centre**2
    return gain, abs(gain - centre) + t_quantile(n) * math.sqrt(variance / n)


def wilson_interval(
    success_NK: np.ndarray, sound_NK: np.ndarray | None = None, z: float = 1.959964
) -> tuple[float, float]:
    """Return (lower, upper end) of the 95 % interval of a success rate over problems.

    Wilson's score interval (1927): with p the rate and n the number of independent episodes

        (p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p ± 1.96 standard errors, it has a width even if all problems were solved, or none. K
    episodes of one problem are not independent: n is `intervals.effective_trials`, from N to N K.

    Args:
      success_NK: 0 or 1, for K episodes of each of N problems.
      sound_NK: bool, whether an episode counts, True for at least one; None: all count.
    """
    success_NK = np.asarray(success_NK, float)
    sound_NK = np.ones(success_NK.shape, bool) if sound_NK is None else sound_NK
    solved_N, played_N = (success_NK * sound_NK).sum(1), sound_NK.sum(1)
    p = solved_N.sum() / played_N.sum()
    here_N = played_N > 0
    n = effective_trials(solved_N[here_N], played_N[here_N])
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = wilson_half_width(p, n, z)
    return float(middle - half_width), float(middle + half_width)


def wilson_half_width(p: float, n: float, z: float = 1.959964) -> float:
    """Return the half-width of `wilson_interval` for a rate p of n independent episodes.

    It also bounds that of the mean of any values from 0 to 1, whose variance is at most p (1 - p).
    """
    return z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)


def pass_at_k(
    solved_N: Sequence[float] | np.ndarray, samples: int | Sequence[int] | np.ndarray, k: int
) -> float:
    """Return the mean over problems of 1 - C(samples - solved, k) / C(samples, k).

    Args:
      solved_N: number of solved episodes of each problem.
      samples: number of episodes of each problem, at least k; one number, or one per problem.
    """
    pairs = zip(solved_N, np.broadcast_to(samples, len(solved_N)).tolist(), strict=True)
    return float(np.mean([1 - math.comb(n - int(s), k) / math.comb(n, k) for s, n in pairs]))


def interval(
    values: Sequence[float], *, halves: Sequence[float] = (), confidence: float = 0.95
) -> tuple[float, float]:
    """Return (mean, half-width by Student's t) over runs; infinite for one run.

    Args:
      halves: half-width of each value's interval within its run. If all values are equal, such as
        in three runs without any success, the result is the half-width of their mean, sqrt(sum of
        squares) / n: agreement is no certainty. (): half-width 0 in this case.
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2)) * error
    return mean, half or math.hypot(*halves) / len(values)
