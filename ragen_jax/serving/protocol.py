"""Requests, responses and errors of the OpenAI API (chat completions), as plain objects.

Fields that would make training wrong (temperature, top_p) are the server's; a request that asks for
others is served, and the fields are listed once. Errors that a client must not retry have status
400, 401, 404 or 413.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.serving.conversation import Message, Reply
from ragen_jax.serving.tool_calls import JsonObject, ToolCall

ROLES = {"developer": "system", **{r: r for r in ("system", "user", "assistant", "tool")}}
READ = (
    *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "n", "logprobs", "return_token_ids"),
)  # fields of a request that are read


class RequestError(ValueError):
    """A request that cannot be served: its status, a type and, for known kinds, a code."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> JsonObject:
        """Return the response's body."""
        kinds = {401: "authentication_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {
            "error": {"message": str(self), "type": kind, "param": None, "code": self.code},
        }


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """What is read of a chat request.

    most: maximum tokens of the reply that the client asks for; None: the server's
    unread: names of the fields that are not read
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    most: int | None
    stop: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool
    unread: tuple[str, ...]


def parse_chat(body: Any) -> ChatRequest:
    """Return a request from its JSON body.

    Raises:
      RequestError: it cannot be served.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message")
    if body.get("n") not in (None, 1):
        raise RequestError(f"n is {body['n']!r}; only 1 is supported")
    options = body.get("stream_options")
    return ChatRequest(
        messages=tuple(_parse_message(m, i) for i, m in enumerate(messages)),
        tools=parse_tools(body.get("tools")),
        most=parse_most(body, ("max_completion_tokens", "max_tokens")),
        stop=parse_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        usage_in_stream=isinstance(options, dict) and bool(options.get("include_usage")),
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
        unread=tuple(name for name in body if name not in READ and body[name] is not None),
    )


def parse_most(body: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first of the fields `names` that is given: the tokens that a client asks for."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
        return value
    return None


def parse_stop(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a request."""
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise RequestError(f"stop is {value!r:.80}; it must be a text or a list of texts")
    return tuple(texts)


def parse_tools(value: Any) -> tuple[JsonObject, ...]:
    """Return the offered tools."""
    if not value:  # [] and null mean that there are none
        return ()
    if not isinstance(value, list):
        raise RequestError("tools must be a list")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("each of tools must be {'type': 'function', 'function': {'name'}}")
    return tuple(value)


def parse_role(message: Any, where: str) -> str:
    """Return the role of a message; `where` it is, for errors."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where} has role {role!r:.40}; accepted: {', '.join(ROLES)}")
    return ROLES[role]


def _parse_message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    role = parse_role(message, where)
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise RequestError(f"{where}.tool_calls must be a list")
    calls = tuple(parse_call(call, where) for call in given)
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RequestError(f"{where}.reasoning_content must be a text")
    text = parse_content(message.get("content"), where)
    return Message(role, text, reasoning, calls)


def parse_content(content: Any, where: str) -> str:
    """Return the text of a message's content: a text, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where}.content has a part of type {kind!r}; only text is read")
        texts.append(part["text"])
    return "".join(texts)


def parse_call(call: Any, where: str) -> ToolCall:
    """Return a tool call of a message."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{where}.tool_calls has a call without function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"{where}.tool_calls: arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.tool_calls: arguments are not a JSON object")
    return ToolCall(name, arguments)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A reply as it is returned.

    number: of the call, for unique ids
    prompt, sampled: int32 ids; logp: float32
    finish: "stop", "length" or "tool_calls"
    """

    number: str
    model: str
    reply: Reply
    prompt: np.ndarray
    sampled: np.ndarray
    logp: np.ndarray
    finish: str
    pieces: Sequence[str]  # text of each sampled id


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the client's stop strings."""
    ends = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(ends)] if ends else text


def completion(answer: Answer, request: ChatRequest, now: int) -> JsonObject:
    """Return the body of a plain response.

    Args:
      now: seconds since the epoch.
    """
    choice: JsonObject = {
        "index": 0,
        "message": _message(answer),
        "finish_reason": answer.finish,
        "logprobs": _logprobs(answer) if request.logprobs else None,
    }
    body = {**_head(answer, "chat.completion", now), "choices": [choice], "usage": _usage(answer)}
    if request.token_ids:
        body["prompt_token_ids"] = answer.prompt.tolist()
        choice["token_ids"] = answer.sampled.tolist()
    return body


def chunks(answer: Answer, request: ChatRequest, now: int) -> list[str]:
    """Return the server-sent events of a streamed response: role, text, calls, finish, usage."""
    message = _message(answer)
    calls = message.pop("tool_calls", [])
    deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: message[name]}] if message.get(name) else []
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
    head = _head(answer, "chat.completion.chunk", now)
    events: list[JsonObject] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in deltas
    ]
    last: JsonObject = {"index": 0, "delta": {}, "finish_reason": answer.finish}
    if request.logprobs:
        last["logprobs"] = _logprobs(answer)
    if request.token_ids:
        last["token_ids"] = answer.sampled.tolist()
        events[0]["prompt_token_ids"] = answer.prompt.tolist()
    events.append({**head, "choices": [last]})
    if request.usage_in_stream:
        events.append({**head, "choices": [], "usage": _usage(answer)})
    return [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]


def models(name: str, positions: int) -> JsonObject:
    """Return the body of /v1/models."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "ragen_jax"}
    return {"object": "list", "data": [model | {"max_model_len": positions}]}


def _head(answer: Answer, kind: str, now: int) -> JsonObject:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": now,
        "model": answer.model,
    }


def _message(answer: Answer) -> JsonObject:
    message = answer.reply.message
    written: JsonObject = {"role": "assistant", "content": message.text}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["content"] = message.text or None
        written["tool_calls"] = [
            {
                "id": f"call_{answer.number}_{i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(message.calls)
        ]
    return written


def _usage(answer: Answer) -> JsonObject:
    prompt, reply = len(answer.prompt), len(answer.sampled)
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _logprobs(answer: Answer) -> JsonObject:
    return {
        "content": [
            {"token": piece, "logprob": float(x), "bytes": None, "top_logprobs": []}
            for piece, x in zip(answer.pieces, answer.logp, strict=True)
        ]
    }
