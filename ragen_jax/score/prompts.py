"""Token ids of prompts, as the policy read them. A prompt is given as

- token ids: those;
- messages: what the model's chat template makes of them, as the trainer did;
- text with control tokens (`<|im_start|>`): that text's ids;
- text that a trainer decoded without control tokens (verl and TRL do: skip_special_tokens): it is
  parsed by the texts that the template writes around messages, rendered again, and accepted where
  the result reads the same without its control tokens;
- any other text: its ids, with what the tokenizer puts in front (a beginning of sentence).
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
    """The control tokens that trainers leave out of what they decode, longest first."""
    tokens = tokenizer.added_tokens_decoder.values()
    return tuple(sorted((t.content for t in tokens if t.special), key=len, reverse=True))


def text_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Ids of a text as it is, control tokens included."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Tracked(dict[str, Any]):
    """A message that records which of its keys a chat template reads."""

    def __init__(self, message: Mapping[str, Any], reads: set[str], path: str = "") -> None:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            inner = [Tracked(call, reads, "tool_calls[].") for call in calls]
            message = {**message, "tool_calls": inner}
        super().__init__(message)
        self._reads, self._path = reads, path

    def __getitem__(self, key: str) -> Any:
        self._reads.add(self._path + key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def items(self) -> Any:  # of a template that writes all of it
        self._reads |= {self._path + key for key in self}
        return super().items()


def render_text(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Messages,
    tools: Sequence[dict[str, Any]] = (),
    *,
    reads: set[str] | None = None,
    reply_next: bool = True,
) -> str:
    """Text of a conversation up to where the next reply begins.

    Args:
      tools: offered to the policy.
      reads: gets the message keys that the template reads.
      reply_next: whether to end with what the template writes before a reply.

    Raises:
      ValueError: no chat template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("holds messages, but the model's tokenizer has no chat template")
    tracked = [Tracked(each, set() if reads is None else reads) for each in messages]
    try:
        text = tokenizer.apply_chat_template(
            tracked, tools=list(tools) or None, tokenize=False, add_generation_prompt=reply_next
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(f"holds messages that the chat template refuses: {error}") from error
    return str(text)


def render(tokenizer: "PreTrainedTokenizerFast", messages: Messages) -> list[int]:
    """Ids of a conversation up to where the next reply begins; errors as `render_text`."""
    return text_ids(tokenizer, render_text(tokenizer, messages))


@functools.lru_cache(maxsize=64)
def writes_role(tokenizer: "PreTrainedTokenizerFast", role: str) -> bool:
    """Whether the chat template writes a message of a role at the start of a conversation."""
    messages = [{"role": role, "content": "A_MESSAGE"}, {"role": "user", "content": "ANOTHER"}]
    try:
        return "A_MESSAGE" in render_text(tokenizer, messages)
    except ValueError:
        return False


@functools.lru_cache(maxsize=8)
def writes_reasoning(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether the chat template reads `reasoning_content`; if not, content has to hold it."""
    reads: set[str] = set()
    reply = {"role": "assistant", "content": "REPLY", "reasoning_content": "THOUGHT"}
    try:
        render_text(tokenizer, [{"role": "user", "content": "MESSAGE"}, reply], reads=reads)
    except ValueError:
        return False
    return "reasoning_content" in reads


def left_out(text: str, messages: Messages, tools: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the parts of a conversation that its rendered text lacks."""
    missing = set()
    for message in messages:
        content = message["content"] or ""
        written = content.strip() in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
        if message["role"] != "assistant" and not written:  # of replies, templates drop reasoning
            missing.add(f"messages of the role {message['role']!r}")
        if any(_name(call) not in text for call in message.get("tool_calls", ())):
            missing.add("tool calls")
    if any(_name(tool) not in text for tool in tools):
        missing.add("tools")
    return sorted(missing)


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


def restore_text(tokenizer: "PreTrainedTokenizerFast", text: str, opening: str) -> tuple[str, str]:
    """(kind of the text: "control tokens", "restored" or "text"; it with its control tokens).

    Args:
      opening: the tag that opens a reasoning, which a trainer may have put behind the template's
        own text.
    """
    if any(token in text for token in special_tokens(tokenizer)):
        return "control tokens", text
    if tokenizer.chat_template:
        for tag in ("", opening):
            found = _restored(tokenizer, text.removesuffix(tag)) if text.endswith(tag) else None
            if found is not None:
                return "restored", found + tag
    return "text", text


def _restored(tokenizer: "PreTrainedTokenizerFast", text: str) -> str | None:
    """A conversation from whose text the control tokens are gone, with them; None: it is none."""
    for system in (False, True):
        messages = _messages(text, _around(tokenizer, system))
        if messages is None:
            continue
        try:
            found = render_text(tokenizer, messages)
        except ValueError:  # of roles that the template refuses in this order
            continue
        if _bare(tokenizer, found) == text:
            return found
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


def _around(tokenizer: "PreTrainedTokenizerFast", system: bool) -> tuple[str, ...] | None:
    """Texts that the template writes before, between and after messages, less control tokens.

    None: it refuses such a conversation, or does not show it verbatim.
    """
    found = asked(tokenizer, system)
    return found[1] if found else None


@functools.lru_cache(maxsize=8)
def asked(
    tokenizer: "PreTrainedTokenizerFast", system: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Texts that the template writes before, between and after messages: (with control tokens,
    without them).

    None: it refuses such a conversation, or does not show it verbatim.
    """
    first = 0 if system else 1
    named = zip(ASKED_ROLES[first:], ASKED_MARKS[first:], strict=True)
    try:
        full = render_text(tokenizer, [{"role": role, "content": mark} for role, mark in named])
    except ValueError:
        return None
    found = []
    for text in (full, _bare(tokenizer, full)):
        if tuple(re.findall("|".join(ASKED_MARKS), text)) != ASKED_MARKS[first:]:
            return None
        found.append(tuple(re.split("|".join(ASKED_MARKS), text)))
    return found[0], found[1]


def _bare(tokenizer: "PreTrainedTokenizerFast", text: str) -> str:
    """A text as trainers decode its ids."""
    return str(tokenizer.decode(text_ids(tokenizer, text), skip_special_tokens=True))
