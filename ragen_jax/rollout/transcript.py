"""Write a turn as OpenAI messages, and check whether these reproduce the ids used in training.

    prompt_ids  = template(messages[:-1], generation prompt, enable_thinking) + added
    sampled_ids = the last message without its lead, and the stop token

A template that shows the date uses model.date of the run's config.json.

A prompt is built from ids: earlier replies as they were sampled, and text in which control strings
are not control tokens. The tokenizer may read the messages differently: it may split a reply into
other tokens, an observation may contain `<|im_end|>`, or the template may drop earlier reasoning.
The fields prompt_exact and reply_exact report such differences.

A message with images is a list of parts in OpenAI's format, and an image part names a file
(run/log.py writes these files). In the prompt's ids an image has several tokens, all beyond the
vocabulary; in the template's text it has one token.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.core.clean_text import clean_text
from ragen_jax.core.types import Turn
from ragen_jax.envs.types import IMAGE
from ragen_jax.model.template import ASKED_TO_THINK, Template, encode_texts
from ragen_jax.rollout.chat import Chat

# How a reply ends.
CLOSED, OTHER_STOP, STOP_STRING, TRUNCATED = "closed", "other stop", "stop string", "truncated"

THINK = "<think>"
# Content of a message: text, or a tuple of its text parts and images (None).
Content = str | tuple[str | None, ...]


def transcript(
    chat: Chat, turns: Sequence[Turn], turn: Turn, *, folder: str = ""
) -> dict[str, Any]:
    """Return the messages that a turn shows, with its reply as the last, and details about them.

    Args:
      turns: the episode's turns before `turn`.
      folder: prefix of the image files' paths in the messages.

    Returns:
      A dict with these entries.
      messages: dicts of role and content. The content is text or, in a message with images, parts
        of type "text" and "image_url". Replies begin with the opening tag of the reasoning and have
        no stop token. The result of a tool call has the role "tool".
      images: the files of the turn's own images, in order; absent without images.
      tools: the JSON schemas that the template shows; absent without tools.
      added: text of the prompt after the template's generation prompt ("<think>" or ""), with
        which the last message begins.
      prompt_exact: whether tokenizing the template's text of messages[:-1] and `added` gives the
        prompt's ids, with each image counted as one token.
      reply_exact: whether tokenizing the last message, without the part already in the prompt,
        gives the sampled ids without a stop token.
      end: "closed" (by the template's stop token), "other stop" (another stop token), "stop string"
        (rollout.stop), or "truncated" (at rollout.max_new_tokens).
    """
    if turn.messages:
        return _recorded(chat, turn)
    opening = chat.text(chat.opening)
    lead, added = chat.template.lead + opening, chat.template.added + opening
    shown = turns[chat.first_shown(turns, turn.message, turn.prompt, turn.spans) :]
    messages = [] if chat.system is None else [_message("system", chat.system)]
    role = "user"
    for earlier in shown:
        messages.append(_turn_message(role, earlier, folder))
        messages.append(_message("assistant", lead + chat.text(_reply_ids(chat, earlier))))
        role = "tool" if chat.calls(earlier) else "user"
    messages.append(_turn_message(role, turn, folder))
    reply_ids = _reply_ids(chat, turn)
    reply = chat.text(reply_ids)
    asked = _ask(chat.template, tuple((m["role"], _content(m)) for m in messages), added)
    prompt = turn.prompt
    if any(earlier.images for earlier in (*shown, turn)):
        prompt = images_as_one(prompt, len(chat.token_bytes), chat.template.image_pad)
    return {
        "messages": [*messages, _message("assistant", lead + reply)],
        **({"tools": list(chat.template.tools)} if chat.template.tools else {}),
        **({"images": image_files(turn, folder)} if turn.images else {}),
        "added": added,
        "prompt_exact": np.array_equal(asked, prompt),
        "reply_exact": np.array_equal(_encode(chat.template, reply), reply_ids),
        "end": _end(chat, turn),
    }


def _recorded(chat: Chat, turn: Turn) -> dict[str, Any]:
    """Return the `transcript` of a turn whose messages a client wrote, as it wrote them.

    prompt_exact tells whether the template's text of these messages has the ids of the prompt. It
    does not where the client left out reasoning that the prompt repeats, or templates drop it.
    """
    *asked, _ = turn.messages
    tools: list[Any] = list(turn.tools)
    ids = _reply_ids(chat, turn)
    lead = THINK if chat.text(turn.prompt).endswith(THINK) else ""
    try:
        text = chat.template.tokenizer.apply_chat_template(
            [_for_template(message) for message in asked],
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **ASKED_TO_THINK,
        )
        assert isinstance(text, str)
        added = lead if lead and not text.endswith(THINK) else ""
        exact = np.array_equal(_encode(chat.template, text + added), turn.prompt)
    except Exception:  # Jinja's errors, and any error that a template makes it raise
        added, exact = lead, False
    return {
        "messages": list(turn.messages),
        **({"tools": tools} if tools else {}),
        "added": added,
        "prompt_exact": exact,
        "reply_exact": np.array_equal(_encode(chat.template, chat.text(ids)), ids),
        "end": _end(chat, turn),
    }


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's format as templates read it: arguments of calls as objects."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**f, "arguments": json.loads(f["arguments"])}}
        for call in message["tool_calls"]
        for f in [call["function"]]
    ]
    return {**message, "tool_calls": calls}


def _end(chat: Chat, turn: Turn) -> str:
    """Return how a turn's reply ends."""
    if len(_reply_ids(chat, turn)) < len(turn.sampled):
        return CLOSED if turn.sampled[-1] == chat.close_id else OTHER_STOP
    return STOP_STRING if chat.ends_reply(turn.sampled) else TRUNCATED


def image_files(turn: Turn, folder: str = "") -> list[str]:
    """Return the file of each image of a turn, named by a hash of its content."""
    return [f"{folder}{_name(image)}.png" for image in turn.images]


def _name(image: np.ndarray) -> str:
    """Return the first 16 hex digits of the SHA-256 of an image's shape and pixels."""
    shape = "x".join(map(str, image.shape))
    return hashlib.sha256(shape.encode() + image.tobytes()).hexdigest()[:16]


def images_as_one(ids: np.ndarray, vocabulary: int, pad: int | None) -> np.ndarray:
    """Return ids in which each image is a single `pad`, as a chat template writes it.

    Args:
      vocabulary: vocabulary size. Ids >= vocabulary are tokens of images; a run of such ids is an
        image.
    """
    assert pad is not None  # prompts have images only if the model has a vision tower
    of_image = ids >= vocabulary
    again = of_image & np.append(False, of_image[:-1])
    return np.where(of_image, pad, ids)[~again].astype(ids.dtype)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": clean_text(content)}


def _turn_message(role: str, turn: Turn, folder: str) -> dict[str, Any]:
    """Return the message of a turn: text, or with images a list of text and image parts."""
    if not turn.images:
        return _message(role, turn.message)
    first, *others = clean_text(turn.message).split(IMAGE)
    parts = [_text_part(first)]
    for file, text in zip(image_files(turn, folder), others, strict=True):
        parts += [{"type": "image_url", "image_url": {"url": file}}, _text_part(text)]
    return {"role": role, "content": [part for part in parts if part != _text_part("")]}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content(message: dict[str, Any]) -> Content:
    """Return the content of a message without its image files, which templates do not show."""
    content = message["content"]
    return content if isinstance(content, str) else tuple(part.get("text") for part in content)


def _reply_ids(chat: Chat, turn: Turn) -> np.ndarray:
    """Return the sampled ids without the stop token, if any."""
    stopped = len(turn.sampled) > 0 and int(turn.sampled[-1]) in chat.stop_ids
    return turn.sampled[:-1] if stopped else turn.sampled


@functools.lru_cache(maxsize=4096)  # members of a group have the same first prompt
def _ask(template: Template, messages: tuple[tuple[str, Content], ...], added: str) -> np.ndarray:
    conversation: list[Any] = [
        {"role": role, "content": _parts(content)} for role, content in messages
    ]
    text = template.tokenizer.apply_chat_template(
        conversation,
        tools=list(template.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
        **ASKED_TO_THINK,
    )
    return _encode(template, f"{text}{added}")


def _parts(content: Content) -> str | list[dict[str, Any]]:
    """Return a content in the format of the chat templates of vision models."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if text is None else _text_part(text) for text in content]


def _encode(template: Template, text: str) -> np.ndarray:
    (encoding,) = encode_texts(template.tokenizer, [text])
    return np.asarray(encoding.ids, np.int32)
