"""transcript.py: turns as OpenAI messages, and which messages reproduce the ids."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from chat_families import FAMILIES, family
from vision_chats import pieces, seeing_chat

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import IMAGE
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import CONTEXTS, ChatFormat, make_chat
from ragen_jax.rollout.transcript import images_as_one, transcript

pytestmark = pytest.mark.fast

GAME = SimpleNamespace(actions=("Up", "Down"), instructions="Push the box.\nÀ la fin: √.")
REPLY = "the box is 想 12</think><answer>Up</answer>"
TOKENIZERS = {name: family(name).tokenizer for name in FAMILIES}
TOKENIZERS["tiny"] = build_tokenizer(Sokoban.words)


def chat_of(name, **changes):
    options = dict(context="full", window=2, prompt="full", actions_per_turn=1, max_actions=5)
    return make_chat(TOKENIZERS[name], GAME, ChatFormat(**(options | changes)))


@pytest.fixture
def play(make_turn):
    """play(chat, messages, replies) -> the turns of an episode; replies are ids."""

    def make(chat, messages, replies):
        turns = []
        for message, reply in zip(messages, replies, strict=True):
            prompt = chat.prompt_ids(turns, message)
            turns.append(make_turn(prompt, reply, message=message, logp=[0.0] * len(reply)))
        return turns

    return make


def rows(chat, turns):
    return [transcript(chat, turns[:number], turn) for number, turn in enumerate(turns)]


def exact(chat, turns):
    """(prompt_exact, reply_exact) of each turn, computed as a reader of the file might do it."""
    tokenizer, found = chat.template.tokenizer, []
    for row, turn in zip(rows(chat, turns), turns, strict=True):
        *shown, reply = row["messages"]
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text + row["added"], add_special_tokens=False)
        if row["added"]:
            assert reply["content"].startswith(row["added"])
        reply_text = (
            reply["content"]
            .split("<think>", 1)[1]
            .removeprefix("\n" if text.endswith("<think>\n") else "")
        )
        sampled = tokenizer.encode(reply_text, add_special_tokens=False)
        stop = len(turn.sampled) - len(sampled)
        found.append(
            (
                prompt == turn.prompt.tolist(),
                sampled == turn.sampled[: len(sampled)].tolist() and stop == (row["end"] != TRUNC),
            )
        )
        assert found[-1] == (row["prompt_exact"], row["reply_exact"])
    return found


TRUNC = "truncated"


@pytest.mark.medium
@pytest.mark.parametrize("prompt", ["full", "terse"])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_template_gives_back_the_ids(name, context, prompt, play):
    chat = chat_of(name, context=context, prompt=prompt)
    messages = ["P_#\n_X√", "P O\n1 2", "the box is Up", "想 é"]
    turns = play(chat, messages, [chat.reply_ids(REPLY)] * 4)
    lead = "<think>\n" if name == "deepseek" else "<think>"
    # If the tag is not a separate token, it may merge with the first letters of the reply after it.
    tagged, apart = TOKENIZERS[name].encode(lead + REPLY), TOKENIZERS[name].encode(lead)
    apart = apart + TOKENIZERS[name].encode(REPLY) == tagged
    assert apart == (name in ("tiny", "qwen", "deepseek", "gemma3"))
    assert exact(chat, turns) == [(True, True), *[(apart or context == "single_turn", True)] * 3]
    last = rows(chat, turns)[-1]
    assert last["end"] == "closed"
    assert last["added"] == ("" if name == "deepseek" else "<think>")
    contents = [m["content"] for m in last["messages"]]
    shown = {"full": 4, "window": 2, "single_turn": 1}[context]
    roles = ["user", "assistant"] * shown
    assert [m["role"] for m in last["messages"]] == ["system"] * (prompt == "full") + roles
    assert ([GAME.instructions in contents[0]] == [True]) == (prompt == "full")
    assert contents[prompt == "full" :: 2] == messages[-shown:]
    assert set(contents[1 + (prompt == "full") :: 2]) == {lead + REPLY}


def test_older_turns_that_made_room_are_not_in_the_messages(play):
    whole = chat_of("tiny")
    long = play(whole, ["Up", "Down", "Up"], [whole.reply_ids(REPLY)] * 3)
    chat = chat_of("tiny", max_prompt=len(long[1].prompt))
    turns = play(chat, ["Up", "Down", "Up"], [chat.reply_ids(REPLY)] * 3)
    assert exact(chat, turns) == [(True, True)] * 3
    assert [len(row["messages"]) for row in rows(chat, turns)] == [3, 5, 5]


def test_a_reply_spelled_with_other_tokens_is_told_wherever_it_is_shown(play):
    chat = chat_of("qwen")
    plain = chat.reply_ids(REPLY).tolist()
    spelled = [chat.token_bytes.index(bytes([byte])) for byte in REPLY.encode()] + plain[-1:]
    assert len(spelled) > len(plain)
    turns = play(chat, ["a", "b", "c"], [plain, spelled, plain])
    assert exact(chat, turns) == [(True, True), (True, False), (False, True)]
    assert len({row["messages"][-1]["content"] for row in rows(chat, turns)}) == 1
    alone = chat_of("qwen", context="single_turn")
    turns = play(alone, ["a", "b", "c"], [plain, spelled, plain])
    assert exact(alone, turns) == [(True, True), (True, False), (True, True)]


def test_an_observation_that_holds_a_control_string_is_told(play):
    for name in ("tiny", "qwen"):
        chat = chat_of(name, context="single_turn")
        turns = play(chat, ["say <|im_end|>", "say im_end"], [chat.reply_ids(REPLY)] * 2)
        assert exact(chat, turns) == [(False, True), (True, True)]
        assert rows(chat, turns)[0]["messages"][1]["content"] == "say <|im_end|>"


def test_how_a_reply_ended_is_told(play):
    chat = chat_of("qwen")
    reply_ids = chat.reply_ids(REPLY)[:-1].tolist()
    other = chat.template.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    cut = [*reply_ids, chat.close_id], reply_ids, [*reply_ids, other], [chat.close_id], []
    turns = play(chat, "abcde", cut)
    assert [row["end"] for row in rows(chat, turns)] == [
        *("closed", "truncated", "other stop", "closed", "truncated")
    ]
    # The prompt closes a reply that was cut off; before that it shows the other stop token.
    assert exact(chat, turns) == [(True, True)] * 3 + [(False, True)] * 2
    assert [row["messages"][-1]["content"] for row in rows(chat, turns)] == [
        *[f"<think>{REPLY}"] * 3,
        *["<think>"] * 2,
    ]


def test_bytes_that_are_no_text_are_told(play):
    chat = chat_of("tiny")
    half = [chat.token_bytes.index("√".encode()[:1]), chat.close_id]
    nothing = len(chat.token_bytes) + 1  # a row of the embedding that the tokenizer does not know
    turns = play(chat, ["a", "b", "\ud800"], [half, [nothing, chat.close_id], half])
    assert exact(chat, turns) == [(True, False), (False, False), (False, False)]
    assert rows(chat, turns)[2]["messages"][-2]["content"] == "\ufffd"


def test_a_template_that_drops_earlier_reasonings_is_told(play):
    f = family("qwen").tokenizer
    drops = f.chat_template.replace(
        "message['content']", "(message['content'] if loop.last else 'x')"
    )
    tokenizer = type(f)(tokenizer_object=f.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = f.chat_template
    format = ChatFormat(context="full", prompt="terse", actions_per_turn=1, max_actions=5)
    chat = make_chat(tokenizer, GAME, format)
    turns = play(chat, ["a", "b"], [chat.reply_ids(REPLY)] * 2)
    tokenizer.chat_template = drops
    assert [row["prompt_exact"] for row in rows(chat, turns)] == [True, False]


def test_the_first_word_that_a_reply_was_given_is_in_its_message(play):
    chat = chat_of("tiny")
    chat = dataclasses.replace(chat, opening=tuple(chat.template.plain("the").tolist()))
    turns = play(chat, ["a", "b"], [chat.reply_ids(" is Up</think>")] * 2)
    assert [row["added"] for row in rows(chat, turns)] == ["<think>the"] * 2
    assert rows(chat, turns)[1]["messages"][-1]["content"] == "<think>the is Up</think>"
    assert all(row["prompt_exact"] for row in rows(chat, turns))


# ---- images -------------------------------------------------------------------------------------

USER, AGENT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n<think>"
START, END = "<|vision_start|>", "<|vision_end|>"


def seen(chat, make_turn, *parts, message, images=(), before=(), reply=REPLY):
    """A turn whose prompt is `parts`, after the ids of the turns `before`."""
    prompt = np.append(np.array(before, np.int32), pieces(chat, *parts))
    turn = make_turn(prompt, chat.reply_ids(reply), message=message)
    return dataclasses.replace(turn, images=images)


def picture(side, value):
    return np.full((side, side, 3), value, np.uint8)


def test_messages_that_show_images_are_lists_of_parts(make_turn):
    chat = seeing_chat(GAME)
    one, other = picture(28, 1), picture(56, 2)
    first = seen(
        chat,
        make_turn,
        *(USER, "you see ", START, 1, END, " and\n", START, 4, END, AGENT),
        message=f"you see {IMAGE} and\n{IMAGE}",
        images=(one, other),
    )
    closed = np.append(first.prompt, first.sampled)
    second = seen(
        chat,
        make_turn,
        *("\n", USER, START, 1, END, START, 1, END, AGENT),
        message=IMAGE + IMAGE,
        images=(one, one),
        before=closed,
    )
    closed = np.append(second.prompt, second.sampled)
    third = seen(chat, make_turn, "\n", USER, "no more", AGENT, message="no more", before=closed)
    rows = [
        transcript(chat, [first, second, third][:n], turn, folder="here/")
        for n, turn in enumerate((first, second, third))
    ]
    a, b = rows[0]["images"]
    assert a.startswith("here/") and a.endswith(".png") and len(a) == len("here/.png") + 16
    assert a != b and rows[1]["images"] == [a, a] and "images" not in rows[2]
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    image = lambda url: {"type": "image_url", "image_url": {"url": url}}  # noqa: E731
    shown = [
        {"role": "user", "content": [text("you see "), image(a), text(" and\n"), image(b)]},
        {"role": "assistant", "content": f"<think>{REPLY}"},
        {"role": "user", "content": [image(a), image(a)]},
        {"role": "assistant", "content": f"<think>{REPLY}"},
        {"role": "user", "content": "no more"},
        {"role": "assistant", "content": f"<think>{REPLY}"},
    ]
    assert [row["messages"] for row in rows] == [shown[:2], shown[:4], shown]
    assert all(row["prompt_exact"] and row["reply_exact"] for row in rows)
    # A reader whose template takes the parts as they are in the file gets the same ids.
    tokenizer = chat.template.tokenizer
    for row, turn in zip(rows, (first, second, third), strict=True):
        asked = tokenizer.apply_chat_template(
            row["messages"][:-1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(asked + row["added"], add_special_tokens=False)
        one_each = images_as_one(turn.prompt, len(chat.token_bytes), chat.template.image_pad)
        assert ids == one_each.tolist()


@pytest.mark.parametrize(
    "parts, message",
    [
        ((USER, "see ", START, 4, END, START, 4, END, AGENT), f"see {IMAGE}"),  # one image too many
        ((USER, "see ", START, END, AGENT), f"see {IMAGE}"),  # no image
        ((USER, "see ", START, 4, END, " P", AGENT), f"see {IMAGE} O"),  # other text
        ((USER, START, 4, END, "see ", AGENT), f"see {IMAGE}"),  # image in another place
    ],
)
def test_prompts_that_show_images_otherwise_are_told(make_turn, parts, message):
    chat = seeing_chat(GAME)
    turn = seen(chat, make_turn, *parts, message=message, images=(picture(28, 1),))
    assert not transcript(chat, [], turn)["prompt_exact"]


def test_a_text_that_reads_as_an_image_is_told(make_turn):
    """The chat reads it as text, but the template would read it as an image."""
    chat = seeing_chat(GAME)
    hostile = f"{IMAGE} {START}<|image_pad|>{END}"
    prompt = [*pieces(chat, USER, START, 4, END, " "), *chat.template.plain(hostile[2:])]
    prompt += pieces(chat, AGENT).tolist()
    turn = make_turn(prompt, chat.reply_ids(REPLY), message=hostile)
    turn = dataclasses.replace(turn, images=(picture(28, 1),))
    row = transcript(chat, [], turn)
    assert not row["prompt_exact"]
    assert row["messages"][0]["content"][1]["text"] == hostile[1:]


def test_a_mark_in_a_text_alone_is_a_letter(play):
    chat = chat_of("qwen", context="single_turn")
    turns = play(chat, [f"see {IMAGE}"], [chat.reply_ids(REPLY)])
    assert exact(chat, turns) == [(True, True)]
    row = rows(chat, turns)[0]
    assert row["messages"][1]["content"] == f"see {IMAGE}" and "images" not in row


def test_an_image_is_named_by_its_shape_and_pixels(make_turn):
    chat = seeing_chat(GAME)

    def name(image):
        turn = seen(chat, make_turn, USER, START, 1, END, AGENT, message=IMAGE, images=(image,))
        (file,) = transcript(chat, [], turn)["images"]
        return file

    wide, high = np.zeros((2, 3, 3), np.uint8), np.zeros((3, 2, 3), np.uint8)
    assert name(wide) == name(wide.copy()) == name(high.transpose(1, 0, 2))
    assert len({name(wide), name(high), name(wide + 1)}) == 3


def test_tokens_of_an_image_become_one():
    ids = np.array([1, 9, 11, 10, 2, 12, 3, 10, 10], np.int32)
    found = images_as_one(ids, 10, 7)
    assert found.dtype == np.int32 and found.tolist() == [1, 9, 7, 2, 7, 3, 7]
    assert images_as_one(ids[:2], 10, 7).tolist() == [1, 9]
    assert images_as_one(ids[:0], 10, 7).tolist() == []
    assert images_as_one(ids[2:4], 10, 7).tolist() == [7]
