"""The calls of a session as the turns of an episode."""

import dataclasses
from collections.abc import Sequence

from ragen_jax.core.types import Turn
from ragen_jax.envs.types import HarnessResult
from ragen_jax.serving.conversation import as_json
from ragen_jax.serving.harness_chat import HarnessChat
from ragen_jax.serving.recording import Call, kept_calls


def as_turns(chat: HarnessChat, calls: Sequence[Call]) -> tuple[list[Turn], list[int], int]:
    """Return the turns of a session, without rewards.

    Each kept call is a turn. A call is followed by the calls that continue it, so that a row of
    tokens goes from a root to a leaf (algorithm/batch.py), and roots are in the order in which they
    were answered.

    Returns:
      (turns, index of each turn's call, sampled tokens of the calls that are left out).
    """
    kept, _ = kept_calls(calls)
    after: dict[int | None, list[int]] = {}
    for index in kept:
        after.setdefault(calls[index].continues, []).append(index)
    order: list[int] = []
    waiting = after.get(None, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += after.get(order[-1], [])[::-1]
    left_out = sum(len(call.sampled) for call in calls)
    left_out -= sum(len(calls[index].sampled) for index in order)
    return [_as_turn(chat, calls[index]) for index in order], order, left_out


def with_rewards(
    turns: Sequence[Turn], order: Sequence[int], calls: int, result: HarnessResult
) -> tuple[Turn, ...]:
    """Return the turns with the rewards of an episode's result, and its facts on the last turn.

    The reward of a call that is left out goes to the last turn whose call was answered before it.

    Args:
      order: index of each turn's call.
      calls: number of calls.

    Raises:
      ValueError: the result has another number of rewards than there are calls.
    """
    reward = [0.0] * len(turns)
    if not result.rewards:
        reward[-1] = result.reward
    elif len(result.rewards) != calls:
        raise ValueError(
            f"the harness gave {len(result.rewards)} rewards, but {calls} of its requests were "
            "answered"
        )
    for call, value in enumerate(result.rewards):
        before = [place for place, index in enumerate(order) if index <= call]
        reward[max(before, key=lambda place: order[place], default=0)] += value
    facts = {**result.info, "success": result.success}
    last = len(turns) - 1
    return tuple(
        dataclasses.replace(turn, reward=reward[place], info=facts if place == last else {})
        for place, turn in enumerate(turns)
    )


def _as_turn(chat: HarnessChat, call: Call) -> Turn:
    reply, (*shown, said) = chat.read(call.sampled), call.shown
    named = tuple(f"{c.name} {c.arguments}" for c in said.calls)
    return Turn(
        prompt=call.prompt,
        message=shown[-1].text if shown else "",
        sampled=call.sampled,
        logp=call.logp,
        reasoning=reply.reasoning,
        answer=reply.answer,
        actions=named or ((said.text,) if said.text else ()),
        valid=reply.valid and call.finish != "length" and not call.malformed_calls,
        reward=0.0,
        info={},
        messages=tuple(as_json(message) for message in call.shown),
        tools=call.tools,
    )
