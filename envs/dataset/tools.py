"""Python functions that the agent may call: their JSON schemas, and the results of calls."""

import inspect
import json
from collections.abc import Callable, Collection
from typing import Any

from ragen_jax.core.clean_text import clean_text, error_message
from ragen_jax.envs.options import attribute_of

OPENS, CLOSES = "<tool_call>", "</tool_call>"  # around a call, as rollout/chat.py passes it


class Tools:
    """The functions of a list MODULE:LIST, by name.

    The schemas are derived from signatures and docstrings (`transformers.utils.get_json_schema`):
    every argument needs a type, and a line in the section "Args:" of the docstring.

    Raises:
      ValueError: there is no such list, or a function in it has no schema.
    """

    def __init__(self, option: str, value: str) -> None:
        found = attribute_of(option, value, "MODULE:LIST")
        if not isinstance(found, (list, tuple)) or not found or not all(map(callable, found)):
            raise ValueError(f"{option} {value!r} must be a list of functions, got {found!r:.80}")
        self._functions: dict[str, Callable[..., Any]] = {}
        schemas = []
        for function in found:
            schemas.append(_schema(option, value, function))
            self._functions[schemas[-1]["function"]["name"]] = function
        if len(self._functions) < len(found):
            raise ValueError(f"{option} {value!r} has two functions of the same name")
        self.schemas: tuple[dict[str, Any], ...] = tuple(schemas)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a function of the list and return the text to show.

        The text is the result, or "error: ..." for wrong arguments and if the function raises.
        """
        function = self._functions[name]
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {name}: {error}"
        try:
            result = function(**arguments)
        except (Exception, SystemExit) as error:  # the agent's arguments may cause any of them
            return f"error: {name}: {error_message(error)}"
        return clean_text(result if isinstance(result, str) else json.dumps(result, default=str))


def parse_call(text: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Return the name of the tool and the arguments of the call that an action contains.

    Args:
      names: of the tools that there are.

    Raises:
      ValueError: the call cannot be read, names no tool, or its arguments are not an object.
    """
    content = text.removeprefix(OPENS).removesuffix(CLOSES).strip()
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a call must be JSON: {error}") from error
    if not isinstance(call, dict) or "name" not in call:
        raise ValueError('a call must be {"name": ..., "arguments": {...}}')
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"no tool {name!r:.80}; there are: {', '.join(names)}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return name, arguments


def function_schema(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return the schema of a tool in OpenAI's form, which chat templates read."""
    described = {"name": name, "description": description or "", "parameters": parameters}
    return {"type": "function", "function": described}


def is_call(action: str) -> bool:
    """Whether an action is a tool call rather than an answer."""
    return action.startswith(OPENS) and action.endswith(CLOSES)


def _schema(option: str, value: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # imported here because it takes a second

    name = getattr(function, "__name__", repr(function))
    try:
        return get_json_schema(function)
    except Exception as error:  # of several kinds without a common base class
        line = " ".join(str(error).split())
        raise ValueError(f"{option} {value!r}: {name} has no JSON schema: {line}") from error
