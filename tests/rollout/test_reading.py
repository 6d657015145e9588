"""Replies parsed at once, compared with parsing token by token (kept in benchmarks/reading.py)."""

import functools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from chat_families import FAMILIES, TOOL_TEMPLATE, family
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reading import read_one_by_one
from ragen_jax.rollout.chat import ChatFormat, make_chat

pytestmark = pytest.mark.fast

GAME = SimpleNamespace(actions=("Up", "Down", "Left", "Right"), instructions="Push.")
SUM = SimpleNamespace(actions=(), instructions="Write a sum.")
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
MEMBERS = dict.fromkeys(("reset", "render", "identity", "step"), print)
FINDER = SimpleNamespace(actions=(), instructions="Find it.", tools=(TOOL,), **MEMBERS)
# Parts of replies: whole and broken tags, all characters that some language calls whitespace,
# actions, letters of several bytes.
PIECES = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
PIECES += [
    "</thi",
    "nk>",
    "<ans",
    "wer>",
    "</answer",
    ">",
    "</",
    "<",
    "||",
    "Up",
    " dOWN ",
    "Left||",
]
PIECES += [" ", "\n", "\t\r", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u3000"]
PIECES += ["\x00", "é", "e\u0301", "שלום", "你好", "👩\u200d👩", "\U0010ffff", "İı", "ﬁ", "thought"]
WELL_FORMED = "so</think> \n<answer>Up</answer>\n"


@functools.cache
def chats(name):
    """Chats of one family: a game, text answers, and tools if its template supports them."""
    tokenizer = family(name).tokenizer
    format = ChatFormat(context="full", prompt="terse", actions_per_turn=2, max_actions=10)
    made = [make_chat(tokenizer, GAME, format), make_chat(tokenizer, SUM, format)]
    if name == "qwen":
        before, tokenizer.chat_template = tokenizer.chat_template, TOOL_TEMPLATE
        made.append(make_chat(tokenizer, FINDER, format))
        tokenizer.chat_template = before
    return made


texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
inside = st.tuples(texts, texts, st.sampled_from(["answer", "tool_call"]), texts, texts).map(
    lambda t: f"{t[0]}</think>{t[1]}<{t[2]}>{t[3]}</{t[2]}>{t[4]}"
)
near = st.tuples(texts, st.sampled_from(["answer", "tool_call"]), texts).map(
    lambda t: f"{t[0]}</think>\n<{t[1]}>{t[2]}</{t[1]}> "
)


@pytest.mark.medium
@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_was_sampled_is_read_as_token_by_token(name):
    tokenizer = family(name).tokenizer
    # some ids are beyond the tokenizer, because an embedding may be larger
    ids = st.integers(0, len(tokenizer) + 5)

    @settings(deadline=None, max_examples=150)
    @given(texts | inside | near, st.lists(st.tuples(st.integers(0, 40), ids), max_size=3))
    def check(text, strange):
        sampled = tokenizer.encode(text, add_special_tokens=False)
        for place, id_ in strange:
            sampled.insert(min(place, len(sampled)), id_)
        for chat in chats(name):
            expected = read_one_by_one(chat, sampled)
            assert chat.read(sampled) == expected
            assert chat.read(np.array(sampled, np.int32)) == expected
            pieces = [*chat.token_bytes, *[b"\xff"] * 6]
            assert chat.text(sampled).encode() == (
                b"".join(pieces[i] for i in sampled).decode("utf-8", errors="replace").encode()
            )

    check()


def test_what_is_compared_holds_replies_of_all_kinds():
    game, text, finder = chats("qwen")
    encode = functools.partial(family("qwen").tokenizer.encode, add_special_tokens=False)
    assert game.read(encode(WELL_FORMED)).actions == ("Up",)
    assert text.read(encode(WELL_FORMED)).valid
    call = finder.read(encode("so</think>\x0b<tool_call>{}</tool_call>\x0c"))
    assert call.calls and call.actions == ("<tool_call>{}</tool_call>",)
    # \x85 is no whitespace in bytes
    assert not game.read(encode("so</think>\x85<answer>Up</answer>")).valid
    assert not game.read([]).valid and not game.read(np.zeros(0, np.int32)).valid


@pytest.mark.parametrize("answer", ["</answer>", "<answer>", "<answer></answer>", "</answer"])
def test_tags_that_overlap_or_repeat_are_read_as_token_by_token(answer):
    encode = functools.partial(family("llama").tokenizer.encode, add_special_tokens=False)
    for before in ("", "</think>", "a</think>", "a</think><answer>", "a</think></think>"):
        for behind in ("", " ", "</answer>", "</answer></answer>\n", "x", "<answer>"):
            for chat in chats("llama"):
                ids = encode(before + answer + behind)
                assert chat.read(ids) == read_one_by_one(chat, ids)


@pytest.mark.parametrize("piece", ["</think><answer>", " ", "Up||", "<tool_call>{"])
def test_the_time_of_a_long_reply_grows_with_its_length(piece):
    """50,000 pieces: a pass over the whole rest for each of them would take hours."""
    encode = functools.partial(family("qwen").tokenizer.encode, add_special_tokens=False)
    sampled = [*encode("so</think>"), *encode(piece) * 50_000]
    start = time.perf_counter()
    for chat in chats("qwen"):
        chat.read(sampled)
        chat.read([*sampled, *encode("</answer>")])
    assert time.perf_counter() - start < 60
