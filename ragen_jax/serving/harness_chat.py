"""The `Chat` of an environment whose prompts a program writes: how replies and prompts are read."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Turn
from ragen_jax.rollout.chat import Chat, Reply, Spans, token_span
from ragen_jax.rollout.stops import END_OF_REASONING
from ragen_jax.serving.conversation import THINK, Conversation

CALL = b"<tool_call>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessChat(Chat):
    """A `Chat` that does not build prompts.

    conversation: builds them, from the messages of requests
    """

    conversation: Conversation

    def read(self, sampled: Sequence[int] | np.ndarray) -> Reply:
        """Find the reasoning in sampled ids, and what follows it (`Reply.answer`).

        The reasoning ends at </think>. In a reply without <think> it ends at the first tool call;
        a reply without a call is all reasoning. Never raises.
        """
        if len(sampled) and int(sampled[-1]) in self.stop_ids:
            sampled = sampled[:-1]
        text, ends = self._bytes(sampled)
        if self.conversation.thinks or text.lstrip().startswith(THINK.encode()):
            close = text.find(END_OF_REASONING)
            if close < 0:
                return Reply((0, 0), (0, 0), (), False)
            rest = close + len(END_OF_REASONING)
        else:
            close = rest = text.find(CALL) if CALL in text else len(text)
        return Reply(token_span(ends, 0, close), token_span(ends, rest, len(text)), (), True)

    def without_reasoning(
        self, turns: Sequence[Turn], message: str, prompt: np.ndarray, spans: Spans = ()
    ) -> np.ndarray:
        """Return the int32 ids of `prompt` without the reasoning of the replies that it repeats."""
        del message, spans
        kept_P = np.ones(len(prompt), bool)
        for turn in turns:
            start = len(turn.prompt)
            reply = prompt[start : start + len(turn.sampled)]
            before = np.array_equal(prompt[:start], turn.prompt)
            if before and np.array_equal(reply, turn.sampled):
                first, last = turn.reasoning
                closed = last > first or self.read(turn.sampled).valid
                kept_P[start + first : start + (last if closed else len(turn.sampled))] = False
        return prompt[kept_P]


def harness_chat(chat: Chat, conversation: Conversation) -> HarnessChat:
    """Return the `HarnessChat` of a model, with the token ids of `chat`."""
    fields = {field.name: getattr(chat, field.name) for field in dataclasses.fields(chat)}
    return HarnessChat(**fields, conversation=conversation)
