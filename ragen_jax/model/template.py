"""A chat template parsed into control ids, which only the template may place, and plain text.

Control ids mark who speaks and where a message ends in a conversation. They are every special token
of the tokenizer, and the added tokens, special or not, with which the template marks its messages
(`<|user|>`, `[INST]`). Text from environments, data and demonstrations is encoded by `plain_ids`,
in which the text `<|im_end|>` remains plain text. So a document cannot speak as the user or the
agent.

The tokenizer never merges text across a control token. Placing control ids between separately
encoded texts therefore gives the ids of the whole conversation. Between two control tokens, the
template's text and a message are encoded together, because the tokenizer may merge them (line
breaks, for example).

An image in a message becomes the text that the template writes around its `<|image_pad|>`, with
the numbers of the image's tokens (model/vision/positions.py) in place of the pad.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_jax.core.clean_text import clean_text
from ragen_jax.model.dates import with_date

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # in replies; never control tokens
NOTICE = "Your last reply had no valid action."  # in prompts; never a control token

# The conversation rendered to find the text that a template writes around each message.
ASKED_ROLES = ("system", "user", "assistant", "user")
ASKED_MARKS = ("SYSTEM_TEXT", "FIRST_USER", "FIRST_REPLY", "SECOND_USER")
BEHIND_IMAGE = "BEHIND_IMAGE"  # a mark after an image
CALL = "<tool_call>"  # start of a tool call in the supported templates

# Every agent here reasons before it acts. Templates of models with optional reasoning (Qwen3) read
# this flag; with False they write an empty thought before the reply.
ASKED_TO_THINK: dict[str, Any] = {"enable_thinking": True}

# Added tokens in the template's text that are markup, not words or line breaks.
_MARKUP = re.compile(r"<.+>|\[.+\]|\{.+\}", re.DOTALL)

# Characters that the tokenizers library drops next to a token with lstrip or rstrip: Unicode's
# White_Space. str.isspace counts four more separators.
_SPACE = "".join(set(filter(str.isspace, map(chr, range(0x3001)))) - set("\x1c\x1d\x1e\x1f"))


class PromptError(ValueError):
    """A prompt that cannot be used: it does not fit, or the tokenizer refuses its text.

    It is caused by the input of a single episode, so a rollout leaves out only that episode.
    """


@dataclasses.dataclass(frozen=True)
class Control:
    """A control token in a template."""

    id: int
    lstrip: bool  # the tokenizer drops white space before it
    rstrip: bool  # the tokenizer drops white space after it


Part = Control | str  # part of a template: a control token, or the text between two
Span = tuple[int, int]  # (first, count) of the numbers of an image's tokens
Message = str | tuple[str | Span, ...]  # a text, or a sequence of texts and images


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """The template's tokens and text on one side of a user message."""

    ids: np.ndarray  # int32, up to or from the control id nearest to the message, inclusive
    text: str  # plain text between that and the message
    strip: bool  # the tokenizer drops white space next to that control id


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """A parsed chat template and its tokenizer."""

    tokenizer: "PreTrainedTokenizerFast"  # its template writes one fixed date
    control: frozenset[int]
    opening: Side  # before the first user message
    between: Side  # from the end of a reply to the next user message
    middle: Side  # from the end of a user message to the start of the reply, `<think>` included
    close_id: int  # the control id with which the template ends a reply
    lead: str  # start of the agent's messages in a conversation: `<think>` and adjacent text
    added: str  # the part of `lead` that the prompt adds to the template's text: all or nothing
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of functions, shown to the agent
    # With tools, the text on both sides of a tool's result.
    result_between: Side | None = None
    result_middle: Side | None = None
    # For a vision-language model: the id of an image, and the text on both sides of it.
    image_pad: int | None = None
    image_sides: tuple[np.ndarray, np.ndarray] | None = None

    def begin(self, message: Message) -> np.ndarray:
        """Return the int32 ids of a prompt with one user message."""
        return _around(self, self.opening, message, self.middle)

    def next_turn(self, message: Message, *, result: bool = False) -> np.ndarray:
        """Return int32 ids from the end of a reply (`close_id` first) to the start of the next.

        Args:
          result: whether the message is a tool's result, which gets the template's role for it.
        """
        if result:
            assert self.result_between is not None and self.result_middle is not None
            return _around(self, self.result_between, message, self.result_middle)
        return _around(self, self.between, message, self.middle)

    def plain(self, text: str) -> np.ndarray:
        """Return int32 ids of text without control ids; see `plain_ids`."""
        return plain_ids(self.tokenizer, self.control, text)


@functools.lru_cache(maxsize=4096)  # early turns of a group often show the same text
def _around(template: Template, before: Side, message: Message, after: Side) -> np.ndarray:
    texts: list[str] = [before.text]  # adjacent texts are encoded together
    spans: list[Span] = []
    for part in (message,) if isinstance(message, str) else message:
        if isinstance(part, str):
            texts[-1] += part
        else:
            spans.append(part)
            texts.append("")
    texts[-1] += after.text
    ids = [before.ids]
    for number, text in enumerate(texts):
        last = number == len(spans)
        text = _stripped(text, before.strip and number == 0, after.strip and last)
        ids.append(_plain(template, text))
        if not last:
            ids += _image(template, spans[number])
    return np.concatenate([*ids, after.ids])


@functools.lru_cache(maxsize=256)  # the text around images is the same in every message
def _plain(template: Template, text: str) -> np.ndarray:
    return template.plain(text)


def _image(template: Template, span: Span) -> list[np.ndarray]:
    if template.image_sides is None:
        raise PromptError(
            "the message contains an image, but the chat template belongs to a model without vision"
        )
    first, count = span
    before, after = template.image_sides
    return [before, first + np.arange(count, dtype=np.int32), after]


def parse_chat_template(
    tokenizer: "PreTrainedTokenizerFast",
    system: str | None = None,
    tools: Sequence[dict[str, Any]] = (),
    image_pad: int | None = None,
    date: str | None = None,
    *,
    think: bool = True,
) -> Template:
    """Parse the tokenizer's chat template into a `Template` by rendering it around marks.

    Args:
      tokenizer: a tokenizer with a chat template.
      system: text of the system message; None: no such message.
      tools: JSON schemas of functions that the template shows.
      image_pad: the id that stands for an image in the rendered template; None: the model has no
        vision tower.
      date: the day that the template writes, if any; see `with_date`.
      think: whether a reply begins inside <think>, which is added if the template does not write
        it; False is for conversations without reasoning.

    Raises:
      ValueError: there is no chat template, or it refuses such a conversation, makes random
        choices, does not show its messages verbatim and in order, ends the reasoning before the
        reply begins, does not end a reply with a control token, shows no tools that are called
        with <tool_call>, or writes no image_pad between control tokens for an image.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer of model.path has no chat template (chat_template.jinja)")
    tokenizer = with_date(tokenizer, date)
    spoken = system is not None
    rendered = _render(tokenizer, system=spoken, tools=tools)
    head, name, tail, last = _around_marks(rendered, system=spoken)
    tail_of_result = after_result = ""
    if tools:
        if CALL not in head:
            raise ValueError(
                f"the tokenizer's chat template does not show tool calls as {CALL}, the format "
                "of Qwen2.5 and Qwen3"
            )
        tool_text = _render(tokenizer, system=spoken, tools=tools, last="tool")
        *_, tail_of_result, after_result = _around_marks(tool_text, system=spoken)
    for text in (last, after_result):
        if "</think>" in text:
            raise ValueError(
                "the tokenizer's chat template closes the reasoning before the reply begins, "
                f"even with enable_thinking=true: after the last message it writes {text!r}; "
                "remove that from the template (chat_template.jinja)"
            )
    # The agent may write the tags of a call, which the list of tools describes. Only the template
    # may write the tags around a result.
    written = _render(tokenizer, system=spoken) + tail_of_result + after_result
    image_text = "" if image_pad is None else _around_image(tokenizer)
    written += image_text
    control = _control_ids(tokenizer, written)
    added = "<think>" if think and not last.rstrip().endswith("<think>") else ""
    opening, between, middle = (
        _apart(tokenizer, control, text) for text in (head, tail, last + added)
    )
    close = between[0] if between else None
    if not isinstance(close, Control):
        raise ValueError(
            "the tokenizer's chat template does not end a reply with a control token, so the "
            f"end of a reply cannot be detected; a reply is followed by {tail!r}"
        )
    result_between = result_middle = None
    if tools:
        parts = _apart(tokenizer, control, tail_of_result)
        if not parts or parts[0] != close:
            raise ValueError(
                "the tokenizer's chat template ends a reply differently before a tool result: "
                f"with {tail_of_result!r}"
            )
        result_between = _before_message(tokenizer, control, parts)
        result_middle = _after_message(
            tokenizer, control, _apart(tokenizer, control, after_result + added)
        )
    sides = None if image_pad is None else _image_sides(tokenizer, control, image_text, image_pad)
    if system is not None:
        opening = [p.replace(ASKED_MARKS[0], system) if isinstance(p, str) else p for p in opening]
    return Template(
        tokenizer=tokenizer,
        control=control,
        opening=_before_message(tokenizer, control, opening),
        between=_before_message(tokenizer, control, between),
        middle=_after_message(tokenizer, control, middle),
        close_id=close.id,
        lead=(last + added).removeprefix(name) if last.startswith(name) else added,
        added=added,
        tools=tuple(tools),
        result_between=result_between,
        result_middle=result_middle,
        image_pad=image_pad,
        image_sides=sides,
    )


def _around_image(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the text that the template writes for an image in a message."""
    content = [
        {"type": "text", "text": ASKED_MARKS[-1]},
        {"type": "image"},
        {"type": "text", "text": BEHIND_IMAGE},
    ]
    text = _render(tokenizer, system=False, content=content)
    found = re.search(f"{ASKED_MARKS[-1]}(.*?){BEHIND_IMAGE}", text, re.DOTALL)
    if found is None:
        raise ValueError(
            "the tokenizer's chat template does not render a message of text and an image in "
            "order (chat_template.jinja): the model has vision, but its template does not "
            "support it"
        )
    return found[1]


def _image_sides(
    tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], image_text: str, image_pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that the template writes before and after the id of an image."""
    parts = _apart(tokenizer, control, image_text)
    ids = [part.id if isinstance(part, Control) else None for part in parts]
    if ids.count(image_pad) != 1 or None in (ids[0], ids[-1]) or len(ids) < 3:
        raise ValueError(
            f"the tokenizer's chat template writes {image_text!r} for an image; expected token "
            f"{image_pad} (image_token_id in config.json) once, between control tokens"
        )
    at = ids.index(image_pad)
    return ids_of_parts(tokenizer, control, parts[:at]), ids_of_parts(
        tokenizer, control, parts[at + 1 :]
    )


def _around_marks(rendered: str, *, system: bool) -> list[str]:
    """Return the text before and after the first user message, after the reply, and at the end."""
    marks = ASKED_MARKS if system else ASKED_MARKS[1:]
    if tuple(re.findall("|".join(ASKED_MARKS), rendered)) != marks:
        raise ValueError(
            "the tokenizer's chat template does not render every message once, verbatim, in "
            f"the order {', '.join(ASKED_ROLES[-len(marks) :])}"
        )
    return re.split("|".join(ASKED_MARKS[1:]), rendered)


def plain_ids(
    tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], text: str
) -> np.ndarray:
    """Return the token ids of a text, without any control token.

    The ids decode to the text, or to its normalised form if the tokenizer normalises (Qwen's uses
    NFC). A text without control strings is encoded as usual. Otherwise every control token that
    the tokenizer finds is cut in two and the pieces are encoded separately, until it finds none.
    (`split_special_tokens` would keep the added tokens that are not flagged special.)

    Args:
      control: the control ids.
      text: unpaired surrogates, which are not valid text, become U+FFFD.

    Returns:
      int32 ids.

    Raises:
      PromptError: the tokenizer refuses the text, or encodes one character as a control token.
    """
    pieces = [clean_text(text)]
    while True:
        try:
            encoded = encode_texts(tokenizer, pieces)
        except Exception as error:  # a third-party tokenizer may raise any exception
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise PromptError(f"the tokenizer refuses {text!r:.80}: {reason:.200}") from error
        ids = [encoding.ids for encoding in encoded]
        whole = [control.isdisjoint(one) for one in ids]
        if all(whole):
            return np.asarray([*itertools.chain(*ids)], np.int32)
        pieces = [
            part
            for row, piece in enumerate(pieces)
            for part in ([piece] if whole[row] else _cut(piece, encoded[row], control))
        ]


def encode_texts(tokenizer: "PreTrainedTokenizerFast", texts: list[str]) -> list["Encoding"]:
    """Encode texts without the special tokens that begin or end a sequence.

    A call of transformers' tokenizer takes twice as long as what it calls, for a short text. It is
    needed for classes with code of their own, and to end the truncation or padding that a
    tokenizer's file or another call has set.

    Raises:
      TypeError: the tokenizer is none of the `tokenizers` library. It may raise other errors.
    """
    from transformers import PreTrainedTokenizerFast

    if type(tokenizer) is PreTrainedTokenizerFast:
        backend = tokenizer.backend_tokenizer
        whole = backend.truncation is None and backend.padding is None
        if whole and backend.encode_special_tokens == tokenizer.split_special_tokens:
            return backend.encode_batch(texts, add_special_tokens=False)
    found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
    if found.encodings is None:
        raise TypeError(f"{type(tokenizer).__name__} is not a tokenizer of the tokenizers library")
    return found.encodings


def _cut(text: str, encoding: "Encoding", control: frozenset[int]) -> list[str]:
    """Return the pieces of a text, with each of its control tokens cut in two."""
    places = [0]
    for id_, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if id_ in control:
            if stop - start < 2:
                raise PromptError(
                    f"the tokenizer parses {text[start:stop]!r} as a control token, so it "
                    "cannot be written as plain text; use a tokenizer without that special "
                    "token"
                )
            places.append((start + stop) // 2)
    return [text[start:stop] for start, stop in itertools.pairwise([*places, len(text)])]


def _render(
    tokenizer: "PreTrainedTokenizerFast",
    *,
    system: bool,
    tools: Sequence[dict[str, Any]] = (),
    last: str = "user",
    content: Sequence[dict[str, str]] = (),
) -> str:
    """Render a conversation of marks, up to the start of its second reply.

    Args:
      last: role of the last message.
      content: content of the last message, in parts; (): its mark.
    """
    first = 0 if system else 1
    roles = (*ASKED_ROLES[first:-1], last)
    messages: list[dict[str, Any]] = [
        {"role": role, "content": mark}
        for role, mark in zip(roles, ASKED_MARKS[first:], strict=True)
    ]
    if content:
        messages[-1]["content"] = list(content)
    try:
        # ty: ignore[invalid-explicit-return] a string, because of tokenize=False
        return tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=True,
            **ASKED_TO_THINK,
        )
    except Exception as error:  # Jinja's errors, and any error that a template makes it raise
        raise ValueError(
            f"the tokenizer's chat template refuses a conversation of {', '.join(roles)}: "
            f"{error or type(error).__name__}"
        ) from error


def _control_ids(tokenizer: "PreTrainedTokenizerFast", rendered: str) -> frozenset[int]:
    """Return the ids that only a template may place.

    A special token of one character (some tokenizers pad with `!`) counts as ordinary text.
    """
    texts = [rendered]
    try:
        texts.append(_render(tokenizer, system=True))
    except ValueError:
        pass  # the template has no system role, so there are no ids to protect for it
    written = {id_ for t in texts for id_ in tokenizer.encode(t, add_special_tokens=False)}
    named = set(tokenizer.all_special_ids)  # includes eos, for example, if not flagged special
    return frozenset(
        id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if (token.special or id_ in named or (id_ in written and _MARKUP.fullmatch(token.content)))
        and len(token.content) > 1
        and token.content not in TAGS
    )


def _apart(tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], text: str) -> list[Part]:
    """Split the template's text into control tokens and the texts between them."""
    added = tokenizer.added_tokens_decoder
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    parts, end = [], 0
    for id_, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if id_ in control:
            parts += [text[end:start], Control(id_, added[id_].lstrip, added[id_].rstrip)]
            end = stop
    return [part for part in (*parts, text[end:]) if part]


def _before_message(
    tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], parts: Sequence[Part]
) -> Side:
    """Return the `Side` before a message."""
    tag_end = max((i + 1 for i, part in enumerate(parts) if isinstance(part, Control)), default=0)
    return Side(
        ids=ids_of_parts(tokenizer, control, parts[:tag_end]),
        text=_text(parts[tag_end:]),
        strip=tag_end > 0 and _strips_after(parts[tag_end - 1]),
    )


def _after_message(
    tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], parts: Sequence[Part]
) -> Side:
    """Return the `Side` after a message."""
    first = next((i for i, part in enumerate(parts) if isinstance(part, Control)), len(parts))
    return Side(
        ids=ids_of_parts(tokenizer, control, parts[first:]),
        text=_text(parts[:first]),
        strip=first < len(parts) and _strips_before(parts[first]),
    )


def ids_of_parts(
    tokenizer: "PreTrainedTokenizerFast", control: frozenset[int], parts: Sequence[Part]
) -> np.ndarray:
    """Return the int32 ids of parts: control tokens, and texts that hold none.

    Raises:
      PromptError: as in `plain_ids`.
    """
    ids = [np.zeros(0, np.int32)]
    for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
        if isinstance(part, str):
            part = _stripped(part, _strips_after(before), _strips_before(after))
            ids.append(plain_ids(tokenizer, control, part))
        else:
            ids.append(np.array([part.id], np.int32))
    return np.concatenate(ids)


def _text(parts: Sequence[Part]) -> str:
    """Return the text of parts that contain no control token."""
    return "".join(part for part in parts if isinstance(part, str))


def _strips_before(part: Part | None) -> bool:
    return isinstance(part, Control) and part.lstrip


def _strips_after(part: Part | None) -> bool:
    return isinstance(part, Control) and part.rstrip


def _stripped(text: str, left: bool, right: bool) -> str:
    text = text.lstrip(_SPACE) if left else text
    return text.rstrip(_SPACE) if right else text
