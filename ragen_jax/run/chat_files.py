"""Conversations in a file as demonstrations, for supervised fine-tuning.

A row of the JSON Lines or Parquet file has `messages`, a list of {"role", "content"}, or a `prompt`
and a `completion`, each a text or such a list. All replies of the assistant are imitated.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.core.types import Episode, Turn
from ragen_jax.envs.files import json_rows, open_parquet, parquet_rows
from ragen_jax.model.template import PromptError, parse_chat_template
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.episode import Room
from ragen_jax.run.demonstrations import make_episode, make_turn
from ragen_jax.storage.console import console

SUFFIXES = (".jsonl", ".parquet")
THINK = "<think>"
ROLES = ("system", "user", "assistant")


class Unusable(ValueError):
    """A row that cannot be imitated; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation whose replies are imitated.

    reasons: whether its replies begin with <think>, as those of training do
    """

    system: str | None
    exchanges: tuple[tuple[str, str], ...]  # (user's message, reply)
    reasons: bool


def read_episodes(path: str | Path, chat: Chat, positions: int) -> list[Episode]:
    """Return the conversations of a file as episodes; a line counts those that are left out.

    Args:
      chat: of the environment that the model is trained on; only its tokenizer is read.
      positions: number of positions of the model, the maximum length of a prompt and its reply.

    Raises:
      ValueError: the file cannot be read, or holds no conversation that can be used.
    """
    episodes: list[Episode] = []
    reasons: collections.Counter[str] = collections.Counter()
    without = 0
    first = ""
    templates = functools.lru_cache(maxsize=None)(functools.partial(_chat_of, chat))
    for index, row in enumerate(_rows(Path(path))):
        try:
            conversation = parse_conversation(row)
            speaker = templates(conversation.system, conversation.reasons)
            episodes.append(_as_episode(conversation, speaker, positions))
            without += not conversation.reasons
        except (Unusable, PromptError) as error:
            first = first or f"row {index}: {error}"
            reasons[str(error) if isinstance(error, Unusable) else "it does not fit"] += 1
    left_out = reasons.total()
    if not episodes:
        raise ValueError(
            f"config.warmstart.demonstrations is {path}, of which no row can be imitated"
            + (f"; {first}" if first else ": it is empty")
        )
    if left_out:
        console(
            f"warning: {left_out} of {left_out + len(episodes)} rows of {path} are left out; "
            f"{first}"
        )
    if without:
        console(
            f"warning: {without} of {len(episodes)} conversations of {path} have replies without "
            f"{THINK}, which training puts before every reply"
        )
    return episodes


def parse_conversation(row: Any) -> Conversation:
    """Return the conversation of a row.

    Raises:
      Unusable: it is none, or not one of user and assistant in turn.
    """
    messages = _messages(row)
    system = None
    if messages and messages[0][0] == "system":
        (_, system), *messages = messages
    roles = [role for role, _ in messages]
    if not roles or len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
        raise Unusable(
            f"its messages have the roles {', '.join(roles) or 'none'}; expected user and "
            "assistant in turn, after at most one system message"
        )
    texts = [text for _, text in messages]
    replies = texts[1::2]
    if not all(reply.strip() for reply in replies):
        raise Unusable("it has an empty reply")
    opened = [reply.lstrip().startswith(THINK) for reply in replies]
    if any(opened) and not all(opened):
        raise Unusable(f"only some of its replies begin with {THINK}")
    if opened[0]:
        replies = [reply.lstrip().removeprefix(THINK) for reply in replies]
    return Conversation(system, tuple(zip(texts[0::2], replies, strict=True)), opened[0])


def _messages(row: Any) -> list[tuple[str, str]]:
    """Return [(role, content)] of a row."""
    if not isinstance(row, dict):
        raise Unusable("it is not an object")
    if "messages" in row:
        return _listed(row["messages"], "messages")
    if "prompt" not in row or "completion" not in row:
        raise Unusable("it has neither messages nor prompt and completion")
    found = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        value = row[name]
        found += [(role, value)] if isinstance(value, str) else _listed(value, name)
    return found


def _listed(value: Any, name: str) -> list[tuple[str, str]]:
    if not isinstance(value, list):
        raise Unusable(f"its {name} is not a list of messages")
    found = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(content, str):
            raise Unusable(
                f"a message of its {name} has role {role!r:.20}; expected text by one of "
                f"{', '.join(ROLES)}"
            )
        found.append((role, content))
    return found


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"config.warmstart.demonstrations is {path}; expected a file that ends with "
            f"{' or '.join(SUFFIXES)}"
        )
    if path.suffix == ".jsonl":
        yield from json_rows(path)
        return
    with open_parquet(path) as file:
        yield from parquet_rows(file, path)


def _chat_of(chat: Chat, system: str | None, reasons: bool) -> Chat:
    """Return the `Chat` of conversations with a system message."""
    template = parse_chat_template(chat.template.tokenizer, system, think=reasons)
    if not reasons and template.lead.endswith(THINK):
        raise Unusable(f"its replies have no {THINK}, but the chat template writes it")
    format = dataclasses.replace(chat.format, context="full", max_prompt=0)
    return dataclasses.replace(chat, template=template, format=format)


def _as_episode(conversation: Conversation, chat: Chat, positions: int) -> Episode:
    turns: list[Turn] = []
    for message, reply in conversation.exchanges:
        sampled = chat.reply_ids(reply)
        prompt = chat.prompt_ids(turns, message)
        Room(positions, len(sampled)).check(prompt, len(turns))
        turns.append(make_turn(prompt, message, sampled))
    return make_episode(turns)


def hold_back_conversations(
    episodes: Sequence[Episode], most: int
) -> tuple[list[Episode], list[Episode]]:
    """Return (episodes to imitate, held-out episodes): the last tenth, `most` at most.

    A single conversation is imitated and held out.
    """
    count = min(most, len(episodes) // 10 or 1)
    return list(episodes[: len(episodes) - count]) or list(episodes), list(episodes[-count:])
