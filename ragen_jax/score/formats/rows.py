"""A rollout as the readers of formats return it, and the description of a format."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from ragen_jax.score.messages import Messages
from ragen_jax.score.values import Fields

Prompt = str | Messages | list[int]
Response = str | list[int]


@dataclasses.dataclass(frozen=True)
class ParsedReply:
    """A reply, and the prompt that the policy read before it."""

    prompt: Prompt  # text as the policy read it, messages, or token ids
    response: Response  # text or token ids
    actions: tuple[str, ...] | None = None  # None: the answer's text is the only action
    valid: bool | None = None  # None: not recorded
    whole: bool = False  # an answer must follow the reasoning and end the reply
    calls: tuple[dict[str, Any], ...] = ()  # tool calls that end the reply
    tools: tuple[dict[str, Any], ...] = ()  # tools offered to the policy; only with messages
    transcript: bool = False  # the response may hold later turns, as one text


@dataclasses.dataclass(frozen=True)
class Row:
    """One rollout."""

    place: str  # FILE:LINE
    replies: tuple[ParsedReply, ...]  # at least one
    group: str | None  # rows of a group share a prompt; None: rows with equal prompts are a group
    step: int | None
    reward: float | None
    success: bool | None
    form: str  # name of its format
    # Number of messages with each key other than role, content and reasoning.
    message_keys: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Number of parts of each kind that are not scored, such as steps of another model.
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    day: str | None = None  # YYYY-MM-DD on which it was sampled; None: not recorded
    day_from: str = ""  # what recorded it, in words


@dataclasses.dataclass(frozen=True)
class Format:
    """How to read the records of a trainer."""

    needs: tuple[str, ...]  # fields by which it is recognised
    read: Callable[[Fields], tuple[ParsedReply, ...]]
    # None, or a function that returns None: the first field of registry.REWARD or registry.GROUP.
    reward: Callable[[Fields], float | None] | None = None
    group: Callable[[Fields], str | None] | None = None
    # Lists of raw messages whose keys are counted; None: the fields of `needs` that hold messages.
    messages: Callable[[Fields], list[Any]] | None = None
