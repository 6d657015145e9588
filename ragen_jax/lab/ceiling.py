"""Mutual information at its ceiling: it cannot rise, so it cannot decide a claim.

mi_seq is at most log N, where N is the number of prompts of the estimate. If every reasoning
identifies its prompt, mi_seq is at this ceiling with any treatment. `own_margin` has no ceiling;
it decides the claims in runs that recorded it.
"""

import importlib
import math
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab.curves import Rows, curve, end

CEILING_FRACTION = 0.97  # a metric is at its ceiling from this fraction of the ceiling on
CANNOT_BE_JUDGED = "cannot be judged (at the ceiling)"  # verdict
PROMPTS = {  # scope -> config field with the number of prompts
    "collapse/first_turn": "rollout.groups",
    "collapse/trajectory": "diagnose.trajectory_samples",
    "probe": "diagnose.probe_problems",
}
BOUNDED = ("mi_seq",)  # metrics whose ceiling is log N


def scope_of(figure: str) -> str | None:
    """Return the scope of a metric with a ceiling; None for any other metric."""
    scope, _, name = figure.rpartition("/")
    return scope if scope in PROMPTS and name in BOUNDED else None


def companions(figures: Sequence[str]) -> tuple[str, ...]:
    """Return the further metrics to record for metrics with a ceiling: ceiling and margin."""
    scopes = dict.fromkeys(scope for name in figures if (scope := scope_of(name)))
    return tuple(f"{x}/{name}" for x in scopes for name in ("mi_upper_bound", "own_margin"))


def margin_of(figure: str) -> str:
    """Return the metric without a ceiling in the same scope as a metric."""
    return f"{figure.rpartition('/')[0]}/own_margin"


def config_of(experiment: Experiment, setting: str, treatment: str) -> ConfigDict:
    """Return the config of an arm without overrides on the command line."""
    name, _, preset = experiment.config.partition(":")
    get_config = importlib.import_module(f"ragen_jax.configs.{name}").get_config
    config = get_config(preset) if preset else get_config()
    config.update_from_flattened_dict(
        experiment.common_fields
        | experiment.settings.get(setting, {})
        | experiment.treatments.get(treatment, {})
    )
    return config


def ceiling(experiment: Experiment, figure: str, setting: str, treatment: str, rows: Rows) -> float:
    """Return the ceiling of a metric in a run, in nats; infinite for a metric without a ceiling.

    It is the value of mi_upper_bound at the end of the run, or, in runs without this metric, log N
    from the arm's config.
    """
    scope = scope_of(figure)
    if scope is None:
        return math.inf
    recorded = end(rows, f"{scope}/mi_upper_bound")
    if not math.isnan(recorded):
        return recorded
    config = config_of(experiment, setting, treatment)
    section, name = PROMPTS[scope].split(".")
    return math.log(config[section][name])


def fraction(experiment: Experiment, figure: str, key: tuple[str, str, int], rows: Rows) -> float:
    """Return a metric at the end of a run divided by its ceiling; 0 without a ceiling."""
    setting, treatment, _ = key
    return end(rows, figure) / ceiling(experiment, figure, setting, treatment, rows)


def at_ceiling(experiment: Experiment, figure: str, arms: Sequence[dict]) -> bool:
    """Return whether the mean over runs of a metric is at its ceiling in every arm.

    Args:
      arms: {(setting, treatment, seed): rows} for each arm that a claim compares.
    """
    if scope_of(figure) is None:
        return False
    means = [
        np.mean([fraction(experiment, figure, key, rows) for key, rows in arm.items()])
        for arm in arms
    ]
    return bool(means) and all(mean >= CEILING_FRACTION for mean in means)


def has_margin(figure: str, arms: Sequence[dict]) -> bool:
    """Return whether every run recorded the metric without a ceiling (`margin_of`)."""
    return all(len(curve(rows, margin_of(figure))[0]) for arm in arms for rows in arm.values())
