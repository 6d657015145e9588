"""Episodes of verifiers v1, which prime-rl writes.

The writers: src/prime_rl/monitors/file.py of prime-rl, FileMonitor.log_episodes, a line for each
episode of verifiers (verifiers/v1/episode.py, to_record). An episode holds the traces of its
agents, each a graph of messages.
"""

from collections.abc import Sequence
from typing import Any

from ragen_jax.score import values
from ragen_jax.score.formats.replies import message_reply
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.messages import read_message, read_messages
from ragen_jax.score.values import Fields, format_value


def _read(record: Fields) -> tuple[ParsedReply, ...]:
    """Return the sampled messages of an episode, each with its ancestors as the prompt."""
    replies = []
    traces, others = _split_traces(record)
    record.leave_out("traces of agents that are not trained", len(others))
    for trace in traces:
        nodes = trace.objects("nodes")
        left_out = _left_compactions(nodes)
        record.leave_out("summaries from which the harness did not continue", len(left_out))
        for index, node in enumerate(nodes):
            if not values.boolean(node.get("sampled"), "sampled") or index in left_out:
                continue
            path = [nodes[i] for i in _ancestors(nodes, index)]
            mask = values.parse_nested(node.get("mask"))
            if mask is not None and not isinstance(mask, list):
                raise ValueError(f"has {format_value(mask)} as its mask; expected a list")
            if all(n.get("token_ids") for n in (*path, node)) and any(mask or ()):
                ids = values.ids(node.get("token_ids"), "token_ids")
                mask = [bool(values.boolean(each, "mask")) for each in mask]
                start = mask.index(True)
                prompt = [i for n in path for i in values.ids(n.get("token_ids"), "token_ids")]
                end = len(mask) - mask[::-1].index(True)
                replies.append(ParsedReply(prompt + ids[:start], ids[start:end]))
            else:
                before = read_messages([n.get("message") for n in path])
                replies.append(message_reply(before, read_message(node.get("message"))))
    if not replies:
        raise ValueError("has no sampled message")
    return tuple(replies)


def _split_traces(record: Fields) -> tuple[list[Fields], list[Fields]]:
    """Return (traces of agents that are trained, traces of judges and the like).

    Raises:
      ValueError: no agent is trained.
    """
    trained, others = [], []
    for trace in record.objects("traces"):
        agent = trace.object("agent")
        is_trained = agent is None or (
            values.boolean(agent.get("trainable"), "trainable") is not False
        )
        (trained if is_trained else others).append(trace)
    if not trained:
        raise ValueError("has no trace of an agent that is trained (agent.trainable)")
    return trained, others


def _left_compactions(nodes: Sequence[Fields]) -> set[int]:
    """Return the leaves that sum up a conversation and from which the harness did not go on.

    They are not trained (verifiers/v1/trace.py, `branches`).
    """
    parents = {values.whole(node.get("parent"), "parent") for node in nodes}
    links = [values.parse_nested(node.get("semantic_parents")) for node in nodes]
    kinds = [
        {
            (str(link.get("type")), values.whole(link.get("node"), "node"))
            for link in each
            if isinstance(link, dict)
        }
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


def _reward(record: Fields) -> float | None:
    found = [trace.get("rewards") for trace in _split_traces(record)[0]]
    parts = [values.total(each, "rewards") for each in found if each]
    given = [part for part in parts if part is not None]
    return values.add_rewards(given) if given and len(given) == len(parts) else None


def _messages(record: Fields) -> list[Any]:
    nodes = [node for trace in record.objects("traces") for node in trace.objects("nodes")]
    return [[n.values.get("message")] for n in nodes if not n.has("token_ids")]


FORMAT = Format(("traces",), _read, _reward, messages=_messages)
