"""Tools of MCP servers: programs that speak the Model Context Protocol over their standard streams.

Every episode that calls a tool starts its own servers, so that what one agent does is not seen by
another. The protocol is that of the `mcp` package, whose clients all run in one thread.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import shlex
import subprocess
import threading
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any

from ragen_jax.core.clean_text import clean_text, error_message, one_line
from ragen_jax.envs.dataset.tools import function_schema

SECONDS = 60.0  # for an answer, and for the start of a server
SECONDS_TO_END = 5.0  # for a server
PAGES = 100  # of a server's list of tools


class McpServers:
    """The servers of an environment, and the tools that they offer.

    commands: a command line for each server, without a shell

    Raises:
      ValueError: the package is not installed, a server does not start or offers no tool, or two
        tools have the same name.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ValueError("MCP servers need an extra: pip install 'ragen_jax[mcp]'")
        self._commands = [_words(command) for command in commands]
        schemas: dict[str, dict[str, Any]] = {}
        self._server_of: dict[str, int] = {}
        with contextlib.closing(self.open()) as session:
            for number, words in enumerate(self._commands):
                try:
                    offered = session.tools(number)
                except Exception as error:  # of the package and of the program, of any kind
                    line = one_line(_reason(error), 300)
                    raise ValueError(f"mcp server {words[0]!r} cannot be used: {line}") from error
                if not offered:
                    raise ValueError(f"mcp server {words[0]!r} offers no tool")
                for schema in offered:
                    name = schema["function"]["name"]
                    if name in schemas:
                        raise ValueError(f"two mcp tools have the name {name!r}")
                    schemas[name], self._server_of[name] = schema, number
        self.schemas: tuple[dict[str, Any], ...] = tuple(schemas.values())

    def open(self) -> "McpSession":
        """Return the session of an episode; a server starts at the first call of its tools."""
        return McpSession(self._commands)

    def call(self, session: "McpSession", name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result, or "error: ..."; see `Tools.call`."""
        try:
            return session.call(self._server_of[name], name, arguments)
        except Exception as error:  # as above
            return f"error: {name}: {one_line(_reason(error), 500)}"


class McpSession:
    """The servers of one episode, which end when it is closed or forgotten."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._clients: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        weakref.finalize(self, self._stack.close)

    def tools(self, number: int) -> list[dict[str, Any]]:
        """Return the tools of a server in OpenAI's form."""
        client, found, cursor = self._client(number), [], None
        for _ in range(PAGES):
            page = _ask(client.list_tools(cursor=cursor))
            found += [function_schema(t.name, t.description, t.input_schema) for t in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    def call(self, number: int, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of the result of a call; "error: ..." if the tool says so."""
        client = self._client(number)
        result = _ask(client.call_tool(name, arguments))
        texts = [getattr(block, "text", None) or f"({block.type})" for block in result.content]
        text = clean_text("\n".join(texts))
        return f"error: {text}" if result.is_error else text

    def close(self) -> None:
        """End the servers."""
        self._stack.close()

    def _client(self, number: int) -> Any:
        if number not in self._clients:
            connection = _Connection(self._commands[number])
            self._stack.callback(connection.close)
            self._clients[number] = connection.client
        return self._clients[number]


class _Connection:
    """A client of the package, connected to a server that it has started.

    The client is entered and left by one task, as the package demands.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._stop = asyncio.Event()
        ready: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._held = asyncio.run_coroutine_threadsafe(self._hold(words, ready), _loop())
        self.client: Any = ready.result(SECONDS)

    async def _hold(self, words: Sequence[str], ready: "concurrent.futures.Future[Any]") -> None:
        mcp: Any = importlib.import_module("mcp")  # an optional dependency
        program, *rest = words
        server = mcp.StdioServerParameters(command=program, args=rest)
        try:
            streams = mcp.stdio_client(server, errlog=subprocess.DEVNULL)  # they log every call
            async with mcp.Client(streams, read_timeout_seconds=SECONDS) as client:
                ready.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def close(self) -> None:
        """End the server."""
        _loop().call_soon_threadsafe(self._stop.set)
        with contextlib.suppress(Exception):  # whatever the server does at its end
            self._held.result(SECONDS_TO_END)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients. Its thread ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _ask(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a client's call.

    Raises:
      TimeoutError: it takes too long.
    """
    return asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, SECONDS), _loop()).result()


def _reason(error: BaseException) -> str:
    """Return the message of an error, or of the first in a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error_message(error)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"mcp must be command lines, got {command!r}: {error}") from error
    if not words:
        raise ValueError(f"mcp must be command lines, got {command!r}")
    return words
