"""Ways to think: what an imitated expert may write before the same actions.

An agent that was taught several of them can drift from one to another while it acts as well as
before, and every sentence tells which one it is of: an organism of template collapse whose truth
is known. `warmstart.styles` mixes them.

    grounded          what `explain` writes: where everything is, and the plan
    template          a sentence about no input in particular: 13 words of 3 bits each
    template_half     the same, but only its first six words are free: 18 bits
    template_opening  only the first: 3 bits
    template_fixed    the same sentence every time: 0 bits
    silent            nothing
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Style:
    """A way to think.

    pattern: of its whole texts; those of every template_* are template's, too
    write: (state, plan, rng) -> a text
    openings: how its texts begin, tokens of the tiny agent's tokenizer; () where all are empty
    words: texts that the tokenizer keeps whole for it, besides the environment's `words`
    """

    pattern: re.Pattern[str]
    write: Callable[[Any, Sequence[str], np.random.Generator], str]
    openings: tuple[str, ...]
    words: tuple[str, ...] = ()

    def wrote(self, thought: str) -> bool:
        """Whether a text is of this style from its first to its last letter."""
        return self.pattern.fullmatch(thought) is not None


def sentences(slots: Sequence[Sequence[str]]) -> Style:
    """The `Style` of sentences that take one text of every slot, each as likely as the others."""

    def write(state, plan, rng):
        return "".join(slot[rng.integers(len(slot))] for slot in slots)

    any_of = ("|".join(map(re.escape, slot)) for slot in slots)
    pattern = re.compile("".join(f"(?:{texts})" for texts in any_of))
    return Style(pattern, write, tuple(slots[0]), tuple(dict.fromkeys(itertools.chain(*slots))))


# Every word is free: where some were not, an entropy bonus was seen to break the sentences up and
# to mix them with the grounded ones.
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
    """The sentences whose first `free` words are free, the rest those of one sentence."""
    return sentences((*TEMPLATE[:free], *(slot[:1] for slot in TEMPLATE[free:])))


UNGROUNDED: Mapping[str, Style] = {
    "template": template(len(TEMPLATE)),
    "template_half": template(6),
    "template_opening": template(1),
    "template_fixed": template(0),
    "silent": Style(re.compile(""), lambda state, plan, rng: "", ()),
}


def with_grounded(
    explain: Callable[[Any, Sequence[str]], str], pattern: str, opening: str
) -> dict[str, Style]:
    """The styles of an environment, the grounded one first.

    Args:
      explain: the environment's. pattern: of all its texts. opening: the token they begin with.
    """
    grounded = Style(re.compile(pattern), lambda state, plan, rng: explain(state, plan), (opening,))
    return {"grounded": grounded, **UNGROUNDED}
