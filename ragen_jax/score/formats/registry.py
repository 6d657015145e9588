"""The formats in the order in which they are tried, and the conversion of a record to a `Row`."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats import (
    atif,
    chat_log,
    nemo_gym,
    nemo_rl,
    openenv,
    plain,
    prime_rl,
    ragen,
    ragen_jax,
    rllm,
    skyrl,
    slime,
    token_export,
    trl,
    verifiers,
    verl,
)
from ragen_jax.score.formats.rows import Format, Row
from ragen_jax.score.messages import count_keys, is_messages, read_tools
from ragen_jax.score.values import Fields, format_value

shows_images = ragen_jax.shows_images

FORMATS = {  # a record has the first format whose fields are all present
    "OpenEnv": openenv.FORMAT,
    "ragen_jax": ragen_jax.FORMAT,
    "prime-rl": prime_rl.FORMAT,
    "ATIF": atif.FORMAT,
    "NeMo-Gym": nemo_gym.FORMAT,
    "NeMo-RL": nemo_rl.FORMAT,
    "token-export": token_export.FORMAT,
    "SkyRL": skyrl.FORMAT,
    "rLLM": rllm.FORMAT,
    "slime": slime.FORMAT,
    "RAGEN": ragen.FORMAT,
    "verl": verl.FORMAT,
    "verifiers": verifiers.FORMAT,
    "TRL": trl.FORMAT,
    "plain": plain.FORMAT,
    "chat-log": chat_log.FORMAT,
}
GROUP = ("group", "group_id", "uid", "example_id")
STEP = ("export_step", "training_step", "step", "global_step")
REWARD = ("reward", "score", "total_reward", "rewards", "acc")
SUCCESS = ("success", "acc", "correct", "is_correct")


def find_format(name: str) -> str:
    """Return the name of a format in FORMATS, given in any case; "": to be recognised.

    Raises:
      ValueError: there is no such format.
    """
    names = {each.lower(): each for each in FORMATS}
    if name and name.lower() not in names:
        raise ValueError(f"--format={name} is not a format; accepted: {', '.join(FORMATS)}")
    return names[name.lower()] if name else ""


def read_row(
    record: Any, place: str, rewards: Sequence[str] = (), form: str = ""
) -> tuple[Row, set[str]]:
    """Return (`Row`, names of the record's unread fields) for a record.

    Args:
      record: the content of a line.
      place: FILE:LINE.
      rewards: names of the fields whose sum is the reward; empty: the format's rule.
      form: name of the format in FORMATS; "": the first whose fields are present.

    Raises:
      ValueError: the format is unknown, or a field is missing or has an invalid value.
    """
    record = values.parse_nested(record)
    if not isinstance(record, dict):
        raise ValueError(f"is not an object, but {format_value(record)}")
    fields = Fields(record)
    name = form or _recognise(fields)
    found = FORMATS[name]
    lacks = [each for each in found.needs if each not in record]
    if lacks:
        raise ValueError(f"has no field {lacks[0]!r}, which the format {name} needs")
    replies = found.read(fields)
    run = fields.object("run")
    inner = [fields.object("metadata"), run, run.object("work") if run else None]  # of verifiers
    scopes = [fields, *(each for each in inner if each is not None)][::-1]
    if any(is_messages(reply.prompt) for reply in replies):
        tools = next(values.first(scopes, ("tools",)), None)
        if tools:
            offered = tuple(read_tools(tools[2]))
            replies = tuple(
                dataclasses.replace(reply, tools=reply.tools or offered) for reply in replies
            )
    step = next(values.first(scopes, STEP), None)
    own_group = found.group(fields) if found.group else None
    row = Row(
        place=place,
        replies=replies,
        group=own_group or _group(scopes),
        step=values.step(step[2]) if step else None,
        success=_success(scopes),
        reward=values.reward(_reward(found, fields, scopes, rewards)),
        form=name,
        message_keys=_message_keys(found, fields),
        left_out=fields.left_out,
    )
    return row, fields.unread


def _recognise(fields: Fields) -> str:
    for is_here in (fields.has, fields.values.__contains__):  # null only if no other fits
        for name, form in FORMATS.items():
            if all(is_here(each) for each in form.needs):
                return name
    raise ValueError(
        f"has the fields {', '.join(map(repr, fields.values)) or '(none)'}, which match no "
        "format; prompt and response are required"
    )


def _group(scopes: Sequence[Fields]) -> str | None:
    for fields, name, value in values.first(scopes, GROUP):
        inner = fields.object(name)  # present in verifiers' episodes
        found = values.label(inner.get("id") if inner else value)
        if found is not None:
            return found
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
        named = [*scopes, *_named_rewards([*scopes, fields.object("trial")])]
        found = [next(values.first(named, (name,)), None) for name in rewards]
        parts = [values.total(each[2], each[1]) if each else None for each in found]
        given = [part for part in parts if part is not None]
        return values.add_rewards(given) if len(given) == len(parts) else None
    own = form.reward(fields) if form.reward else None
    if own is not None:
        return own
    first = next(values.first(scopes, REWARD), None)
    return values.total(first[2], first[1]) if first else None


def _named_rewards(scopes: Sequence[Fields | None]) -> list[Fields]:
    """Return the objects {name: reward} in the fields `reward` and `rewards`."""
    found = [each.object(name) for each in scopes if each for name in ("reward", "rewards")]
    return [each for each in found if each is not None]


def _message_keys(form: Format, fields: Fields) -> collections.Counter[str]:
    if form.messages is not None:
        found = form.messages(fields)
    else:
        found = [fields.values[name] for name in form.needs]
    return sum(map(count_keys, filter(is_messages, found)), collections.Counter())
