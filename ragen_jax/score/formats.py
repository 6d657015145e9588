"""Rollout formats of trainers: convert a record of a file to a `Row`.

A format is recognised by a record's fields. To add a format, write a function from a record to its
replies and add a row to FORMATS. The code that writes each format (as of 2026):

    ragen_jax   ragen_jax/run/log.py, write_rollouts
    prime-rl    src/prime_rl/monitors/file.py, FileMonitor.log_episodes: an Episode of verifiers
                (verifiers/v1/episode.py, to_record) per line
    RAGEN       ragen/llm_agent/agent_proxy.py, _save_as_jsonl; scripts/convert_to_jsonl.py
    verl        verl/trainer/ppo/ray_trainer.py, _dump_generations; also used by RAGEN's training;
                verl/trainer/ppo/v1/trainer_base.py, whose uid is of a row
    verifiers   verifiers/legacy/utils/save_utils.py, results.jsonl (prime-rl wrote the same)
    TRL         trl/trainer/grpo_trainer.py, log: completions/completions_STEP.parquet
    chat log    a line {"messages": [...]}, as of OpenAI's API
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from ragen_jax.score import values
from ragen_jax.score.messages import (
    Messages,
    count_keys,
    is_messages,
    read_message,
    read_messages,
    read_tools,
    reply_text,
)
from ragen_jax.score.values import Fields, format_value

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
    # Number of messages with each key other than role, content and reasoning.
    message_keys: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    day: str | None = None  # YYYY-MM-DD on which it was sampled; None: not recorded
    day_from: str = ""  # what recorded it, in words


@dataclasses.dataclass(frozen=True)
class Format:
    """How to read the records of a trainer."""

    needs: tuple[str, ...]  # fields by which it is recognised
    read: Callable[[Fields], tuple[ParsedReply, ...]]
    reward: Callable[[Fields], float | None] | None = None  # None: the first field of REWARD
    group: re.Pattern[str] | None = None  # its first match in a group's name; None: the whole name


GROUP = ("group", "group_id", "uid", "example_id")
STEP = ("step", "global_step")
REWARD = ("reward", "score", "total_reward", "rewards", "acc")
SUCCESS = ("success", "acc", "correct")


def read_row(record: Any, place: str, rewards: Sequence[str] = ()) -> tuple[Row, set[str]]:
    """Return (`Row`, names of the record's unread fields) for a record.

    Args:
      record: the content of a line.
      place: FILE:LINE.
      rewards: names of the fields whose sum is the reward; empty: the format's rule.

    Raises:
      ValueError: the format is unknown, or a field has an invalid value.
    """
    record = values.parse_nested(record)
    if not isinstance(record, dict):
        raise ValueError(f"is not an object, but {format_value(record)}")
    fields = Fields(record)
    form = _format_of(fields)
    replies = form.read(fields)
    inner = [fields.object("metadata"), fields.object("run")]
    scopes = [fields, *(each for each in inner if each is not None)][::-1]
    if any(is_messages(reply.prompt) for reply in replies):
        tools = next(values.first(scopes, ("tools",)), None)
        if tools:
            offered = tuple(read_tools(tools[2]))
            replies = tuple(dataclasses.replace(reply, tools=offered) for reply in replies)
    step = next(values.first(scopes, STEP), None)
    row = Row(
        place=place,
        replies=replies,
        group=_group(scopes, form.group),
        step=values.step(step[2]) if step else None,
        success=_success(scopes),
        reward=values.reward(_reward(form, fields, scopes, rewards)),
        message_keys=_message_keys(form, fields),
    )
    return row, fields.unread


def _format_of(fields: Fields) -> Format:
    for is_here in (fields.has, fields.values.__contains__):  # null only if no other fits
        for form in FORMATS.values():
            if all(is_here(name) for name in form.needs):
                return form
    raise ValueError(
        f"has the fields {', '.join(map(repr, fields.values)) or '(none)'}, which match no "
        "format; prompt and response are required"
    )


def _group(scopes: Sequence[Fields], pattern: re.Pattern[str] | None) -> str | None:
    for fields, name, value in values.first(scopes, GROUP):
        inner = fields.object(name)  # present in verifiers' episodes
        found = values.label(inner.get("id") if inner else value)
        part = pattern.match(found) if pattern is not None and found is not None else None
        if found is not None:
            return part[1] if part else found
    return None


def _success(scopes: Sequence[Fields]) -> bool | None:
    """Return the first field of SUCCESS that is true, false, 0 or 1; other values are scores."""
    for name in SUCCESS:
        for fields in scopes:
            value = fields.values.get(name)
            found = values.boolean(value, name)
            if found is not None or values.is_missing(value):
                fields.mark_read(name)
            if found is not None:
                return found
    return None


def _reward(
    form: Format, fields: Fields, scopes: Sequence[Fields], rewards: Sequence[str]
) -> float | None:
    if rewards:
        found = [next(values.first(scopes, (name,)), None) for name in rewards]
        parts = [values.total(each[2], each[1]) if each else None for each in found]
        given = [part for part in parts if part is not None]
        return values.add_rewards(given) if len(given) == len(parts) else None
    own = form.reward(fields) if form.reward else None
    if own is not None:
        return own
    first = next(values.first(scopes, REWARD), None)
    return values.total(first[2], first[1]) if first else None


def _message_keys(form: Format, fields: Fields) -> collections.Counter[str]:
    found = [fields.values[name] for name in form.needs if is_messages(fields.values.get(name))]
    traces = fields.objects("traces") if "traces" in form.needs else []
    nodes = [node for trace in traces for node in trace.objects("nodes")]
    found += [[n.values.get("message")] for n in nodes if not n.has("token_ids")]
    return sum(map(count_keys, found), collections.Counter())


def shows_images(record: Any) -> bool:
    """Return whether a record is from ragen_jax and a turn shows images.

    Only its own model with its vision tower could read them.
    """
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        return False
    return any(isinstance(turn, dict) and turn.get("images") for turn in turns)


# ------------------------------------------------------------------------------ formats


def _ours(record: Fields) -> tuple[ParsedReply, ...]:
    return tuple(
        ParsedReply(
            prompt=values.ids(turn.get("prompt_ids"), "prompt_ids"),
            response=values.ids(turn.get("sampled_ids"), "sampled_ids"),
            actions=values.texts(turn.get("actions")) or (),
            valid=values.boolean(turn.get("valid"), "valid"),
            whole=True,
        )
        for turn in record.objects("turns")
    )


def _our_reward(record: Fields) -> float | None:
    return values.total([turn.get("reward") for turn in record.objects("turns")], "reward")


def _trained_traces(record: Fields) -> list[Fields]:
    """Return the traces of agents that are trained; judges and the like are not.

    Raises:
      ValueError: there is none.
    """
    found = []
    for trace in record.objects("traces"):
        agent = trace.object("agent")
        if agent is None or values.boolean(agent.get("trainable"), "trainable") is not False:
            found.append(trace)
    if not found:
        raise ValueError("has no trace of an agent that is trained (agent.trainable)")
    return found


def _left_compactions(nodes: Sequence[Fields]) -> set[int]:
    """Return the leaves that sum up a conversation and from which the harness did not go on.

    They are not trained (verifiers/v1/trace.py, `branches`).
    """
    parents = {node.values.get("parent") for node in nodes}
    links = [values.parse_nested(node.get("semantic_parents")) for node in nodes]
    kinds = [
        {(link.get("type"), link.get("node")) for link in each if isinstance(link, dict)}
        if isinstance(each, list)
        else set()
        for each in links
    ]
    accepted = {node for each in kinds for kind, node in each if kind == "compaction"}
    attempts = [
        index
        for index, each in enumerate(kinds)
        if any(kind == "compaction_attempt" for kind, _ in each)
    ]
    return {index for index in attempts if index not in parents and index not in accepted}


def _episode(record: Fields) -> tuple[ParsedReply, ...]:
    """Return the sampled messages of a verifiers episode, each with its ancestors as the prompt."""
    replies = []
    for trace in _trained_traces(record):
        nodes = trace.objects("nodes")
        left_out = _left_compactions(nodes)
        for index, node in enumerate(nodes):
            if not values.boolean(node.get("sampled"), "sampled") or index in left_out:
                continue
            path = [nodes[i] for i in _ancestors(nodes, index)]
            mask = node.get("mask")
            if all(n.get("token_ids") for n in (*path, node)) and any(mask or ()):
                ids = values.ids(node.get("token_ids"), "token_ids")
                mask = [bool(values.boolean(each, "mask")) for each in mask]
                start = mask.index(True)
                prompt = [i for n in path for i in values.ids(n.get("token_ids"), "token_ids")]
                end = len(mask) - mask[::-1].index(True)
                replies.append(ParsedReply(prompt + ids[:start], ids[start:end]))
            else:
                before = read_messages([n.get("message") for n in path])
                replies.append(_reply(before, read_message(node.get("message"))))
    if not replies:
        raise ValueError("has no sampled message")
    return tuple(replies)


def _ancestors(nodes: Sequence[Fields], index: int) -> list[int]:
    """Return the indices of a node's ancestors, from the root."""
    path: list[int] = []
    parent = nodes[index].get("parent")
    while parent is not None:
        before = values.whole(parent, "parent")
        if before is None or before >= (path[0] if path else index):
            raise ValueError(f"has a node whose parent is {format_value(parent)}")
        path.insert(0, before)
        parent = nodes[before].get("parent")
    return path


def _episode_reward(record: Fields) -> float | None:
    found = [trace.get("rewards") for trace in _trained_traces(record)]
    parts = [values.total(each, "rewards") for each in found if each]
    given = [part for part in parts if part is not None]
    return values.add_rewards(given) if given and len(given) == len(parts) else None


def _ragen(record: Fields) -> tuple[ParsedReply, ...]:
    return _conversation([], record.get("messages"))


def _reader(prompt: str, reply: str) -> Callable[[Fields], tuple[ParsedReply, ...]]:
    """Return a reader of records with a prompt and a reply: each text, messages, or token ids."""

    def read(record: Fields) -> tuple[ParsedReply, ...]:
        shown_to, response = _prompt(record, prompt), record.get(reply)
        if is_messages(response):
            return _conversation(shown_to, response)
        if isinstance(response, list) and response:
            return (ParsedReply(shown_to, values.ids(response, reply)),)
        return (ParsedReply(shown_to, _text(record, reply), transcript=True),)

    return read


def _reward_columns(record: Fields) -> list[str]:
    """Return the reward columns; TRL has a column for each reward function, with its name.

    A column *reward holds rewards, whatever its values are. Others are columns of a reward function
    if they hold a number: a column reward_model may be text.
    """
    return [
        name
        for name, value in record.values.items()
        if name.lower().endswith("reward")
        or "reward" in name.lower()
        and (
            values.is_missing(value)
            or isinstance(value, int | float | Decimal)
            or values.is_number(value)
        )
    ]


def _trl_reward(record: Fields) -> float | None:
    """Return the sum of the reward columns; functions that do not apply have no value."""
    found = [values.number(record.get(name), name) for name in _reward_columns(record)]
    given = [value for value in found if value is not None]
    return values.add_rewards(given) if given else None


# Its newer trainer names a row UID_ROLLOUT_OUTPUT; the rows of a group share the UID.
_VERL_GROUP = re.compile(r"(.+)_[0-9]+_[0-9]+$")

FORMATS = {  # a record has the first format whose fields are all present
    "ragen_jax": Format(("turns",), _ours, _our_reward),
    "prime-rl": Format(("traces",), _episode, _episode_reward),
    "RAGEN": Format(("messages", "metadata"), _ragen),
    "verl": Format(("input", "output"), _reader("input", "output"), group=_VERL_GROUP),
    "verifiers": Format(("prompt", "completion", "example_id"), _reader("prompt", "completion")),
    "TRL": Format(("prompt", "completion"), _reader("prompt", "completion"), _trl_reward),
    "plain": Format(("prompt", "response"), _reader("prompt", "response")),
    "chat log": Format(("messages",), _ragen),
}


# ------------------------------------------------------------------------------ fields


def _conversation(prompt: Prompt, raw: Any) -> tuple[ParsedReply, ...]:
    """Return a `ParsedReply` for each assistant message, with all earlier messages as prompt."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and not isinstance(prompt[0], dict):
        raise ValueError("has token ids as its prompt, but messages as its reply")
    before: Messages = list(prompt)  # ty: ignore[invalid-assignment] checked to be messages
    replies = []
    for message in read_messages(raw):
        if message["role"] == "assistant":
            if not before:
                raise ValueError("begins with an assistant message, without a prompt")
            replies.append(_reply(list(before), message))
        before.append(message)
    if not replies:
        raise ValueError("has no message of the role 'assistant'")
    return tuple(replies)


def _reply(before: Messages, message: dict[str, Any]) -> ParsedReply:
    return ParsedReply(before, reply_text(message), calls=tuple(message.get("tool_calls", ())))


def _prompt(record: Fields, name: str) -> Prompt:
    value = record.get(name)
    parsed = values.parse_nested(value)
    if isinstance(parsed, list) and parsed and isinstance(values.parse_nested(parsed[0]), dict):
        if isinstance(value, list) or is_messages(value):
            return read_messages(value)
    if isinstance(value, list) and value:
        return values.ids(value, name)
    text = _text(record, name)
    if not text:
        raise ValueError(f"has an empty {name}")
    return text


def _text(record: Fields, name: str) -> str:
    """Return a text unchanged: here "nan" is a text, and an empty text is a value."""
    record.mark_read(name)
    value = record.values.get(name)
    if not isinstance(value, str):
        raise ValueError(f"has {format_value(value)} as its {name}; expected text or messages")
    return value
