"""The program's questions, answered from a run's last rows in a sentence each.

Does the reasoning depend on its prompt, does the action follow the reasoning, and is it true?
"""

from collections.abc import Sequence

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.level_rules import NO_DEPENDENCE, NO_USE, RECENT, Estimate, estimate

FIRST_TURN = "collapse/first_turn"


def answer_questions(rows: Sequence[Metrics]) -> list[str]:
    """Return one sentence for each question that the rows answer.

    Each uses the last RECENT rows with its metric, so metrics that are measured every few steps are
    answered as well.

    Args:
      rows: rows of metrics.jsonl of one environment, without labels.
    """
    questions = (_dependence, _use, _truth)
    return [sentence for ask in questions for sentence in [ask(rows)] if sentence]


def _recent(rows: Sequence[Metrics], name: str, *, minus: str = "") -> Estimate | None:
    return estimate([row for row in rows if name in row][-RECENT:], name, minus=minus)


def _choose(effect: Estimate, none: float, *, yes: str, no: str, unknown: str) -> str:
    """Return the answer that an effect's interval gives: `yes` above 0, else `no` below `none`."""
    if effect.low > 0:
        return yes
    return no if effect.high < none else unknown


def _dependence(rows: Sequence[Metrics]) -> str | None:
    own = _recent(rows, f"{FIRST_TURN}/retrieval_acc")
    chance = _recent(rows, f"{FIRST_TURN}/retrieval_chance")
    excess = _recent(rows, f"{FIRST_TURN}/retrieval_acc", minus=f"{FIRST_TURN}/retrieval_chance")
    if not own or not chance or not excess:
        return None
    figures = (
        f"{own.mean:.0%} ± {100 * own.half_width:.0f} of it is most likely under its own prompt "
        f"(chance: {chance.mean:.0%})"
    )
    answer = _choose(
        excess,
        NO_DEPENDENCE,
        yes="The reasoning depends on its prompt",
        no="The reasoning does not depend on its prompt",
        unknown="It is open whether the reasoning depends on its prompt",
    )
    return f"{answer}: {figures}."


def _use(rows: Sequence[Metrics]) -> str | None:
    effect = _recent(rows, "flow/first_turn/za_swap")
    if not effect:
        return None
    answer = _choose(
        effect,
        NO_USE,
        yes="The action follows the reasoning",
        no="The action does not follow the reasoning",
        unknown="It is open whether the action follows the reasoning",
    )
    return f"{answer}: za_swap is {effect.mean:.2f} ± {effect.half_width:.2f} nats per action."


def _truth(rows: Sequence[Metrics]) -> str | None:
    true = _recent(rows, "reasoning/grounded_rate")
    if not true:
        return None
    return f"{true.mean:.0%} ± {100 * true.half_width:.0f} of the facts in the reasoning are true."
