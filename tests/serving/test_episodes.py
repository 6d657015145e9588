"""The calls of a session as turns: order, rewards, what is reasoning, rows of tokens."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.config.build_environment import build_chat
from ragen_jax.core.types import Episode
from ragen_jax.diagnostics.rollouts import request_metrics
from ragen_jax.envs.harness.env import as_result
from ragen_jax.envs.types import HarnessResult
from ragen_jax.rollout.env_calls import in_threads
from ragen_jax.serving.conversation import Message, make_conversation
from ragen_jax.serving.episodes import as_turns, with_rewards
from ragen_jax.serving.harness_chat import harness_chat
from ragen_jax.serving.recording import Call
from ragen_jax.serving.tool_calls import ToolCall

pytestmark = pytest.mark.fast
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


@pytest.fixture(scope="module")
def chats(tokenizer):
    """HarnessChat by `thinks`."""
    from ragen_jax.config.load import load_config
    from ragen_jax.configs import sokoban

    config = load_config(sokoban.get_config())
    environment = SimpleNamespace(actions=(), instructions="")
    plain = build_chat(config, tokenizer, environment)
    return {
        thinks: harness_chat(plain, make_conversation(tokenizer, thinks=thinks))
        for thinks in (False, True)
    }


def a_call(chat, prompt, text, *, continues=None, messages=(), tools=(), calls=(), **fields):
    sampled = np.append(chat.template.plain(text), chat.close_id).astype(np.int32)
    shown = (*(messages or (Message("user", "go"),)), Message("assistant", text, None, calls))
    ids = np.asarray(prompt, np.int32)
    logp = np.zeros(len(sampled), np.float32)
    found = Call(continues, tools, shown, ids, sampled, logp, "stop")
    return dataclasses.replace(found, **fields)


def follow(chat, calls, index, rest, text, **fields):
    """A call that continues call `index` with further ids of its prompt."""
    prompt = np.concatenate([calls[index].prompt, calls[index].sampled, rest])
    return a_call(chat, prompt, text, continues=index, **fields)


def branching(chat):
    """main 0 -> 1 -> 4, a fork 0 -> 3, a sub-agent 2, a retry of it 5 (the one that is kept)."""
    calls = [a_call(chat, [1, 2], "a")]
    calls.append(follow(chat, calls, 0, [3], "b"))
    calls.append(a_call(chat, [9], "sub"))
    calls.append(follow(chat, calls, 0, [4], "c"))
    calls.append(follow(chat, calls, 1, [5], "d"))
    calls.append(a_call(chat, [9], "sub again"))
    return calls


def test_a_row_goes_from_a_root_to_a_leaf_and_each_token_is_trained_once(chats):
    chat = chats[False]
    calls = branching(chat)
    turns, order, left_out = as_turns(chat, calls)
    assert order == [0, 1, 4, 3, 5] and left_out == len(calls[2].sampled)
    episode = Episode(0, 0, 0, tuple(turns), False, left_out=left_out)
    batch = make_batch([episode])
    assert len(batch.weight_B) == 3  # 0-1-4, 0-3, 5
    assert batch.mask_BT.sum() == sum(len(calls[index].sampled) for index in order)
    first = batch.tokens_BT[0][batch.mask_BT[0] > 0]
    np.testing.assert_array_equal(first, np.concatenate([calls[i].sampled for i in (0, 1, 4)]))
    # In the second row, call 0 is context.
    assert batch.mask_BT[1][: len(calls[3].prompt)].sum() == 0
    figures = request_metrics([episode])
    assert figures["rollout/forks"] == 2 and figures["rollout/prefix_reuse"] == 3 / 4
    assert figures["rollout/untrained_tokens"] == left_out


def test_the_reward_is_that_of_the_last_turn_or_of_each_request(chats):
    turns, order, _ = as_turns(chats[False], branching(chats[False]))
    whole = with_rewards(turns, order, 6, HarnessResult(2.0, True, info={"steps": 3}))
    assert [turn.reward for turn in whole] == [0, 0, 0, 0, 2.0]
    assert [turn.info for turn in whole] == [{}] * 4 + [{"steps": 3, "success": True}]
    each = with_rewards(turns, order, 6, HarnessResult(21.0, False, (1, 2, 3, 4, 5, 6)))
    # Call 2 is left out: the turn before it is that of call 1.
    assert dict(zip(order, (turn.reward for turn in each), strict=True)) == {
        **{0: 1, 1: 5, 3: 4, 4: 5, 5: 6}
    }
    with pytest.raises(ValueError, match="gave 2 rewards, but 6 of its requests"):
        with_rewards(turns, order, 6, HarnessResult(3.0, False, (1.0, 2.0)))


READ = [  # thinks, reply, reasoning, rest, whether it is closed
    (True, "up</think> go", "up", " go", True),
    (True, "up", "", "", False),
    (True, "</think>go", "", "go", True),
    (False, "<think>up</think> go", "<think>up", " go", True),
    (False, "<think>up", "", "", False),
    (False, "I add. <tool_call>{}</tool_call>", "I add. ", "<tool_call>{}</tool_call>", True),
    (False, "It is 5.", "It is 5.", "", True),
    (False, "", "", "", True),
]


@pytest.mark.parametrize(("thinks", "text", "reasoning", "rest", "closed"), READ)
def test_what_is_reasoning(chats, thinks, text, reasoning, rest, closed):
    chat = chats[thinks]
    sampled = np.append(chat.template.plain(text), chat.close_id)
    reply = chat.read(sampled)
    assert chat.text(sampled[slice(*reply.reasoning)]) == reasoning
    assert chat.text(sampled[slice(*reply.answer)]) == rest
    assert reply.valid == closed


def test_a_prompt_without_the_reasoning_that_it_repeats(chats):
    chat = chats[True]
    calls = [a_call(chat, [1, 2], "up</think>go")]
    calls.append(follow(chat, calls, 0, [3], "never closed"))
    calls.append(follow(chat, calls, 1, [4], "x</think>y"))
    turns, _, _ = as_turns(chat, calls)
    bare = chat.without_reasoning(turns[:2], "", turns[2].prompt)
    end = chat.template.plain("</think>go").tolist()
    assert bare.tolist() == [1, 2, *end, chat.close_id, 3, 4]
    other = chat.without_reasoning(turns[:1], "", np.array([5, 6], np.int32))
    assert other.tolist() == [5, 6]  # it repeats nothing


def test_a_turn_tells_its_tools_and_calls(chats):
    chat = chats[False]
    called = (ToolCall("add", {"a": 1}),)
    made = a_call(chat, [1], "<tool_call>{}</tool_call>", tools=TOOLS, calls=called)
    cut = a_call(chat, [2], "and so", tools=TOOLS, finish="length")
    wrong = a_call(chat, [3], "x", tools=TOOLS, malformed_calls=1)
    (turn, long, malformed), _, _ = as_turns(chat, [made, cut, wrong])
    assert turn.actions == ("add {'a': 1}",) and turn.tools == TOOLS and turn.valid
    assert turn.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
    assert (long.actions, long.valid) == (("and so",), False) and not malformed.valid


RESULTS = [
    (0.5, HarnessResult(0.5, False)),
    ({"reward": 2}, HarnessResult(2.0, True)),
    ({"reward": 0, "success": True, "steps": 4}, HarnessResult(0.0, True, (), {"steps": 4})),
    ({"rewards": [1, 0.5]}, HarnessResult(1.5, True, (1.0, 0.5))),
]


@pytest.mark.parametrize(("value", "expected"), RESULTS)
def test_results(value, expected):
    assert as_result(value, "agent", 1.0) == expected


@pytest.mark.parametrize("value", ["1", None, {}, {"rewards": []}, {"rewards": [1, "2"]}, [1.0]])
def test_results_that_are_refused(value):
    with pytest.raises(TypeError, match="agent must"):
        as_result(value, "agent", 1.0)


def test_jobs_that_are_late_are_given_up():
    from threading import Event

    from ragen_jax.rollout.env_calls import EnvFailure, Limits

    event, given_up = Event(), []
    results = in_threads(
        lambda job, tick: event.wait(20) if job else job, [0, 1], Limits(0.2, 2), given_up.append
    )
    event.set()
    assert results[0] == 0 and isinstance(results[1], EnvFailure) and given_up == [1]
