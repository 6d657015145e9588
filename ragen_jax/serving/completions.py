"""The completions API of OpenAI: a prompt as text or token ids, which no chat template renders.

Text never becomes control tokens. Token ids are taken as they are: this is how clients that render
the chat template themselves speak.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.serving.protocol import Answer, RequestError, parse_most, parse_stop
from ragen_jax.serving.recording import Call, Start
from ragen_jax.serving.tool_calls import JsonObject

READ = ("model", "prompt", "max_tokens", "stop", "stream", "n", "logprobs", "return_token_ids")


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """What is read of a completion request; fields as in `protocol.ChatRequest`.

    prompt: a text or token ids
    """

    prompt: str | tuple[int, ...]
    most: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool
    token_ids: bool
    unread: tuple[str, ...]


def parse_completion(body: Any, vocabulary: int) -> CompletionRequest:
    """Return a request from its JSON body.

    Args:
      vocabulary: number of token ids of the model.

    Raises:
      RequestError: it cannot be served.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if body.get("n") not in (None, 1):
        raise RequestError(f"n is {body['n']!r:.40}; only 1 is supported")
    given = body.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        (given,) = given  # a batch of one
    prompt: str | tuple[int, ...]
    if isinstance(given, str) and given:
        prompt = given
    elif isinstance(given, list) and given and all(type(i) is int for i in given):
        prompt = tuple(given)
        outside = [i for i in prompt if not 0 <= i < vocabulary]
        if outside:
            raise RequestError(f"prompt has token id {outside[0]}; the model has {vocabulary} ids")
    else:
        raise RequestError("prompt must be one text or one list of token ids, and not empty")
    return CompletionRequest(
        prompt=prompt,
        most=parse_most(body, ("max_tokens",)),
        stop=parse_stop(body.get("stop")),
        stream=bool(body.get("stream")),
        logprobs=body.get("logprobs") not in (None, False),
        token_ids=bool(body.get("return_token_ids")),
        unread=tuple(name for name in body if name not in READ and body[name] is not None),
    )


def find_start(calls: Sequence[Call], prompt: np.ndarray) -> Start:
    """Return the call with the longest prompt and reply that a prompt of ids begins with."""
    best, length = None, 0
    for index, call in enumerate(calls):
        path = np.concatenate([call.prompt, call.sampled])
        if length <= len(path) < len(prompt) and np.array_equal(prompt[: len(path)], path):
            best, length = index, len(path)
    return Start(best, prompt)


def completion(answer: Answer, request: CompletionRequest, now: int) -> JsonObject:
    """Return the body of a response.

    Args:
      now: seconds since the epoch.
    """
    choice: JsonObject = {
        **{"index": 0, "text": answer.reply.message.text, "finish_reason": answer.finish},
        "logprobs": None,
    }
    if request.logprobs:
        choice["logprobs"] = {
            "tokens": list(answer.pieces),
            "token_logprobs": [float(x) for x in answer.logp],
            **{"top_logprobs": None, "text_offset": []},
        }
    prompt, reply = len(answer.prompt), len(answer.sampled)
    usage = {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
    body: JsonObject = {
        **{"id": f"cmpl-{answer.number}", "object": "text_completion", "created": now},
        **{"model": answer.model, "choices": [choice], "usage": usage},
    }
    if request.token_ids:
        body["prompt_token_ids"] = answer.prompt.tolist()
        choice["token_ids"] = answer.sampled.tolist()
    return body


def chunks(answer: Answer, request: CompletionRequest, now: int) -> list[str]:
    """Return the server-sent events of a streamed response: one with everything, then the end."""
    return [f"data: {json.dumps(completion(answer, request, now))}\n\n", "data: [DONE]\n\n"]
