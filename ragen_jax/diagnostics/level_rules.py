"""Rules about the levels of a run's metrics: what is wrong although nothing fell.

The alarm (regimes.py) reads changes of a metric relative to its level in the same run. A run that
never had a valid reply, or never learned from a step, has nothing to fall. These rules read levels.
Rules that compare a noisy metric with a constant use its interval over several steps, so that noise
alone does not fulfil them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.intervals import wilson_interval

FEW_STEPS = 5  # number of steps below which a run is too short to judge
RECENT = 5  # number of the last steps whose replies are judged
VALID = 0.5  # fraction of valid replies below which a run teaches mostly format
CUT_OFF = 0.5  # fraction of invalid replies that are cut off, from which length is the cause
SOLVED = 0.98  # held-out success at step 0 from which nothing is left to learn
TRUE = 0.5  # fraction of true statements below which reasoning misreads its prompt
NO_USE = 0.25  # nats per action; an effect of the reasoning below this is none
NO_DEPENDENCE = 0.1  # retrieval above chance that counts as none

BAD, WEAK, UNKNOWN = "bad", "weak", "unknown"  # grades of findings


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of an environment of a run that the rules read."""

    rows: Sequence[Metrics]  # rows of metrics.jsonl, step 0 included, without labels
    updates: Sequence[Metrics]  # the same rows with the metrics that environments share
    outcomes: Mapping[int, Sequence[float]]  # {step: success on each held-out problem}
    # Fraction of the invalid saved replies that were cut off; read if rows have no cut_off_rate.
    saved_cut_off: float = math.nan
    imitated: bool = False  # whether the run began with imitation (warmstart)

    @property
    def steps(self) -> Sequence[Metrics]:
        """The rows of the steps, without the evaluation before them."""
        return [row for row in self.rows if row["step"] > 0]


@dataclasses.dataclass(frozen=True)
class LevelRule:
    """A named rule, and what to do if it holds."""

    name: str
    grade: str  # BAD, WEAK or UNKNOWN
    rule: str  # in words, thresholds included
    cure: str
    find: Callable[[Records], str | None]  # the evidence in words; None: the rule does not hold


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that holds."""

    rule: LevelRule
    words: str  # the evidence: a sentence without a full stop


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of a metric over some steps, with a 95 % interval."""

    mean: float
    half_width: float  # NaN if the rows have no interval
    steps: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def estimate(rows: Sequence[Metrics], name: str, *, minus: str = "") -> Estimate | None:
    """Return the mean of a metric over the rows that have it, or None if no row has it.

    Steps are independent, so the variance of the mean is that of the steps' 95 % intervals
    (`name`_ci95) divided by their number.

    Args:
      minus: a metric that is subtracted, such as the chance level.
    """
    found = [row for row in rows if name in row and (not minus or minus in row)]
    if not found:
        return None
    values = [row[name] - (row[minus] if minus else 0.0) for row in found]
    halves = [row.get(f"{name}_ci95", math.nan) for row in found]
    half_width = math.sqrt(sum(half**2 for half in halves)) / len(halves)
    return Estimate(float(np.mean(values)), half_width, len(found))


def find_levels(records: Records) -> list[Finding]:
    """Return the findings of all rules, most basic first; later ones may follow from earlier."""
    found = ((rule, rule.find(records)) for rule in RULES)
    return [Finding(rule, words) for rule, words in found if words]


# ------------------------------------------------------------------------------ the rules


def _not_finite(r: Records) -> str | None:
    skipped = [row for row in r.updates if row.get("update/skipped", 0) > 0]
    if not skipped or len(skipped) < len(r.steps) / 2:
        return None
    return f"updates were not finite, and were skipped, in {len(skipped)} of {len(r.steps)} steps"


def _kept(r: Records) -> tuple[int, int]:
    """Return (number of steps that kept no episode, number of steps)."""
    rows = [row for row in r.steps if "filter/kept_ratio" in row]
    return sum(row["filter/kept_ratio"] == 0 for row in rows), len(rows)


def _no_update(r: Records) -> str | None:
    empty, steps = _kept(r)
    if not steps or empty < steps:
        return None
    zero = estimate(r.steps, "filter/zero_groups")
    why = f"; {zero.mean:.0%} of the groups had no reward variance" if zero else ""
    return f"no step was learned from: the filter kept no group in any of {steps} steps{why}"


def _few_updates(r: Records) -> str | None:
    empty, steps = _kept(r)
    if not steps or not steps / 2 <= empty < steps:
        return None
    return f"the filter kept no group in {empty} of {steps} steps"


def _valid(r: Records) -> float:
    """Return the fraction of valid replies in the last steps; NaN if unknown."""
    found = estimate(r.steps[-RECENT:], "rollout/valid_rate")
    return found.mean if found else math.nan


def _cut_off(r: Records) -> float:
    """Return the fraction of the invalid replies that were cut off; NaN if unknown."""
    found = estimate(r.steps[-RECENT:], "rollout/cut_off_rate")
    return found.mean / (1 - _valid(r)) if found else r.saved_cut_off


def _truncated(r: Records) -> str | None:
    if not _valid(r) < VALID or not _cut_off(r) >= CUT_OFF:
        return None
    return (
        f"{_valid(r):.0%} of the replies are valid, and {_cut_off(r):.0%} of the others were cut "
        "off at rollout.max_new_tokens"
    )


def _malformed(r: Records) -> str | None:
    if not _valid(r) < VALID or _cut_off(r) >= CUT_OFF:
        return None
    closed = estimate(r.steps[-RECENT:], "rollout/valid_think_rate")
    why = f"; {closed.mean:.0%} of the reasoning is closed" if closed else ""
    return f"{_valid(r):.0%} of the replies have the required form{why}"


def _success(r: Records) -> list[float]:
    """Return all success rates of steps and evaluations."""
    names = ("rollout/success", "eval/success")
    return [row[name] for row in r.rows for name in names if name in row]


def _never_solved(r: Records) -> str | None:
    rates = _success(r)
    if len(r.steps) < FEW_STEPS or not rates or max(rates) > 0:
        return None
    return f"no problem was solved in {len(r.steps)} steps and {len(r.outcomes)} evaluations"


def _always_solved(r: Records) -> str | None:
    rates = _success(r)
    if len(r.steps) < FEW_STEPS or not rates or min(rates) < 1:
        return None
    return f"every problem was solved in {len(r.steps)} steps: nothing is left to learn"


def _solved_before(r: Records) -> str | None:
    solved = [x for x in r.outcomes.get(0, ()) if not math.isnan(x)]
    if not solved or np.mean(solved) < SOLVED:
        return None
    return f"held-out success was {np.mean(solved):.3f} before the first update"


def _imitation_at_chance(r: Records) -> str | None:
    first = r.rows[0] if r.rows else {}
    if not r.imitated or "eval/chance_success" not in first or "eval/success" not in first:
        return None
    solved = [x for x in r.outcomes.get(0, ()) if not math.isnan(x)]
    chance = first["eval/chance_success"]
    if not solved or wilson_interval(np.array(solved)[:, None])[0] > chance:
        return None
    return (
        f"after imitation, held-out success was {first['eval/success']:.3f}, no better than with "
        f"answers to other problems ({chance:.3f})"
    )


def _no_dependence(r: Records) -> str | None:
    found = {
        name: estimate(r.steps, f"{name}/retrieval_acc", minus=f"{name}/retrieval_chance")
        for name in ("collapse/first_turn", "probe")
    }
    known = [x for x in found.values() if x and x.steps >= FEW_STEPS]
    if not known or not all(x.low <= 0 and x.high < NO_DEPENDENCE for x in known):
        return None
    excess = known[0]
    return (
        f"from the start, reasoning was no likelier under its own prompt than under others "
        f"(retrieval minus chance {excess.mean:+.2f} ± {excess.half_width:.2f})"
    )


def _decoration(r: Records) -> str | None:
    effect = estimate(r.steps, "flow/first_turn/za_swap")
    if not effect or not (effect.low <= 0 and effect.high < NO_USE):
        return None
    return (
        f"from the start, actions did not depend on the reasoning (za_swap {effect.mean:+.2f} "
        f"± {effect.half_width:.2f} nats)"
    )


def _misread(r: Records) -> str | None:
    true = estimate(r.steps[:RECENT], "reasoning/grounded_rate")
    now = estimate(r.steps[-RECENT:], "reasoning/grounded_rate")
    if not true or not now or not (true.high < TRUE and now.high < TRUE):
        return None
    return f"from the start, only {true.mean:.0%} of the facts stated in the reasoning were true"


def _too_few(r: Records) -> str | None:
    # Rows of another trainer's rollouts have no times.
    if len(r.steps) >= FEW_STEPS or not any("time/step" in row for row in r.steps):
        return None
    return f"{len(r.steps)} step{'s' * (len(r.steps) != 1)} are too few to judge"


RULES = (
    LevelRule(
        "updates that are not finite",
        BAD,
        "updates were skipped in at least half of the steps",
        "Lower `optimizer.learning_rate`, or use `model.dtype=float32`; "
        "`nonfinite_step_N.npz` has the batch.",
        _not_finite,
    ),
    LevelRule(
        "replies that are cut off",
        BAD,
        f"fewer than {VALID:.0%} of the replies of the last {RECENT} steps are valid, and at least "
        f"{CUT_OFF:.0%} of the others have `rollout.max_new_tokens` tokens",
        "Raise `rollout.max_new_tokens`, or penalise length with `reward.overlong_buffer`.",
        _truncated,
    ),
    LevelRule(
        "replies without the required form",
        BAD,
        f"fewer than {VALID:.0%} of the replies of the last {RECENT} steps are valid",
        "Look at `rollouts/*.jsonl`: the model may need `env.prompt=full`, an example of the "
        "form in its instructions, or supervised training.",
        _malformed,
    ),
    LevelRule(
        "no update",
        BAD,
        "the filter kept no group in any step",
        "See why rewards do not vary (`anatomy/`): easier or harder problems, more members per "
        "group (`rollout.group_size`), or a higher temperature.",
        _no_update,
    ),
    LevelRule(
        "no problem is solved",
        BAD,
        "success is 0 in every step and evaluation",
        "Begin with easier problems or a better model: a group without any success has nothing to "
        "compare.",
        _never_solved,
    ),
    LevelRule(
        "imitation at chance",
        BAD,
        "after imitation, held-out success is not above that of answers to other problems",
        "Raise `warmstart.success` above `eval/chance_success`, or raise `warmstart.rooms`.",
        _imitation_at_chance,
    ),
    LevelRule(
        "no dependence on the prompt",
        BAD,
        f"the 95 % interval of retrieval minus chance, over at least {FEW_STEPS} steps, contains 0 "
        f"and ends below {NO_DEPENDENCE}",
        "The reasoning was a template before training: choose another model or prompt.",
        _no_dependence,
    ),
    LevelRule(
        "reasoning as decoration",
        BAD,
        f"the 95 % interval of za_swap over all steps contains 0 and ends below {NO_USE} nats",
        "The policy reads the answer from the prompt: the reasoning is not used, and its "
        "diagnostics say nothing about the actions.",
        _decoration,
    ),
    LevelRule(
        "false statements from the start",
        WEAK,
        f"the fraction of true statements is below {TRUE:.0%} in the first and last {RECENT} steps",
        "Compare `rollouts/*.jsonl` with the prompts: the model misreads the observation.",
        _misread,
    ),
    LevelRule(
        "solved before training",
        WEAK,
        f"held-out success at step 0 is at least {SOLVED}",
        "Choose harder problems: evaluation cannot show a gain.",
        _solved_before,
    ),
    LevelRule(
        "every problem is solved",
        WEAK,
        "success is 1 in every step and evaluation",
        "Choose harder problems.",
        _always_solved,
    ),
    LevelRule(
        "few updates",
        WEAK,
        "the filter kept no group in at least half of the steps",
        "See why rewards do not vary (`anatomy/`).",
        _few_updates,
    ),
    LevelRule(
        "too few steps",
        UNKNOWN,
        f"the run has fewer than {FEW_STEPS} steps",
        "Train longer.",
        _too_few,
    ),
)
