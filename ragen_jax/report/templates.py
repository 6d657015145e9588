"""The shared texts of the reasonings at the first and the last saved step, side by side.

The texts are an agent's: they enter the page as a line of escaped text.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from tokenizers import Tokenizer

from ragen_jax.core.clean_text import one_line
from ragen_jax.diagnostics.shared_texts import (
    Reasonings,
    Template,
    find_template,
    measure_text,
    reasoning_of,
)
from ragen_jax.report.episodes import SavedEpisodes
from ragen_jax.run.run_files import text_of

SHOWN_LETTERS = 200  # largest number of characters of a text


@dataclasses.dataclass(frozen=True)
class StepTemplate:
    """What the reasonings of a step share."""

    step: int
    reasonings: Reasonings
    template: Template

    @property
    def free(self) -> str:
        """Return the fraction of the reasonings that fit any prompt, in words."""
        free = self.template.free
        return "unknown" if math.isnan(free) else f"{free:.0%}"


def find_step_template(step: int, reasonings: Reasonings) -> StepTemplate:
    return StepTemplate(step, reasonings, find_template(reasonings))


def first_and_last(
    saved: Sequence[SavedEpisodes],
    label: str,
    tokenizer: Tokenizer | None,
    tags: tuple[str, str],
) -> list[StepTemplate]:
    """Return what the reasonings share at the first and the last saved step with several prompts.

    Only first turns are compared, whose prompts are the same in a group. [] if no step has them.
    """
    parts = [part for part in saved if part.label == label and not part.heldout]
    found = []
    for part in (parts[0], parts[-1]) if len(parts) > 1 else parts:
        reasonings = _read(part.records, tokenizer, tags)
        if len({prompt for prompt, _ in reasonings}) > 1:
            found.append(find_step_template(part.step, reasonings))
    return found


def _read(
    records: Sequence[dict[str, Any]], tokenizer: Tokenizer | None, tags: tuple[str, str]
) -> list[tuple[int, str]]:
    """Return (group, reasoning) of the first turns of saved episodes."""
    found = []
    for record in records:
        if record.get("error") or not record["turns"]:
            continue
        turn = record["turns"][0]
        if tokenizer is None:
            text = text_of(turn["messages"][-1]["content"])
        else:
            text = tokenizer.decode(turn["sampled_ids"], skip_special_tokens=False)
        found.append((record["group"], reasoning_of(text, tags)))
    return found


def template_html(label: str, steps: Sequence[StepTemplate]) -> str:
    """Return a table of the shared texts with their fractions at each step; "" without steps."""
    if not steps:
        return ""
    heads = "".join(f'<th scope="col">step {each.step}</th>' for each in steps)
    rows = [("reasonings that fit any prompt", "", [each.free for each in steps])]
    texts = {(x.kind, x.text): x for each in reversed(steps) for x in each.template.texts}
    for shared in texts.values():
        at = [measure_text(shared, each.reasonings) for each in steps]
        cells = [
            f"{x.prompts:.0%} of the prompts, {x.reasonings:.0%} of the reasonings" for x in at
        ]
        rows.append((shared.kind, shared.text, cells))
    body = "".join(
        f'<tr><th scope="row">{kind}{_quoted(text)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for kind, text, cells in rows
    )
    examples = "".join(
        f"<p>For example, at step {each.step}:{_quoted(each.template.example)}</p>"
        for each in steps
        if each.template.example
    )
    of = f" ({escape(label)})" if label else ""
    caption = f"What the reasonings of different prompts share{of}"
    note = (
        ""
        if texts
        else "<p>No sentence or opening that fits any prompt is shared by the prompts.</p>"
    )
    return (
        f"<h4>{caption}</h4>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table>'
        f'<thead><tr><th scope="col">text</th>{heads}</tr></thead><tbody>{body}</tbody>'
        f"</table></div>{note}{examples}"
    )


def template_lines(found: StepTemplate) -> list[str]:
    """Return console lines about what the reasonings of a step share; [] if nothing."""
    template = found.template
    if not template.example and not template.texts:
        return []
    lines = [
        f"shared by the reasonings of step {found.step} ({found.free} of them fit any prompt):"
    ]
    if template.example:
        lines.append(f"  for example: {one_line(template.example, SHOWN_LETTERS)}")
    lines += [
        f"  {x.kind}, {x.prompts:.0%} of the prompts: {one_line(x.text, SHOWN_LETTERS)}"
        for x in template.texts
    ]
    return lines


def _quoted(text: str) -> str:
    return f" <q>{escape(one_line(text, SHOWN_LETTERS))}</q>" if text else ""
