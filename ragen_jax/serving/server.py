"""The HTTP server: chat completions for clients with the key of a session, and an admin door.

    POST /v1/chat/completions       with the key as API key, or under /s/KEY/v1/
    POST /v1/completions, /v1/responses
    GET  /v1/models
    POST /v1/reward                 a number, or an object with the reward: kept with the session
    POST /admin/sessions            with the admin key: opens a session, returns its key; the body
                                    may hold its budget (calls, tokens, seconds)
    DELETE /admin/sessions/KEY      with the admin key: ends it and writes its record

Starlette is a small ASGI library without a framework of its own, and uvicorn serves it; both are
maintained by the same people.
"""

import asyncio
import dataclasses
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragen_jax.model.template import PromptError, plain_ids
from ragen_jax.rollout.rows import Endings
from ragen_jax.serving import completions, protocol, responses
from ragen_jax.serving.completions import CompletionRequest
from ragen_jax.serving.conversation import Conversation, Message, Reply
from ragen_jax.serving.engine import Engine, Sampled, Ticket
from ragen_jax.serving.protocol import Answer, ChatRequest, RequestError
from ragen_jax.serving.recording import Call, Start, find_start
from ragen_jax.serving.sessions import CONTEXT_EXCEEDED, Budget, Session, Sessions
from ragen_jax.storage.console import console

MOST_BYTES = 4 * 2**20  # of a request's body
SECONDS_TO_READ = 60.0  # a body


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server serves.

    name: of the model, as clients see it
    positions: of the model, for a prompt and its reply
    vocabulary: number of the model's token ids
    most: maximum tokens of a reply
    listed: fields of requests that are not read and have been listed on the console
    """

    engine: Engine
    conversation: Conversation
    sessions: Sessions
    name: str
    positions: int
    vocabulary: int
    most: int
    endings: Endings
    admin_key: str
    listed: set[str] = dataclasses.field(default_factory=set)


def make_app(served: Served) -> Starlette:
    """Return the ASGI application."""

    def list_unread(names: Sequence[str]) -> None:
        new = set(names) - served.listed
        if new:
            served.listed.update(new)
            console(f"fields of requests that are not read: {', '.join(sorted(new))}")

    async def chat(request: Request) -> Response:
        session = served.sessions.find(_key(request))
        asked = protocol.parse_chat(await _json(request))
        list_unread(asked.unread)
        answer, now = await _answer(served, session, asked), int(time.time())
        if asked.stream:
            return _streamed(protocol.chunks(answer, asked, now))
        return JSONResponse(protocol.completion(answer, asked, now))

    async def complete(request: Request) -> Response:
        session = served.sessions.find(_key(request))
        asked = completions.parse_completion(await _json(request), served.vocabulary)
        list_unread(asked.unread)
        answer, now = await _complete(served, session, asked), int(time.time())
        if asked.stream:
            return _streamed(completions.chunks(answer, asked, now))
        return JSONResponse(completions.completion(answer, asked, now))

    async def respond(request: Request) -> Response:
        session = served.sessions.find(_key(request))
        asked = responses.parse_response(await _json(request))
        list_unread(asked.unread)
        answer = await _answer(served, session, asked)
        return JSONResponse(responses.response(answer, int(time.time())))

    async def reward(request: Request) -> Response:
        session = served.sessions.find(_key(request))
        session.posted = await _json(request)
        return JSONResponse({})

    async def models(request: Request) -> Response:
        served.sessions.find(_key(request))
        return JSONResponse(protocol.models(served.name, served.positions))

    async def open_session(request: Request) -> Response:
        _require_admin(request, served.admin_key)
        asked = await request.body()
        key = served.sessions.open(budget=_budget(await _json(request)) if asked else None)
        return JSONResponse({"api_key": key, "path": f"/s/{key}/v1"})

    async def end_session(request: Request) -> Response:
        _require_admin(request, served.admin_key)
        session = served.sessions.end(request.path_params["key"])
        return JSONResponse({"calls": len(session.calls)})

    return Starlette(
        routes=[
            *(
                Route(prefix + path, _guarded(handler), methods=[method])
                for prefix in ("/v1", "/s/{key}/v1")
                for path, handler, method in (
                    ("/chat/completions", chat, "POST"),
                    ("/completions", complete, "POST"),
                    ("/responses", respond, "POST"),
                    ("/models", models, "GET"),
                    ("/reward", reward, "POST"),
                )
            ),
            Route("/admin/sessions", _guarded(open_session), methods=["POST"]),
            Route("/admin/sessions/{key}", _guarded(end_session), methods=["DELETE"]),
        ],
        exception_handlers={404: _not_found},
    )


Handler = Callable[[Request], Awaitable[Response]]


def _guarded(handler: Handler) -> Handler:
    """Return a handler that answers a `RequestError` in OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return JSONResponse(error.body(), error.status)

    return guarded


async def _not_found(request: Request, error: Exception) -> Response:
    del error
    return JSONResponse(RequestError(f"there is no {request.url.path}", 404).body(), 404)


def _budget(asked: object) -> Budget:
    """Return the budget that the body of a request to open a session asks for."""
    names = [field.name for field in dataclasses.fields(Budget)]
    if not isinstance(asked, dict) or not asked.keys() <= set(names):
        raise RequestError(f"the body must be an object with {', '.join(names)}, or empty")
    for name, value in asked.items():
        whole = isinstance(value, int) or (name == "seconds" and isinstance(value, float))
        if not whole or isinstance(value, bool) or not 0 <= value < 1e9:  # False for NaN
            raise RequestError(f"{name} is {value!r:.80}; it must be a number of at least 0")
    return Budget(**asked)


def _streamed(events: Sequence[str]) -> Response:
    return StreamingResponse(iter(events), media_type="text/event-stream")


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _key(request: Request) -> str:
    """Return the key of a session: that of the path, else the API key."""
    return request.path_params.get("key") or _bearer(request)


def _require_admin(request: Request, key: str) -> None:
    if not hmac.compare_digest(_bearer(request).encode(), key.encode()):
        raise RequestError("the API key is not the admin key", 401, "invalid_api_key")


async def _json(request: Request) -> object:
    """Return the JSON of a request's body.

    Raises:
      RequestError: it is too long, too slow, or not JSON.
    """
    body = bytearray()

    async def read() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > MOST_BYTES:
                raise RequestError(f"the body has more than {MOST_BYTES} bytes", 413)

    try:
        await asyncio.wait_for(read(), SECONDS_TO_READ)
    except TimeoutError as error:
        raise RequestError(f"the body took more than {SECONDS_TO_READ:g} s", 400) from error
    except ClientDisconnect as error:
        raise RequestError("the client has gone") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _answer(served: Served, session: Session, asked: ChatRequest) -> Answer:
    """Return the policy's reply to a chat request, which is recorded in the session."""
    number = session.begin(time.monotonic())
    try:
        start = find_start(session.calls, served.conversation, asked.messages, asked.tools)
    except PromptError as error:
        raise RequestError(str(error)) from error
    sampled = await _sample(served, session, number, start, asked.most)
    text, finish = _read(served, sampled, asked.stop)
    reply = served.conversation.read(text, asked.tools)
    finish = "tool_calls" if reply.message.calls else finish
    shown = (*asked.messages, reply.message)
    call = Call(
        start.continues, asked.tools, shown, start.prompt, *sampled, finish, reply.malformed_calls
    )
    session.add(call)
    return _as_answer(served, call, reply)


async def _complete(served: Served, session: Session, asked: CompletionRequest) -> Answer:
    """Return the policy's continuation of a prompt, which is recorded in the session."""
    number = session.begin(time.monotonic())
    conversation = served.conversation
    if isinstance(asked.prompt, str):
        try:
            prompt = plain_ids(conversation.tokenizer, conversation.control, asked.prompt)
        except PromptError as error:
            raise RequestError(str(error)) from error
    else:
        prompt = np.asarray(asked.prompt, np.int32)
    start = completions.find_start(session.calls, prompt)
    sampled = await _sample(served, session, number, start, asked.most)
    text, finish = _read(served, sampled, asked.stop)
    reply = Reply(Message("assistant", text), 0)
    shown = (Message("user", served.conversation.text(prompt.tolist())), reply.message)
    call = Call(start.continues, (), shown, prompt, *sampled, finish)
    session.add(call)
    return _as_answer(served, call, reply)


async def _sample(
    served: Served, session: Session, number: int, start: Start, most: int | None
) -> Sampled:
    """Return the engine's reply to a prompt.

    Raises:
      RequestError: the prompt leaves no room for a reply, or the engine has failed (status 500).
    """
    room = served.positions - len(start.prompt)
    if room < 1:
        session.refused = CONTEXT_EXCEEDED
        raise RequestError(
            # In words that clients look for, to shorten their history.
            f"this model's maximum context length is {served.positions} tokens for a prompt and "
            f"its reply; the prompt has {len(start.prompt)}",
            code=CONTEXT_EXCEEDED,
        )
    most = min(most or served.most, served.most, room)
    ticket = Ticket(start.prompt, most, (*session.draw, number))
    try:
        return await asyncio.wrap_future(served.engine.submit(ticket))
    except RuntimeError as error:
        raise RequestError(str(error), 500) from error


def _read(served: Served, sampled: Sampled, stop: Sequence[str]) -> tuple[str, str]:
    """Return (the text of a reply up to the client's stop strings, why it ended)."""
    ids, endings = sampled.ids.tolist(), served.endings
    closed = bool(ids) and ids[-1] in endings.ids
    ended = closed or (endings.stops is not None and endings.stops.have_ended(sampled.ids))
    text = served.conversation.text(ids[:-1] if closed else ids)
    cut = protocol.cut_at(text, stop)
    return cut, "stop" if ended or cut != text else "length"


def _as_answer(served: Served, call: Call, reply: Reply) -> Answer:
    return Answer(
        number=secrets.token_hex(12),
        model=served.name,
        reply=reply,
        prompt=call.prompt,
        sampled=call.sampled,
        logp=call.logp,
        finish=call.finish,
        pieces=[served.conversation.text([id_]) for id_ in call.sampled.tolist()],
    )
