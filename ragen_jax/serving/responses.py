"""The Responses API of OpenAI, as far as an agent needs it: items in, items out, without a stream.

The server keeps no responses: a request holds the whole input, as the Agents SDK sends it.
"""

import json
from collections.abc import Sequence
from typing import Any

from ragen_jax.serving.conversation import Message
from ragen_jax.serving.protocol import (
    Answer,
    ChatRequest,
    RequestError,
    parse_call,
    parse_content,
    parse_most,
    parse_role,
    parse_tools,
)
from ragen_jax.serving.tool_calls import JsonObject

READ = ("model", "input", "instructions", "tools", "max_output_tokens", "stream")
FALSE = ("background", "previous_response_id", "conversation", "stream")  # must not be asked for


def parse_response(body: Any) -> ChatRequest:
    """Return a request from its JSON body.

    Raises:
      RequestError: it cannot be served.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for name in FALSE:
        if body.get(name):
            raise RequestError(
                f"{name} is {body[name]!r:.40}, which is not supported: responses are not stored "
                "or streamed; send the whole input, or use /v1/chat/completions"
            )
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise RequestError("input must be a text or a list of at least one item")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append(Message("system", parse_content(body["instructions"], "instructions")))
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return ChatRequest(
        messages=tuple(messages),
        tools=parse_tools(_as_chat_tools(body.get("tools"))),
        most=parse_most(body, ("max_output_tokens",)),
        stop=(),
        stream=False,
        usage_in_stream=False,
        logprobs=False,
        token_ids=False,
        unread=tuple(name for name in body if name not in (*READ, *FALSE) and body[name]),
    )


def _add_item(messages: list[Message], item: Any, where: str) -> None:
    """Append the message of an item; a call joins the assistant's message before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if kind == "message":
        messages.append(Message(parse_role(item, where), parse_content(item.get("content"), where)))
    elif kind == "function_call":
        call = parse_call({"function": item}, where)
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant":
            messages[-1] = Message("assistant", last.text, last.reasoning, (*last.calls, call))
        else:
            messages.append(Message("assistant", "", None, (call,)))
    elif kind == "function_call_output":
        messages.append(Message("tool", parse_content(item.get("output"), where)))
    elif kind != "reasoning":  # reasoning of a recorded reply is found there
        raise RequestError(f"{where} has type {kind!r}; only messages and functions are read")


def _as_chat_tools(tools: Any) -> Any:
    """Return tools in the form of chat completions, which templates show."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def response(answer: Answer, now: int) -> JsonObject:
    """Return the body of a response.

    Args:
      now: seconds since the epoch.
    """
    message, number = answer.reply.message, answer.number
    output: list[JsonObject] = []
    if message.reasoning is not None:
        text = [{"type": "reasoning_text", "text": message.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": text})
    if message.text or not message.calls:
        part = {"type": "output_text", "text": message.text, "annotations": []}
        output.append(
            {
                **{"type": "message", "id": f"msg_{number}", "role": "assistant"},
                **{"status": "completed", "content": [part]},
            }
        )
    output += [
        {
            **{"type": "function_call", "id": f"fc_{number}_{i}", "call_id": f"call_{number}_{i}"},
            **{"name": call.name, "arguments": json.dumps(call.arguments), "status": "completed"},
        }
        for i, call in enumerate(message.calls)
    ]
    cut = answer.finish == "length"
    return {
        **{"id": f"resp_{number}", "object": "response", "created_at": now, "model": answer.model},
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **{"error": None, "output": output, "usage": _usage(answer)},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
    }


def _usage(answer: Answer) -> JsonObject:
    sizes: Sequence[int] = (len(answer.prompt), len(answer.sampled))
    return {
        **{"input_tokens": sizes[0], "output_tokens": sizes[1], "total_tokens": sum(sizes)},
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
