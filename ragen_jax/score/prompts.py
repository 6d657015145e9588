"""Token ids of prompts, as the policy read them. A prompt is given as

- token ids: those;
- messages: what the model's chat template makes of them, as the trainer did;
- text with control tokens (`<|im_start|>`): that text's ids;
- text that a trainer decoded without control tokens (verl and TRL do: skip_special_tokens): it is
  taken apart by what the template writes around messages, rendered again, and accepted where the
  result reads the same without its control tokens;
- any other text: its ids, with what the tokenizer puts in front (a beginning of sentence).
"""

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from ragen_jax.model.template import ASKED_MARKS, ASKED_ROLES
from ragen_jax.score.formats import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, ...]:
    """The control tokens that trainers leave out of what they decode, longest first."""
    tokens = tokenizer.added_tokens_decoder.values()
    return tuple(sorted((t.content for t in tokens if t.special), key=len, reverse=True))


def text_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Ids of a text as it is, control tokens included."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer: "PreTrainedTokenizerFast", messages: Messages) -> list[int]:
    """Ids of a conversation up to where the next reply begins.

    Raises:
      ValueError: no chat template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("holds messages, but the model's tokenizer has no chat template")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"holds messages that the chat template refuses: {error}") from error
    return text_ids(tokenizer, str(text))


def read_text(
    tokenizer: "PreTrainedTokenizerFast", text: str, opening: str
) -> tuple[str, list[int]]:
    """(what the text was: "control tokens", "restored" or "text", its ids).

    Args:
      opening: the tag that opens a reasoning, which a trainer may have put behind the template's
        own text.
    """
    if any(token in text for token in special_tokens(tokenizer)):
        return "control tokens", text_ids(tokenizer, text)
    if tokenizer.chat_template:
        for tag in ("", opening):
            ids = _restored(tokenizer, text.removesuffix(tag)) if text.endswith(tag) else None
            if ids is not None:
                return "restored", ids + text_ids(tokenizer, tag)
    return "text", tokenizer(text)["input_ids"]


def _restored(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int] | None:
    """The ids of a conversation from whose text the control tokens are gone; None: it is none."""
    for system in (False, True):
        messages = _messages(text, _around(tokenizer, system))
        if messages is None:
            continue
        try:
            ids = render(tokenizer, messages)
        except ValueError:  # of roles that the template refuses in this order
            continue
        if _bare(tokenizer, ids) == text:
            return ids
    return None


def _messages(text: str, around: Sequence[str] | None) -> Messages | None:
    """The messages of a bare text; None: it does not begin and end as the template does."""
    if around is None:
        return None
    head, *behind_system, reply, user, tail = around
    if not (text.startswith(head) and text.endswith(tail)) or not reply or not user:
        return None
    body, messages = text[len(head) : len(text) - len(tail)], []
    for mark in behind_system:
        said, found, body = body.partition(mark)
        if not found:
            return None
        messages.append({"role": "system", "content": said})
    # Which mark stood between two parts is checked where the conversation is rendered again.
    parts = re.split(f"{re.escape(reply)}|{re.escape(user)}", body)
    if len(parts) % 2 == 0:  # the last is a reply
        return None
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": part} for i, part in enumerate(parts)]


@functools.lru_cache(maxsize=8)
def _around(tokenizer: "PreTrainedTokenizerFast", system: bool) -> tuple[str, ...] | None:
    """What the template writes before, between and behind messages, less control tokens.

    None: it refuses such a conversation, or does not show it verbatim.
    """
    first = 0 if system else 1
    named = zip(ASKED_ROLES[first:], ASKED_MARKS[first:], strict=True)
    try:
        ids = render(tokenizer, [{"role": role, "content": mark} for role, mark in named])
    except ValueError:
        return None
    bare = _bare(tokenizer, ids)
    if tuple(re.findall("|".join(ASKED_MARKS), bare)) != ASKED_MARKS[first:]:
        return None
    return tuple(re.split("|".join(ASKED_MARKS), bare))


def _bare(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> str:
    """The text of ids as trainers decode them."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
