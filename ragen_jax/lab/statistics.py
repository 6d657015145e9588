"""p-values that agree with the pages' intervals, exact tests for few runs, and Holm's correction.

A claim is decided by its 95 % interval; equivalently, its p-value is below 0.05. claims.md corrects
these p-values for the number of claims on the page.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import binomtest, rankdata

from ragen_jax.core.randomness import Purpose, generator

ERROR = 0.05  # probability that a claim is decided although there is no difference
LEAST_SETTINGS = 6  # for a rank correlation; four settings have perfect order in 1 of 12 cases
EXACT_UP_TO = 8  # number of settings up to which all orders are counted: 8! = 40,320
SHUFFLES = 20_000  # number of random orders for more settings


def in_words(mean: float, half_width: float, *, digits: int = 3) -> str:
    """Return an estimate with its 95 % interval: "+0.023 ± 0.012 (95 % CI)"."""
    if math.isinf(half_width):
        return f"{mean:+.{digits}f} (no interval: one run)"
    return f"{mean:+.{digits}f} ± {half_width:.{digits}f} (95 % CI)"


def p_text(p: float | None) -> str:
    """Return a p-value for a table: "0.012", "< 0.001" if smaller; "" if nothing was tested."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _one_sided(distance: float, half_width: float, df: int, confidence: float) -> float:
    """Return P(Student's t > distance / standard error) for an interval with that half-width."""
    if math.isnan(distance) or math.isinf(half_width):
        return 0.5
    if half_width == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    ratio = distance / half_width * float(stdtrit(df, (1 + confidence) / 2))
    return float(stdtr(df, -ratio))


def p_value(mean: float, half_width: float, df: int, *, confidence: float = 1 - ERROR) -> float:
    """Return the two-sided p-value of a difference; < 1 - confidence if its interval excludes 0.

    Args:
      half_width: half-width of the interval at `confidence`, by Student's t.
      df: degrees of freedom.
    """
    return min(1.0, 2 * _one_sided(abs(mean), half_width, df, confidence))


def p_within(
    mean: float, half_width: float, df: int, margin: float, *, confidence: float = 1 - ERROR
) -> float:
    """Return the p-value of the claim that a difference is within a margin of 0, or beyond it.

    It is below 1 - confidence if the whole interval is within the margin, or outside it.
    """
    inside = _one_sided(margin - abs(mean), half_width, df, confidence)
    return min(1.0, 2 * min(inside, 1 - inside))


def judge_count(yes: int, no: int, undecided: int = 0) -> tuple[str, float, tuple[float, float]]:
    """Judge the claim that more than half of the runs do something, by the exact binomial test.

    The verdict must hold for any outcome of the undecided runs.

    Returns:
      (reproduced, reversed or undecided; p-value; 95 % Clopper-Pearson interval of the fraction
      among the decided runs, 0 to 1 without any decided run).
    """
    total = yes + no + undecided
    if not yes + no:
        return "undecided", 1.0, (0.0, 1.0)
    decided = binomtest(yes, yes + no).proportion_ci(1 - ERROR, method="exact")
    share = (float(decided.low), float(decided.high))
    least, most = (binomtest(count, total) for count in (yes, yes + undecided))
    if yes > total / 2:
        p = float(least.pvalue)
        return ("reproduced" if p < ERROR else "undecided"), p, share
    if yes + undecided < total / 2:
        p = float(most.pvalue)
        return ("reversed" if p < ERROR else "undecided"), p, share
    return "undecided", 1.0, share


def permutation_test(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return (Spearman's correlation, its two-sided p-value over all orders of y).

    The p-value is exact for up to EXACT_UP_TO points; for more, it uses the observed order and
    SHUFFLES random orders. It is (0, 1) if either has no variation.
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0, 1.0
    rank_x, rank_y = (rankdata(values) for values in (x, y))
    rank_x, rank_y = rank_x - rank_x.mean(), rank_y - rank_y.mean()
    scale = math.sqrt(float((rank_x**2).sum() * (rank_y**2).sum()))
    observed = float(rank_x @ rank_y) / scale
    if len(rank_x) <= EXACT_UP_TO:
        orders = np.array(list(itertools.permutations(rank_y)))
    else:
        rng = generator(Purpose.RANK_ORDERS)
        orders = np.array([rank_y, *(rng.permutation(rank_y) for _ in range(SHUFFLES))])
    found = np.abs(orders @ rank_x) / scale
    return observed, float(np.mean(found >= abs(observed) - 1e-9))


def holm(p: Mapping[int, float]) -> dict[int, float]:
    """Return Holm's adjusted p-values, with the same keys.

    If all claims below 0.05 are decided, any of these decisions is wrong with a probability of at
    most 0.05.
    """
    adjusted, highest = {}, 0.0
    for rank, (key, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p) - rank) * value))
        adjusted[key] = highest
    return adjusted
