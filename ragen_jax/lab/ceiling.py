"""Information at its ceiling: a claim cannot be judged if mutual information cannot rise.

mi_seq is at most log N, where N is the number of prompts of the estimate. If every reasoning still
identifies its prompt, mi_seq is at this ceiling with any treatment. `own_margin` has no such
ceiling; claims are judged by it in runs that recorded it.
"""

import importlib
import math
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab.curves import Rows, curve, end

AT = 0.97  # fraction of the ceiling above which a figure is at it
CANNOT = "cannot be judged (at the ceiling)"
PROMPTS = {  # scope -> field of the number of prompts
    "collapse/first_turn": "rollout.groups",
    "collapse/trajectory": "diagnose.trajectory_samples",
    "probe": "diagnose.probe_problems",
}
BOUNDED = ("mi_seq",)  # figures whose ceiling is exactly log N


def scope_of(figure: str) -> str | None:
    """Return the scope of a figure with a ceiling; None for any other figure."""
    scope, _, name = figure.rpartition("/")
    return scope if scope in PROMPTS and name in BOUNDED else None


def companions(figures: Sequence[str]) -> tuple[str, ...]:
    """Return the figures to record with figures that have a ceiling: the ceiling and the margin."""
    scopes = dict.fromkeys(scope for name in figures if (scope := scope_of(name)))
    return tuple(f"{x}/{name}" for x in scopes for name in ("mi_upper_bound", "own_margin"))


def margin_of(figure: str) -> str:
    """The figure without a ceiling in the scope of a figure."""
    return f"{figure.rpartition('/')[0]}/own_margin"


def config_of(experiment: Experiment, setting: str, treatment: str) -> ConfigDict:
    """The config of an arm, as the command line without overrides would make it."""
    name, _, preset = experiment.config.partition(":")
    get_config = importlib.import_module(f"ragen_jax.configs.{name}").get_config
    config = get_config(preset) if preset else get_config()
    config.update_from_flattened_dict(
        experiment.always
        | experiment.settings.get(setting, {})
        | experiment.treatments.get(treatment, {})
    )
    return config


def ceiling(experiment: Experiment, figure: str, setting: str, treatment: str, rows: Rows) -> float:
    """The ceiling of a figure in a run, in nats; infinite for figures without one.

    As recorded at the end of the run (mi_upper_bound); for runs that did not record it, log N by
    the arm's config.
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
    """A figure at the end of a run over its ceiling; 0 for figures without a ceiling."""
    setting, treatment, _ = key
    return end(rows, figure) / ceiling(experiment, figure, setting, treatment, rows)


def at_ceiling(experiment: Experiment, figure: str, arms: Sequence[dict]) -> bool:
    """Return whether every arm's runs are on average at the ceiling of a figure.

    Args:
      arms: {(setting, treatment, seed): rows} of each arm that a claim compares.
    """
    if scope_of(figure) is None:
        return False
    means = [
        np.mean([fraction(experiment, figure, key, rows) for key, rows in arm.items()])
        for arm in arms
    ]
    return bool(means) and all(mean >= AT for mean in means)


def has_margin(figure: str, arms: Sequence[dict]) -> bool:
    """Whether every run recorded the figure without a ceiling."""
    return all(len(curve(rows, margin_of(figure))[0]) for arm in arms for rows in arm.values())
