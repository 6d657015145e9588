"""A turn as OpenAI messages, and whether these give back the ids that it was trained on.

    prompt_ids  = template(messages[:-1], generation prompt, enable_thinking) + added
    sampled_ids = the last message less its lead, and the stop token

A template that writes the date writes model.date of the run's config.json.

A prompt is built of ids: earlier replies as they were sampled, and text in which no control string
is control. Where the tokenizer reads the messages otherwise (a reply that it would spell with other
tokens, an observation that holds `<|im_end|>`, a template that drops earlier reasonings), the row
says so.

Where a message shows images it is a list of parts, as OpenAI writes it, and a part that is an image
names a file (run/log.py writes them). In the prompt's ids an image has as many tokens as it needs,
all of them beyond the vocabulary; the template has one for it.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ragen_jax.core.clean_text import clean_text
from ragen_jax.core.types import Turn
from ragen_jax.envs.types import IMAGE
from ragen_jax.model.template import ASKED_TO_THINK, Template
from ragen_jax.rollout.chat import Chat

CLOSED, OTHER_STOP, TRUNCATED = "closed", "other stop", "truncated"  # how a reply ends

# Text, or a part of a message for each text and image (None) of it.
Content = str | tuple[str | None, ...]


def transcript(
    chat: Chat, turns: Sequence[Turn], turn: Turn, *, folder: str = ""
) -> dict[str, Any]:
    """The messages that a turn shows, its reply the last of them, and what they leave out.

    Args:
      turns: the episode's turns before it.
      folder: of the files of images, as the messages tell it.

    Returns:
      messages: dicts of role and content, a text, or parts of type "text" and "image_url" where a
        message shows images. Replies begin with the thought's opening tag, and have no stop token.
        What a call led to has the role "tool".
      images: the files of the turn's own images, in order; left out where there are none.
      tools: the JSON schemas that the template shows; left out where there are none.
      added: text that the prompt has behind the template's generation prompt ("<think>" or ""),
        with which the last message begins.
      prompt_exact: whether the tokenizer gives the prompt's ids of the template's text of
        messages[:-1] and `added`, an image being one token of it.
      reply_exact: whether it gives the sampled ids, less a stop token, of the last message's text
        behind what the prompt has of it.
      end: "closed" (by the template's own stop token), "other stop", or "truncated" (none: at
        rollout.max_new_tokens).
    """
    opening = chat.text(chat.opening)
    lead, added = chat.template.lead + opening, chat.template.added + opening
    shown = turns[chat.first_shown(turns, turn.message, turn.prompt, turn.spans) :]
    messages = [] if chat.system is None else [_message("system", chat.system)]
    role = "user"
    for earlier in shown:
        messages.append(_shown(role, earlier, folder))
        messages.append(_message("assistant", lead + chat.text(_said(chat, earlier))))
        role = "tool" if chat.calls(earlier) else "user"
    messages.append(_shown(role, turn, folder))
    said = _said(chat, turn)
    reply = chat.text(said)
    asked = _ask(chat.template, tuple((m["role"], _content(m)) for m in messages), added)
    prompt = turn.prompt
    if any(earlier.images for earlier in (*shown, turn)):
        prompt = images_as_one(prompt, len(chat.token_bytes), chat.template.image_pad)
    stopped = len(said) < len(turn.sampled)
    closed = stopped and turn.sampled[-1] == chat.close_id
    return {
        "messages": [*messages, _message("assistant", lead + reply)],
        **({"tools": list(chat.template.tools)} if chat.template.tools else {}),
        **({"images": image_files(turn, folder)} if turn.images else {}),
        "added": added,
        "prompt_exact": np.array_equal(asked, prompt),
        "reply_exact": np.array_equal(_encode(chat.template, reply), said),
        "end": CLOSED if closed else OTHER_STOP if stopped else TRUNCATED,
    }


def image_files(turn: Turn, folder: str = "") -> list[str]:
    """The file of each image of a turn, named by its content."""
    return [f"{folder}{_name(image)}.png" for image in turn.images]


def _name(image: np.ndarray) -> str:
    """16 hex digits of the SHA-256 of an image's shape and pixels."""
    shape = "x".join(map(str, image.shape))
    return hashlib.sha256(shape.encode() + image.tobytes()).hexdigest()[:16]


def images_as_one(ids: np.ndarray, vocabulary: int, pad: int | None) -> np.ndarray:
    """Ids in which all tokens of an image are one `pad`, as a chat template writes it.

    Args:
      vocabulary: ids from it on are of images, of one image up to an id below it.
    """
    assert pad is not None  # a model that cannot see is shown no images
    of_image = ids >= vocabulary
    again = of_image & np.append(False, of_image[:-1])
    return np.where(of_image, pad, ids)[~again].astype(ids.dtype)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": clean_text(content)}


def _shown(role: str, turn: Turn, folder: str) -> dict[str, Any]:
    """The message of a turn: text, or where it shows images the parts between and with them."""
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
    """The content of a message without the files of its images, which no template shows."""
    content = message["content"]
    return content if isinstance(content, str) else tuple(part.get("text") for part in content)


def _said(chat: Chat, turn: Turn) -> np.ndarray:
    """The sampled ids without the stop token, if there is one."""
    stopped = len(turn.sampled) > 0 and int(turn.sampled[-1]) in chat.stop_ids
    return turn.sampled[:-1] if stopped else turn.sampled


@functools.lru_cache(maxsize=4096)  # members of a group are shown the same first prompt
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
    """A content as templates of models that see take it."""
    if isinstance(content, str):
        return content
    return [{"type": "image"} if text is None else _text_part(text) for text in content]


def _encode(template: Template, text: str) -> np.ndarray:
    ids = template.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
    return np.asarray(ids["input_ids"], np.int32)
