"""The program's questions, answered from a run's newest rows in a sentence each.

Does the reasoning depend on its prompt, does the action follow the reasoning, and is it true?
"""

import math
from collections.abc import Sequence

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.estimates import (
    FIRST_TURN,
    NO_EFFECT,
    ZA_SWAP,
    Estimate,
    estimate,
    find_independence,
    name_steps,
    newest_rows,
)


def answer_questions(rows: Sequence[Metrics]) -> list[str]:
    """Return one sentence for each question that the rows answer.

    Each is about the latest state of its metric (`newest_rows`) and names its steps if there are
    several rows.

    Args:
      rows: rows of metrics.jsonl of one environment, without labels.
    """
    questions = (_dependence, _use, _truth)
    return [sentence for ask in questions for sentence in [ask(rows)] if sentence]


def _where(newest: Sequence[Metrics], rows: Sequence[Metrics]) -> str:
    return f" {name_steps(newest)}" if len(rows) > 1 else ""


def _choose(effect: Estimate, none: bool, *, yes: str, no: str, unknown: str) -> str:
    """Return the answer that an effect's interval gives: `yes` above 0, else `no` if `none`."""
    if effect.low > 0:
        return yes
    return no if none else unknown


def _dependence(rows: Sequence[Metrics]) -> str | None:
    names = f"{FIRST_TURN}/retrieval_acc", f"{FIRST_TURN}/retrieval_chance"
    newest = newest_rows(rows, names[0], minus=names[1])
    own, chance = (estimate(newest, name) for name in names)
    excess = estimate(newest, names[0], minus=names[1])
    if not own or not chance or not excess:
        return None
    answer = _choose(
        excess,
        find_independence(newest, FIRST_TURN) is not None,
        yes="The reasoning depends on its prompt",
        no="The reasoning does not depend on its prompt",
        unknown="It is open whether the reasoning depends on its prompt",
    )
    return (
        f"{answer}: {own.percentage} of it is most likely under its own prompt"
        f"{_where(newest, rows)} (chance: {chance.mean:.0%})."
    )


def _use(rows: Sequence[Metrics]) -> str | None:
    newest = newest_rows(rows, ZA_SWAP)
    effect = estimate(newest, ZA_SWAP)
    if not effect:
        return None
    answer = _choose(
        effect,
        effect.high < NO_EFFECT,
        yes="The action follows the reasoning",
        no="The action does not follow the reasoning",
        unknown="It is open whether the action follows the reasoning",
    )
    where = _where(newest, rows)
    if math.isnan(effect.half_width):
        return f"{answer}: za_swap is {effect.mean:.2f} nats per action{where} (interval unknown)."
    figures = f"{effect.mean:.2f} ± {effect.half_width:.2f} nats per action"
    return f"{answer}: za_swap is {figures}{where}."


def _truth(rows: Sequence[Metrics]) -> str | None:
    newest = newest_rows(rows, "reasoning/grounded_rate")
    true = estimate(newest, "reasoning/grounded_rate")
    if not true:
        return None
    return f"{true.percentage} of the facts in the reasoning are true{_where(newest, rows)}."
