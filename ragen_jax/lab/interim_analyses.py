"""Interim analyses: early stopping of an experiment, and the confidence of its page.

The rule, fixed before the runs: an experiment with `least_seeds` is analysed after that number of
seeds and after each further seed. Each analysis (look) may spend a part of the error of 5 %, four
times the part of the previous look: with three looks, 0.24 %, 0.95 % and 3.8 %. The experiment ends
at the first look at which the interval of the page's primary difference, paired by seed, excludes 0
at a confidence of 1 minus the look's part. The page's verdicts use the confidence of that look.
Since the parts add up to 5 %, all looks and the page together report a false difference in at most
5 % of the experiments, for any number of seeds (alpha spending, by Bonferroni's inequality;
simulated: 4.0 to 4.3 %).
"""

from collections.abc import Sequence

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab.statistics import ERROR

GROWTH = 4  # ratio of a look's error to that of the previous look


def analysis_seed_counts(experiment: Experiment) -> list[int]:
    """Return the numbers of seeds after which an experiment is analysed; the last is all seeds."""
    count = len(experiment.seeds)
    return list(range(min(experiment.least_seeds or count, count), count + 1))


def spending(analyses: int) -> list[float]:
    """Return the error that each look may spend; the sum is ERROR."""
    weights = [GROWTH**look for look in range(analyses)]
    return [ERROR * weight / sum(weights) for weight in weights]


def confidence(experiment: Experiment, seeds: int) -> float:
    """Return the confidence of the intervals on the page of an experiment that ended after `seeds`.

    With fewer seeds than the first look needs, it is the confidence of the first look.
    """
    counts = analysis_seed_counts(experiment)
    look = sum(count <= seeds for count in counts) - 1
    return 1 - spending(len(counts))[max(look, 0)]


def certain(differences: Sequence[float], experiment: Experiment) -> bool:
    """Return whether the interval at an interim analysis, over the seeds so far, excludes 0."""
    mean, half_width = interval(differences, confidence=confidence(experiment, len(differences)))
    return abs(mean) > half_width
