"""Rules that stop a run that has nothing left to learn from.

Each rule counts how many times in a row something was bad, its streak, and fires when the streak is
as long as its patience. What a rule does then is its action: "stop" fires for as long as the
streak lasts, "warn" once a streak, "off" never. Streaks are counted whatever the action.

    rule        bad                                                              counted
    variance    mean reward variance < ratio * its mean over the first           iterations
                `baseline` iterations
    success     held-out success < least                                         evaluations
    empty       the filter kept no group                                         iterations
    nonfinite   an update was skipped: its loss or gradient was not finite       iterations

The first two: RAGEN-2, appendix B.2; the third: the released code.
"""

import dataclasses

import flax.struct
import numpy as np

RULES = ("variance", "success", "empty", "nonfinite")
ACTIONS = ("stop", "warn", "off")


@flax.struct.dataclass
class StoppingState:
    """What the rules remember. Scalars, part of `types.TrainState`."""

    variance_sum: np.ndarray  # float32, of the mean reward variance over the first iterations
    variance_count: np.ndarray  # int32, how many iterations that are, at most `baseline`
    streak: dict[str, np.ndarray]  # rule -> int32


@dataclasses.dataclass(frozen=True)
class Fired:
    """A rule that fired, or the alarm of regimes.py."""

    rule: str  # one of RULES, or "regimes"
    action: str  # "stop" or "warn"; of the alarm, one of regimes.ACTIONS
    reason: str  # a sentence with the numbers


def init_stopping():
    """The `StoppingState` of a run that has not begun."""
    return StoppingState(
        variance_sum=np.zeros((), np.float32),
        variance_count=np.zeros((), np.int32),
        streak={rule: np.zeros((), np.int32) for rule in RULES},
    )


def update_stopping(state, settings, *, variance, kept, skipped, success=None):
    """Counts one iteration.

    Args:
      state: `StoppingState`; arrays of any kind, as a checkpoint restores them.
      settings: the config's stopping section as a dict: rule -> its fields.
      variance: mean over the step's groups of the reward variance inside the group, before any
        filter (the mean of filter.group_scores(return_GK, "reward_variance")).
      kept: number or share of groups that the filter kept.
      skipped: updates of the iteration that were skipped because they were not finite.
      success: share of held-out problems solved; None where the iteration ended without an
        evaluation, which leaves that streak as it is.

    Returns:
      (StoppingState, list of `Fired` in the order of RULES).
    """
    # float32 throughout, so that a run and its resumed twin add the same numbers.
    total, count = np.float32(state.variance_sum), int(state.variance_count)
    floor = np.float32(0)
    if count < settings["variance"]["baseline"]:
        total, count = np.float32(total + np.float32(variance)), count + 1
    else:
        floor = np.float32(settings["variance"]["ratio"]) * (total / np.float32(count))
    bad = {  # None: says nothing
        "variance": bool(np.float32(variance) < floor),
        "success": None if success is None else bool(success < settings["success"]["least"]),
        "empty": not kept,
        "nonfinite": skipped > 0,
    }
    streak = {rule: int(state.streak[rule]) for rule in RULES}
    for rule in RULES:
        if bad[rule] is not None:
            streak[rule] = streak[rule] + 1 if bad[rule] else 0

    reasons = {
        "variance": lambda n: (
            f"the mean reward variance, {variance:.3g} now, was below {floor:.3g} "
            f"({settings['variance']['ratio']} of its mean over the first {count} iterations) in "
            f"{n} iterations in a row"
        ),
        "success": lambda n: (
            f"held-out success, {success:.3g} now, was below {settings['success']['least']} in "
            f"{n} evaluations in a row"
        ),
        "empty": lambda n: f"the filter kept no group in {n} iterations in a row",
        "nonfinite": lambda n: f"updates were not finite in {n} iterations in a row",
    }
    fired = []
    for rule in RULES:
        action, patience = settings[rule]["action"], settings[rule]["patience"]
        reached = bool(bad[rule]) and streak[rule] >= patience
        if reached and (action == "stop" or action == "warn" and streak[rule] == patience):
            reason = f"{reasons[rule](streak[rule])} (stopping.{rule})"
            fired.append(Fired(rule=rule, action=action, reason=reason))
    state = StoppingState(
        variance_sum=np.array(total, np.float32),  # arrays, as Orbax saves no NumPy scalars
        variance_count=np.array(count, np.int32),
        streak={rule: np.array(streak[rule], np.int32) for rule in RULES},
    )
    return state, fired
