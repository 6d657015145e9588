"""An environment on a server of OpenEnv (Hugging Face, Meta): one WebSocket for each episode.

    --config=openenv --config.env.options.url=http://127.0.0.1:8000

The server tells what an action looks like. If it requires one text, the whole answer is that text;
otherwise an answer is a JSON object with the action's fields. Servers with tools (MCP) show them to
the agent, which calls them. A refused action is shown to the agent; its episode goes on.

Members of a group play the same problem only if the server's `reset` uses the seed. A server whose
first observation differs for one seed is refused.
"""

import contextlib
import importlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Mapping
from typing import Any

from ragen_jax.core.clean_text import one_line
from ragen_jax.core.http_json import max_values, parse_json
from ragen_jax.envs.dataset.tools import function_schema, is_call, parse_call
from ragen_jax.envs.engines import ClosingEngine, EngineEnvironment, EngineStep
from ragen_jax.envs.options import finite_number, text
from ragen_jax.envs.scalars import plain_scalar

MAX_BYTES = 2**24  # of a message
MAX_REWARD = 1e6
MAX_SECONDS = 3600.0
OWN_FIELDS = ("done", "reward", "metadata")  # of every observation
SHOWN_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")  # after which the episode goes on
FULL = "CAPACITY_REACHED"


class ServerError(RuntimeError):
    """A server's error message; `code` as in OpenEnv, `said` without the code."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code"))
        listed = data.get("errors")  # of the fields of an action
        of_fields = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
        parts = [f"{_place(e)}{e.get('msg')}" for e in of_fields]
        self.said = one_line("; ".join([str(data.get("message")), *parts]), 500)
        super().__init__(f"the server says {self.code}: {self.said}")


class OpenEnv(EngineEnvironment):
    """An environment of an OpenEnv server (0.10); see `ragen_jax.envs.engines`.

    url: of the server, http:// or https://
    arguments: further arguments of `reset`
    instructions: rules of the game; "": the server's description, with the form of an action
    success_reward: sum of rewards from which an episode counts as a success
    timeout: seconds for an answer of the server, and for a free place on it
    """

    def __init__(
        self,
        url: str = "",
        arguments: Mapping[str, Any] | None = None,
        instructions: str = "",
        success_reward: float = 1.0,
        timeout: float = 60.0,
        split: str | None = "train",
    ) -> None:
        if not text("url", url).startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}")
        text("instructions", instructions)
        least = finite_number("success_reward", success_reward, most=MAX_REWARD)
        seconds = finite_number("timeout", timeout, most=MAX_SECONDS)
        if seconds <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout!r}")
        server = _Server(url.rstrip("/"), dict(arguments or {}), seconds)
        try:
            server.look()
            first, again = (_Episode(server, least).begin(0) for _ in range(2))
        except (OSError, ValueError, ServerError) as error:
            raise ValueError(f"url {url!r} cannot be played: {error}") from error
        if first != again:
            raise ValueError(
                f"the server at {url!r} shows two problems for one seed, so that the members of a "
                "group could not be compared; its reset must use the seed"
            )
        self.tools: tuple[dict[str, Any], ...] = server.tools
        super().__init__(
            lambda: _Episode(server, least),
            name=url,
            instructions=instructions or server.describe(),
            split=split,
            split_by="seed",
            replay=False,
        )


class _Server:
    """What is known of a server."""

    def __init__(self, url: str, arguments: dict[str, Any], seconds: float) -> None:
        self.url, self.arguments, self.seconds = url, arguments, seconds
        self.tools: tuple[dict[str, Any], ...] = ()
        self.properties: dict[str, Any] = {}
        self.required: list[str] = []
        self._about = ""

    def look(self) -> None:
        """Read the server's schema, description and tools."""
        schema = self._get("/schema").get("action") or {}
        described = schema.get("properties") if isinstance(schema, dict) else None
        properties = described if isinstance(described, dict) else {}
        self.properties = {k: v for k, v in properties.items() if k not in OWN_FIELDS}
        self.required = [n for n in schema.get("required") or () if n in self.properties]
        about = self._get("/metadata").get("description")
        self._about = about if isinstance(about, str) else ""
        with _Socket(self) as socket:
            socket.ask("reset", {"seed": 0, **self.arguments})
            try:
                listed = socket.ask("step", {"type": "list_tools"})["observation"].get("tools")
            except ServerError:
                listed = None  # its actions are of another kind
        found = [tool for tool in listed or () if isinstance(tool, dict) and "name" in tool]
        self.tools = tuple(_schema(tool) for tool in found)

    def describe(self) -> str:
        """Return the rules: the server's description, and the form of an action."""
        if self.tools:
            form = ""
        elif self.single is not None:
            form = f"Your answer is the {self.single} of your next action."
        else:
            fields = json.dumps(self.properties)
            form = f"Your answer is your next action, a JSON object with these fields: {fields}"
        return "\n".join(part for part in (self._about, form) if part)

    @property
    def single(self) -> str | None:
        """The only field of an action that is required; None if there are none or several."""
        names = self.required or list(self.properties)
        return names[0] if len(names) == 1 else None

    def action(self, answer: str) -> dict[str, Any]:
        """Return the action that an answer or a call stands for.

        Raises:
          ValueError: it stands for none.
        """
        if self.tools:
            names = [tool["function"]["name"] for tool in self.tools]
            name, arguments = parse_call(answer, names)
            return {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            value = answer
        if isinstance(value, dict) and value.keys() <= self.properties.keys():
            return value
        if self.single is None:
            raise ValueError(f"an action is a JSON object with {', '.join(self.properties)}")
        kind = self.properties[self.single].get("type")
        return {self.single: answer if kind in ("string", None) else value}

    def _get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path; {} if there is none there."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=self.seconds) as answer:
                data = answer.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {}
            raise
        value = parse_json(data, max_values=max_values(MAX_BYTES))
        return value if isinstance(value, dict) else {}


class _Socket:
    """A connection, and so a session, to a server."""

    def __init__(self, server: _Server) -> None:
        self._seconds = server.seconds
        parts = urllib.parse.urlsplit(server.url)
        scheme = "wss" if parts.scheme == "https" else "ws"
        self._url = urllib.parse.urlunsplit((scheme, parts.netloc, f"{parts.path}/ws", "", ""))
        self._socket: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "_Socket":
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        client = _websockets("sync.client")
        try:
            self._socket = self._stack.enter_context(
                client.connect(
                    self._url, open_timeout=self._seconds, max_size=MAX_BYTES, proxy=None
                )
            )
        except (OSError, _websockets("exceptions").WebSocketException) as error:
            raise ConnectionError(f"no WebSocket at {self._url}: {error}") from error

    def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer, an observation.

        Raises:
          ServerError: the answer is an error.
          ConnectionError: there is no answer, or none that can be read.
        """
        broken = _websockets("exceptions").WebSocketException
        try:
            with contextlib.suppress(broken):  # a server may have said why it has closed
                self._socket.send(json.dumps({"type": kind, "data": data}))
            received = self._socket.recv(timeout=self._seconds)
        except TimeoutError as error:
            raise ConnectionError(f"no answer within {self._seconds:g} s") from error
        except (OSError, broken) as error:
            raise ConnectionError(f"the connection broke: {error}") from error
        raw = received.encode() if isinstance(received, str) else received
        answer = parse_json(raw, max_values=max_values(MAX_BYTES))
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise ConnectionError(f"an answer has no data: {one_line(str(answer), 100)}")
        if answer.get("type") == "error":
            raise ServerError(found)
        if not isinstance(found.get("observation"), dict):
            raise ConnectionError("an answer has no observation")
        return found

    def close(self) -> None:
        self._stack.close()


class _Episode(ClosingEngine):
    """An episode on a server; its connection is closed when it is over or forgotten."""

    def __init__(self, server: _Server, least: float) -> None:
        self._server, self._least = server, least
        self._socket, self._total = _Socket(server), 0.0
        # Episodes that end at a limit of the run are only forgotten.
        weakref.finalize(self, self._socket.close)

    def reset(self, seed: int) -> str:
        end, wait = time.monotonic() + self._server.seconds, 0.1
        while True:
            self._socket.connect()
            try:
                return _shown(self._socket.ask("reset", {"seed": seed, **self._server.arguments}))
            except ServerError as error:
                self._socket.close()
                if error.code != FULL or time.monotonic() + wait > end:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, 2.0)

    def close(self) -> None:
        self._socket.close()

    def begin(self, seed: int) -> str:
        """Return the first observation, and close the connection."""
        try:
            return self.reset(seed)
        finally:
            self.close()

    def step(self, action: str) -> EngineStep:
        goes_on = {"success": False}
        if self._server.tools and not is_call(action):  # an answer is final
            self.close()
            return EngineStep("", 0.0, True, {"success": self._total >= self._least})
        try:
            data = self._server.action(action)
            answer = self._socket.ask("step", data)
        except ValueError as error:
            return EngineStep(f"error: {error}", 0.0, False, goes_on)
        except ServerError as error:
            if error.code not in SHOWN_ERRORS:
                raise
            return EngineStep(f"error: {error.said}", 0.0, False, goes_on)
        reward = plain_scalar(answer.get("reward"))
        reward = float(reward) if isinstance(reward, (int, float)) else 0.0
        self._total += reward
        done = bool(answer.get("done"))
        if done:
            self._socket.close()
        info = {"success": self._total >= self._least}
        return EngineStep("" if done else _shown(answer), reward, done, info)


def _websockets(module: str) -> Any:
    """Return a module of the WebSocket client's package.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module(f"websockets.{module}")
    except ImportError as error:
        raise ValueError("OpenEnv needs an extra: pip install 'ragen_jax[openenv]'") from error


def _place(error: dict[str, Any]) -> str:
    """Return the field that an error is about, with a colon."""
    place = error.get("loc")
    return f"{'.'.join(map(str, place))}: " if isinstance(place, list) and place else ""


def _shown(answer: dict[str, Any]) -> str:
    """Return the text of an observation: a tool's result, the only field, or all fields as JSON."""
    seen = {k: v for k, v in answer["observation"].items() if k not in OWN_FIELDS}
    if "tool_name" in seen:
        error, result = seen.get("error"), seen.get("result")
        if error:
            message = error.get("message") if isinstance(error, dict) else error
            return f"error: {message}"
        content = result.get("content") if isinstance(result, dict) else None
        blocks = [x for x in content if isinstance(x, dict)] if isinstance(content, list) else []
        if blocks:
            return "\n".join(str(x.get("text") or f"({x.get('type')})") for x in blocks)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    given = [value for value in seen.values() if value not in (None, "", [], {})]
    if len(given) == 1 and isinstance(given[0], str):
        return given[0]
    return json.dumps(seen, ensure_ascii=False)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool of a server in OpenAI's form."""
    empty = {"type": "object", "properties": {}}
    parameters = tool.get("input_schema") or tool.get("inputSchema") or empty
    return function_schema(tool["name"], tool.get("description"), parameters)
