"""The page of experiment figures: which metrics of a run correlate with its final success.

These rules were fixed before the runs were examined:

    end          mean of a metric's last ten values, of the last two for success (curves.py)
    correlation  Spearman's, between the end of a metric and the end of success, over all runs;
                 identical runs count once. 95 % interval: jackknife over treatments (runs of one
                 treatment resemble each other) of the inverse hyperbolic tangent (simulated
                 coverage 0.93 to 0.96 for thirty treatments)
    reproduced   if RAGEN-2 says that a metric correlates with success: the interval is above 0; if
                 it says that a metric does not: the interval is within WEAK of 0
    reversed     the interval is below 0; or beyond WEAK
    undecided    otherwise
    cannot be judged   the runs are at the metric's ceiling (ceiling.py)
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
from ragen_jax.lab.statistics import p_text, p_value, p_within

WEAK = 0.3  # correlations closer to 0 count as none
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
# Claims of RAGEN-2: metric -> (Spearman's correlation with success there, whether it correlates).
CLAIMS = {
    MI_ZSCORE: ("+0.39", True),
    MI_SEQ: ("+0.22", True),
    ENTROPY: ("-0.14 to -0.11", False),
    CONDITIONAL: ("-0.14 to -0.11", False),
}


def ends(runs: Runs, name: str) -> np.ndarray:
    """Return a metric at the end of each run, float64 [runs]; NaN if it was not measured."""
    return np.array([end(rows, name) for rows in runs.values()])


def with_interval(
    measure: Callable[[np.ndarray], float], treatment_R: Sequence[str]
) -> tuple[float, float, float]:
    """Return (correlation, lower and upper end of its 95 % interval), by the jackknife.

    Args:
      measure: function from a mask, bool [runs], to the correlation over the selected runs.
      treatment_R: treatment of each run; the jackknife deletes a treatment at a time.
    """
    treatment_names_R = np.array(treatment_R)
    deleted = [measure(treatment_names_R != name) for name in dict.fromkeys(treatment_R)]
    middle, *odd = np.arctanh(
        np.clip([measure(treatment_names_R == treatment_names_R), *deleted], -LIMIT, LIMIT)
    )
    half = jackknife(odd)
    value, low, high = (float(np.tanh(x)) for x in (middle, middle - half, middle + half))
    return value, low, high


def correlation(runs: Runs, name: str) -> tuple[float, float, float] | None:
    """Return Spearman's correlation of a metric with success, and the ends of its interval.

    Identical runs count once. None if a run lacks the metric, or if all values are equal.
    """
    runs = distinct(runs)
    figure, success = ends(runs, name), ends(runs, SUCCESS)
    if np.isnan(figure).any() or np.ptp(figure) == 0 or np.ptp(success) == 0:
        return None
    return with_interval(
        lambda kept: float(spearmanr(figure[kept], success[kept]).statistic),
        [treatment for _, treatment, _ in runs],
    )


def verdict(name: str, low: float, high: float) -> str:
    """Return reproduced, reversed or undecided, by the rule above."""
    if CLAIMS[name][1]:
        return "reproduced" if low > 0 else "reversed" if high < 0 else "undecided"
    if -WEAK <= low and high <= WEAK:
        return "reproduced"
    return "reversed" if low > WEAK or high < -WEAK else "undecided"


def p_of(name: str, runs: Runs, value: float, high: float) -> float:
    """Return the p-value of a verdict, which agrees with its interval."""
    clusters = len({treatment for _, treatment, _ in distinct(runs)})
    middle, upper = np.arctanh(np.clip([value, high], -LIMIT, LIMIT))
    half_width = float(upper - middle)
    if CLAIMS[name][1]:
        return p_value(float(middle), half_width, clusters - 1)
    return p_within(float(middle), half_width, clusters - 1, float(np.arctanh(WEAK)))


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on RAGEN-2's claims about metrics that correlate with success."""
    found = []
    for name, (there, goes) in CLAIMS.items():
        shown = correlation(runs, name)
        if shown:
            value, low, high = shown
            verb = "correlates" if goes else "does not correlate"
            what = f"`{name}` {verb} with success (RAGEN-2: {there})"
            figures = f"Spearman {value:+.2f} (95 % CI {low:+.2f} to {high:+.2f})"
            if ceiling.at_ceiling(experiment, name, [runs]):
                found.append(Verdict("section 4", what, ceiling.CANNOT_BE_JUDGED, figures))
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
        f"The runs are the {len(runs)} runs of experiment {experiment.runs}: {len(treatments)} "
        f"treatments, seeds {', '.join(map(str, seeds))}. Without copies of identical runs, "
        f"{len(once)} runs of {len({name for _, name, _ in once})} treatments remain.",
        "",
        "| metric | correlation in RAGEN-2 | here (95 % CI) | p | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    shown_claims = [name for name in CLAIMS if name in found]
    for name, claim_verdict in zip(shown_claims, verdicts(experiment, runs), strict=True):
        value, low, high = found[name]
        shown = f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append(
            f"| `{name}` | {CLAIMS[name][0]} | {shown} | {p_text(claim_verdict.p)} | "
            f"**{claim_verdict.verdict}** |"
        )
    lines += [
        "",
        f"![Spearman's correlation of every metric with success]({picture})",
        "",
        "## Every metric",
        "",
        "| metric | correlation | 95 % CI |",
        "| --- | --- | --- |",
    ]
    for name, (value, low, high) in sorted(found.items(), key=lambda item: -item[1][0]):
        lines.append(f"| `{name}` | {value:+.2f} | {low:+.2f} to {high:+.2f} |")
    lines += [
        "",
        "The rule, fixed before the runs were examined: Spearman's correlation, over all runs, "
        "between a metric at the end of the run (mean of its last ten values) and held-out success "
        "(mean of its last two). Intervals are by the jackknife over treatments; identical runs "
        "count once. A claim that a metric correlates with success is reproduced if the interval "
        "is above 0. A claim that it does not is reproduced if the interval is within "
        f"{WEAK:g} of 0.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw the correlation of each metric with its interval."""
    found = {name: value for name in CORRELATED if (value := correlation(runs, name))}
    draw_ranking(found, path, "Spearman's correlation with held-out success at the end", (-1, 1))
