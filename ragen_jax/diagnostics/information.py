"""Mutual information between prompts and reasonings, from a matrix of cross scores.

Axes: M scored reasonings, N scoring prompts, D distinct prompts. The matrix is tiny, so all of this
is NumPy float64 on the host. Source: RAGEN-2, section 2.3, table 1 and equation 1.
"""

from collections.abc import Iterator, Sequence

import chex
import numpy as np
from scipy.special import gammaln

from ragen_jax.core.types import Array, Metrics

RECALL_AT = (2, 4, 8)


def information_metrics(
    score_MN: Array,
    length_M: Array,
    prompt_M: Array,
    *,
    prompt_id_N: np.ndarray | None = None,
    std_eps: float = 1e-3,
) -> Metrics:
    """Return the paper's measures of how much the reasoning depends on the prompt.

    With L[m, n] = log p(z_m | x_n) summed over the tokens of z_m, own = prompt_M[m],
    |z_m| = length_M[m], lse the log of the sum of exponentials, mean and population std over m:

        matched     = L[m, own] / |z|        marginal     = (lse_n L[m, n] - log N) / |z|
        matched_seq = L[m, own]              marginal_seq =  lse_n L[m, n] - log N
                                             released     =  lse_n (L[m, n] / |z|) - log N

    | key | formula |
    | --- | --- |
    | mi | mean(matched - marginal), nats per token |
    | mi_seq | mean(matched_seq - marginal_seq), nats per reasoning; at most log N |
    | h_cond, h_cond_seq | -mean matched, -mean matched_seq |
    | h_marginal, h_marginal_seq | -mean marginal, -mean marginal_seq; h_marginal = mi + h_cond |
    | marginal_std, marginal_std_seq | std(marginal), std(marginal_seq) |
    | mi_zscore, mi_zscore_seq | mi / (marginal_std + std_eps), the same with the sequence forms |
    | mi_upper_bound | log N |
    | mi_released | mean(matched - released) |
    | h_marginal_released | -mean released |
    | marginal_std_released | std(released) |
    | mi_zscore_released | mi_released / (marginal_std_released + std_eps) |
    | own_margin | mean over m of L[m, own] - mean of L[m, n] over the n of other prompts |
    | retrieval_acc | mean over m of P(own answer ranks first) |
    | recall_at_2, _4, _8 | mean over m of P(own answer ranks among the first min(k, N)) |
    | retrieval_chance, recall_chance_at_2, _4, _8 | the same with all scores equal |

    **The figure without an upper bound.** own_margin is in nats per reasoning. Its expectation is
    E_{x,x'} KL(p(z|x) || p(z|x')) = I(X;Z) + L(X;Z), the sum of the mutual and the lautum
    information (Palomar and Verdu 2008), for every N. It adds up over independent parts of a
    reasoning and is not bounded by log N. Tokens that are equally likely under every prompt do not
    change it, so it does not depend on the length alone. It is 0 if all prompts are the same.

    The released code averages length-normalised scores inside the logarithm. Its numbers have
    separate names, so that a run can be compared with a RAGEN log.

    **Ranking.** Columns with equal ids are the same prompt, hence one answer, scored by its best
    column. Answers with exactly equal scores are ranked by a random permutation of their columns
    (an answer has the rank of its first column). The figures use the probability of a hit, not a
    random outcome. Among t tied answers without duplicates, with h other answers that score higher,
    the own answer is among the first k with probability clip((k - h) / t, 0, 1). So reasoning that
    ignores the prompt scores exactly the chance level, at every k and with any duplicates:
    mean over m of (columns equal to own) / N for the first rank, min(k, N) / N for recall when no
    prompt occurs twice. The marginal is over all N columns, duplicates included, which are the
    batch's prior over prompts.

    Args:
      score_MN: real, finite.
      length_M: tokens of each reasoning, >= 1: the caller drops empty and unclosed ones.
      prompt_M: integer, the column of the prompt that each reasoning was sampled from.
      prompt_id_N: integers or strings, equal ids = same prompt; None = all different.
      std_eps: the paper's epsilon in the z-scores.
    Returns:
      Python floats with the keys above.
    Raises:
      ValueError: M or N is 0; a score is not finite; a length is below 1; a prompt column is not
        an integer in 0..N-1.
      AssertionError: ranks or axis lengths disagree.
    """
    scores = checked_scores(score_MN, length_M, prompt_M, prompt_id_N)
    return _means([_reasoning_values(*scores)], std_eps)


def within_metrics(
    score_MN: Array,
    length_M: Array,
    prompt_M: Array,
    part_N: np.ndarray,
    *,
    prompt_id_N: np.ndarray | None = None,
    std_eps: float = 1e-3,
) -> Metrics:
    """Return `information_metrics`, with each reasoning compared only with prompts of its part.

    With C_m = {n: part_N[n] = part_N[own]}, the N_m columns of reasoning m, all formulas of
    `information_metrics` hold with C_m in place of the N columns:

        marginal_seq = lse over C_m of L[m, n] - log N_m     mi_upper_bound = mean of log N_m
        retrieval, recall: ranks among the answers in C_m, recall of the first min(k, N_m)
        retrieval_chance = mean over m of (columns of C_m equal to own) / N_m

    Means and standard deviations are over all reasonings whose part has two distinct prompts; the
    other reasonings have no prompt to be compared with and are left out. So mi_seq is at most
    mi_upper_bound, and common features of all prompts of a part do not count.

    Args:
      part_N: integers or strings, the part that a prompt belongs to. The other arguments are as in
        `information_metrics`.

    Returns:
      Python floats with the same keys; {} if no part has two distinct prompts and a reasoning.

    Raises:
      ValueError, AssertionError: as `information_metrics` does.
    """
    score_MN, length_M, own_M, prompt_id_N = checked_scores(
        score_MN, length_M, prompt_M, prompt_id_N
    )
    part_values = [
        _reasoning_values(
            score_MN[np.ix_(rows, columns)], length_M[rows], own_columns, prompt_id_N[columns]
        )
        for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N)
    ]
    return _means(part_values, std_eps) if part_values else {}


def parts(
    own_M: np.ndarray,
    prompt_id_N: np.ndarray,
    part_N: np.ndarray,
    keep_N: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (rows, columns, own columns among them) of each part with two distinct prompts.

    Args:
      own_M, prompt_id_N: as `checked_scores` returns them. part_N: as in `within_metrics`.
      keep_N: bool, the columns to use; None: all.
    """
    part_N = np.asarray(part_N)
    chex.assert_shape(part_N, prompt_id_N.shape)
    keep_N = np.ones(len(part_N), bool) if keep_N is None else keep_N
    for part in np.unique(part_N[keep_N]):
        inside_N = keep_N & (part_N == part)
        columns, rows = np.flatnonzero(inside_N), np.flatnonzero(inside_N[own_M])
        ids = prompt_id_N[columns]
        if len(rows) and np.any(ids != ids[0]):
            yield rows, columns, np.searchsorted(columns, own_M[rows])


def _reasoning_values(
    score_MN: np.ndarray, length_M: np.ndarray, own_M: np.ndarray, prompt_id_N: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the values that the figures are means of: arrays [M], or [M, ranks]."""
    M, N = score_MN.shape
    matched_seq_M = score_MN[np.arange(M), own_M]
    marginal_seq_M = np.logaddexp.reduce(score_MN, axis=1) - np.log(N)
    hit_MR, chance_MR = _retrieval(score_MN, own_M, prompt_id_N)
    return {
        "matched": matched_seq_M / length_M,
        "matched_seq": matched_seq_M,
        "marginal": marginal_seq_M / length_M,
        "marginal_seq": marginal_seq_M,
        "margin": own_margins(score_MN, own_M, prompt_id_N),
        "marginal_released": np.logaddexp.reduce(score_MN / length_M[:, None], axis=1) - np.log(N),
        "bound": np.full(M, np.log(N)),
        "hit": hit_MR,
        "chance": chance_MR,
    }


def own_margins(score_MN: np.ndarray, own_M: np.ndarray, prompt_id_N: np.ndarray) -> np.ndarray:
    """Return each reasoning's log-likelihood under its own prompt, minus the mean over the columns
    of other prompts: float64 [M], in nats; 0 without other prompts.

    Arguments as `checked_scores` returns them.
    """
    other_MN = prompt_id_N[None, :] != prompt_id_N[own_M][:, None]
    others_M = other_MN.sum(axis=1)
    total_M = np.where(other_MN, score_MN, 0.0).sum(axis=1)
    own_score_M = score_MN[np.arange(len(own_M)), own_M]
    return np.where(others_M > 0, own_score_M - total_M / np.maximum(others_M, 1), 0.0)


def _means(part_values: Sequence[dict[str, np.ndarray]], std_eps: float) -> Metrics:
    """Return the metrics of one or more results of `_reasoning_values`."""
    values = {name: np.concatenate([part[name] for part in part_values]) for name in part_values[0]}
    metrics = {
        "h_cond": -np.mean(values["matched"]),
        "h_cond_seq": -np.mean(values["matched_seq"]),
        "mi_upper_bound": np.mean(values["bound"]),
        "own_margin": np.mean(values["margin"]),
    }
    for suffix in ("", "_seq", "_released"):
        matched_M = values["matched_seq" if suffix == "_seq" else "matched"]
        marginal_M = values["marginal" + suffix]
        mi, std = np.mean(matched_M - marginal_M), np.std(marginal_M)
        metrics["mi" + suffix] = mi
        metrics["h_marginal" + suffix] = -np.mean(marginal_M)
        metrics["marginal_std" + suffix] = std
        metrics["mi_zscore" + suffix] = mi / (std + std_eps)
    hit_R, chance_R = values["hit"].mean(axis=0), values["chance"].mean(axis=0)
    metrics["retrieval_acc"], metrics["retrieval_chance"] = hit_R[0], chance_R[0]
    for k, hit, chance in zip(RECALL_AT, hit_R[1:], chance_R[1:], strict=True):
        metrics[f"recall_at_{k}"], metrics[f"recall_chance_at_{k}"] = hit, chance
    return {key: float(value) for key, value in metrics.items()}


def first_ranks(score_MN: np.ndarray, own_M: np.ndarray, prompt_id_N: np.ndarray) -> np.ndarray:
    """Return P(own answer ranks first), float64 [M]: its fraction of the top-scored columns.

    Arguments as `checked_scores` returns them.
    """
    _, answer_N, columns_D = np.unique(prompt_id_N, return_inverse=True, return_counts=True)
    best_MD = best_columns(score_MN, answer_N)
    own_best_M = best_MD[np.arange(len(own_M)), answer_N[own_M]]
    tied_M = (best_MD == own_best_M[:, None]) @ columns_D
    return (own_best_M == best_MD.max(axis=1)) * columns_D[answer_N[own_M]] / tied_M


def _retrieval(
    score_MN: np.ndarray, own_M: np.ndarray, prompt_id_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(own answer ranks among the first 1, 2, 4, 8), and the same with all scores equal.

    Returns:
      (hit_MR, chance_MR), float64; the first column of hit_MR is `first_ranks`.
    """
    M, N = score_MN.shape
    _, answer_N, columns_D = np.unique(prompt_id_N, return_inverse=True, return_counts=True)
    best_MD = best_columns(score_MN, answer_N)
    own_answer_M = answer_N[own_M]
    own_best_M1 = best_MD[np.arange(M), own_answer_M][:, None]
    higher_M = np.sum(best_MD > own_best_M1, axis=1)
    tied_MD = best_MD == own_best_M1

    ranks = np.minimum((1, *RECALL_AT), N)
    hit_MR = (higher_M[:, None] < ranks).astype(float)
    for m in np.flatnonzero(np.sum(tied_MD, axis=1) > 1):
        answer = own_answer_M[m]
        tied_others_D = tied_MD[m].copy()
        tied_others_D[answer] = False
        rank_probabilities = _first_rank_probabilities(columns_D[answer], columns_D[tied_others_D])
        hit_MR[m] = [_within(rank_probabilities, k - higher_M[m]) for k in ranks]
    own_columns_M = columns_D[own_answer_M]
    chance_MR = np.zeros((M, len(ranks)))
    for c in np.unique(own_columns_M):
        rank_probabilities = _first_rank_probabilities(
            c, np.delete(columns_D, np.argmax(columns_D == c))
        )
        chance_MR[own_columns_M == c] = [_within(rank_probabilities, k) for k in ranks]
    return hit_MR, chance_MR


def _first_rank_probabilities(own_columns: int, columns_J: np.ndarray) -> np.ndarray:
    """Return P(own answer has rank 0, 1, 2, ... among J others) with columns in random order.

    Give every column an independent exponential clock. The first clock of an answer of c columns
    rings at rate c. With u = exp(-time), no clock of another answer of c_j columns has rung with
    probability u^c_j. The rank is the number of others that rang before the own answer, so with c
    own columns

        P(rank = r) = integral_0^1 c u^(c-1) P(r of the events "1 - u^c_j" happen) du,

    a polynomial of degree (number of columns - 1), which Gauss-Legendre integrates exactly.
    """
    others = len(columns_J)
    if np.all(columns_J == own_columns):
        return np.full(others + 1, 1.0 / (others + 1))
    nodes_Q, weights_Q = np.polynomial.legendre.leggauss((own_columns + np.sum(columns_J)) // 2 + 1)
    u_Q = (nodes_Q + 1) / 2
    # Number of others that rang: binomial for answers of one column, then the rest one at a time.
    ones = np.sum(columns_J == 1)
    r, silent_Q1 = np.arange(ones + 1), u_Q[:, None]
    choose = gammaln(ones + 1) - gammaln(r + 1) - gammaln(ones - r + 1)
    rang_QR = np.zeros((len(u_Q), others + 1))
    rang_QR[:, : ones + 1] = np.exp(
        choose + r * np.log1p(-silent_Q1) + (ones - r) * np.log(silent_Q1)
    )
    for c in columns_J[columns_J > 1]:
        silent_Q1 = u_Q[:, None] ** c
        earlier_QR = np.roll(rang_QR, 1, axis=1)  # the last entry, rolled to the front, is still 0
        rang_QR = silent_Q1 * rang_QR + (1 - silent_Q1) * earlier_QR
    density_Q = own_columns * u_Q ** (own_columns - 1) * weights_Q / 2
    return density_Q @ rang_QR


def _within(probability_R: np.ndarray, count: int) -> float:
    """Return P(rank < count); exactly 1 if count covers all ranks, without rounding errors."""
    if count >= len(probability_R):
        return 1.0
    return float(np.sum(probability_R[: max(count, 0)]))


def best_columns(score_MN: np.ndarray, answer_N: np.ndarray) -> np.ndarray:
    """Return the score of each distinct prompt, that of its best column, [M, D].

    Args:
      answer_N: integers 0..D-1, each at least once: the distinct prompt of each column.
    """
    best_MD = np.full((len(score_MN), np.max(answer_N) + 1), -np.inf)
    for n, answer in enumerate(answer_N):
        best_MD[:, answer] = np.maximum(best_MD[:, answer], score_MN[:, n])
    return best_MD


def checked_scores(
    score_MN: Array,
    length_M: Array,
    prompt_M: Array,
    prompt_id_N: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Check the arguments of `information_metrics`; return them as float64, float64, int, ids.

    Raises:
      ValueError, AssertionError: as `information_metrics` does.
    """
    score_MN = np.asarray(score_MN, np.float64)
    length_M = np.asarray(length_M, np.float64)
    own_M = np.asarray(prompt_M)
    chex.assert_rank([score_MN, length_M, own_M], [2, 1, 1])
    M, N = score_MN.shape
    chex.assert_shape([length_M, own_M], (M,))
    prompt_id_N = np.arange(N) if prompt_id_N is None else np.asarray(prompt_id_N)
    chex.assert_shape(prompt_id_N, (N,))
    if M == 0 or N == 0:
        raise ValueError(f"need at least one reasoning and one prompt, got score_MN {M} x {N}")
    bad = np.argwhere(~np.isfinite(score_MN))
    if len(bad):
        m, n = bad[0]
        raise ValueError(f"score_MN[{m}, {n}] = {score_MN[m, n]}; {len(bad)} of {M * N} not finite")
    bad = np.flatnonzero(~(np.isfinite(length_M) & (length_M >= 1)))
    if len(bad):
        m = bad[0]
        raise ValueError(f"length_M[{m}] = {length_M[m]}: drop reasonings without tokens first")
    if not np.issubdtype(own_M.dtype, np.integer):
        raise ValueError(f"prompt_M holds columns and must be integer, got {own_M.dtype}")
    bad = np.flatnonzero((own_M < 0) | (own_M >= N))
    if len(bad):
        m = bad[0]
        raise ValueError(f"prompt_M[{m}] = {own_M[m]} is not a column of 0..{N - 1}")
    return score_MN, length_M, own_M, prompt_id_N
