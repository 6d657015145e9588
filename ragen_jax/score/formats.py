"""What trainers write of their rollouts: one record of a file -> one `Row`.

A format is told by the fields that a record has. To add one: a function from a record to its
replies, and a row of FORMATS. Where the writers are (read in 2026):

    ragen_jax   ragen_jax/run/log.py, write_rollouts
    prime-rl    src/prime_rl/monitors/file.py, FileMonitor.log_episodes: an Episode of verifiers
                (verifiers/v1/episode.py, to_record) a line
    RAGEN       ragen/llm_agent/agent_proxy.py, _save_as_jsonl; scripts/convert_to_jsonl.py
    verl        verl/trainer/ppo/ray_trainer.py, _dump_generations; RAGEN's training uses it, too
    verifiers   verifiers/legacy/utils/save_utils.py, results.jsonl (prime-rl wrote the same)
    TRL         trl/trainer/grpo_trainer.py, log: completions/completions_STEP.parquet
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]  # a line of a file
Messages = list[dict[str, str]]  # as a chat template takes them
Prompt = str | Messages | list[int]
Response = str | list[int]


@dataclasses.dataclass(frozen=True)
class Reply:
    """One reply, and what the policy read before it."""

    prompt: Prompt  # text as the policy read it, messages, or token ids
    response: Response  # text or token ids
    actions: tuple[str, ...] | None = None  # None: the text of the answer is the only one
    valid: bool | None = None  # None: the trainer does not say
    whole: bool = False  # an answer must follow the reasoning and end the reply


@dataclasses.dataclass(frozen=True)
class Row:
    """One rollout."""

    place: str  # FILE:LINE
    replies: tuple[Reply, ...]  # at least one
    group: str | None  # rows with equal ones are of one prompt; None: those with equal prompts are
    step: int | None
    reward: float | None
    success: bool | None


@dataclasses.dataclass(frozen=True)
class Format:
    """How the records of a trainer are read."""

    needs: tuple[str, ...]  # fields by which it is told
    read: Callable[[Record], tuple[Reply, ...]]
    fields: tuple[str, ...] = ()  # others that it reads, but for those of `read_row`
    reward: Callable[[Record], float | None] | None = None  # None: a field named so


GROUP = ("group", "group_id", "uid", "example_id")
STEP = ("step", "global_step")
REWARD = ("reward", "score", "total_reward")
SUCCESS = ("success", "acc", "correct")


def read_row(record: Any, place: str, rewards: Sequence[str] = ()) -> tuple[Row, set[str]]:
    """(`Row`, the names of the record's fields that were not read) of one record.

    Args:
      record: what a line holds.
      place: FILE:LINE.
      rewards: names of the fields whose sum is the reward; none: what the format says.

    Raises:
      ValueError: it is of no format, or a field holds something else than it should.
    """
    if not isinstance(record, dict):
        raise ValueError(f"is not an object, but {_shown(record)}")
    found = [form for form in FORMATS.values() if all(name in record for name in form.needs)]
    if not found:
        raise ValueError(
            f"has the fields {', '.join(map(repr, record)) or '(none)'}, which no format has; "
            f"prompt and response are the least"
        )
    form = found[0]
    replies = form.read(record)
    about = {**record, **_object(record, "metadata"), **_object(record, "run")}
    group = _first(about, GROUP)
    if isinstance(group, dict):  # of verifiers' episodes
        group = group.get("id")
    step = _first(about, STEP)
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"has the step {_shown(step)}; expected a number from 0")
    if rewards:
        values = [_number(record, name) for name in rewards]
        reward = None if None in values else math.fsum(v for v in values if v is not None)
    elif form.reward:
        reward = form.reward(record)
    else:
        reward = next((_number(about, name) for name in REWARD if name in about), None)
    success = _first(about, SUCCESS)
    if success is not None and success not in (0, 1):
        raise ValueError(f"says of its success {_shown(success)}; expected true or false")
    row = Row(
        place=place,
        replies=replies,
        group=None if group is None else str(group),
        step=step,
        reward=reward,
        success=None if success is None else bool(success),
    )
    known = {*form.needs, *form.fields, *GROUP, *STEP, *REWARD, *SUCCESS, *rewards, "run"}
    if form.reward is _trl_reward:
        known |= _reward_columns(record)
    return row, set(record) - known


def shows_images(record: Any) -> bool:
    """Whether a record is of ours and one of its turns shows images, which only its own model with
    its tower could read."""
    turns = record.get("turns") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        return False
    return any(isinstance(turn, dict) and turn.get("images") for turn in turns)


# ------------------------------------------------------------------------------ formats


def _ours(record: Record) -> tuple[Reply, ...]:
    return tuple(
        Reply(
            prompt=_ids(turn, "prompt_ids"),
            response=_ids(turn, "sampled_ids"),
            actions=tuple(map(str, turn.get("actions", ()))),
            valid=bool(turn["valid"]) if "valid" in turn else None,
            whole=True,
        )
        for turn in _objects(record, "turns")
    )


def _our_reward(record: Record) -> float | None:
    rewards = [_number(turn, "reward") for turn in _objects(record, "turns")]
    return None if None in rewards else math.fsum(r for r in rewards if r is not None)


def _episode(record: Record) -> tuple[Reply, ...]:
    """The sampled messages of a verifiers episode, behind those on their way from the root."""
    replies = []
    for trace in _objects(record, "traces"):
        nodes = _objects(trace, "nodes")
        for index, node in enumerate(nodes):
            if not node.get("sampled"):
                continue
            path = []
            before = node.get("parent")
            while before is not None:
                if not isinstance(before, int) or not 0 <= before < index - len(path):
                    raise ValueError(f"has a node whose parent is {_shown(before)}")
                path.insert(0, nodes[before])
                before = nodes[before].get("parent")
            if all(n.get("token_ids") for n in (*path, node)) and any(node.get("mask") or ()):
                ids, mask = _ids(node, "token_ids"), node["mask"]
                start = mask.index(True)
                prompt = [i for n in path for i in _ids(n, "token_ids")] + ids[:start]
                replies.append(Reply(prompt, ids[start : len(mask) - mask[::-1].index(True)]))
            else:
                messages = _messages([n.get("message") for n in path])
                replies.append(Reply(messages, _said(node.get("message"))))
    if not replies:
        raise ValueError("has no sampled message")
    return tuple(replies)


def _episode_reward(record: Record) -> float | None:
    values = []
    for trace in _objects(record, "traces"):
        for name, reward in _object(trace, "rewards").items():
            if reward is None:
                return None
            score, weight = _number(reward, "score"), reward.get("weight", 1.0)
            if score is None:
                raise ValueError(f"has a reward {name} without a score")
            values.append(score * weight)
    return math.fsum(values) if values else None


def _ragen(record: Record) -> tuple[Reply, ...]:
    return _conversation([], record["messages"])


def _verl(record: Record) -> tuple[Reply, ...]:
    return (Reply(_prompt(record, "input"), _text(record, "output")),)


def _completion(record: Record) -> tuple[Reply, ...]:
    if isinstance(record["completion"], str):
        return (Reply(_prompt(record, "prompt"), _text(record, "completion")),)
    return _conversation(_prompt(record, "prompt"), record["completion"])


def _plain(record: Record) -> tuple[Reply, ...]:
    prompt, response = _prompt(record, "prompt"), record["response"]
    if isinstance(response, list) and response and isinstance(response[0], dict):
        return _conversation(prompt, response)
    if isinstance(response, list) and response:
        return (Reply(prompt, _ids(record, "response")),)
    return (Reply(prompt, _text(record, "response")),)


def _reward_columns(record: Record) -> set[str]:
    """TRL has a column for each of its reward functions, under the function's name."""
    numbers = {k for k, v in record.items() if isinstance(v, (int, float)) or v is None}
    return {name for name in numbers if "reward" in name.lower()}


def _trl_reward(record: Record) -> float | None:
    """The sum of its reward columns; a function that does not apply to a row has none there."""
    values = [_number(record, name) for name in _reward_columns(record)]
    given = [value for value in values if value is not None]
    return math.fsum(given) if given else None


FORMATS = {  # the first of which a record has all fields
    "ragen_jax": Format(("turns",), _ours, ("seed", "member", "error"), _our_reward),
    "prime-rl": Format(("traces",), _episode, ("task", "ok", "id"), _episode_reward),
    "RAGEN": Format(("messages", "metadata"), _ragen, ("custom_id",)),
    "verl": Format(("input", "output"), _verl),
    "verifiers": Format(("prompt", "completion", "example_id"), _completion),
    "TRL": Format(("prompt", "completion"), _completion, ("advantage",), _trl_reward),
    "plain": Format(("prompt", "response"), _plain),
}


# ------------------------------------------------------------------------------ fields


def _conversation(prompt: Prompt, messages: Any) -> tuple[Reply, ...]:
    """A `Reply` for each message of the assistant, which has read all before it."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and not isinstance(prompt[0], dict):
        raise ValueError("has token ids as its prompt, but messages as its reply")
    before: Messages = list(prompt)  # ty: ignore[invalid-assignment] messages, as was checked
    replies = []
    for raw, message in zip(messages, _messages(messages), strict=True):
        if message["role"] == "assistant":
            if not before:
                raise ValueError("begins with a message of the assistant: nothing was read before")
            replies.append(Reply(list(before), _said(raw)))
        before.append(message)
    if not replies:
        raise ValueError("has no message of the role 'assistant'")
    return tuple(replies)


def _prompt(record: Record, name: str) -> Prompt:
    value = record[name]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _messages(value)
    if isinstance(value, list) and value:
        return _ids(record, name)
    return _text(record, name, empty=False)


def _messages(value: Any) -> Messages:
    if not isinstance(value, list):
        raise ValueError(f"has {_shown(value)} where messages are expected")
    return [{"role": str(_role(m)), "content": _said(m)} for m in value]


def _role(message: Any) -> Any:
    if not isinstance(message, dict) or "role" not in message:
        raise ValueError(f"has the message {_shown(message)}, which has no role")
    return message["role"]


# What servers that split a reply name its reasoning; `_said` puts these tags around it, which
# encode.py replaces by the ones that are looked for.
REASONING = ("reasoning_content", "reasoning")
OPEN, CLOSE = "\x00reasoning\x00", "\x00/reasoning\x00"


def _said(message: Any) -> str:
    """The text of a message."""
    _role(message)
    content = message.get("content")
    if isinstance(content, list):
        other = [part for part in content if part.get("type", "text") != "text"]
        if other:
            raise ValueError(f"has a message with {_shown(other[0])}; only text is read")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | None):
        raise ValueError(f"has a message whose content is {_shown(content)}")
    thought = _first(message, REASONING)
    if isinstance(thought, str) and thought:
        return f"{OPEN}{thought}{CLOSE}{content or ''}"
    return content or ""


def _text(record: Record, name: str, empty: bool = True) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"has {_shown(value)} as its {name}; expected text or messages")
    if not value and not empty:
        raise ValueError(f"has an empty {name}")
    return value


def _ids(record: Record, name: str) -> list[int]:
    value = record.get(name)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError(f"has {_shown(value)} as its {name}; expected token ids")
    return value


def _object(record: Record, name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _objects(record: Record, name: str) -> list[dict[str, Any]]:
    value = record.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise ValueError(f"has {_shown(value)} as its {name}; expected a list of objects")
    return value


def _number(record: Record, name: str) -> float | None:
    """A finite number; None: there is none (as NaN, which tables write for it)."""
    value = record.get(name)
    if value is None or isinstance(value, float) and math.isnan(value):
        return None
    if not isinstance(value, (int, float)) or math.isinf(value):
        raise ValueError(f"has {_shown(value)} as its {name}; expected a finite number")
    return float(value)


def _first(record: Record, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
