"""Convert the messages of a conversation from their form in files to that of chat templates.

All keys of a message with a value are kept for the template (`tool_calls`, `tool_call_id`, `name`,
...). A list of parts becomes its text, JSON-text arguments of a call become the object that
templates write, and reasoning that the server split off becomes `reasoning_content`.
"""

import collections
from collections.abc import Sequence
from typing import Any

from ragen_jax.score.values import format_value, is_missing, parse_nested

Messages = list[dict[str, Any]]
TEXT_PARTS = ("text", "input_text", "output_text")
CALL_KEYS = ("function", "name", "arguments")
# Keys of the reasoning that a server split off a reply.
REASONING = ("reasoning_content", "reasoning")
# `reply_text` puts these around the reasoning; encode.py replaces them with the configured tags.
OPEN, CLOSE = "\x00reasoning\x00", "\x00/reasoning\x00"


def is_messages(value: Any) -> bool:
    """Return whether a value, or the JSON text in it, is a list of messages."""
    found = parse_nested(value)
    return isinstance(found, list) and bool(found) and all(_has_role(each) for each in found)


def _has_role(value: Any) -> bool:
    found = parse_nested(value)
    return isinstance(found, dict) and "role" in found


def read_messages(value: Any) -> Messages:
    """Return the messages of a list; the list or each message may be JSON text.

    Raises:
      ValueError: not a list, a message without a role, or content other than text.
    """
    found = parse_nested(value)
    if not isinstance(found, list):
        raise ValueError(f"has {format_value(value)} where messages are expected")
    return [read_message(each) for each in found]


def read_message(value: Any) -> dict[str, Any]:
    """Return a message: role, content (text, empty if missing) and its other keys.

    Raises:
      ValueError: see `read_messages`.
    """
    found = parse_nested(value)
    if not isinstance(found, dict) or is_missing(found.get("role")):
        raise ValueError(f"has the message {format_value(value)}, which has no role")
    kept = {
        key: each
        for key, each in found.items()
        if key not in ("content", *REASONING) and not is_missing(each)
    }
    message = {"role": str(kept.pop("role")), "content": _content(found.get("content")), **kept}
    calls = read_calls(message.pop("tool_calls", None))
    if calls:
        message["tool_calls"] = calls
    for name in REASONING:
        thought = found.get(name)
        if is_missing(thought) or "reasoning_content" in message:
            continue
        if not isinstance(thought, str):
            raise ValueError(
                f"has a message whose {name} is {format_value(thought)}; expected text"
            )
        message["reasoning_content"] = thought
    return message


def reply_text(message: dict[str, Any]) -> str:
    """Return the text that the policy wrote as a message, without its tool calls."""
    content, thought = message["content"], message.get("reasoning_content")
    return f"{OPEN}{thought}{CLOSE}{content}" if thought else content


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls; arguments in JSON text become objects.

    Raises:
      ValueError: a call that is not an object.
    """
    found = parse_nested(value)
    if is_missing(found):
        return []
    calls = []
    for raw in found if isinstance(found, list) else [found]:
        call = parse_nested(raw)
        if not isinstance(call, dict):
            raise ValueError(f"has the tool call {format_value(raw)}; expected an object")
        function = parse_nested(call.get("function"))
        if isinstance(function, dict):
            calls.append(call | {"function": _with_arguments(function)})
        else:
            calls.append(_with_arguments(call))
    return calls


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    if is_missing(function.get("name")):
        raise ValueError(f"has the tool call {format_value(function)}, which has no name")
    arguments = parse_nested(function.get("arguments"))
    return function | {"arguments": {} if is_missing(arguments) else arguments}


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools that a row offers: a list of objects, which may be JSON text.

    Raises:
      ValueError: anything else.
    """
    found = parse_nested(value)
    tools = [parse_nested(each) for each in found] if isinstance(found, list) else [None]
    result = [each for each in tools if isinstance(each, dict)]
    if len(result) < len(tools):
        raise ValueError(f"has {format_value(value)} as its tools; expected a list of objects")
    return result


def openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's chat API, which chat templates read.

    The tool may be in that form, or have its name and parameters directly, as in OpenAI's Responses
    API (with its type), in MCP and in agents' own definitions.
    """
    if isinstance(tool.get("function"), dict) or "name" not in tool:
        return tool
    schemas = ("input_schema", "inputSchema")  # of Anthropic's API and of MCP
    function = {
        "parameters" if key in schemas else key: value
        for key, value in tool.items()
        if key != "type"
    }
    return {"type": "function", "function": function}


def count_keys(value: Any) -> collections.Counter[str]:
    """Count messages by key, except role, content and the reasoning, which are always read.

    Keys inside tool calls and parts are counted as `tool_calls[].id` and `content[].cache_control`.
    """
    counts: collections.Counter[str] = collections.Counter()
    for raw in parse_nested(value):
        message = parse_nested(raw)
        paths = {key for key, each in message.items() if not is_missing(each) and each != []}
        for call in _objects(message.get("tool_calls")):
            paths |= {f"tool_calls[].{key}" for key, each in call.items() if not is_missing(each)}
        for part in _objects(message.get("content")):
            paths |= {f"content[].{key}" for key in part if key not in ("type", "text")}
        if all(name in paths for name in REASONING) and len({message[n] for n in REASONING}) == 1:
            paths.discard(REASONING[1])  # some servers write the same text twice
        used = next((name for name in REASONING if name in paths), None)
        counts.update(paths - {"role", "content", used})
    return counts


def _objects(value: Any) -> Sequence[dict[str, Any]]:
    found = parse_nested(value)
    many = found if isinstance(found, list) else [found]
    return [each for each in map(parse_nested, many) if isinstance(each, dict)]


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if is_missing(value):
        return ""
    if not isinstance(value, list | dict):
        raise ValueError(f"has a message whose content is {format_value(value)}; expected text")
    texts = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
            part = "" if part.get("text") is None else part["text"]
        if not isinstance(part, str):
            raise ValueError(f"has a message with {format_value(part)}; only text is supported")
        texts.append(part)
    return "".join(texts)
