"""Rules that stop a run that has nothing left to learn from.

Each rule counts how many times in a row something was bad, its streak, and fires when the streak is
as long as its patience. What a rule does then is its action: "stop" fires for as long as the
streak lasts, "warn" once a streak, "off" never. Streaks are counted whatever the action.

    rule        bad                                                              counted
    variance    an environment's mean reward variance < ratio * its mean over    iterations
                the first `baseline` iterations
    success     held-out success < least                                         evaluations
    empty       the filter kept no group                                         iterations
    nonfinite   an update was skipped: its loss or gradient was not finite       iterations

The first two: RAGEN-2, appendix B.2; the third: the released code.

Rewards of different environments have different units, so the variance of each is compared with its
own start. A run of several goes on while one of them still has something to learn from: where the
rule holds in some alone, it warns once about each, whatever its action but "off".

Axis: E environments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np
from jax.typing import ArrayLike

from ragen_jax.core.types import Array

RULES = ("variance", "success", "empty", "nonfinite")
ACTIONS = ("stop", "warn", "off")


@flax.struct.dataclass
class StoppingState:
    """What the rules remember. Scalars, part of `types.TrainState`."""

    variance_sum_E: Array  # float32, of the mean reward variance over the first iterations
    variance_count: Array  # int32, how many iterations that are, at most `baseline`
    variance_streak_E: Array  # int32, iterations in a row that were bad
    streak: dict[str, Array]  # each other rule -> int32


@dataclasses.dataclass(frozen=True)
class Fired:
    """A rule that fired, the alarm of regimes.py, or what environments did (run/stages.py)."""

    rule: str  # one of RULES, "regimes", "errors", "prompts" or "console"
    action: str  # "stop" or "warn"; of the alarm, one of regimes.ACTIONS
    reason: str  # a sentence with the numbers


def init_stopping(environments: int = 1) -> StoppingState:
    """The `StoppingState` of a run that has not begun."""
    return StoppingState(
        variance_sum_E=np.zeros(environments, np.float32),
        variance_count=np.zeros((), np.int32),
        variance_streak_E=np.zeros(environments, np.int32),
        streak={rule: np.zeros((), np.int32) for rule in RULES if rule != "variance"},
    )


def update_stopping(
    state: StoppingState,
    settings: Mapping[str, Any],
    *,
    variance_E: Sequence[ArrayLike] | np.ndarray,
    kept: float,
    skipped: float,
    success: float | None = None,
    labels: Sequence[str] = ("",),
) -> tuple[StoppingState, list[Fired]]:
    """Counts one iteration.

    Args:
      state: arrays of any kind, as a checkpoint restores them.
      settings: the config's stopping section: rule -> its fields.
      variance_E: of each environment, the mean over the step's groups of the reward variance inside
        the group, before any filter (filter.group_scores(return_GK, "reward_variance")).
      kept: number or share of groups that the filter kept. skipped: updates that were not finite.
      success: share of held-out problems solved; None where the iteration ended without an
        evaluation, which leaves that streak as it is.
      labels: of the environments, for the reasons; "" of a run's only one.

    Returns:
      (StoppingState, list of `Fired` in the order of RULES).
    """
    # float32 throughout, so that a run and its resumed twin add the same numbers.
    variance_E = np.asarray(variance_E, np.float32)
    total_E, count = np.array(state.variance_sum_E, np.float32), int(state.variance_count)
    floor_E = np.zeros_like(total_E)
    low_E = np.array(state.variance_streak_E, np.int32)
    if not np.isfinite(variance_E).all():  # it would stay in the mean for ever
        pass
    elif count < settings["variance"]["baseline"]:
        total_E, count, low_E = total_E + variance_E, count + 1, np.zeros_like(low_E)
    else:
        floor_E = np.float32(settings["variance"]["ratio"]) * (total_E / np.float32(count))
        low_E = np.where(variance_E < floor_E, low_E + 1, 0)
    bad = {  # None: says nothing
        "success": None if success is None else bool(success < settings["success"]["least"]),
        "empty": not kept,
        "nonfinite": skipped > 0,
    }
    streak = {rule: int(state.streak[rule]) for rule in bad}
    for rule in bad:
        if bad[rule] is not None:
            streak[rule] = streak[rule] + 1 if bad[rule] else 0

    def narrow(e):
        """The reason about an environment's variance."""
        return (
            f"the mean reward variance{' of ' + labels[e] if labels[e] else ''}, now "
            f"{variance_E[e]:.3g}, was below {floor_E[e]:.3g} ({settings['variance']['ratio']} "
            f"of its mean over the first {count} iterations) in {low_E[e]} iterations in a row"
        )

    reasons = {
        "success": lambda n: (
            f"held-out success, now {success:.3g}, was below {settings['success']['least']} in "
            f"{n} evaluations in a row"
        ),
        "empty": lambda n: f"the filter kept no group in {n} iterations in a row",
        "nonfinite": lambda n: f"updates were not finite in {n} iterations in a row",
    }
    fired, patience = [], settings["variance"]["patience"]
    if (low_E >= patience).all():
        reason = "; ".join(narrow(e) for e in range(len(labels)))
        fired += _fire("variance", reason, low_E.min(), settings)
    elif settings["variance"]["action"] != "off":
        for e in np.flatnonzero(low_E == patience):
            reason = f"{narrow(e)} (stopping.variance)"
            fired.append(Fired(rule="variance", action="warn", reason=reason))
    for rule in bad:
        if bad[rule] and streak[rule] >= settings[rule]["patience"]:
            fired += _fire(rule, reasons[rule](streak[rule]), streak[rule], settings)
    state = StoppingState(
        variance_sum_E=total_E,
        variance_count=np.array(count, np.int32),  # arrays, as Orbax saves no NumPy scalars
        variance_streak_E=low_E.astype(np.int32),
        streak={rule: np.array(streak[rule], np.int32) for rule in bad},
    )
    return state, fired


def _fire(rule: str, reason: str, streak: int, settings: Mapping[str, Any]) -> list[Fired]:
    """What a rule whose patience is over does: a list of one `Fired`, or of none."""
    action = settings[rule]["action"]
    if action == "off" or (action == "warn" and streak > settings[rule]["patience"]):
        return []
    return [Fired(rule=rule, action=action, reason=f"{reason} (stopping.{rule})")]
