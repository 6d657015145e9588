"""The calls of a session: which call continues which, and which of them are kept.

A call continues the longest earlier path whose messages and tools match its own: its prompt is then
the ids of that call's prompt and reply, and the rendered rest. Otherwise it is a new root. So the
ids of a path are those that were shown and sampled, never text that was tokenised again.

Left out of the recording, and counted: retries and abandoned siblings (calls with the prompt of
another call that was continued or came later), and side roots (roots of a single call, with other
tools or another system message than the first root's, that nothing continues).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.serving.conversation import Conversation, Message, as_json
from ragen_jax.serving.tool_calls import JsonObject


@dataclasses.dataclass(frozen=True)
class Call:
    """A request and its reply.

    continues: index of the call whose path this one continues; None: a new root
    logp: float32 log-probs of the sampled ids
    shown: the conversation up to and including the reply, as the client knows it
    """

    continues: int | None
    tools: tuple[JsonObject, ...]
    shown: tuple[Message, ...]
    prompt: np.ndarray
    sampled: np.ndarray
    logp: np.ndarray
    finish: str
    malformed_calls: int = 0


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a request stands: the call that it continues, if any, and its prompt."""

    continues: int | None
    prompt: np.ndarray


def find_start(
    calls: Sequence[Call],
    conversation: Conversation,
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
) -> Start:
    """Return the longest recorded path that a request continues, and the request's prompt.

    Among equally long paths, the latest is taken.

    Raises:
      PromptError: the chat template or the tokenizer refuses the messages.
    """
    best, length = None, 0
    for index, call in enumerate(calls):
        known = call.shown
        if length <= len(known) < len(messages) and list(call.tools) == list(tools):
            if all(a.same_as(b) for a, b in zip(known, messages, strict=False)):
                best, length = index, len(known)
    if best is None:
        return Start(None, conversation.prompt(messages, tools))
    call, tail = calls[best], messages[length:]
    return Start(best, conversation.go_on(call.prompt, call.sampled, tail, tools))


def kept_calls(calls: Sequence[Call]) -> tuple[list[int], Counter[str]]:
    """Return (indices of the calls that are kept, how many are left out for each reason)."""
    continued = {call.continues for call in calls}
    left_out: dict[int, str] = {}
    same_prompt: dict[bytes, list[int]] = {}
    for index, call in enumerate(calls):
        same_prompt.setdefault(call.prompt.tobytes(), []).append(index)
    for siblings in same_prompt.values():
        alive = [i for i in siblings if i in continued] or siblings[-1:]
        left_out |= {i: "retry" for i in siblings if i not in alive}
    first = next((call for i, call in enumerate(calls) if i not in left_out), None)
    for index, call in enumerate(calls):
        if first is None or call is first or index in left_out:
            continue
        lonely = call.continues is None and index not in continued
        if lonely and _frame(call) != _frame(first):
            left_out[index] = "side call"
    kept = [index for index in range(len(calls)) if index not in left_out]
    return kept, Counter(left_out.values())


def _frame(call: Call) -> tuple[list[JsonObject], list[str]]:
    """Return what stays the same in the calls of an agent: its tools and system messages."""
    return list(call.tools), [m.text for m in call.shown if m.role == "system"]


def as_records(
    calls: Sequence[Call], session: int, *, shared: bool = False
) -> list[dict[str, Any]]:
    """Return the conversations of a session as lines of a rollout file (docs/score.md).

    A conversation has a root and all kept calls that continue it, as turns.

    Args:
      session: its number.
      shared: whether several agents or episodes share the session: all of its calls are kept.
    """
    kept, left_out = (list(range(len(calls))), Counter()) if shared else kept_calls(calls)
    root: dict[int, int] = {}
    for index, call in enumerate(calls):
        root[index] = index if call.continues is None else root[call.continues]
    conversations: dict[int, list[int]] = {}
    for index in kept:
        conversations.setdefault(root[index], []).append(index)
    return [
        {
            **{"session": session, "calls": len(calls), "left_out": dict(left_out)},
            "malformed_calls": sum(calls[index].malformed_calls for index in indices),
            "turns": [_as_turn(calls[index]) for index in indices],
        }
        for indices in conversations.values()
    ]


def _as_turn(call: Call) -> dict[str, Any]:
    return {
        "messages": [as_json(message) for message in call.shown],
        **({"tools": list(call.tools)} if call.tools else {}),
        "end": call.finish,
        "prompt_ids": call.prompt.tolist(),
        "sampled_ids": call.sampled.tolist(),
        "logps": [round(x, 4) for x in call.logp.tolist()],
    }
