"""NeMo-Gym's rollouts, NAME.jsonl: an OpenAI Responses request and response, and a reward.

The writers: nemo_gym/rollout_collection.py, nemo_gym/openai_utils.py (the items), and
nemo_gym/global_config.py (the keys). The output of all calls of the model is one list of items; the
ids of a call are on its last item. Failed attempts are in NAME_failures.jsonl.
"""

from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.replies import message_reply
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.messages import Messages, openai_tool, read_message, read_tools
from ragen_jax.score.values import Fields, format_value, parse_nested

FAILURE = "_ng_failure_class"


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    failure = record.get(FAILURE)
    if failure is not None:
        raise ValueError(f"is a failed attempt ({FAILURE} is {format_value(failure)})")
    request, response = record.object("responses_create_params"), record.object("response")
    if request is None or response is None:
        raise ValueError("has no object as its responses_create_params or its response")
    offered = request.get("tools")
    tools = tuple(map(openai_tool, read_tools(offered))) if offered else ()
    history, replies = _prompt(request), []
    call: list[Fields] = []  # items of the current call of the model
    for item in response.objects("output"):
        kind = item.get("type") or "message"
        is_sampled = kind in ("reasoning", "function_call") or (
            kind == "message" and item.get("role") in (None, "assistant")
        )
        if not is_sampled:
            _end_call(call, history, replies, tools)
            _add(record, history, item)
            continue
        call.append(item)
        if item.get("generation_token_ids"):
            _end_call(call, history, replies, tools)
    _end_call(call, history, replies, tools)
    if not replies:
        raise ValueError("has no item of the model in its response.output")
    return tuple(replies)


def _prompt(request: Fields) -> Messages:
    """Return the messages of a request: its instructions, then its input."""
    history: Messages = []
    instructions = request.get("instructions")
    if instructions is not None:
        history.append(read_message({"role": "system", "content": instructions}))
    raw = request.get("input")
    items = parse_nested(raw)
    if isinstance(raw, str) and not (isinstance(items, list) and items and _is_item(items[0])):
        history.append({"role": "user", "content": raw})
        return history
    call: list[Fields] = []
    for item in request.objects("input"):
        kind = item.get("type") or "message"
        if kind in ("reasoning", "function_call") or item.get("role") == "assistant":
            call.append(item)
            continue
        if call:
            history.append(_message(call))
            call = []
        _add(request, history, item)
    if call:
        history.append(_message(call))
    return history


def _is_item(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "type" in value)


def _add(record: Fields, history: Messages, item: Fields) -> None:
    """Append a message or the result of a tool; other items have no form in chat templates."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        history.append(read_message({"role": role, "content": _parts(item.get("content"))}))
    elif kind == "function_call_output":
        result = read_message({"role": "tool", "content": _parts(item.get("output"))})
        call_id = item.get("call_id")
        history.append(result | ({} if call_id is None else {"tool_call_id": call_id}))
    else:
        record.leave_out(f"items of the type {kind!r}")


def _end_call(
    call: list[Fields],
    history: Messages,
    replies: list[ParsedReply],
    tools: tuple[dict[str, Any], ...],
) -> None:
    """Add the reply of a call to the replies and to the history; the items are removed."""
    if not call:
        return
    message = _message(call)
    prompt, sampled = (call[-1].get(f"{name}_token_ids") for name in ("prompt", "generation"))
    if prompt and sampled:
        ids = values.ids(prompt, "prompt_token_ids"), values.ids(sampled, "generation_token_ids")
        replies.append(ParsedReply(*ids))
    else:
        if not history:
            raise ValueError("begins with a reply, without a prompt")
        replies.append(message_reply(list(history), message, tools))
    history.append(message)
    call.clear()


def _message(call: list[Fields]) -> dict[str, Any]:
    """Return the items of a call as an assistant message."""
    content, thoughts, calls = "", [], []
    for item in call:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = parse_nested(item.get("content")) or parse_nested(item.get("summary"))
            thoughts += _texts(parts)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        else:
            content += read_message({"role": "assistant", "content": _parts(item.get("content"))})[
                "content"
            ]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return read_message(message | {"reasoning_content": "\n".join(thoughts)})


def _parts(value: Any) -> Any:
    """Return content, with a refusal as the text that it is."""
    found = parse_nested(value) if not isinstance(value, str) else value
    if not isinstance(found, list):
        return found
    return [
        each["refusal"] if isinstance(each, dict) and each.get("type") == "refusal" else each
        for each in found
    ]


def _texts(parts: Any) -> list[str]:
    """Return the texts of a reasoning's content or summary."""
    if parts is None:
        return []
    found = parts if isinstance(parts, list) else [None]
    texts = [each.get("text") if isinstance(each, dict) else each for each in found]
    result = [each for each in texts if isinstance(each, str)]
    if len(result) < len(texts):
        raise ValueError(f"has a reasoning whose content is {format_value(parts)}; expected texts")
    return result


def _group(record: Fields) -> str | None:
    return values.label(record.get("_ng_task_index"))


FORMAT = Format(("responses_create_params", "response"), _read, group=_group)
