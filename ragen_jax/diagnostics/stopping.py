"""Early-stopping rules for a run that can no longer learn.

Each rule counts how many times in a row a condition was bad, its streak, and fires when the streak
reaches its patience. Its action says how often: "stop" fires as long as the streak lasts, "warn"
once per streak, "off" never. Streaks are counted for every action.

    rule        bad                                                              counted
    variance    an environment's mean reward variance < ratio * its mean over    iterations
                the first `baseline` iterations
    success     held-out success < least                                         evaluations
    empty       the filter kept no group                                         iterations
    nonfinite   an update was skipped: its loss or gradient was not finite       iterations

The first two rules: RAGEN-2, appendix B.2; the third rule: the released code.

Rewards of different environments have different units, so the variance of each environment is
compared with its initial variance. A run of several environments continues while at least one can
still learn: if the variance rule fires in some environments only, it warns once about each of them,
unless its action is "off".

Axis: E environments.
"""

import dataclasses
from collections.abc import Sequence

import flax.struct
import numpy as np
from jax.typing import ArrayLike

from ragen_jax.configs.base import Stopping
from ragen_jax.core.types import Array

RULES = ("variance", "success", "empty", "nonfinite")


@flax.struct.dataclass
class StoppingState:
    """State of the rules; part of `update.state.TrainState`."""

    variance_sum_E: Array  # float32, sum of the mean reward variance over the first iterations
    variance_count: Array  # int32, number of summed iterations, at most `baseline`
    variance_streak_E: Array  # int32, number of bad iterations in a row
    streak: dict[str, Array]  # rule, except variance -> int32 streak


@dataclasses.dataclass(frozen=True)
class Fired:
    """A rule that fired, the alarm of regimes.py, or an event of environments (run/stages.py)."""

    rule: str  # one of RULES, "regimes", "errors", "prompts" or "console"
    action: str  # "stop" or "warn"; for the alarm, one of regimes.ACTIONS
    reason: str  # a sentence with the numbers


def init_stopping(environments: int = 1) -> StoppingState:
    """Return the `StoppingState` of a new run."""
    return StoppingState(
        variance_sum_E=np.zeros(environments, np.float32),
        variance_count=np.zeros((), np.int32),
        variance_streak_E=np.zeros(environments, np.int32),
        streak={rule: np.zeros((), np.int32) for rule in RULES if rule != "variance"},
    )


def update_stopping(
    state: StoppingState,
    settings: Stopping,
    *,
    variance_E: Sequence[ArrayLike] | np.ndarray,
    kept: float,
    skipped: float,
    success: float | None = None,
    labels: Sequence[str] = ("",),
) -> tuple[StoppingState, list[Fired]]:
    """Update the streaks with one iteration, and return the rules that fire.

    Args:
      state: arrays of any kind, as a checkpoint restores them.
      settings: the config's stopping section.
      variance_E: for each environment, the mean over the step's groups of the reward variance
        within the group, before any filter (filter.group_scores(return_GK, "reward_variance")).
      kept: number or fraction of groups that the filter kept.
      skipped: number of updates that were not finite.
      success: fraction of held-out problems solved; None if the iteration had no evaluation, which
        leaves the streak unchanged.
      labels: names of the environments, for the reasons; "" if there is only one environment.

    Returns:
      (StoppingState, list of `Fired` in the order of RULES).
    """
    # float32 throughout, so that a resumed run computes the same numbers.
    variance_E = np.asarray(variance_E, np.float32)
    total_E, count = np.array(state.variance_sum_E, np.float32), int(state.variance_count)
    floor_E = np.zeros_like(total_E)
    low_E = np.array(state.variance_streak_E, np.int32)
    if not np.isfinite(variance_E).all():  # it would stay in the mean forever
        pass
    elif count < settings.variance.baseline:
        total_E, count, low_E = total_E + variance_E, count + 1, np.zeros_like(low_E)
    else:
        floor_E = np.float32(settings.variance.ratio) * (total_E / np.float32(count))
        low_E = np.where(variance_E < floor_E, low_E + 1, 0)
    bad = {  # None: no information
        "success": None if success is None else bool(success < settings.success.least),
        "empty": not kept,
        "nonfinite": skipped > 0,
    }
    streak = {rule: int(state.streak[rule]) for rule in bad}
    for rule in bad:
        if bad[rule] is not None:
            streak[rule] = streak[rule] + 1 if bad[rule] else 0

    def narrow(e):
        """Return the reason that names an environment's variance."""
        return (
            f"the mean reward variance{' of ' + labels[e] if labels[e] else ''}, now "
            f"{variance_E[e]:.3g}, was below {floor_E[e]:.3g} ({settings.variance.ratio} "
            f"of its mean over the first {count} iterations) in {low_E[e]} iterations in a row"
        )

    reasons = {
        "success": lambda n: (
            f"held-out success, now {success:.3g}, was below {settings.success.least} in "
            f"{n} evaluations in a row"
        ),
        "empty": lambda n: f"the filter kept no group in {n} iterations in a row",
        "nonfinite": lambda n: f"updates were not finite in {n} iterations in a row",
    }
    fired, patience = [], settings.variance.patience
    if (low_E >= patience).all():
        reason = "; ".join(narrow(e) for e in range(len(labels)))
        fired += _fire("variance", reason, low_E.min(), settings)
    elif settings.variance.action != "off":
        for e in np.flatnonzero(low_E == patience):
            reason = f"{narrow(e)} (stopping.variance)"
            fired.append(Fired(rule="variance", action="warn", reason=reason))
    for rule in bad:
        if bad[rule] and streak[rule] >= getattr(settings, rule).patience:
            fired += _fire(rule, reasons[rule](streak[rule]), streak[rule], settings)
    state = StoppingState(
        variance_sum_E=total_E,
        variance_count=np.array(count, np.int32),  # arrays: Orbax saves no NumPy scalars
        variance_streak_E=low_E.astype(np.int32),
        streak={rule: np.array(streak[rule], np.int32) for rule in bad},
    )
    return state, fired


def _fire(rule: str, reason: str, streak: int, settings: Stopping) -> list[Fired]:
    """Return a list with the `Fired` of a rule that reached its patience; empty if silent."""
    action = getattr(settings, rule).action
    if action == "off" or (action == "warn" and streak > getattr(settings, rule).patience):
        return []
    return [Fired(rule=rule, action=action, reason=f"{reason} (stopping.{rule})")]
