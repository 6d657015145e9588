"""Recover the token ids of prompts as the policy read them. A prompt is given as one of:

- token ids: used unchanged;
- messages: rendered by the model's chat template, as the trainer did;
- text with control tokens (`<|im_start|>`): encoded;
- text that a trainer decoded without control tokens (verl and TRL do: skip_special_tokens): parsed
  with the texts that the template writes around messages, rendered again, and accepted if the
  result is the same text without its control tokens;
- any other text: encoded, with the ids that the tokenizer puts in front (beginning of sentence).
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ragen_jax.model.template import ASKED_MARKS, ASKED_ROLES
from ragen_jax.score.messages import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> tuple[str, ...]:
    """Return the control tokens that trainers leave out when they decode, longest first."""
    tokens = tokenizer.added_tokens_decoder.values()
    return tuple(sorted((t.content for t in tokens if t.special), key=len, reverse=True))


def text_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Encode a text unchanged, including its control tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_text(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Messages,
    tools: Sequence[dict[str, Any]] = (),
    *,
    reply_next: bool = True,
) -> str:
    """Return the text of a conversation up to the start of the next reply.

    Args:
      tools: tools offered to the policy.
      reply_next: whether to end with the text that the template writes before a reply.

    Raises:
      ValueError: there is no chat template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("holds messages, but the model's tokenizer has no chat template")
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=reply_next
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"holds messages that the chat template refuses: {error}") from error
    return str(text)


def render(tokenizer: "PreTrainedTokenizerFast", messages: Messages) -> list[int]:
    """Return the ids of a conversation up to the next reply; raises like `render_text`."""
    return text_ids(tokenizer, render_text(tokenizer, messages))


@functools.lru_cache(maxsize=64)
def writes_role(tokenizer: "PreTrainedTokenizerFast", role: str) -> bool:
    """Return whether the chat template writes a role's message at the start of a conversation."""
    messages = [{"role": role, "content": "A_MESSAGE"}, {"role": "user", "content": "ANOTHER"}]
    try:
        return "A_MESSAGE" in render_text(tokenizer, messages)
    except ValueError:
        return False


@functools.lru_cache(maxsize=8)
def writes_reasoning(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Return whether the chat template reads `reasoning_content`; if not, content must hold it."""
    reply = {"role": "assistant", "content": "REPLY", "reasoning_content": "THOUGHT"}
    messages = [{"role": "user", "content": "MESSAGE"}, reply]
    try:
        return "THOUGHT" in render_text(tokenizer, messages, reply_next=False)
    except ValueError:
        return False


CALLS = "tool_calls[]."


def list_keys(messages: Messages) -> set[str]:
    """Return keys of messages except role and content; those of calls are `tool_calls[].id`."""
    found = {key for message in messages for key in message}
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    return (found | {CALLS + key for call in calls for key in call}) - {"role", "content"}


def writes_key(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Messages,
    tools: Sequence[dict[str, Any]],
    key: str,
) -> bool:
    """Return whether removing a key from the messages changes the rendered conversation."""
    reduced = []
    for message in messages:
        kept = {name: value for name, value in message.items() if name != key}
        if key.startswith(CALLS) and "tool_calls" in kept:
            name = key.removeprefix(CALLS)
            kept["tool_calls"] = [
                {k: v for k, v in call.items() if k != name} for call in kept["tool_calls"]
            ]
        reduced.append(kept)
    try:
        return render_text(tokenizer, messages, tools) != render_text(tokenizer, reduced, tools)
    except ValueError:  # the template requires the key
        return True


def find_missing_parts(text: str, messages: Messages, tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return names of the parts of a conversation that are missing in its rendered text."""
    missing = set()
    for message in messages:
        content = message["content"]
        is_written = (
            content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
        )
        if message["role"] != "assistant" and not is_written:  # templates drop replies' reasoning
            missing.add(f"messages of the role {message['role']!r}")
        if any(_get_name(call) not in text for call in message.get("tool_calls", ())):
            missing.add("tool calls")
    if any(_get_name(tool) not in text for tool in tools):
        missing.add("tools")
    return sorted(missing)


def _get_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


def restore_text(tokenizer: "PreTrainedTokenizerFast", text: str, opening: str) -> tuple[str, str]:
    """Return (kind: "control tokens", "restored" or "text"; the text with its control tokens).

    Args:
      opening: the tag that opens a reasoning, which a trainer may have put after the template's
        text.
    """
    if any(token in text for token in special_tokens(tokenizer)):
        return "control tokens", text
    if tokenizer.chat_template:
        for tag in ("", opening):
            found = (
                _restore_conversation(tokenizer, text.removesuffix(tag))
                if text.endswith(tag)
                else None
            )
            if found is not None:
                return "restored", found + tag
    return "text", text


def _restore_conversation(tokenizer: "PreTrainedTokenizerFast", text: str) -> str | None:
    """Restore a conversation's missing control tokens; None if the text is no conversation."""
    for system in (False, True):
        messages = _messages(text, _bare_template_texts(tokenizer, system))
        if messages is None:
            continue
        try:
            found = render_text(tokenizer, messages)
        except ValueError:  # the template refuses this order of roles
            continue
        if _decode_bare(tokenizer, found) == text:
            return found
    return None


def _messages(text: str, template_texts: Sequence[str] | None) -> Messages | None:
    """Return the messages of a bare text; None if it does not begin and end like the template."""
    if template_texts is None:
        return None
    head, *after_system, reply, user, tail = template_texts
    if not (text.startswith(head) and text.endswith(tail)) or not reply or not user:
        return None
    body, messages = text[len(head) : len(text) - len(tail)], []
    for mark in after_system:
        system, found, body = body.partition(mark)
        if not found:
            return None
        messages.append({"role": "system", "content": system})
    # The mark between two parts is checked when the conversation is rendered again.
    parts = re.split(f"{re.escape(reply)}|{re.escape(user)}", body)
    if len(parts) % 2 == 0:  # the last part is a reply
        return None
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": part} for i, part in enumerate(parts)]


def _bare_template_texts(
    tokenizer: "PreTrainedTokenizerFast", system: bool
) -> tuple[str, ...] | None:
    """Return the template's texts before, between and after messages, without control tokens.

    None if the template refuses such a conversation or does not show it verbatim.
    """
    found = split_template(tokenizer, system)
    return found[1] if found else None


@functools.lru_cache(maxsize=8)
def split_template(
    tokenizer: "PreTrainedTokenizerFast", system: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the template's texts before, between and after messages.

    The result is (with control tokens, without them), or None if the template refuses such a
    conversation or does not show it verbatim.
    """
    first = 0 if system else 1
    named = zip(ASKED_ROLES[first:], ASKED_MARKS[first:], strict=True)
    try:
        full = render_text(tokenizer, [{"role": role, "content": mark} for role, mark in named])
    except ValueError:
        return None
    found = []
    for text in (full, _decode_bare(tokenizer, full)):
        if tuple(re.findall("|".join(ASKED_MARKS), text)) != ASKED_MARKS[first:]:
            return None
        found.append(tuple(re.split("|".join(ASKED_MARKS), text)))
    return found[0], found[1]


def _decode_bare(tokenizer: "PreTrainedTokenizerFast", text: str) -> str:
    """Return a text in the form in which trainers decode its ids."""
    return str(tokenizer.decode(text_ids(tokenizer, text), skip_special_tokens=True))
