"""eval/ask/*: does the agent ask for what it needs, and does it use the replies?

"On Information Self-Locking" (arXiv 2603.12109) reports that agents that must ask for information
stop asking, and divides their skill in two: the choice of questions, which determines what is
observed, and the tracking of beliefs, which uses the observations. Where the needed texts are
known, both can be counted:

    question -> observation   shown      fraction of the needed texts that the agent has seen
    observation -> belief     use        success with all needed texts seen, minus success without

The probability of a right guess is the success without them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ragen_jax.core.types import Episode, Metrics


def ask_metrics(
    episodes: Sequence[Episode], needed: Sequence[tuple[str, ...]], asks: Callable[[str], bool]
) -> Metrics:
    """Return eval/ask/* metrics of the sound episodes whose needed texts are known; {} without any.

    Args:
      needed: the texts that each episode's observations must show; (): unknown.
      asks: whether an action asks for information.

    Returns:
      eval/ask/questions, number of questions per episode; eval/ask/informative, fraction of the
      questions after which the agent sees a needed text for the first time; eval/ask/shown;
      eval/ask/success_shown and success_blind, success of the episodes with all needed texts seen
      and of the others, and eval/ask/use, their difference. Rates of nothing are left out.
    """
    questions = informative = 0
    shown_E, success_E = [], []
    for episode, texts in zip(episodes, needed, strict=True):
        if episode.error or not texts:
            continue
        seen: set[str] = set()
        asked = False  # whether the last turn asked
        for turn in episode.turns:
            new = {text for text in texts if text in turn.message} - seen
            informative += bool(asked and new)
            seen |= new
            asked = any(map(asks, turn.actions))
            questions += asked
        shown_E.append(len(seen) / len(texts))
        success_E.append(episode.success)
    if not shown_E:
        return {}
    shown_E, success_E = np.array(shown_E), np.array(success_E, float)
    metrics: Metrics = {
        "eval/ask/questions": questions / len(shown_E),
        "eval/ask/shown": float(shown_E.mean()),
    }
    if questions:
        metrics["eval/ask/informative"] = informative / questions
    rates = {"success_shown": shown_E == 1, "success_blind": shown_E < 1}
    found = {name: float(success_E[which].mean()) for name, which in rates.items() if which.any()}
    if len(found) == len(rates):
        found["use"] = found["success_shown"] - found["success_blind"]
    return metrics | {f"eval/ask/{name}": value for name, value in found.items()}
