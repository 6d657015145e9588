"""Reasoning styles: the texts that an imitated expert may write before the same actions.

An agent that was taught several styles can drift from one to another while it acts equally well,
and every sentence shows which style it belongs to: a model organism of template collapse with a
known ground truth. `warmstart.styles` mixes the styles.

    grounded          the text of `explain`, or of `narrate` for a language model: where everything
                      is, and the plan
    template          a sentence about no particular input: 13 words of 3 bits each
    template_half     the same, but only its first six words are free: 18 bits
    template_opening  only the first word is free: 3 bits
    template_fixed    the same sentence every time: 0 bits
    silent            no text
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Style:
    """A reasoning style.

    pattern: matches its complete texts; the pattern of "template" matches every template_* text
    write: (state, plan, rng) -> a text
    openings: first words of its texts, each a single token of the tiny agent's tokenizer; () if all
        texts are empty
    words: texts that the tokenizer keeps as one token each, in addition to the environment's
        `words`
    """

    pattern: re.Pattern[str]
    write: Callable[[Any, Sequence[str], np.random.Generator], str]
    openings: tuple[str, ...]
    words: tuple[str, ...] = ()

    def matches(self, thought: str) -> bool:
        """Whether the whole text is of this style."""
        return self.pattern.fullmatch(thought) is not None


def sentences(slots: Sequence[Sequence[str]]) -> Style:
    """Return a `Style` whose sentences take one text from every slot, uniformly at random."""

    def write(state, plan, rng):
        return "".join(slot[rng.integers(len(slot))] for slot in slots)

    any_of = ("|".join(map(re.escape, slot)) for slot in slots)
    pattern = re.compile("".join(f"(?:{texts})" for texts in any_of))
    return Style(pattern, write, tuple(slots[0]), tuple(dict.fromkeys(itertools.chain(*slots))))


# Every word is free: with some words fixed, an entropy bonus was seen to break the sentences up
# and to mix them with grounded sentences.
TEMPLATE = (
    ("First", "Now", "Here", "Next", "Again", "Okay", "Well", "So"),
    (" I must", " I will", " I can", " I should", " we must", " we will", " we can", " we should"),
    (" think", " look", " plan", " watch", " study", " search", " check", " reason"),
    (" carefully", " slowly", " calmly", " quickly", " wisely", " boldly", " gently", " firmly"),
    (" and", " then", " to", " or", " and soon", " and then", " and also", " in order to"),
    (" solve", " clear", " finish", " master", " beat", " handle", " settle", " crack"),
    (" the", " this", " that", " my", " our", " every", " one", " another"),
    (" small", " hard", " whole", " tricky", " neat", " strange", " quiet", " simple"),
    (" puzzle", " room", " task", " game", " board", " problem", " level", " challenge"),
    (
        " to win",
        " to score",
        " to pass",
        " to improve",
        " to learn",
        " to gain",
        " to lead",
        " to go",
    ),
    (" without", " with no", " free of", " avoiding", " minus", " despite", " beyond", " lacking"),
    (" mistakes", " errors", " haste", " waste", " doubt", " delay", " trouble", " fear"),
    (" today", " now", " here", " again", " this time", " at last", " for once", " for good"),
)


def template(free: int) -> Style:
    """Return the style whose first `free` words are free; the other words are fixed."""
    return sentences((*TEMPLATE[:free], *(slot[:1] for slot in TEMPLATE[free:])))


UNGROUNDED: Mapping[str, Style] = {
    "template": template(len(TEMPLATE)),
    "template_half": template(6),
    "template_opening": template(1),
    "template_fixed": template(0),
    "silent": Style(re.compile(""), lambda state, plan, rng: "", ()),
}


def make_styles(
    explain: Callable[[Any, Sequence[str]], str], pattern: str, opening: str
) -> dict[str, Style]:
    """Return the styles of an environment, the grounded style first.

    Args:
      explain: the environment's `explain`, or `narrate` for `sentence_styles`.
      pattern: regular expression that matches all texts of `explain`.
      opening: the word that those texts begin with.
    """
    grounded = Style(re.compile(pattern), lambda state, plan, rng: explain(state, plan), (opening,))
    return {"grounded": grounded, **UNGROUNDED}
