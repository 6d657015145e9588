"""Tool calls in the text of a reply, in the syntax of the model's own chat template.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated (Hermes, Qwen)
    coder    <tool_call><function=F><parameter=P>V</parameter></function></tool_call> (Qwen3-Coder)
    llama    {"name": ..., "parameters": {...}} at the start of the reply (Llama 3.1 and later)

A reply is parsed when it is complete. If one of its calls is malformed or of a tool that was not
offered, the whole reply stays text, so that nothing is lost; the malformed calls are counted.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]

HERMES, CODER, LLAMA = "hermes", "coder", "llama"

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)  # the last may be unclosed
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
# A value may hold </parameter>: it ends where the next parameter or the function's end follows.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: JsonObject


def syntax_of(shown: str) -> str:
    """Return the syntax that a chat template asks for, from its text with a tool."""
    if "<function=" in shown:
        return CODER
    return HERMES if "<tool_call>" in shown else LLAMA


def parse_calls(
    text: str, tools: Sequence[JsonObject], syntax: str
) -> tuple[tuple[ToolCall, ...], str, int]:
    """Return (the calls of a reply, its text without them, number of malformed calls).

    Args:
      text: of the reply, after its reasoning.
      tools: those that were offered, in OpenAI's form.
    """
    offered = {tool["function"]["name"]: tool["function"] for tool in tools}
    if syntax == LLAMA:
        found, rest = _from_start(text)
        blocks = [found] if found is not None else []
        if found is not None and found.get("name") not in offered:
            return (), text, 0  # an answer that happens to be JSON
    else:
        inside = _BLOCK.findall(text)
        coder = syntax == CODER
        blocks = [_coder(each, offered) if coder else _json_object(each) for each in inside]
        rest = _BLOCK.sub("", text).strip()
    calls = []
    for block in blocks:
        name, arguments = (block or {}).get("name"), (block or {}).get("arguments", {})
        if isinstance(name, str) and name in offered and isinstance(arguments, dict):
            calls.append(ToolCall(name, arguments))
    malformed = len(blocks) - len(calls)
    return ((), text, malformed) if malformed or not calls else (tuple(calls), rest, 0)


def _json_object(text: str) -> JsonObject | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _from_start(text: str) -> tuple[JsonObject | None, str]:
    """Return (the JSON object at the start of a text as a call, the rest), in Llama's syntax."""
    start = text.lstrip()
    try:
        found, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return None, text
    if not isinstance(found, dict) or "name" not in found:
        return None, text
    arguments = found.get("parameters", found.get("arguments", {}))
    return {"name": found["name"], "arguments": arguments}, start[end:].strip()


def _coder(inside: str, offered: Mapping[str, JsonObject]) -> JsonObject | None:
    function = _FUNCTION.match(inside)
    if function is None:
        return None
    name, body = function[1].strip(), function[2]
    if _PARAMETER.sub("", body).strip():
        return None  # something between the parameters
    schema = (offered.get(name, {}).get("parameters") or {}).get("properties") or {}
    return {
        "name": name,
        "arguments": {
            key.strip(): _typed(value, schema.get(key.strip()))
            for key, value in _PARAMETER.findall(body)
        },
    }


def _typed(value: str, schema: Any) -> Any:
    """Return a parameter's value by its schema: a text as it is, others as JSON or Python."""
    value = value.removeprefix("\n").removesuffix("\n")
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value)
            json.dumps(found)  # Python's sets and bytes have no place in JSON
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return found
    return value
