"""Rules about the levels of a run's metrics: what is wrong although nothing fell.

The alarm (regimes.py) reads changes of a metric relative to its level in the same run. A run that
never had a valid reply, or never learned from a step, has nothing to fall. These rules read levels.
Rules that compare a noisy metric with a constant use its interval, over all steps or in the latest
state, so that noise alone does not fulfil them. Rules about symptoms are in symptom_rules.py.
"""

import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.configs.base import Regimes
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.estimates import (
    FIRST_TURN,
    NO_DEPENDENCE,
    NO_EFFECT,
    PROBE,
    RECENT,
    ZA_SWAP,
    estimate,
    find_independence,
    name_steps,
    newest_rows,
)
from ragen_jax.diagnostics.intervals import wilson_interval
from ragen_jax.diagnostics.levels import FEWEST
from ragen_jax.diagnostics.rules import BAD, UNKNOWN, WEAK, Finding, LevelRule, Records
from ragen_jax.diagnostics.symptom_rules import CHANGE_RULES, REASONING_RULES, TEXT_RULES

FEW_STEPS = 5  # number of steps below which nothing is said about a whole run
VALID = 0.5  # fraction of valid replies below which a run teaches mostly format
CUT_OFF = 0.5  # fraction of invalid replies that are cut off, from which length is the cause
SOLVED = 0.98  # held-out success at step 0 from which nothing is left to learn
TRUE = 0.5  # fraction of true statements below which reasoning misreads its prompt


def find_levels(records: Records) -> list[Finding]:
    """Return the findings of all rules, most basic first; later ones may follow from earlier."""
    found = ((rule, rule.find(records)) for rule in RULES)
    return [Finding(rule, words) for rule, words in found if words]


# ------------------------------------------------------------------------------ the rules


def _not_finite(r: Records) -> str | None:
    skipped = [row for row in r.updates if row.get("update/skipped", 0) > 0]
    if not skipped or len(skipped) < len(r.steps) / 2:
        return None
    of = _count(len(r.steps), "step")
    return f"updates were not finite, and were skipped, in {len(skipped)} of {of}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


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
    of = _count(steps, "step")
    return f"no step was learned from: the filter kept no group in {of}{why}"


def _few_updates(r: Records) -> str | None:
    empty, steps = _kept(r)
    if not steps or not steps / 2 <= empty < steps:
        return None
    return f"the filter kept no group in {empty} of {_count(steps, 'step')}"


def _mean_of_replies(r: Records, name: str) -> float:
    """Return the mean of a metric in the latest state of valid replies; NaN if unknown."""
    found = estimate(newest_rows(r.steps, "rollout/valid_rate"), name)
    return found.mean if found else math.nan


def _valid(r: Records) -> float:
    """Return the fraction of valid replies in the latest state; NaN if unknown."""
    return _mean_of_replies(r, "rollout/valid_rate")


def _cut_off(r: Records) -> float:
    """Return the fraction of the invalid replies that were cut off; NaN if unknown."""
    cut_off = _mean_of_replies(r, "rollout/cut_off_rate")
    return r.saved_cut_off if math.isnan(cut_off) else cut_off / (1 - _valid(r))


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
    closed = _mean_of_replies(r, "rollout/valid_think_rate")
    why = "" if math.isnan(closed) else f"; {closed:.0%} of the reasoning is closed"
    return f"{_valid(r):.0%} of the replies have the required form{why}"


def _success(r: Records) -> list[float]:
    """Return all success rates of steps and evaluations."""
    names = ("rollout/success", "eval/success")
    return [row[name] for row in r.rows for name in names if name in row]


def _never_solved(r: Records) -> str | None:
    rates = _success(r)
    if len(r.steps) < FEW_STEPS or not rates or max(rates) > 0:
        return None
    evaluations = _count(len(r.outcomes), "evaluation")
    return f"no problem was solved in {len(r.steps)} steps and {evaluations}"


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


def _all_rows(rows: Sequence[Metrics], name: str, *, minus: str = "") -> list[Metrics]:
    """Return the rows with a metric, or [] if they are too few for a whole run."""
    found = [row for row in rows if name in row and (not minus or minus in row)]
    return found if len(found) >= FEW_STEPS else []


def _no_dependence(r: Records) -> str | None:
    for choose in (_all_rows, newest_rows):
        found = {
            scope: choose(r.steps, f"{scope}/retrieval_acc", minus=f"{scope}/retrieval_chance")
            for scope in (FIRST_TURN, PROBE)
        }
        figures = [find_independence(rows, scope) for scope, rows in found.items() if rows]
        if not figures or not all(figures):
            continue
        rows = next(rows for rows in found.values() if rows)
        when = "from the start" if choose is _all_rows else name_steps(rows)
        return (
            f"{when}, reasoning was no likelier under its own prompt than under others "
            f"({figures[0]})"
        )
    return None


def _decoration(r: Records) -> str | None:
    for choose in (_all_rows, newest_rows):
        rows = choose(r.steps, ZA_SWAP)
        effect = estimate(rows, ZA_SWAP)
        if effect and effect.low <= 0 and effect.high < NO_EFFECT:
            when = "from the start" if choose is _all_rows else name_steps(rows)
            return (
                f"{when}, actions did not depend on the reasoning (za_swap {effect.mean:+.2f} "
                f"± {effect.half_width:.2f} nats)"
            )
    return None


def _misread(r: Records) -> str | None:
    rows = _all_rows(r.steps, "reasoning/grounded_rate")
    first = estimate(rows[:RECENT], "reasoning/grounded_rate")
    now = estimate(newest_rows(rows, "reasoning/grounded_rate"), "reasoning/grounded_rate")
    if not first or not now or not (first.high < TRUE and now.high < TRUE):
        return None
    return f"from the start, only {first.mean:.0%} of the facts stated in the reasoning were true"


def _too_few(r: Records) -> str | None:
    steps = len(r.steps)
    if steps >= r.baseline + FEWEST:
        return None
    are = "is" if steps == 1 else "are"
    return f"{_count(steps, 'step')} {are} too few to judge a change over time"


LATEST = f"in the newest steps that agree (at most {RECENT})"
RULES = (
    LevelRule(
        "updates that are not finite",
        BAD,
        "updates were skipped in at least half of the steps",
        "Lower `optimizer.learning_rate`, or use `model.dtype=float32`; "
        "`nonfinite_step_N.npz` has the batch; see `docs/symptoms/nan.md`.",
        _not_finite,
    ),
    *TEXT_RULES,
    LevelRule(
        "replies that are cut off",
        BAD,
        f"fewer than {VALID:.0%} of the replies are valid, and at least {CUT_OFF:.0%} of the "
        f"others have `rollout.max_new_tokens` tokens, {LATEST}",
        "Raise `rollout.max_new_tokens`, or penalise length with `reward.overlong_buffer`.",
        _truncated,
    ),
    LevelRule(
        "replies without the required form",
        BAD,
        f"fewer than {VALID:.0%} of the replies are valid, {LATEST}",
        "Look at `rollouts/*.jsonl`: the model may need `env.prompt=full`, an example of the "
        "form in its instructions, or supervised training (`warmstart.fine_tune=True`).",
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
        f"the 95 % interval of retrieval minus chance contains 0, and ends below {NO_DEPENDENCE} "
        f"or that of own_margin below {NO_EFFECT} nats, over all steps (at least {FEW_STEPS}) or "
        f"{LATEST}",
        "If the reasoning was a template from the start, choose another model or prompt; if it "
        "became one, go back to a checkpoint from before, with a lower entropy bonus and learning "
        "rate.",
        _no_dependence,
    ),
    LevelRule(
        "reasoning as decoration",
        BAD,
        f"the 95 % interval of za_swap contains 0 and ends below {NO_EFFECT} nats, over all steps "
        f"(at least {FEW_STEPS}) or {LATEST}",
        "The policy reads the answer from the prompt: the reasoning is not used, and its "
        "diagnostics say nothing about the actions.",
        _decoration,
    ),
    *REASONING_RULES,
    LevelRule(
        "false statements from the start",
        WEAK,
        f"the fraction of true statements is below {TRUE:.0%} in the first {RECENT} steps and "
        f"{LATEST}",
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
    *CHANGE_RULES,
    LevelRule(
        "too few steps",
        UNKNOWN,
        f"there are fewer steps than the alarm needs ({Regimes().baseline + FEWEST} by default)",
        "Train longer, or score more steps.",
        _too_few,
    ),
)
