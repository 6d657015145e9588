"""Detectors of pure noise: the control of experiment detectors.

A metric that does not depend on the input also crosses its alarm level at some step of a long run,
and an early alarm without a reason has a long lead. Therefore DRAWS detectors of each kind of noise
are evaluated on the same runs and labels as the metrics:

    white   independent values around a mean
    drift   a random walk, like a metric that drifts during training

A metric is distinguishable from noise if its AUC is outside the range of all these draws. A noise
detector is outside in at most 2 of DRAWS + 1 cases; at least one of thirty in less than 5 %.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata

from ragen_jax.core.randomness import Purpose, generator

DRAWS = 1500  # detectors of each kind of noise
KINDS = ("white", "drift")
SPREAD = (0.025, 0.5, 0.975)  # quantiles on the page
COUNTED = ("auc", "false", "runs", "delay", "lead")


class Truth(NamedTuple):
    """The known facts of a run at the probes after the baseline."""

    step_P: np.ndarray
    collapsed_P: np.ndarray  # bool
    healthy: bool  # whether its setting should not collapse
    success_lost: float | None  # step at which success was lost; None: never


class Control(NamedTuple):
    """The results of all detectors of one kind of noise."""

    draws: dict[str, np.ndarray]  # name in COUNTED -> float64 [DRAWS]; NaN: no value

    def spread(self, name: str) -> tuple[float, float, float] | None:
        """Return (2.5 %, median, 97.5 %) of a result in COUNTED, over the draws that have it.

        None if no draw has it: there is no lead where no run lost its success.
        """
        values = self.draws[name]
        values = values[~np.isnan(values)]
        if not len(values):
            return None
        low, middle, high = np.quantile(values, SPREAD)
        return float(low), float(middle), float(high)

    def contains(self, name: str, value: float) -> bool:
        """Return whether a value is within the central 95 % of the noise detectors."""
        spread = self.spread(name)
        return spread is not None and spread[0] <= value <= spread[2]


def _scores(rng: np.random.Generator, kind: str, probes: int, baseline: int) -> np.ndarray:
    """Return scores of noise relative to the mean of its baseline, float64 [DRAWS, probes]."""
    values = rng.standard_normal((DRAWS, baseline + probes))
    if kind == "drift":
        values = values.cumsum(axis=1)
    return values[:, baseline:] - values[:, :baseline].mean(axis=1, keepdims=True)


def control(truths: Mapping[Any, Truth], kind: str, *, baseline: int, level: float) -> Control:
    """Return the results of DRAWS detectors of noise on runs with a known truth.

    Args:
      baseline: number of first probes whose mean is the reference of a score.
      level: quantile of the healthy runs' scores above which a score is an alarm.
    """
    rng = generator(Purpose.NOISE_DETECTORS, int(kind == "drift"))
    runs = list(truths.values())
    scores = [_scores(rng, kind, len(run.step_P), baseline) for run in runs]
    collapsed = np.concatenate([run.collapsed_P for run in runs])
    ranks = rankdata(np.concatenate(scores, axis=1), axis=1)
    n = collapsed.sum()
    auc = (ranks[:, collapsed].sum(1) - n * (n + 1) / 2) / (n * (~collapsed).sum())
    healthy = [i for i, run in enumerate(runs) if run.healthy]
    threshold = np.quantile(np.concatenate([scores[i] for i in healthy], axis=1), level, axis=1)
    false = np.zeros(DRAWS)
    for i in healthy:
        others = np.concatenate([scores[j] for j in healthy if j != i], axis=1)
        false += (scores[i] > np.quantile(others, level, axis=1)[:, None]).mean(1) / len(healthy)
    delays, leads = [], []
    for run, score in zip(runs, scores, strict=True):
        if run.healthy or not run.collapsed_P.any():
            continue
        above = score > threshold[:, None]
        first = np.where(above.any(1), run.step_P[above.argmax(1)], np.nan)
        delays.append(first - run.step_P[run.collapsed_P][0])
        if run.success_lost is not None:
            leads.append(run.success_lost - first)
    seen = np.sum(~np.isnan(delays), axis=0).astype(float)
    empty = np.full(DRAWS, np.nan)
    return Control(
        {
            **{"auc": auc, "false": false, "runs": seen, "delay": _medians(delays)},
            "lead": _medians(leads) if leads else empty,
        }
    )


def _medians(values: list[np.ndarray]) -> np.ndarray:
    """Return the median over runs of each draw, float64 [DRAWS]; NaN if no run has a value."""
    stacked = np.array(values)
    found = np.full(stacked.shape[1], np.nan)
    some = ~np.isnan(stacked).all(axis=0)
    found[some] = np.nanmedian(stacked[:, some], axis=0)
    return found
