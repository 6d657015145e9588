"""The page of experiment figures: which figures of a run correlate with its final success.

These rules were fixed before the runs were examined:

    end          of a figure, as in curves.py: its last ten values, of success the last two
    correlation  Spearman's, of a figure's end with success's, over all runs, identical runs once;
                 95 % interval: the jackknife over treatments (runs of one resemble each other), of
                 its inverse hyperbolic tangent (simulated coverage 0.93 to 0.96 for thirty
                 treatments)
    reproduced   where RAGEN-2 says that a figure goes with success: the interval is above 0; where
                 it says that a figure does not show it: the interval is within WEAK of 0
    reversed     below 0; beyond WEAK
    undecided    otherwise
    cannot be judged   the runs are at the figure's ceiling (ceiling.py)
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import jackknife
from ragen_jax.lab import ceiling
from ragen_jax.lab.curves import SUCCESS, Runs, Verdict, draw_ranking, end, factors
from ragen_jax.lab.identical import distinct
from ragen_jax.lab.statistics import p_value, p_within

WEAK = 0.3  # a correlation nearer to 0 does not show who succeeds
LIMIT = 1 - 1e-6  # correlations are clipped to this before the inverse hyperbolic tangent
SCOPES = ("collapse/trajectory", "collapse/first_turn", "probe")
INFORMATION = (
    *("mi", "mi_released", "mi_seq", "mi_zscore", "mi_zscore_seq", "retrieval_acc"),
    "own_margin",
)
ENTROPIES = ("h_cond", "h_marginal")
MI_ZSCORE, MI_SEQ = "collapse/trajectory/mi_zscore", "collapse/trajectory/mi_seq"
ENTROPY, CONDITIONAL = "update/entropy", "collapse/trajectory/h_cond"
OTHERS = (
    *("flow/first_turn/za_swap", "flow/first_turn/xa_swap"),
    *("reasoning/grounded_rate", "rollout/reasoning_length", "rollout/valid_rate"),
    *("filter/score_mean", "regime/index"),
)
CORRELATED = (
    *(f"{scope}/{name}" for scope in SCOPES for name in INFORMATION + ENTROPIES),
    *(ENTROPY, *OTHERS),
)
FIGURES = tuple(dict.fromkeys((SUCCESS, *CORRELATED, *ceiling.companions(CORRELATED))))
# RAGEN-2: figure -> (Spearman's correlation there, whether it is said to correlate with success).
CLAIMS = {
    MI_ZSCORE: ("+0.39", True),
    MI_SEQ: ("+0.22", True),
    ENTROPY: ("-0.14 to -0.11", False),
    CONDITIONAL: ("-0.14 to -0.11", False),
}


def ends(runs: Runs, name: str) -> np.ndarray:
    """Return a figure at the end of each run, float64 [runs]; NaN if it was not measured."""
    return np.array([end(rows, name) for rows in runs.values()])


def with_interval(
    measure: Callable[[np.ndarray], float], treatment_R: Sequence[str]
) -> tuple[float, float, float]:
    """(a correlation, its 95 % interval), the jackknife over the runs' treatments.

    Args:
      measure: of a bool [runs], the correlation over these.
    """
    of_run = np.array(treatment_R)
    deleted = [measure(of_run != name) for name in dict.fromkeys(treatment_R)]
    middle, *odd = np.arctanh(np.clip([measure(of_run == of_run), *deleted], -LIMIT, LIMIT))
    half = jackknife(odd)
    value, low, high = (float(np.tanh(x)) for x in (middle, middle - half, middle + half))
    return value, low, high


def correlation(runs: Runs, name: str) -> tuple[float, float, float] | None:
    """Spearman's correlation of a figure with success, and its interval; None where a run lacks the
    figure, or all have the same value. Identical runs count once."""
    runs = distinct(runs)
    figure, success = ends(runs, name), ends(runs, SUCCESS)
    if np.isnan(figure).any() or np.ptp(figure) == 0 or np.ptp(success) == 0:
        return None
    return with_interval(
        lambda kept: float(spearmanr(figure[kept], success[kept]).statistic),
        [treatment for _, treatment, _ in runs],
    )


def verdict(name: str, low: float, high: float) -> str:
    """reproduced, reversed or undecided, by the rule above."""
    if CLAIMS[name][1]:
        return "reproduced" if low > 0 else "reversed" if high < 0 else "undecided"
    if -WEAK <= low and high <= WEAK:
        return "reproduced"
    return "reversed" if low > WEAK or high < -WEAK else "undecided"


def p_of(name: str, runs: Runs, value: float, high: float) -> float:
    """The p-value of a verdict, on the scale of its interval."""
    clusters = len({treatment for _, treatment, _ in distinct(runs)})
    middle, upper = np.arctanh(np.clip([value, high], -LIMIT, LIMIT))
    half_width = float(upper - middle)
    if CLAIMS[name][1]:
        return p_value(float(middle), half_width, clusters - 1)
    return p_within(float(middle), half_width, clusters - 1, float(np.arctanh(WEAK)))


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on the figures that RAGEN-2 names."""
    found = []
    for name, (there, goes) in CLAIMS.items():
        shown = correlation(runs, name)
        if shown:
            value, low, high = shown
            what = f"`{name}` {'goes' if goes else 'does not go'} with success ({there})"
            figures = f"Spearman {value:+.2f} ({low:+.2f} to {high:+.2f})"
            if ceiling.at_ceiling(experiment, name, [runs]):
                found.append(Verdict("section 4", what, ceiling.CANNOT, figures))
                continue
            p = p_of(name, runs, value, high)
            found.append(Verdict("section 4", what, verdict(name, low, high), figures, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    _, treatments, seeds = factors(runs)
    found = {name: value for name in CORRELATED if (value := correlation(runs, name))}
    once = distinct(runs)
    lines = [
        f"The {len(runs)} runs of experiment {experiment.runs}: {len(treatments)} treatments, "
        f"seeds {', '.join(map(str, seeds))}; {len(once)} runs of "
        f"{len({name for _, name, _ in once})} treatments differ, and count. Written by that "
        "command.",
        "",
        "| figure | in RAGEN-2 | here (95 %) | p | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    shown_claims = [name for name in CLAIMS if name in found]
    for name, of_claim in zip(shown_claims, verdicts(experiment, runs), strict=True):
        value, low, high = found[name]
        shown = f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
        p = "" if of_claim.p is None else f"{of_claim.p:.3f}"
        lines.append(f"| `{name}` | {CLAIMS[name][0]} | {shown} | {p} | **{of_claim.verdict}** |")
    lines += [
        "",
        f"![Spearman's correlation of every figure with success]({picture})",
        "",
        "## Every figure",
        "",
        "| figure | correlation | 95 % |",
        "| --- | --- | --- |",
    ]
    for name, (value, low, high) in sorted(found.items(), key=lambda item: -item[1][0]):
        lines.append(f"| `{name}` | {value:+.2f} | {low:+.2f} to {high:+.2f} |")
    lines += [
        "",
        "The rule, fixed before the runs were looked at: Spearman's correlation over all runs of a "
        "figure at the end (mean of its last ten values) with held-out success (of its last two); "
        "intervals by the jackknife over treatments, identical runs counted once. A figure that is "
        "said to go with success is reproduced where its interval lies above 0; one that is said "
        "not to show it, where it lies within "
        f"{WEAK:g} of 0.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw each figure's correlation and interval, a line per figure."""
    found = {name: value for name in CORRELATED if (value := correlation(runs, name))}
    draw_ranking(found, path, "Spearman's correlation with held-out success at the end", (-1, 1))
