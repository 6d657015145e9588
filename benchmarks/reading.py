"""Time of reading replies on the host."""

import dataclasses
import re

import numpy as np

from benchmarks.measure import Row, compare
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import ChatFormat, Reply, make_chat, token_span

VOCABULARY = 150_000  # about the size of Qwen2.5's vocabulary
_REASONING = re.compile(rb"(.*?)</think>", re.DOTALL)
_ANSWER = re.compile(rb"</think>\s*<answer>(.*?)</answer>\s*\Z", re.DOTALL)
_CALL = re.compile(rb"</think>\s*<tool_call>(.*?)</tool_call>\s*\Z", re.DOTALL)


def reading(repeats, *, replies=1024, tokens=4096):
    """chat.read of 1,024 replies of 4,096 tokens, against reading them token by token."""
    chat, ids_BT = _replies(replies, tokens)

    def ours():
        return [chat.read(ids_T) for ids_T in ids_BT]

    def other():
        return [read_one_by_one(chat, ids_T) for ids_T in ids_BT]

    found = ours()
    assert found == other() and all(reply.valid for reply in found)
    return [
        Row(
            name=f"{replies:,} replies of {tokens:,} tokens",
            other_name="one by one",
            work=replies * tokens,
            **compare(ours, other, repeats=repeats),
        )
    ]


def _replies(replies, tokens):
    """Return (`Chat`, ids [replies, tokens]): long reasonings and an answer, large vocabulary."""
    rng = np.random.default_rng(0)
    chat = make_chat(
        build_tokenizer(Sokoban.words),
        Sokoban(),
        ChatFormat(context="full", prompt="terse", actions_per_turn=2, max_actions=10),
    )
    letters = rng.integers(97, 123, (VOCABULARY - len(chat.token_bytes), 8)).astype(np.uint8)
    lengths = rng.integers(1, 9, len(letters))
    words = [bytes(row[:length]) for row, length in zip(letters, lengths, strict=True)]
    chat = dataclasses.replace(chat, token_bytes=(*chat.token_bytes, *words))
    answer = chat.reply_ids("</think><answer>Up || Down</answer>")
    # The frequencies of a language: in proportion to 1 / n for the n-th word (Zipf).
    frequency_V = 1 / np.arange(1, len(words) + 1)
    drawn_BT = rng.choice(len(words), size=(replies, tokens), p=frequency_V / frequency_V.sum())
    ids_BT = (VOCABULARY - len(words) + drawn_BT).astype(np.int32)
    ids_BT[:, -len(answer) :] = answer
    return chat, ids_BT


def read_one_by_one(chat, sampled):
    """Return the result of `chat.read` by its first method: token by token, with expressions."""
    if len(sampled) and int(sampled[-1]) in chat.stop_ids:
        sampled = sampled[:-1]
    table = chat.token_bytes
    pieces = [table[i] if i < len(table) else b"\xff" for i in sampled]
    text = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    thought = _REASONING.match(text)
    if not thought:
        return Reply((0, 0), (0, 0), (), False)
    reasoning = token_span(ends, 0, thought.end(1))
    match = _ANSWER.match(text, thought.end(1))
    if not match and chat.template.tools:
        call = _CALL.match(text, thought.end(1))
        if call and b"<tool_call>" not in call[1]:
            said = call[0].removeprefix(b"</think>").strip().decode("utf-8", errors="replace")
            return Reply(reasoning, token_span(ends, *call.span(1)), (said,), True, calls=True)
    if not match:
        return Reply(reasoning, (0, 0), (), False)
    answer = token_span(ends, *match.span(1))
    said = match[1].decode("utf-8", errors="replace")
    if not chat.actions:
        said = said.strip()
        return Reply(reasoning, answer, (said,) if said else (), bool(said))
    actions_by_word = {action.lower(): action for action in chat.actions}
    words = [word.strip().lower() for word in said.split("||")][: chat.format.actions_per_turn]
    actions = tuple(actions_by_word[word] for word in words if word in actions_by_word)
    return Reply(reasoning, answer, actions, len(actions) == len(words))
