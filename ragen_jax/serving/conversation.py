"""Messages of the OpenAI API as token ids, and sampled ids as a message.

The tokenizer's chat template renders a conversation as it is. Text of clients never becomes control
tokens: before rendering, every control string in it is replaced by a mark, and the mark is replaced
by the string after the template's own control tokens have been found. A later prompt repeats the
ids of an earlier prompt and its reply; the template renders only what follows.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_jax.model.template import (
    ASKED_TO_THINK,
    Control,
    Part,
    PromptError,
    ids_of_parts,
    parse_chat_template,
)
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.serving.tool_calls import JsonObject, ToolCall, parse_calls, syntax_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINK, END_OF_THINK = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a conversation.

    role: system, user, assistant or tool
    reasoning: the text inside <think> of an assistant's message; None: not given
    calls: tool calls of an assistant's message
    """

    role: str
    text: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()

    def same_as(self, other: "Message") -> bool:
        """Whether the messages are the same; reasoning that one of them lacks does not matter."""
        if (self.role, self.text, self.calls) != (other.role, other.text, other.calls):
            return False
        return None in (self.reasoning, other.reasoning) or self.reasoning == other.reasoning


@dataclasses.dataclass(frozen=True)
class Reply:
    """A sampled reply as a message, and what was found in it."""

    message: Message
    malformed_calls: int  # calls that are not JSON, or of a tool that was not offered


@dataclasses.dataclass(frozen=True)
class Conversation:
    """How conversations are written for a model.

    thinks: whether a prompt ends with <think>, which the reply continues; added if the template
        does not write it
    close_id: the control id with which the template ends a reply
    syntax: of tool calls
    """

    tokenizer: "PreTrainedTokenizerFast"
    control: frozenset[int]
    close_id: int
    thinks: bool
    syntax: str

    def prompt(self, messages: Sequence[Message], tools: Sequence[JsonObject] = ()) -> np.ndarray:
        """Return the int32 ids of a prompt that asks for the reply to `messages`.

        Raises:
          PromptError: the chat template or the tokenizer refuses the messages.
        """
        parts = self._render(messages, tools)
        return ids_of_parts(self.tokenizer, self.control, parts)

    def go_on(
        self,
        before: np.ndarray,
        sampled: np.ndarray,
        tail: Sequence[Message],
        tools: Sequence[JsonObject] = (),
    ) -> np.ndarray:
        """Return the ids of the prompt that continues an earlier prompt and its sampled reply.

        Args:
          before: ids of the earlier prompt. sampled: ids of its reply.
          tail: the messages after the reply.

        Raises:
          PromptError: as in `prompt`.
        """
        mark = _unused("REPLY", tail, tools)
        parts = self._render([Message("user", "x"), Message("assistant", mark), *tail], tools)
        at = next((i for i, p in enumerate(parts) if isinstance(p, str) and mark in p), None)
        if at is None:
            raise PromptError("the chat template does not show a reply before a further message")
        text = parts[at]
        assert isinstance(text, str)
        rest = text.split(mark, 1)[1]
        after = ids_of_parts(
            self.tokenizer, self.control, [*([rest] if rest else []), *parts[at + 1 :]]
        )
        # The template closes a reply. If the policy has sampled that token, it is not repeated.
        if len(sampled) and sampled[-1] == self.close_id and after[0] == self.close_id:
            after = after[1:]
        return np.concatenate([before, sampled, after]).astype(np.int32)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; ids beyond the tokenizer's have none."""
        pieces = token_bytes(self.tokenizer)
        texts = (pieces[id_] if id_ < len(pieces) else b"" for id_ in ids)
        return b"".join(texts).decode("utf-8", errors="replace")

    def read(self, text: str, tools: Sequence[JsonObject] = ()) -> Reply:
        """Return the message of a reply's text, which does not include the token that ended it.

        Args:
          tools: those that the request offered.
        """
        reasoning = None
        if self.thinks or text.lstrip().startswith(THINK):
            inside, closed, rest = text.lstrip().removeprefix(THINK).partition(END_OF_THINK)
            reasoning, text = inside.strip("\n"), rest.lstrip("\n") if closed else ""
        calls: tuple[ToolCall, ...] = ()
        malformed = 0
        if tools:
            calls, text, malformed = parse_calls(text, tools, self.syntax)
        return Reply(Message("assistant", text, reasoning, calls), malformed)

    def _render(self, messages: Sequence[Message], tools: Sequence[JsonObject]) -> list[Part]:
        """Return the parts of the rendered conversation, up to the start of the next reply."""
        hide, show = self._hidden(messages, tools)
        written = [_as_template_reads(message, hide) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                written,
                tools=_map_text(list(tools), hide) or None,
                tokenize=False,
                add_generation_prompt=True,
                **ASKED_TO_THINK,
            )
        except Exception as error:  # Jinja's errors, and any error that a template makes it raise
            roles = ", ".join(message.role for message in messages)
            raise PromptError(
                f"the model's chat template refuses messages of {roles:.200}: "
                f"{error or type(error).__name__}"
            ) from error
        assert isinstance(text, str)
        if self.thinks and not text.rstrip().endswith(THINK):
            text += THINK
        # Every control string in the text is the template's own.
        pieces = self._pattern.split(text)
        return [self._tokens.get(piece) or show(piece) for piece in pieces if piece]

    @functools.cached_property
    def _tokens(self) -> dict[str, Control]:
        """Text of every control token -> the token; the longest texts first."""
        added = self.tokenizer.added_tokens_decoder
        tokens = sorted(self.control, key=lambda id_: len(added[id_].content), reverse=True)
        return {added[i].content: Control(i, added[i].lstrip, added[i].rstrip) for i in tokens}

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """The pattern of a control token's text, as a group."""
        return re.compile(f"({'|'.join(map(re.escape, self._tokens))})")

    def _hidden(
        self, messages: Sequence[Message], tools: Sequence[JsonObject]
    ) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Return functions that replace control strings by marks, and marks by control strings."""
        mark = _unused("MARK", messages, tools)
        marks = {text: f"{mark}{i}Y" for i, text in enumerate(self._tokens)}
        back = {mark: text for text, mark in marks.items()}
        return (
            lambda text: self._pattern.sub(lambda found: marks[found[0]], text),
            lambda text: re.sub(rf"{mark}\d+Y", lambda found: back[found[0]], text),
        )


def _unused(name: str, messages: Sequence[Message], tools: Sequence[JsonObject]) -> str:
    """Return a text of letters and digits that no message or tool holds."""
    everything = json.dumps([dataclasses.asdict(m) for m in messages]) + json.dumps(list(tools))
    number = 0
    while f"{name}{number}X" in everything:
        number += 1
    return f"{name}{number}X"


_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


def make_conversation(
    tokenizer: "PreTrainedTokenizerFast", *, thinks: bool, date: str | None = None
) -> Conversation:
    """Return how conversations are written for a model.

    Args:
      tokenizer: has a chat template.
      thinks: as in `Conversation`.
      date: the day that the template writes, if any.

    Raises:
      ValueError: as in `parse_chat_template`.
    """
    template = parse_chat_template(tokenizer, date=date, think=thinks)
    control = template.control
    try:  # the tags around a tool's result are the template's as well
        with_tools = parse_chat_template(tokenizer, tools=[_ANY_TOOL], date=date, think=thinks)
        control |= with_tools.control
    except ValueError:
        pass  # the template shows no tools, or in another syntax than <tool_call>
    asked = [{"role": "user", "content": "x"}]
    try:
        shown = template.tokenizer.apply_chat_template(asked, tools=[_ANY_TOOL], tokenize=False)
    except Exception:  # Jinja's errors, and any error that a template makes it raise
        shown = ""  # it refuses tools, and so every request that has some
    syntax = syntax_of(str(shown))
    return Conversation(template.tokenizer, control, template.close_id, thinks, syntax)


def as_json(message: Message) -> JsonObject:
    """Return a message as in a chat log: reasoning inside <think>, calls in OpenAI's shape."""
    reasoning = "" if message.reasoning is None else f"{THINK}{message.reasoning}{END_OF_THINK}"
    calls = [
        {"type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for c in message.calls
    ]
    written = {"role": message.role, "content": reasoning + message.text}
    return {**written, **({"tool_calls": calls} if calls else {})}


def _as_template_reads(message: Message, hide: Callable[[str], str]) -> JsonObject:
    """Return a message in the form that chat templates read."""
    written: JsonObject = {"role": message.role, "content": hide(message.text)}
    if message.reasoning is not None:
        # Templates that know reasoning read it from the content, or drop it there.
        written["content"] = f"{THINK}{hide(message.reasoning)}{END_OF_THINK}" + written["content"]
    if message.calls:
        written["tool_calls"] = [
            {
                "type": "function",
                "function": {
                    "name": hide(call.name),
                    "arguments": _map_text(call.arguments, hide),
                },
            }
            for call in message.calls
        ]
    return written


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON-like value with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _map_text(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_map_text(inner, change) for inner in value]
    return value
