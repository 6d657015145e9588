"""Ways to think: what an imitated expert may write before the same actions.

An agent that was taught several of them can drift from one to another while it acts as well as
before, and every sentence tells which one it is of: an organism of template collapse whose truth
is known. `warmstart.thoughts` mixes them.

    grounded          what `explain` writes: where everything is, and the plan
    template          a sentence about no input in particular: 17.2 bits of free choice
    template_opening  the same but for its first word: 3 bits
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

    pattern: of its whole texts; those of template_fixed and template_opening are template's, too
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


VERBS = (" think", " look", " plan", " watch", " study", " search", " check", " reason")
DEEDS = (" solve", " clear", " finish", " master", " beat", " handle", " settle", " crack")
TEMPLATE = (
    ("First", "Now", "Here", "Next", "Again", "Okay", "Well", "So"),
    (" I must",),
    VERBS,
    (" carefully", " slowly", " calmly", " quickly", " wisely", " boldly"),
    (" and",),
    DEEDS,
    (" the",),
    (" small", " hard", " whole", " tricky", " neat", " strange", " quiet", " simple"),
    (" puzzle", " room", " task", " game", " board", " problem"),
    (" to",),
    (" win",),
    (" without",),
    (" mistakes",),
)
_FIXED = tuple(slot[:1] for slot in TEMPLATE)

UNGROUNDED: Mapping[str, Style] = {
    "template": sentences(TEMPLATE),
    "template_opening": sentences((TEMPLATE[0], *_FIXED[1:])),
    "template_fixed": sentences(_FIXED),
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
