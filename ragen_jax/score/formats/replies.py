"""Convert prompts, conversations and masked token ids to replies."""

from collections.abc import Callable
from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.rows import ParsedReply, Prompt
from ragen_jax.score.messages import Messages, is_messages, read_messages, reply_text
from ragen_jax.score.values import Fields, format_value


def prompt_and_reply(prompt: str, reply: str) -> Callable[[Fields], tuple[ParsedReply, ...]]:
    """Return a reader of records with a prompt and a reply: each text, messages, or token ids."""

    def read(record: Fields) -> tuple[ParsedReply, ...]:
        shown_to, response = _prompt(record, prompt), record.get(reply)
        if is_messages(response):
            return conversation_replies(shown_to, response)
        if isinstance(response, list) and response:
            return (ParsedReply(shown_to, values.ids(response, reply)),)
        return (ParsedReply(shown_to, _text(record, reply), transcript=True),)

    return read


def conversation_replies(prompt: Prompt, raw: Any) -> tuple[ParsedReply, ...]:
    """Return a `ParsedReply` for each assistant message, with all earlier messages as prompt.

    Args:
      prompt: messages or text before the conversation.
      raw: the messages of the conversation, as a file holds them.

    Raises:
      ValueError: there is no reply, or nothing before the first one.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and not isinstance(prompt[0], dict):
        raise ValueError("has token ids as its prompt, but messages as its reply")
    before: Messages = list(prompt)  # ty: ignore[invalid-assignment] checked to be messages
    replies = []
    for message in read_messages(raw):
        if message["role"] == "assistant":
            if not before:
                raise ValueError("begins with an assistant message, without a prompt")
            replies.append(message_reply(list(before), message))
        before.append(message)
    if not replies:
        raise ValueError("has no message of the role 'assistant'")
    return tuple(replies)


def message_reply(
    before: Messages, message: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()
) -> ParsedReply:
    """Return an assistant message as a reply after earlier messages."""
    calls = tuple(message.get("tool_calls", ()))
    return ParsedReply(before, reply_text(message), calls=calls, tools=tools)


def masked_replies(ids: list[int], mask: Any, name: str) -> tuple[ParsedReply, ...]:
    """Return a reply for each span of sampled tokens, with all earlier tokens as its prompt.

    Args:
      ids: token ids of prompts, replies and observations.
      mask: for each id, 0 or false if the policy did not sample it.
      name: the mask's field, for messages.

    Raises:
      ValueError: the mask is not a list of that length, or no sampled token follows a prompt.
    """
    found = values.parse_nested(mask)
    if not isinstance(found, list):
        raise ValueError(f"has {format_value(mask)} as its {name}; expected a list of 0 and 1")
    if len(found) != len(ids):
        raise ValueError(f"has {len(ids)} token ids, but {len(found)} values in its {name}")
    sampled = [_is_sampled(each, name) for each in found]
    if not any(sampled):
        raise ValueError(f"has no sampled token: its {name} is 0 everywhere")
    if sampled[0]:
        raise ValueError(f"begins with a sampled token, without a prompt: its {name} begins with 1")
    starts = [i for i in range(1, len(ids)) if sampled[i] and not sampled[i - 1]]
    ends = [i for i in range(1, len(ids)) if not sampled[i] and sampled[i - 1]]
    if len(ends) < len(starts):
        ends.append(len(ids))
    spans = zip(starts, ends, strict=True)
    return tuple(ParsedReply(ids[:start], ids[start:end]) for start, end in spans)


def _is_sampled(value: Any, name: str) -> bool:
    if value is True or value is False:
        return value
    found = values.number(value, name)
    if found is None:
        raise ValueError(f"has {format_value(value)} in its {name}; expected 0 or 1")
    return found != 0


def _prompt(record: Fields, name: str) -> Prompt:
    value = record.get(name)
    parsed = values.parse_nested(value)
    if isinstance(parsed, list) and parsed and isinstance(values.parse_nested(parsed[0]), dict):
        if isinstance(value, list) or is_messages(value):
            return read_messages(value)
    if isinstance(value, list) and value:
        return values.ids(value, name)
    text = _text(record, name)
    if not text:
        raise ValueError(f"has an empty {name}")
    return text


def _text(record: Fields, name: str) -> str:
    """Return a text unchanged: here "nan" is a text, and an empty text is a value."""
    record.mark_read(name)
    value = record.values.get(name)
    if not isinstance(value, str):
        raise ValueError(f"has {format_value(value)} as its {name}; expected text or messages")
    return value
