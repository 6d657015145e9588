"""rLLM's episodes/train_step_N_epoch_E/episode_*.json, a file for each episode.

The writer: rllm/utils/episode_logger.py. A step is a call of the model: `chat_completions` are its
messages up to and including the reply, `model_response` and `thought` the reply (rllm/agents/
agent.py, Step). Token ids are not written.
"""

from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.replies import message_reply
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.messages import is_messages, read_messages
from ragen_jax.score.values import Fields, format_value


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    trajectories = record.objects("trajectories")
    replies = [_reply(step) for each in trajectories for step in _steps(each)]
    if not replies:
        raise ValueError("has no step in its trajectories")
    return tuple(replies)


def _steps(trajectory: Fields) -> list[Fields]:
    """Return the steps of a trajectory; an agent that never replied has none."""
    return trajectory.objects("steps") if trajectory.get("steps") else []


def _reply(step: Fields) -> ParsedReply:
    raw = step.get("chat_completions")
    if not is_messages(raw):
        raise ValueError(f"has {format_value(raw)} as its chat_completions; expected messages")
    messages = read_messages(raw)
    # Agents may shorten the message (accumulated thinking is cut); the response is what was said.
    said = messages.pop() if messages[-1]["role"] == "assistant" else {"content": ""}
    if not messages:
        raise ValueError("has a step that begins with its reply, without a prompt")
    response, thought = step.get("model_response"), step.get("thought")
    for name, value in (("model_response", response), ("thought", thought)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"has {format_value(value)} as its {name}; expected text")
    content = response or said["content"]
    thought = thought or said.get("reasoning_content")
    if thought and thought in content:  # the response is the raw text, with its reasoning
        thought = None
    return message_reply(messages, said | {"content": content, "reasoning_content": thought})


def _reward(record: Fields) -> float | None:
    """Return the sum of the rewards of the trajectories; those of steps are parts of them."""
    found = [values.number(t.get("reward"), "reward") for t in record.objects("trajectories")]
    given = [each for each in found if each is not None]
    return values.add_rewards(given) if len(given) == len(found) else None


def _group(record: Fields) -> str | None:
    return values.label(record.get("task_hash"))


def _messages(record: Fields) -> list[Any]:
    steps = [_steps(each)[-1:] for each in record.objects("trajectories")]
    return [step.get("chat_completions") for last in steps for step in last]


FORMAT = Format(("trajectories", "episode_id"), _read, _reward, _group, _messages)
