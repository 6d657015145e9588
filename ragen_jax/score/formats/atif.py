"""Trajectories of the Agent Trajectory Interchange Format (ATIF) 1.0 to 1.8.

Harbor writes them as TRIAL/agent/trajectory.json (its rfcs/0001-trajectory-format.md; also
tunix/experimental/trajectory/trajectory.py of Tunix and rllm/integrations/harbor/
atif_trajectory_bridge.py of rLLM). `score.harbor` adds the fields `trial` (the reward, the task)
and `continuations` (the files that continue a trajectory).

An agent step is a reply, its tool calls and their results. Steps copied from an earlier trajectory
are read as context, not as replies; so are steps without a call of the model. The ids in `metrics`
are those of the call; if a step sums up several calls, they are not used.
"""

import re
from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.replies import message_reply
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.messages import Messages, openai_tool, read_message, read_tools
from ragen_jax.score.values import Fields, format_value

_VERSION = re.compile(r"ATIF-v1\.\d+")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    version = record.get("schema_version")
    if version is not None and not (isinstance(version, str) and _VERSION.fullmatch(version)):
        raise ValueError(f"has the schema {format_value(version)}; expected ATIF-v1.0 to ATIF-v1.8")
    replies = _trajectory_replies(record, record)
    trial = record.object("trial")
    if trial is not None and all(isinstance(reply.response, str) for reply in replies):
        recorded = _recorded_calls(trial)
        if recorded:
            return tuple(recorded)
    if not replies:
        raise ValueError("has no step of the agent")
    return tuple(replies)


def _trajectory_replies(trajectory: Fields, root: Fields) -> list[ParsedReply]:
    """Return the replies of a trajectory, of the files that continue it, and of its subagents."""
    replies: list[ParsedReply] = []
    history: Messages = []
    tools = _tools(trajectory)
    more = trajectory.objects("continuations") if trajectory.get("continuations") else []
    for part in (trajectory, *more):
        steps = part.objects("steps")
        if any(_is_copied(step) for step in steps):
            history = []  # the part repeats the context that it continues
        for step in steps:
            _add_step(root, step, history, replies, tools)
    for part in (trajectory, *more):
        nested = part.get("subagent_trajectories")
        for subagent in part.objects("subagent_trajectories") if nested else []:
            if _is_other_model(trajectory, subagent):
                root.leave_out("subagents with another model")
            else:
                replies += _trajectory_replies(subagent, root)
    return replies


def _add_step(
    root: Fields,
    step: Fields,
    history: Messages,
    replies: list[ParsedReply],
    tools: tuple[dict[str, Any], ...],
) -> None:
    """Append the messages of a step to the history, and its reply, if any, to the replies."""
    source = step.get("source")
    if not isinstance(source, str) or source not in _ROLES:
        raise ValueError(
            f"has a step whose source is {format_value(source)}; expected {', '.join(_ROLES)}"
        )
    message: dict[str, Any] = {"role": _ROLES[source], "content": step.values.get("message")}
    step.mark_read("message")
    if source == "agent":
        calls = step.objects("tool_calls") if step.get("tool_calls") else []
        message["reasoning_content"] = step.get("reasoning_content")
        message["tool_calls"] = [_call(call) for call in calls]
    message = read_message(message)
    count = values.whole(step.get("llm_call_count"), "llm_call_count")
    if source == "agent" and _is_copied(step):
        root.leave_out("steps copied from an earlier trajectory")
    elif source == "agent" and count == 0:
        root.leave_out("steps without a call of the model")
    elif source == "agent":
        replies.append(_reply(step, message, history, tools, summed=(count or 1) > 1))
    history.append(message)
    history += _results(step)


def _reply(
    step: Fields,
    message: dict[str, Any],
    history: Messages,
    tools: tuple[dict[str, Any], ...],
    *,
    summed: bool,
) -> ParsedReply:
    metrics = step.object("metrics")
    sampled = metrics.get("completion_token_ids") if metrics and not summed else None
    prompt = metrics.get("prompt_token_ids") if metrics and not summed else None
    if prompt and sampled:
        ids = values.ids(prompt, "prompt_token_ids"), values.ids(sampled, "completion_token_ids")
        return ParsedReply(*ids)
    if not history:
        raise ValueError("begins with a step of the agent, without a prompt")
    if sampled:  # before version 1.4, without the prompt
        ids = values.ids(sampled, "completion_token_ids")
        return ParsedReply(list(history), ids, tools=tools)
    return message_reply(list(history), message, tools)


def _is_copied(step: Fields) -> bool:
    return values.boolean(step.get("is_copied_context"), "is_copied_context") is True


def _call(call: Fields) -> dict[str, Any]:
    function = {"name": call.get("function_name"), "arguments": call.get("arguments")}
    return {"id": call.get("tool_call_id"), "type": "function", "function": function}


def _results(step: Fields) -> Messages:
    """Return the results of tools, and everything else that was observed as a user's message."""
    observation = step.object("observation")
    if observation is None or not observation.get("results"):
        return []
    messages, others = [], []
    for result in observation.objects("results"):
        call = result.get("source_call_id")
        text = read_message({"role": "tool", "content": result.get("content")})["content"]
        if call is not None:
            messages.append({"role": "tool", "content": text, "tool_call_id": str(call)})
        elif text:
            others.append(text)
    return messages + ([{"role": "user", "content": "\n".join(others)}] if others else [])


def _tools(trajectory: Fields) -> tuple[dict[str, Any], ...]:
    agent = trajectory.object("agent")
    tools = agent.get("tool_definitions") if agent else None
    return tuple(map(openai_tool, read_tools(tools))) if tools else ()


def _is_other_model(trajectory: Fields, subagent: Fields) -> bool:
    """Return whether both name their model, and differently; PROVIDER/NAME is NAME."""
    names = []
    for each in (trajectory, subagent):
        agent = each.object("agent")
        name = agent.get("model_name") if agent else None
        names.append(str(name).rpartition("/")[2] if name is not None else None)
    return None not in names and names[0] != names[1]


def _recorded_calls(trial: Fields) -> list[ParsedReply]:
    """Return the calls whose ids Harbor recorded in result.json (collect_rollout_details)."""
    replies = []
    for chat in trial.objects("rollout_details") if trial.get("rollout_details") else []:
        prompts, sampled = (
            values.parse_nested(chat.get(f"{name}_token_ids")) for name in ("prompt", "completion")
        )
        if not prompts and not sampled:
            continue
        if not isinstance(prompts, list) or not isinstance(sampled, list):
            raise ValueError("has rollout_details without lists of token ids")
        if len(prompts) != len(sampled):
            raise ValueError(
                f"has {len(prompts)} prompts and {len(sampled)} completions in its rollout_details"
            )
        for prompt, reply in zip(prompts, sampled, strict=True):
            ids = values.ids(prompt, "prompt_token_ids"), values.ids(reply, "completion_token_ids")
            replies.append(ParsedReply(*ids))
    return replies


def _reward(record: Fields) -> float | None:
    trial = record.object("trial")
    rewards = trial.object("rewards") if trial else None
    return values.one_reward(rewards) if rewards else None


def _group(record: Fields) -> str | None:
    trial = record.object("trial")
    return values.label(trial.get("task_name")) if trial else None


FORMAT = Format(("steps", "agent"), _read, _reward, _group)
