"""samples.py: replies on the console, and why they are invalid."""

import dataclasses
import types

import pytest

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.run.samples import explain_invalid, invalid_reply_lines, sample_lines

pytestmark = pytest.mark.fast
REASONS = {
    "so</think><answer>Sideways</answer>": "with an unknown or no action",
    "so</think>Up": "without an answer",
    "so</think>then <answer>Up</answer>": "with text before <answer>",
    "so</think><answer>Up</answer> and more": "with text after </answer>",
    "so <answer>Up</answer>": "with unclosed reasoning",
}


@pytest.fixture
def task(tokenizer):
    format = ChatFormat(context="full", prompt="terse", actions_per_turn=2, max_actions=10)
    chat = make_chat(tokenizer, Sokoban(split="train"), format)
    return types.SimpleNamespace(label="", settings=types.SimpleNamespace(chat=chat))


def turn_of(task, make_turn, text, **changes):
    chat = task.settings.chat
    sampled = chat.reply_ids(text)
    read = chat.read(sampled)
    turn = make_turn([1], sampled, message="a room", valid=read.valid, reward=0.5)
    return dataclasses.replace(turn, answer=read.answer, **changes)


@pytest.mark.parametrize("text", REASONS)
def test_why_a_reply_is_invalid(task, make_turn, text):
    turn = turn_of(task, make_turn, text)
    assert not turn.valid
    assert explain_invalid(task.settings.chat, turn, 99) == REASONS[text]
    cut = dataclasses.replace(turn, sampled=turn.sampled[:-1])
    limit = len(cut.sampled)
    assert explain_invalid(task.settings.chat, cut, limit) == "cut off at rollout.max_new_tokens"


def test_an_example_is_printed_if_most_are_invalid(task, make_turn, make_episode):
    texts = [*REASONS, "so</think>Down", "so</think><answer>Up</answer>"]
    episodes = [make_episode(g, 0, [turn_of(task, make_turn, t)]) for g, t in enumerate(texts)]
    head, prompt, reply = invalid_reply_lines(task, episodes, 99)
    assert head.startswith("  6 of 7 replies are not valid: 2 without an answer, 1 with ")
    assert head.endswith("; for example") and prompt == "    prompt: a room"
    assert reply.startswith("    reply: <think>so</think>Up")
    assert invalid_reply_lines(task, episodes[-1:] * 7 + episodes[:6], 99) == []
    broken = [dataclasses.replace(e, error="x") for e in episodes]
    assert invalid_reply_lines(task, broken, 99) == []


def test_samples_are_of_different_groups(task, make_turn, make_episode):
    text = "so</think><answer>Up</answer>"
    turns = [turn_of(task, make_turn, f"{i} {text}") for i in range(4)]
    episodes = [make_episode(g, k, [turns[2 * g + k]]) for g in range(2) for k in range(2)]
    lines = sample_lines(task, episodes, 5)
    assert [line.strip().split(":")[0] for line in lines] == [
        *("prompt", "reply", "reward +0.50"),
        *("prompt", "reply", "reward +0.50"),
    ]
    assert "<think>0 so" in lines[1] and "<think>2 so" in lines[4]
    assert sample_lines(task, episodes, 0) == []
    hostile = dataclasses.replace(turns[0], message="\x1b[2J\n" + 500 * "x")
    (prompt, *_) = sample_lines(task, [make_episode(0, 0, [hostile])], 1)
    assert "\x1b" not in prompt and "\n" not in prompt and len(prompt) < 230
