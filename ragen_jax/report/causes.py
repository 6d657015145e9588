"""Named causes of a collapse or of failed learning: rules with thresholds, and the remedies.

A rule reads the steps of an environment and returns the step since which it holds, or None. The
alarm (diagnostics/regimes.py) decides which metrics left their levels: a kind of metric is a `sign`
while it is outside its interval. If several rules hold, the earliest is reported. The remedies are
quoted from docs/diagnostics.md.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.regimes import LOW
from ragen_jax.report.episodes import Truncation

CUT = 0.1  # fraction of truncated replies above which truncation is the cause
# Used if no episode is saved: mean reply length as a fraction of rollout.max_new_tokens, while
# at least CUT of the reasonings are not closed. Length alone is no evidence: all replies may have
# the maximum length.
NEAR = 0.9
EXPLAINED = 0.5  # fraction of invalid replies that are truncated, above which format is no cause
ZERO = 0.5  # fraction of groups without variance, mean over STEPS
STEPS = 5  # window of a running mean, in steps that have the metric
FLOAT32_GAP = 1e-3  # rollout/logp_gap above which there is a mismatch, in float32
GAP_RISE = 10  # the threshold in other dtypes, as a multiple of the median of the first STEPS
IN_A_ROW = 3  # number of consecutive steps above the threshold
INFORMATION = frozenset(("mi", "mi_sign"))
VALIDITY = frozenset(("valid_think", "valid_action"))
RATES = {  # rollouts of other trainers may lack the first
    "rollout/valid_rate": "valid replies",
    "rollout/valid_think_rate": "closed reasoning",
}


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The data of a step that the rules read."""

    step: int
    row: Metrics
    signs: frozenset[str]  # kinds of regimes.FIGURES
    alarm: bool
    h_share: float  # first-turn H(Z|X) over its level, like regime/h_relative; NaN: none yet
    mi_share: float  # first-turn MI over its level
    truncated: Truncation | None  # for the episodes saved at the step


@dataclasses.dataclass(frozen=True)
class Cause:
    """A named cause."""

    name: str
    rule: str  # in words, thresholds included
    cure: str  # remedy, quoted from docs/diagnostics.md
    section: str  # section of docs/diagnostics.md
    # (steps, the run's config) -> (first step at which it holds, evidence in words); None: it does
    # not hold
    find: Callable[[Sequence[Evidence], dict[str, Any]], tuple[int, str] | None]


def find_causes(steps: Sequence[Evidence], config: dict[str, Any]) -> list[tuple[Cause, int, str]]:
    """Return (cause, first step, evidence in words) for all causes that hold, earliest first."""
    found = [(cause, at) for cause in CAUSES for at in [cause.find(steps, config)] if at]
    return sorted(((cause, *at) for cause, at in found), key=lambda each: each[1])


def truncation(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    limit = config["rollout"]["max_new_tokens"]
    saved = any(e.truncated is not None for e in steps)
    for e in steps:
        if e.truncated is not None and e.truncated.share >= CUT:
            return e.step, f"{e.truncated.share:.0%} of the saved replies were cut off"
        length = e.row.get("rollout/response_length", math.nan)
        closed = e.row.get("rollout/valid_think_rate", math.nan)
        if not saved and length >= NEAR * limit and closed <= 1 - CUT:
            words = f"replies have {length:.1f} tokens on average, of {limit} allowed"
            return e.step, f"{words}, and {closed:.2f} of the reasoning is closed"
    return None


def malformed(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    for e in steps:
        if not e.signs & VALIDITY:
            continue
        # Episodes are saved only at some steps: use the nearest of them.
        saved = [other for other in steps if other.truncated is not None]
        nearest = min(saved, key=lambda other: abs(other.step - e.step), default=None)
        of_invalid = nearest.truncated.of_invalid if nearest and nearest.truncated else 0.0
        if of_invalid >= EXPLAINED:
            return None
        figures = [
            f"{words} {e.row[name]:.2f} (initially {steps[0].row.get(name, e.row[name]):.2f})"
            for name, words in RATES.items()
            if name in e.row
        ]
        return e.step, ", ".join(figures)
    return None


def no_variance(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    pairs = [(e.step, e.row["filter/zero_groups"]) for e in steps if "filter/zero_groups" in e.row]
    for i in range(STEPS, len(pairs) + 1):
        mean = float(np.mean([share for _, share in pairs[i - STEPS : i]]))
        if mean >= ZERO:
            return pairs[i - 1][0], f"{mean:.0%} of the groups have no reward variance"
    return None


def mismatch(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    if config["rollout"]["ahead"]:
        return None  # the sampler used another policy
    pairs = [(e.step, e.row["rollout/logp_gap"]) for e in steps if "rollout/logp_gap" in e.row]
    bound = FLOAT32_GAP
    if config["model"]["dtype"] != "float32":
        bound = GAP_RISE * float(np.median([gap for _, gap in pairs[:STEPS]] or [math.inf]))
    streak = 0
    for step, gap in pairs:
        streak = streak + 1 if gap > bound else 0
        if streak == IN_A_ROW:
            return step, (
                f"the log-probability of a token differs by {gap:.2g} between sampler and trainer"
            )
    return None


def _information_lost(steps: Sequence[Evidence], *, low: bool) -> tuple[int, str] | None:
    """Return the first step at which information is a sign, with the evidence in words.

    Args:
      low: whether entropy must be below LOW of its level; if false, it must not be below,
        and validity must not be a sign.
    """
    for e in steps:
        if not e.signs & INFORMATION or not math.isfinite(e.h_share):
            continue
        if (e.h_share < LOW) == low and (low or not e.signs & VALIDITY):
            words = f"MI at {e.mi_share:.2f} of its level, H(Z|X) at {e.h_share:.2f} of its level"
            rates = [f", {what} {e.row[name]:.2f}" for name, what in RATES.items() if name in e.row]
            return e.step, words + "".join(rates)
    return None


def template(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    return _information_lost(steps, low=False)


def low_entropy(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    return _information_lost(steps, low=True)


def untrue(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    for e in steps:
        # Once information is lost, the few facts of a template are no separate evidence.
        if e.signs & INFORMATION:
            return None
        if "grounded" in e.signs:
            rate = e.row.get("reasoning/grounded_rate", math.nan)
            return e.step, (
                f"{rate:.2f} of the stated facts are true, while information is still at its level"
            )
    return None


CAUSES = (
    Cause(
        "truncation",
        f"at least {CUT:.0%} of the saved replies used all of rollout.max_new_tokens and are "
        f"not valid; without saved replies: the mean length is at least {NEAR} of the limit "
        f"and {CUT:.0%} of the reasoning is not closed",
        "Replies cut off at `rollout.max_new_tokens` (length at its limit) need a larger limit or "
        "`reward.overlong_buffer`",
        "rollout/",
        truncation,
    ),
    Cause(
        "format",
        f"valid replies or closed reasoning signal collapse, and less than {EXPLAINED:.0%} of "
        "the invalid replies were cut off",
        "other garbage needs less entropy bonus, a lower learning rate, or a stricter "
        "`env.format_penalty`.",
        "rollout/",
        malformed,
    ),
    Cause(
        "groups without variance",
        f"the mean of filter/zero_groups over {STEPS} steps is at least {ZERO}",
        "Low variance has three causes (`solved`, `failed`, `tied`) and three remedies, but a "
        "filter treats them alike: it drops all of these groups.",
        "anatomy/",
        no_variance,
    ),
    Cause(
        "sampler/trainer mismatch",
        f"rollout/logp_gap is above {FLOAT32_GAP:g} in float32, or {GAP_RISE} times the median "
        f"of its first {STEPS} steps in other dtypes, for {IN_A_ROW} steps in a row",
        "`logp_gap` is float rounding, and larger in bfloat16. In float32, report a value above "
        "1e-3 as a bug.",
        "rollout/",
        mismatch,
    ),
    Cause(
        "template",
        "information signals collapse while H(Z|X) is not below half of its level and "
        "valid replies do not signal collapse",
        "Lower the entropy bonus and the learning rate, raise the KL coefficient, filter by reward "
        "variance, or go back to a checkpoint from before.",
        "collapse/",
        template,
    ),
    Cause(
        "low-entropy collapse",
        "information signals collapse while H(Z|X) is below half of its level",
        "more entropy bonus or KL, lower learning rate, an earlier checkpoint",
        "regime/",
        low_entropy,
    ),
    Cause(
        "false statements in the reasoning",
        "the fraction of true statements signals collapse before information does",
        "Lower the learning rate, or go back to a checkpoint.",
        "reasoning/",
        untrue,
    ),
)
