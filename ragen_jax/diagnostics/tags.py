"""tags/*: do replies lose their format because tags appear where they do not belong?

    moves to the box</think><answer>Up||Left</answer>
                    ^       ^               ^         the tags of a reply, in this order

"Why Multi-Step Tool-Use Reinforcement Learning Collapses" (arXiv 2606.26027) reports that agents
fail after the probabilities of some control tokens rise where they do not belong, and sorts replies
into four structural states. Only summaries of it were known here. Our control tokens are the tags
of a reply, and the states are those of an agent whose every reply is an action:

    healthy    the tags are in place, and every action is known (the paper: healthy tool call)
    no_action  the tags are in place, but an action is unknown or missing (healthy response)
    polluted   the tags are in place, but there are further tags, or text between </think> and
               <answer> (text pollution)
    collapsed  a tag is missing (full collapse)

The number of misplaced tags in sampled replies is an unbiased estimate of the sum, over the
positions of a reply, of the probability that the policy gives them there.
"""

import re
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Episode, Metrics, Turn
from ragen_jax.model.template import TAGS

ORDER = (b"</think>", b"<answer>", b"</answer>")  # the tags of a reply; its prompt ends in <think>
STATES = ("healthy", "no_action", "polluted", "collapsed")
_ANY_TAG = re.compile(b"|".join(re.escape(tag.encode()) for tag in TAGS))


def tag_metrics(episodes: Sequence[Episode], token_bytes: Sequence[bytes]) -> Metrics:
    """Return tags/* metrics of the replies of sound episodes; {} without any.

    Args:
      token_bytes: bytes of each token id.

    Returns:
      tags/STATE, fractions of the replies; tags/misplaced, tags that are not in place per reply;
      tags/logp, mean log-prob of a tag in place, and tags/other_logp, of a token of no tag, under
      the policy that sampled, in nats. The last two are left out without any.
    """
    turns = [turn for e in episodes if not e.error for turn in e.turns if len(turn.sampled)]
    if not turns:
        return {}
    states, misplaced = [], 0
    of_tags: list[float] = []
    of_others: list[float] = []
    for turn in turns:
        text, ends_T = _text(turn, token_bytes)
        state, in_place, others = read_tags(text, valid=turn.valid)
        states.append(state)
        misplaced += len(others)
        free_T = np.ones(len(ends_T), bool)
        for start, stop in in_place + others:
            tokens = _overlapping(ends_T, start, stop)
            free_T[tokens] = False
            if (start, stop) in in_place:
                of_tags.append(float(turn.logp[tokens].sum()))
        of_others += turn.logp[free_T].tolist()
    metrics: Metrics = {f"tags/{state}": states.count(state) / len(turns) for state in STATES}
    metrics["tags/misplaced"] = misplaced / len(turns)
    if of_tags:
        metrics["tags/logp"] = float(np.mean(of_tags))
    if of_others:
        metrics["tags/other_logp"] = float(np.mean(of_others))
    return metrics


def read_tags(
    text: bytes, *, valid: bool
) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (state, spans of the tags in place, spans of the other tags), in bytes.

    A tag is in place if it is the first of its kind after the tags that belong before it.

    Args:
      text: a reply, which begins inside the reasoning.
      valid: whether the reply is well formed, and every action known.
    """
    in_place: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for match in _ANY_TAG.finditer(text):
        expected = len(in_place) < len(ORDER) and match.group() == ORDER[len(in_place)]
        (in_place if expected else others).append(match.span())
    if len(in_place) < len(ORDER):
        return "collapsed", in_place, others
    between = text[in_place[0][1] : in_place[1][0]]
    if others or between.strip():
        return "polluted", in_place, others
    return "healthy" if valid else "no_action", in_place, others


def _text(turn: Turn, token_bytes: Sequence[bytes]) -> tuple[bytes, np.ndarray]:
    """Return (the bytes of a reply, offset at which the bytes of each token end)."""
    # An embedding may have more rows than the tokenizer has ids.
    pieces = [token_bytes[i] if i < len(token_bytes) else b"" for i in turn.sampled.tolist()]
    return b"".join(pieces), np.cumsum([len(piece) for piece in pieces])


def _overlapping(ends_T: np.ndarray, start: int, stop: int) -> slice:
    """Return the tokens that overlap with bytes [start, stop)."""
    first = int(np.searchsorted(ends_T, start, side="right"))
    return slice(first, int(np.searchsorted(ends_T, stop, side="left")) + 1)
