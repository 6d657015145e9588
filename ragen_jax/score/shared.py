"""Console lines that show what the reasonings of different prompts share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragen_jax.diagnostics.rules import Finding
from ragen_jax.diagnostics.symptoms import Text, first_reasonings
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.report.templates import find_step_template, template_lines
from ragen_jax.score.episodes import ScoredStep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The rules that hold if the reasoning says little about its prompt.
LITTLE_INFORMATION = frozenset(
    {
        "no dependence on the prompt",
        "reasoning that fits any prompt",
        "the same sentences for every prompt",
    }
)


def text_decoder(tokenizer: "PreTrainedTokenizerFast") -> Text:
    """Return the function token ids -> text of a byte-level tokenizer, control tokens included."""
    pieces = token_bytes(tokenizer)

    def text(ids: np.ndarray) -> str:
        # A model may have more ids than its tokenizer; see `Chat.text`.
        known = (pieces[i] if i < len(pieces) else b"\xff" for i in ids.tolist())
        return b"".join(known).decode("utf-8", errors="replace")

    return text


def shared_lines(
    last: ScoredStep, findings: Sequence[Finding], text: Text, tags: tuple[str, str]
) -> list[str]:
    """Return what the reasonings of the last step share, if they say little about their prompts.

    Args:
      findings: the rules that hold.
      text, tags: as in `symptom_metrics`.
    """
    if not LITTLE_INFORMATION & {finding.rule.name for finding in findings}:
        return []
    reasonings = first_reasonings(last.episodes, text, tags)
    return template_lines(find_step_template(last.number, reasonings))
