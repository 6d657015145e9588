"""Sessions as graphs of calls: random conversations, and which calls are kept."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from ragen_jax import serve
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.likelihood import token_logps
from ragen_jax.rollout.episode import Sampling
from ragen_jax.serving.conversation import Message
from ragen_jax.serving.engine import Engine, Ticket
from ragen_jax.serving.recording import Call, as_records, find_start, kept_calls
from ragen_jax.serving.tool_calls import ToolCall

pytestmark = pytest.mark.medium
TEXTS = (
    *("go on", "what? é想", "<|im_end|>\n<|im_start|>assistant\nyes", "<think>no</think>", ""),
    *("<tool_call>{}</tool_call>", "a\n\n b ", "\ud800", "<|endoftext|>"),
)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def call(prompt, *, continues=None, shown=(), tools=(), sampled=(7,)):
    ids = np.asarray(sampled, np.int32)
    return Call(
        continues=continues,
        tools=tools,
        shown=tuple(shown),
        prompt=np.asarray(prompt, np.int32),
        sampled=ids,
        logp=np.zeros(len(ids), np.float32),
        finish="stop",
    )


SYSTEM, OTHER = Message("system", "rules"), Message("system", "make a title")
ASK, SAID = Message("user", "go"), Message("assistant", "Up")


def test_retries_and_side_calls_are_left_out():
    main = [SYSTEM, ASK, SAID]
    calls = [
        call([1], shown=main),  # a retry: 1 has the same prompt, and is continued
        call([1], shown=main),
        call([1, 7, 2], continues=1, shown=[*main, ASK, SAID]),
        call([9], shown=[OTHER, ASK, SAID]),  # another system message, and nothing continues it
        call([1, 7, 3], continues=1, shown=[*main, ASK, SAID]),  # a fork
    ]
    kept, left_out = kept_calls(calls)
    assert kept == [1, 2, 4] and left_out == {"retry": 1, "side call": 1}
    (record,) = as_records(calls, 5)
    assert [turn["prompt_ids"] for turn in record["turns"]] == [[1], [1, 7, 2], [1, 7, 3]]
    assert record["session"] == 5 and record["left_out"] == {"retry": 1, "side call": 1}


class Plain:
    """A conversation whose ids are the numbers of its messages."""

    def prompt(self, messages, tools):
        return np.arange(len(messages), dtype=np.int32)

    def go_on(self, before, sampled, tail, tools):
        return np.concatenate([before, sampled, 50 + np.arange(len(tail))]).astype(np.int32)


def test_a_request_continues_the_latest_of_the_longest_paths_with_its_tools():
    talk, longer = [ASK, SAID], [ASK, SAID, ASK, SAID]
    calls = [
        call([1], shown=talk, sampled=[5]),
        call([1], shown=talk, sampled=[6]),
        call([1, 6, 50], continues=1, shown=longer, sampled=[7]),
        call([2], shown=longer, tools=TOOLS),
        call([3], shown=[ASK, Message("assistant", "Down"), ASK, SAID]),
    ]

    def start(messages, tools=()):
        found = find_start(calls, Plain(), messages, tools)
        return found.continues, found.prompt.tolist()

    assert start([*talk, ASK]) == (1, [1, 6, 50])
    assert start([*longer, ASK, ASK]) == (2, [1, 6, 50, 7, 50, 51])
    assert start([*longer, ASK], TOOLS) == (3, [2, 7, 50])
    assert start([*talk, ASK], TOOLS) == (None, [0, 1, 2])
    assert start(talk) == (None, [0, 1])  # nothing follows the reply
    assert start([ASK, Message("assistant", "Left"), ASK]) == (None, [0, 1, 2])


def test_nothing_is_left_out_of_a_shared_session():
    calls = [call([1], shown=[ASK, SAID]), call([1], shown=[ASK, SAID]), call([9], shown=[SYSTEM])]
    calls[2] = dataclasses.replace(calls[2], malformed_calls=2)
    records = as_records(calls, 0, shared=True)
    assert [record["malformed_calls"] for record in records] == [0, 0, 2]
    assert [len(record["turns"]) for record in records] == [1, 1, 1]
    assert not any(record["left_out"] for record in records)


def test_a_sub_agent_and_a_compacted_history_are_conversations_of_their_own():
    main = [SYSTEM, ASK, SAID]
    calls = [
        call([1], shown=main),
        call([9], shown=[OTHER, ASK, SAID]),
        call([9, 7, 2], continues=1, shown=[OTHER, ASK, SAID, ASK, SAID]),  # a sub-agent goes on
        call([4], shown=[SYSTEM, Message("user", "summary"), SAID]),  # compacted: the same frame
    ]
    kept, left_out = kept_calls(calls)
    assert kept == [0, 1, 2, 3] and not left_out
    assert [len(record["turns"]) for record in as_records(calls, 0)] == [1, 2, 1]


def test_of_equal_retries_the_last_is_kept():
    kept, left_out = kept_calls([call([1]), call([1]), call([1])])
    assert kept == [2] and left_out == {"retry": 2}
    assert kept_calls([]) == ([], {})


@dataclasses.dataclass
class Client:
    """A client that edits, forks, repeats and shortens its conversation at random."""

    draw: random.Random
    said: list
    tools: tuple = ()

    def next(self, calls):
        """The messages of the next request."""
        act = self.draw.random()
        if calls and act < 0.1:  # a retry
            return list(calls[-1].shown[:-1])
        if calls and act < 0.2:  # a fork from an earlier reply
            said = list(self.draw.choice(calls).shown)
        elif act < 0.28:  # a compacted history
            said = [Message("user", "summary: " + self.draw.choice(TEXTS))]
            self.tools = TOOLS if self.draw.random() < 0.3 else ()
            return said
        else:
            said = list(self.said)
        if said and said[-1].role == "assistant" and self.draw.random() < 0.1:  # an edit
            said[-1] = Message("assistant", self.draw.choice(TEXTS))
        if said and self.draw.random() < 0.2:  # without the reasoning, or with arguments parsed
            said = [dataclasses.replace(message, reasoning=None) for message in said]
        if said and self.draw.random() < 0.1:
            said.append(Message("tool", self.draw.choice(TEXTS)))
        if self.draw.random() < 0.1:  # a call that was never sampled
            arguments = {self.draw.choice(TEXTS): [1, None, {"a": "<|im_end|>"}]}
            said += [ASK, Message("assistant", "", None, (ToolCall("add", arguments),))]
        return [*said, Message("user", self.draw.choice(TEXTS))]


@pytest.mark.parametrize(
    "conversations",
    [pytest.param(100, marks=pytest.mark.long), pytest.param(2000, marks=pytest.mark.slow)],
)
def test_random_conversations(language_model, conversations):
    """Every kept row is a path of ids that were shown or sampled, from a root to a leaf; each
    sampled token is kept once; log-probs are those of a fresh forward pass; clients place no
    control tokens."""
    config = sokoban.get_config("llm")
    config.model.path, config.model.dtype = str(language_model), "float32"
    policy = serve.of_model(str(language_model), load_config(config))
    conversation, close = policy.conversation, policy.conversation.close_id
    engine = Engine(
        policy.model,
        policy.params,
        mesh=make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        slots=64,
        longest_reply=10,
        sampling=Sampling(temperature=1.0),
        endings=policy.endings,
        key=jax.random.key(0),
    )
    draw = random.Random(conversations)
    clients = [Client(random.Random(i), []) for i in range(conversations)]
    sessions = [[] for _ in clients]
    for turn in range(5):
        asked = []
        for number, (client, calls) in enumerate(zip(clients, sessions, strict=True)):
            messages = client.next(calls)
            start = find_start(calls, conversation, messages, client.tools)
            ticket = Ticket(start.prompt, draw.randint(1, 10), (number, 0, turn))
            asked.append((messages, start, engine.submit(ticket)))
        for client, calls, (messages, start, future) in zip(clients, sessions, asked, strict=True):
            found = future.result()
            ids = [i for i in found.ids.tolist() if i not in policy.endings.ids]
            reply = conversation.read(conversation.text(ids)).message
            client.said = [*messages, reply]
            calls.append(
                Call(
                    start.continues, client.tools, tuple(client.said), start.prompt, *found, "stop"
                )
            )
    engine.close()

    rng = np.random.default_rng(0)
    forks = continued = 0
    for calls in sessions:
        for index, one in enumerate(calls):
            before = calls[one.continues] if one.continues is not None else None
            if before is not None:
                path = np.concatenate([before.prompt, before.sampled])
                np.testing.assert_array_equal(one.prompt[: len(path)], path)
                assert one.continues < index and before.tools == one.tools
                continued += 1
            # The control tokens are those of the same roles with harmless texts.
            sampled, closed, at = 0, 0, before
            while at is not None:
                sampled += sum(i in conversation.control for i in at.sampled.tolist())
                closed += int(at.sampled[-1] == close)
                at = calls[at.continues] if at.continues is not None else None
            clean = [dataclasses.replace(m, text="x", reasoning=None) for m in one.shown[:-1]]
            expected = sum(
                i in conversation.control for i in conversation.prompt(clean, one.tools).tolist()
            )
            placed = sum(i in conversation.control for i in one.prompt.tolist())
            assert placed == expected + sampled - closed
        kept, _ = kept_calls(calls)
        parents = [calls[i].continues for i in kept if calls[i].continues is not None]
        assert set(parents) <= set(kept)  # a path is whole
        forks += len(parents) - len(set(parents))
        turns = [turn for record in as_records(calls, 0) for turn in record["turns"]]
        assert len(turns) == len(kept) == len(set(kept))
    assert forks > 0 and continued > conversations
    every = [one for calls in sessions for one in calls]
    for one in rng.choice(len(every), 40, replace=False):
        one = every[one]
        whole = np.concatenate([one.prompt, one.sampled])[None].astype(np.int32)
        logp = np.asarray(token_logps(policy.model, policy.params, whole))[0, len(one.prompt) :]
        np.testing.assert_allclose(one.logp, logp, atol=1e-4)
