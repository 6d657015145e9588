"""A turn as OpenAI messages, and whether these give back the ids that it was trained on.

    prompt_ids  = template(messages[:-1], generation prompt, enable_thinking) + added
    sampled_ids = the last message less its lead, and the stop token

A prompt is built of ids: earlier replies as they were sampled, and text in which no control string
is control. Where the tokenizer reads the messages otherwise (a reply that it would spell with other
tokens, an observation that holds `<|im_end|>`, a template that drops earlier reasonings), the row
says so.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.model.template import ASKED_TO_THINK, Template, whole_characters
from ragen_jax.rollout.chat import Chat
from ragen_jax.types import Turn

CLOSED, OTHER_STOP, TRUNCATED = "closed", "other stop", "truncated"  # how a reply ends


def transcript(chat: Chat, turns: Sequence[Turn], turn: Turn) -> dict[str, Any]:
    """The messages that a turn shows, its reply the last of them, and what they leave out.

    Args:
      turns: the episode's turns before it.

    Returns:
      messages: dicts of role and content. Replies begin with the thought's opening tag, and have no
        stop token. What a call led to has the role "tool".
      tools: the JSON schemas that the template shows; left out where there are none.
      added: text that the prompt has behind the template's generation prompt ("<think>" or ""),
        with which the last message begins.
      prompt_exact: whether the tokenizer gives the prompt's ids of the template's text of
        messages[:-1] and `added`.
      reply_exact: whether it gives the sampled ids, less a stop token, of the last message's text
        behind what the prompt has of it.
      end: "closed" (by the template's own stop token), "other stop", or "truncated" (none: at
        rollout.max_new_tokens).
    """
    opening = chat.text(chat.opening)
    lead, added = chat.template.lead + opening, chat.template.added + opening
    shown = turns[chat.first_shown(turns, turn.message, turn.prompt) :]
    messages = [] if chat.system is None else [_message("system", chat.system)]
    role = "user"
    for earlier in shown:
        messages.append(_message(role, earlier.message))
        messages.append(_message("assistant", lead + chat.text(_said(chat, earlier))))
        role = "tool" if chat.calls(earlier) else "user"
    messages.append(_message(role, turn.message))
    said = _said(chat, turn)
    reply = chat.text(said)
    asked = _ask(chat.template, tuple((m["role"], m["content"]) for m in messages), added)
    stopped = len(said) < len(turn.sampled)
    closed = stopped and turn.sampled[-1] == chat.close_id
    return {
        "messages": [*messages, _message("assistant", lead + reply)],
        **({"tools": list(chat.template.tools)} if chat.template.tools else {}),
        "added": added,
        "prompt_exact": np.array_equal(asked, turn.prompt),
        "reply_exact": np.array_equal(_encode(chat.template, reply), said),
        "end": CLOSED if closed else OTHER_STOP if stopped else TRUNCATED,
    }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": whole_characters(content)}


def _said(chat: Chat, turn: Turn) -> np.ndarray:
    """The sampled ids without the stop token, if there is one."""
    stopped = len(turn.sampled) > 0 and int(turn.sampled[-1]) in chat.stop_ids
    return turn.sampled[:-1] if stopped else turn.sampled


@functools.lru_cache(maxsize=4096)  # members of a group are shown the same first prompt
def _ask(template: Template, messages: tuple[tuple[str, str], ...], added: str) -> np.ndarray:
    conversation = [{"role": role, "content": content} for role, content in messages]
    text = template.tokenizer.apply_chat_template(
        conversation,
        tools=list(template.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        **ASKED_TO_THINK,
    )
    return _encode(template, f"{text}{added}")


def _encode(template: Template, text: str) -> np.ndarray:
    ids = template.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
    return np.asarray(ids["input_ids"], np.int32)
