"""The causes of trouble that have a name, each a rule with its thresholds, and what to do.

A rule reads the steps of one environment and says since when it holds, or that it does not. Which
figures left their levels is the alarm's to say (diagnostics/regimes.py): a `sign` is one of its
kinds, fallen or risen beyond its own interval. Where several hold the one that began first is
named. The cures are docs/diagnostics.md's, word for word.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragen_jax.core.types import Metrics
from ragen_jax.report.episodes import Truncation

CUT = 0.1  # share of replies that were cut off: truncation
# Where no episode is saved: mean length of the replies, of rollout.max_new_tokens, while CUT of the
# reasonings are not closed. Length alone says nothing: replies may all be as long as is allowed.
NEAR = 0.9
EXPLAINED = 0.5  # of the replies not valid: so many cut off, and the format is not the cause
ZERO = 0.5  # share of groups without variance, mean over STEPS
STEPS = 5  # steps with the figure that a running mean is over
FLOAT32_GAP = 1e-3  # rollout/logp_gap above it, in float32: a mismatch
GAP_RISE = 10  # in other dtypes: times the median of the first STEPS
IN_A_ROW = 3  # steps of it
INFORMATION = frozenset(("mi", "mi_sign"))
VALIDITY = frozenset(("valid_think", "valid_action"))


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A step, as the rules see it."""

    step: int
    row: Metrics
    signs: frozenset[str]  # kinds of regimes.FIGURES
    alarm: bool
    h_share: float  # first-turn H(Z|X) over its level, as regime/h_relative; NaN: none yet
    mi_share: float  # first-turn MI over its level
    truncated: Truncation | None  # of the episodes saved at the step


@dataclasses.dataclass(frozen=True)
class Cause:
    """A named cause."""

    name: str
    rule: str  # in words, thresholds included
    cure: str  # of docs/diagnostics.md
    section: str  # of it
    # (steps, the run's config) -> since which step, and the figures in words; None: not so
    find: Callable[[Sequence[Evidence], dict[str, Any]], tuple[int, str] | None]


def find_causes(steps: Sequence[Evidence], config: dict[str, Any]) -> list[tuple[Cause, int, str]]:
    """(cause, since which step, figures in words) of all that hold, the earliest first."""
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
    for i, e in enumerate(steps):
        if not e.signs & VALIDITY:
            continue
        # Episodes are saved at some steps only: the nearest of them tells.
        saved = [other for other in steps if other.truncated is not None]
        nearest = min(saved, key=lambda other: abs(other.step - e.step), default=None)
        of_invalid = nearest.truncated.of_invalid if nearest and nearest.truncated else 0.0
        if of_invalid >= EXPLAINED:
            return None
        valid, think = (
            e.row.get(name, math.nan) for name in ("rollout/valid_rate", "rollout/valid_think_rate")
        )
        before = steps[0].row.get("rollout/valid_rate", math.nan) if i else math.nan
        words = f"valid replies {valid:.2f} (initially {before:.2f}), closed reasoning {think:.2f}"
        return e.step, words
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
        return None  # the sampler was another policy
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


def _information_lost(
    steps: Sequence[Evidence], config: dict[str, Any], *, low: bool
) -> tuple[int, str] | None:
    """Since when information is a sign while entropy is below `regimes.low` of its level or is
    not, and replies are valid where it is not."""
    bound = config["regimes"]["low"]
    for e in steps:
        if not e.signs & INFORMATION or not math.isfinite(e.h_share):
            continue
        if (e.h_share < bound) == low and (low or not e.signs & VALIDITY):
            valid = e.row.get("rollout/valid_rate", math.nan)
            return e.step, (
                f"MI at {e.mi_share:.2f} of its level, H(Z|X) at {e.h_share:.2f} of its level, "
                f"valid replies {valid:.2f}"
            )
    return None


def template(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    return _information_lost(steps, config, low=False)


def low_entropy(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    return _information_lost(steps, config, low=True)


def untrue(steps: Sequence[Evidence], config: dict[str, Any]) -> tuple[int, str] | None:
    for e in steps:
        # Where information has gone a template's few facts are no evidence of their own.
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
        "Replies cut off at `rollout.max_new_tokens` (length at its limit) want a larger limit or "
        "`reward.overlong_buffer`",
        "rollout/",
        truncation,
    ),
    Cause(
        "format",
        f"valid replies or closed reasoning signal collapse, and less than {EXPLAINED:.0%} of "
        "the invalid replies were cut off",
        "other garbage wants less entropy bonus, a lower learning rate, a stricter "
        "`env.format_penalty`.",
        "rollout/",
        malformed,
    ),
    Cause(
        "groups without variance",
        f"the mean of filter/zero_groups over {STEPS} steps is at least {ZERO}",
        "Low variance has these three causes with three treatments, which a filter treats alike: "
        "it drops them all.",
        "anatomy/",
        no_variance,
    ),
    Cause(
        "sampler/trainer mismatch",
        f"rollout/logp_gap is above {FLOAT32_GAP:g} in float32, or {GAP_RISE} times the median "
        f"of its first {STEPS} steps in other dtypes, for {IN_A_ROW} steps in a row",
        "`logp_gap` is float rounding: larger in bfloat16. In float32, more than 1e-3 is worth a "
        "report.",
        "rollout/",
        mismatch,
    ),
    Cause(
        "template",
        "information signals collapse while H(Z|X) is not below regimes.low of its level and "
        "valid replies do not signal collapse",
        "Lower the entropy bonus and the learning rate, raise the KL coefficient, filter by reward "
        "variance, go back to a checkpoint from before.",
        "collapse/",
        template,
    ),
    Cause(
        "low-entropy collapse",
        "information signals collapse while H(Z|X) is below regimes.low of its level",
        "more entropy bonus or KL, lower learning rate, an earlier checkpoint",
        "regime/",
        low_entropy,
    ),
    Cause(
        "false statements in the reasoning",
        "the fraction of true statements signals collapse before information does",
        "Lower the learning rate; go back to a checkpoint.",
        "reasoning/",
        untrue,
    ),
)
