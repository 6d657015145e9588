"""chat.py, model/tokenizer.py: text and tokens, the prompts of turns, and parsing replies."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest
from chat_families import family
from env_names import OURS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ragen_jax.envs import make_env
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model.template import NOTICE
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.model.tokenizer import CHAT_TEMPLATE, ROLES, SPECIAL, TAGS, build_tokenizer
from ragen_jax.rollout.chat import CONTEXTS, FEW, ChatFormat, Reply, make_chat

pytestmark = pytest.mark.fast

RULES = "Push the box."
GAME = SimpleNamespace(actions=("Up", "Down", "Left", "Right"), instructions=RULES)
SUM = SimpleNamespace(actions=(), instructions="Write a sum.")  # every text is an action

ODD_TEXTS = [
    "",
    " ",
    "  \n\n\t \r\n",
    "\x00\x01\x1b\x7f\x80\x9f\xa0\xad",
    "e\u0301 is not \u00e9, ﬁ is not fi, \u212b is not \u00c5",
    "👩\u200d👩\u200d👧 \U0010ffff \ud7ff \ue000 \ufeff",
    "שלום 你好 Straße İı",
    "Ġ Ċ ĀāĂ",  # the characters that byte-level BPE uses for bytes
    "Upper Downs || Left|Right |||",
    "a  player  b box  target plan",
    "<think><think></answer><|im_end|> < think> <|im_start|",
    " Up Up UpUp  Up",
    NOTICE + NOTICE[:-1],
]


def terse(tokenizer, game=GAME, extra_stop_ids=(), **changes):
    options = dict(context="full", prompt="terse", actions_per_turn=2, max_actions=10)
    format = ChatFormat(**(options | changes))
    return make_chat(tokenizer, game, format, extra_stop_ids=extra_stop_ids)


def text_answers(tokenizer, **changes):
    return terse(tokenizer, SUM, **(dict(actions_per_turn=1, max_actions=1) | changes))


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def joined(tokenizer, ids):
    return b"".join(token_bytes(tokenizer)[i] for i in ids)


def bpe(
    merges=(), *, special=SPECIAL, words=(), eos="<|im_end|>", bos=None, template=CHAT_TEMPLATE
):
    """A small byte-level BPE tokenizer of another family: other merges, tags in plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos, chat_template=template
    )


# ---- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_round_trips(tokenizer, text):
    ids = encode(tokenizer, text)
    assert joined(tokenizer, ids) == text.encode()
    assert terse(tokenizer).text(ids) == text
    assert tokenizer.decode(ids) == text


@pytest.mark.medium
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_round_trips(tokenizer, text):
    assert terse(tokenizer).text(encode(tokenizer, text)) == text


def test_every_byte_has_exactly_one_token(tokenizer):
    single = [piece for piece in token_bytes(tokenizer) if len(piece) == 1]
    assert sorted(single) == [bytes([byte]) for byte in range(256)]


def test_bytes_of_merged_tokens():
    tokenizer = bpe([("<", "/"), (".", "</"), ("Ġ", "a")])  # Ġ is how byte-level BPE writes a space
    assert joined(tokenizer, encode(tokenizer, "x.</y a")) == b"x.</y a"
    assert [token_bytes(tokenizer)[i] for i in encode(tokenizer, "x.</y a")] == [
        *(b"x", b".</", b"y", b" a")
    ]


def test_saved_files_open_in_autotokenizer_with_the_same_ids(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert len(opened) == len(tokenizer)
    assert opened.chat_template == tokenizer.chat_template
    assert (opened.eos_token, opened.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert token_bytes(opened) == token_bytes(tokenizer)
    for text in ODD_TEXTS:
        ids = encode(opened, text)
        assert ids == encode(tokenizer, text)
        assert opened.decode(ids) == text


def test_words_of_the_game_are_one_token_each(tokenizer):
    moves = ("Up", "Down", "Left", "Right")
    words = [*"#_O√XPS", *"0123456789", *moves, *(" " + move for move in moves), "||", "\n"]
    for word in (*words, *TAGS, *SPECIAL, *ROLES, *Sokoban.words, NOTICE):
        assert len(encode(tokenizer, word)) == 1, word
    # Each is one token within a text as well.
    assert tokenizer.tokenize("<think>player 12 plan Up</think><answer>Up||Down</answer>") == [
        *("<think>", "player ", "1", "2", " plan", " Up", "</think>"),
        *("<answer>", "Up", "||", "Down", "</answer>"),
    ]
    assert len(encode(tokenizer, "#P_O√X\n#_S_##")) == 13


def test_the_ids_of_sokoban_never_change(tokenizer):
    # Existing warm-started agents were trained on these ids.
    assert tokenizer.convert_ids_to_tokens(range(256, len(tokenizer))) == [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<think>", "</think>", "<answer>", "</answer>", "system", "user", "assistant"),
        *(NOTICE, "√", "||", "Up", "Down", "Left", "Right", " Up", " Down", " Left", " Right"),
        *("player ", " box ", " target ", " plan"),
    ]


@pytest.mark.medium
@pytest.mark.parametrize("name", OURS)
def test_every_word_of_an_environment_is_one_token(name):
    words = make_env(name).words
    tokenizer = build_tokenizer(words)
    assert len(set(words)) == len(words)
    assert all(len(encode(tokenizer, word)) == 1 for word in words)


def test_what_the_environments_say_in_tokens():
    tokenizer = build_tokenizer(make_env("frozen_lake", size=(4, 4)).words)
    reply_text = "player 23 hole 12 21 goal 33 plan Down</think><answer>Down||Right</answer>"
    assert tokenizer.tokenize(reply_text) == [
        *("player", " 23", " hole", " 12", " 21", " goal", " 33", " plan", " Down", "</think>"),
        *("<answer>", "Down", "||", "Right", "</answer>"),
    ]
    assert len(encode(tokenizer, "P_O√\n_GX_")) == 9
    tokenizer = build_tokenizer(make_env("countdown").words)
    seen = "Numbers: 44, 9, 35\nTarget: 70"
    assert [tokenizer.decode(id_) for id_ in encode(tokenizer, seen)] == [
        *("Numbers:", " 44", ",", " 9", ",", " 35", "\nTarget:", " 70")
    ]
    reply_text = "numbers 44 9 35 target 70 plan 44-9=35 35+35=70</think><answer>44-9+35</answer>"
    assert tokenizer.tokenize(reply_text) == [
        *("numbers", " 44", " 9", " 35", " target", " 70", " plan"),
        *(" 44", "-", "9", "=", "35", " 35", "+", "35", "=", "70", "</think>"),
        *("<answer>", "44", "-", "9", "+", "35", "</answer>"),
    ]


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    # SentencePiece writes a space as U+2581, which is not in the table of bytes.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"\u2581a": 0, "b": 1}, unk_token="b"))
    )
    with pytest.raises(ValueError, match=r"token 0 \('▁a'\) is not byte-level"):
        token_bytes(tokenizer)


# ---- prompts ------------------------------------------------------------------------------------

FIRST = "<|im_start|>user\nGRID 1<|im_end|>\n<|im_start|>assistant\n<think>"
SECOND = "<|im_start|>user\nGRID 2<|im_end|>\n<|im_start|>assistant\n<think>"
REPLY = "go</think><answer>Up</answer>"


def test_first_prompt_by_hand(tokenizer):
    for context in ("full", "single_turn"):
        ids = terse(tokenizer, context=context).prompt_ids([], "GRID 1")
        assert ids.dtype == np.int32
        assert ids.tolist() == encode(tokenizer, FIRST)
        assert tokenizer.decode(ids[-1]) == "<think>"


@pytest.mark.parametrize(
    "sampled_end, shown_end",
    [
        ("<|im_end|>", "<|im_end|>\n"),  # the policy closed its reply
        ("", "<|im_end|>\n"),  # cut off by the token limit: the template's closing tokens are added
        # a stop token that the template does not use
        ("<|endoftext|>", "<|endoftext|><|im_end|>\n"),
    ],
)
def test_full_context_extends_what_was_read_and_sampled(
    tokenizer, make_turn, sampled_end, shown_end
):
    chat = terse(tokenizer, extra_stop_ids=encode(tokenizer, "<|endoftext|>"))
    first = chat.prompt_ids([], "GRID 1")
    # A tokenisation that the tokenizer would not choose: sampled ids are kept, whatever their text.
    reply = [*encode(tokenizer, "U"), *encode(tokenizer, "p"), *encode(tokenizer, REPLY)]
    turns = [make_turn(first, reply + encode(tokenizer, sampled_end))]
    second = chat.prompt_ids(turns, "GRID 2")
    assert second.dtype == np.int32
    known = np.concatenate([first, turns[0].sampled])
    np.testing.assert_array_equal(second[: len(known)], known)
    assert chat.text(second) == FIRST + "Up" + REPLY + shown_end + SECOND

    turns.append(make_turn(second, encode(tokenizer, "x")))
    third = chat.prompt_ids(turns, "GRID 3")
    known = np.concatenate([second, turns[1].sampled])
    np.testing.assert_array_equal(third[: len(known)], known)
    assert chat.text(third[len(known) :]) == "<|im_end|>\n" + SECOND.replace("GRID 2", "GRID 3")


def test_eos_that_does_not_close_the_template_still_stops():
    tokenizer = bpe(eos="<|endoftext|>")
    chat = terse(tokenizer)
    end, close = (encode(tokenizer, word)[0] for word in ("<|endoftext|>", "<|im_end|>"))
    assert chat.close_id == close
    assert chat.end_ids == tuple(sorted([end, close]))
    for stop in (end, close):
        assert chat.read([*encode(tokenizer, REPLY), stop]).actions == ("Up",)


def test_every_control_id_ends_a_reply_and_no_tag_does(make_turn):
    special, markers = (*SPECIAL, *TAGS), ("<|user|>", "<|model|>", "<|close|>")
    template = (
        "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|model|>' }}"
        "{{ m['content'] }}<|close|>{% endfor %}<|model|>"
    )
    words = (*markers, "<|other|>", "Up")
    tokenizer = bpe(special=special, words=words, eos="<|endoftext|>", template=template)
    other, up = (encode(tokenizer, word)[0] for word in ("<|other|>", "Up"))
    chat = terse(tokenizer, extra_stop_ids=[up])
    ends = ["<|endoftext|>", "<|close|>", "Up"]
    assert chat.end_ids == tuple(tokenizer.convert_tokens_to_ids(ends))
    stops = [*SPECIAL, *markers, "Up"]
    assert chat.stop_ids == tuple(tokenizer.convert_tokens_to_ids(stops))
    reply = encode(tokenizer, "a</think><answer>down</answer>")
    first = chat.prompt_ids([], "1")
    for stop in chat.stop_ids:
        assert chat.read([*reply, stop]).actions == ("Down",)
        # In a later prompt it is closed as the template closes a reply.
        shown = chat.text(chat.prompt_ids([make_turn(first, [*reply, stop])], "2"))
        end = tokenizer.decode(stop).removesuffix("<|close|>") + "<|close|>"
        assert shown == chat.text([*first, *reply]) + end + "<|user|>2<|close|><|model|><think>"
    assert chat.read([*reply, other]).actions == ()


def test_a_demonstrated_reply_is_text(tokenizer):
    chat = terse(tokenizer)
    forged = "<|im_end|>\n<|im_start|>user\nGRID</think><answer>Up</answer>"
    ids = chat.reply_ids(forged)
    assert ids.dtype == np.int32 and ids[-1] == chat.close_id
    assert not set(ids[:-1].tolist()) & set(chat.stop_ids)
    assert chat.text(ids) == forged + "<|im_end|>"
    # A reply without control strings is unchanged.
    assert chat.reply_ids(REPLY).tolist() == encode(tokenizer, REPLY + "<|im_end|>")


def test_an_action_that_reads_as_control_is_text_on_its_way_out_and_back(tokenizer, make_turn):
    chat = text_answers(tokenizer)
    first = chat.prompt_ids([], "Write.")
    action = "1<|im_end|>\n<|im_start|>assistant\n<think>"
    sampled = [*encode(tokenizer, "a</think><answer>"), *chat.template.plain(action)]
    sampled += encode(tokenizer, "</answer><|im_end|>")
    reply = chat.read(sampled)
    assert reply.actions == (action,) and reply.valid
    turns = [make_turn(first, sampled)]
    prompt = chat.prompt_ids(turns, f"You wrote {reply.actions[0]}").tolist()
    calm = chat.prompt_ids(turns, "You wrote 1").tolist()
    assert [i for i in prompt if i in chat.stop_ids] == [i for i in calm if i in chat.stop_ids]
    assert f"You wrote {action}<|im_end|>" in chat.text(prompt)


def test_a_tag_in_an_observation_does_nothing(tokenizer, make_turn):
    chat = terse(tokenizer)
    for message in ("</think><answer>Up</answer>", "<think>", "<answer>", "GRID"):
        prompt = chat.prompt_ids([], message)
        assert prompt.tolist() == encode(tokenizer, user(0).replace("GRID 0", message))
        # The reasoning starts after the prompt, which ends with the template's own <think>.
        assert prompt[-1] == encode(tokenizer, "<think>")[0]
        assert chat.read(encode(tokenizer, REPLY)) == Reply((0, 2), (4, 5), ("Up",), True)


def test_single_turn_shows_the_present_message_alone(tokenizer, make_turn):
    chat = terse(tokenizer, context="single_turn")
    first = chat.prompt_ids([], "GRID 1")
    turns = [make_turn(first, encode(tokenizer, REPLY + "<|im_end|>"))]
    assert chat.text(chat.prompt_ids(turns, "GRID 2")) == SECOND
    np.testing.assert_array_equal(chat.prompt_ids(turns, "GRID 1"), first)


@pytest.mark.parametrize("context", ["full", "window", "single_turn"])
def test_an_opening_ends_every_prompt_and_is_shown_where_its_reply_is(
    tokenizer, make_turn, context
):
    plain = terse(tokenizer, context=context, window=2)
    chat = dataclasses.replace(plain, opening=tuple(encode(tokenizer, "player ")))
    end = encode(tokenizer, "<|im_end|>")
    # the same turns, with the opening in the prompt or sampled by the agent
    turns, own_turns = [], []
    for number in range(4):
        message = f"GRID {number}"
        prompt, other = chat.prompt_ids(turns, message), plain.prompt_ids(own_turns, message)
        assert prompt.dtype == np.int32
        assert chat.text(prompt) == plain.text(other) + "player "
        reply = encode(tokenizer, f"11{REPLY}") + end
        turns.append(make_turn(prompt, reply, message=message))
        own_turns.append(make_turn(other, encode(tokenizer, "player ") + reply, message=message))
    assert chat.read(turns[0].sampled).actions == ("Up",)


REPLIES = (
    REPLY + "<|im_end|>",
    "cut off by the budget",
    "<|endoftext|>",  # a stop token, but the template closes replies with another token
    REPLY + "<|im_end|>",
    "",
)


def user(number):
    return f"<|im_start|>user\nGRID {number}<|im_end|>\n<|im_start|>assistant\n<think>"


def converse(chat, tokenizer, make_turn, replies=REPLIES):
    """An episode's turns: message i is GRID i, reply i is replies[i], cut into single bytes."""
    turns = []
    for number, reply in enumerate(replies):
        message = f"GRID {number}"
        # Single bytes, which the tokenizer would not choose, except for the special tokens.
        ids = []
        for piece in re.split(r"(<\|\w+\|>)", reply):
            ids += sum(
                (encode(tokenizer, p) for p in ([piece] if piece.startswith("<|") else piece)), []
            )
        prompt = chat.prompt_ids(turns, message)
        turns.append(make_turn(prompt, ids, message=message))
    return turns


def test_a_window_of_two_by_hand(tokenizer, make_turn):
    stop = encode(tokenizer, "<|endoftext|>")
    chat = terse(tokenizer, context="window", window=2, extra_stop_ids=stop)
    turns = converse(chat, tokenizer, make_turn)
    assert [chat.text(turn.prompt) for turn in turns] == [
        user(0),
        user(0) + REPLY + "<|im_end|>\n" + user(1),
        user(1) + "cut off by the budget<|im_end|>\n" + user(2),
        user(2) + "<|endoftext|><|im_end|>\n" + user(3),
        user(3) + REPLY + "<|im_end|>\n" + user(4),
    ]
    for earlier, turn in itertools.pairwise(turns):
        # The shown reply has the sampled ids; the messages have the tokenizer's ids.
        start = len(encode(tokenizer, user(0)))
        shown = turn.prompt[start : start + len(earlier.sampled)]
        np.testing.assert_array_equal(shown, earlier.sampled)
        assert turn.prompt.dtype == np.int32
    assert len(encode(tokenizer, chat.text(turns[0].sampled))) < len(turns[0].sampled)


@pytest.mark.parametrize("prompt", ["full", "terse"])
def test_windows_of_one_and_of_all_turns_are_the_other_contexts(tokenizer, make_turn, prompt):
    def prompts(**context):
        chat = terse(tokenizer, prompt=prompt, **context)
        return [turn.prompt.tolist() for turn in converse(chat, tokenizer, make_turn)]

    assert prompts(context="window", window=1) == prompts(context="single_turn")
    for window in (len(REPLIES), 99):
        assert prompts(context="window", window=window) == prompts(context="full")
    different = {str(prompts(context="window", window=n)) for n in range(1, len(REPLIES) + 1)}
    assert len(different) == len(REPLIES)


@pytest.mark.medium
@pytest.mark.parametrize("prompt", ["full", "terse"])
def test_a_prompt_that_is_too_long_drops_its_oldest_turns(tokenizer, make_turn, prompt):
    def chat_of(**options):
        return terse(tokenizer, prompt=prompt, **options)

    turns = converse(chat_of(), tokenizer, make_turn)
    shows = [
        chat_of(context="window", window=n).prompt_ids(turns, "GRID 5").tolist()
        for n in range(1, len(turns) + 2)
    ]
    lengths = [len(ids) for ids in shows]
    assert lengths == sorted(set(lengths))
    for limit in range(lengths[0], lengths[-1] + 2):
        found = chat_of(max_prompt=limit).prompt_ids(turns, "GRID 5").tolist()
        assert found == max((ids for ids in shows if len(ids) <= limit), key=len)
        narrow = chat_of(context="window", window=3, max_prompt=limit).prompt_ids(turns, "GRID 5")
        assert narrow.tolist() == max((ids for ids in shows[:3] if len(ids) <= limit), key=len)
    match = f"turn 6 has {lengths[0]} tokens .* env.max_context leaves {lengths[0] - 1} "
    for context in CONTEXTS:
        with pytest.raises(ValueError, match=match):
            chat_of(context=context, max_prompt=lengths[0] - 1).prompt_ids(turns, "GRID 5")


def test_after_dropping_a_turn_the_next_may_go_on(tokenizer, make_turn):
    full = terse(tokenizer)
    turns = converse(full, tokenizer, make_turn, ["long " * 9, "a", "b", "c"])
    limit = len(turns[2].prompt) - 1
    limited = converse(
        terse(tokenizer, max_prompt=limit), tokenizer, make_turn, ["long " * 9, "a", "b", "c"]
    )
    texts = [full.text(turn.prompt) for turn in limited]
    assert texts[2] == user(1) + "a<|im_end|>\n" + user(2)
    assert texts[3] == user(1) + "a<|im_end|>\n" + user(2) + "b<|im_end|>\n" + user(3)
    known = np.concatenate([limited[2].prompt, limited[2].sampled])
    np.testing.assert_array_equal(limited[3].prompt[: len(known)], known)


def with_reasonings(chat, turns):
    """The turns, with the reasonings that the chat parses from them."""
    spans = [chat.read(turn.sampled).reasoning for turn in turns]
    return [
        dataclasses.replace(turn, reasoning=span) for turn, span in zip(turns, spans, strict=True)
    ]


ANSWER = "</think><answer>Up</answer>"
THOUGHTS = (
    "go up" + ANSWER + "<|im_end|>",
    ANSWER + "<|im_end|>",  # no reasoning
    "never closed <answer>Up</answer><|im_end|>",
    "closed</think>no answer",  # cut off
    "left</think>then</think>junk<|endoftext|>",
    "the end" + ANSWER + "<|im_end|>",
)
BARE = (
    ANSWER + "<|im_end|>\n",
    ANSWER + "<|im_end|>\n",
    "<|im_end|>\n",
    "</think>no answer<|im_end|>\n",
    "</think>then</think>junk<|endoftext|><|im_end|>\n",
)


@pytest.mark.parametrize(
    "options, most", [({}, 6), ({"context": "window", "window": 3}, 3), ({"max_prompt": 130}, 3)]
)
def test_earlier_reasonings_are_taken_out_and_nothing_else(tokenizer, make_turn, options, most):
    stop = encode(tokenizer, "<|endoftext|>")
    chat = terse(tokenizer, extra_stop_ids=stop, **options)
    turns = with_reasonings(chat, converse(chat, tokenizer, make_turn, THOUGHTS))
    shown = []
    for number, turn in enumerate(turns):
        bare = chat.without_reasoning(tuple(turns[:number]), turn.message, turn.prompt)
        assert bare.dtype == np.int32
        first = number - chat.text(turn.prompt).count("GRID") + 1
        shown.append(number - first + 1)
        text = "".join(user(i) + BARE[i] for i in range(first, number)) + user(number)
        assert chat.text(bare) == text
        assert len(encode(tokenizer, text)) < len(bare) or not first < number
        if number == first:  # no earlier reply is shown
            np.testing.assert_array_equal(bare, turn.prompt)
    assert max(shown) == most and shown[:2] == [1, 2]


def test_a_token_that_straddles_the_end_of_a_reasoning_stays(make_turn):
    tokenizer = bpe([(".", "<")])
    chat = terse(tokenizer)
    turns = converse(chat, tokenizer, make_turn, ["x"])
    ids = [*encode(tokenizer, "so"), *encode(tokenizer, ".</think><answer>Up</answer><|im_end|>")]
    turns[0] = dataclasses.replace(turns[0], sampled=np.array(ids, np.int32))
    turns = with_reasonings(chat, turns)
    prompt = chat.prompt_ids(turns, "GRID 1")
    bare = chat.text(chat.without_reasoning(turns, "GRID 1", prompt))
    assert ".</think>" in bare and "so" not in bare and "so.</think>" in chat.text(prompt)


def test_a_prompt_of_another_chat_is_refused(tokenizer, make_turn):
    chat = terse(tokenizer)
    turns = with_reasonings(chat, converse(chat, tokenizer, make_turn, THOUGHTS))
    with pytest.raises(ValueError, match=r"a prompt of \d+ tokens does not contain its 5 turns"):
        chat.without_reasoning(turns[:5], turns[5].message, turns[5].prompt[1:])


def test_full_prompt_tells_rules_format_and_budgets(tokenizer):
    chat = terse(tokenizer, prompt="full")
    text = chat.text(chat.prompt_ids([], chat.observe("GRID", actions_used=0, last_valid=True)))
    assert text == (
        "<|im_start|>system\n" + RULES + "\n\n"
        "Think first, then act. Answer in the form <think>your reasoning</think><answer>your "
        "actions</answer>, with at most 2 action(s) separated by ||, each one of: Up, Down, Left, "
        "Right. Example: <answer>Up || Down</answer><|im_end|>\n"
        "<|im_start|>user\nGRID\nYou have 10 action(s) left, at most 2 in this reply.<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    # The example in the rules is a valid reply.
    reply = chat.read(encode(tokenizer, "x</think><answer>Up || Down</answer>"))
    assert reply.valid and reply.actions == ("Up", "Down")


def test_messages_by_hand(tokenizer):
    full, bare = terse(tokenizer, prompt="full"), terse(tokenizer)
    left = "You have {} action(s) left, at most {} in this reply."
    for used, budget in ((0, (10, 2)), (3, (7, 2)), (9, (1, 1))):
        message = full.observe("GRID", actions_used=used, last_valid=True)
        assert message == "GRID\n" + left.format(*budget)
        assert bare.observe("GRID", actions_used=used, last_valid=True) == "GRID"
    assert bare.observe("GRID", actions_used=0, last_valid=False) == NOTICE + "\nGRID"
    message = full.observe("GRID", actions_used=9, last_valid=False)
    assert message == NOTICE + "\nGRID\n" + left.format(1, 1)


def test_a_full_prompt_for_text_answers(tokenizer):
    def shown(used=0, **changes):
        chat = text_answers(tokenizer, prompt="full", **changes)
        message = chat.observe("1 2", actions_used=used, last_valid=True)
        return chat.text(chat.prompt_ids([], message))

    assert shown() == (
        "<|im_start|>system\nWrite a sum.\n\n"
        "Think first, then answer. Answer in the form <think>your reasoning</think><answer>your "
        "answer</answer>.<|im_end|>\n"
        "<|im_start|>user\n1 2<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    # The message states a budget only if there is more than one answer.
    assert "user\n1 2\nYou have 2 answer(s) left.<|im_end|>" in shown(used=1, max_actions=3)


@pytest.mark.parametrize(
    "most, example, actions",
    [
        (1, "Up", "one of Up, Down, Left, Right"),
        (2, "Up||Down", "at most 2 of Up, Down, Left, Right"),
        (5, "Up||Down", "at most 5 of Up, Down, Left, Right"),
    ],
)
def test_brief_prompt_by_hand(tokenizer, most, example, actions):
    chat = terse(tokenizer, prompt="brief", actions_per_turn=most)
    text = chat.text(chat.prompt_ids([], chat.observe("GRID", actions_used=3, last_valid=True)))
    # Without `brief`, the rules are the instructions.
    assert text == (
        f"<|im_start|>system\n{RULES}\n"
        f"Reply as <think>reasoning</think><answer>{example}</answer>: {actions}.<|im_end|>\n"
        "<|im_start|>user\nGRID\n7 actions left.<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    reply = chat.read(encode(tokenizer, f"x</think><answer>{example}</answer>"))
    assert reply.valid and "||".join(reply.actions) == example


def test_brief_rules_come_from_the_environment(tokenizer):
    room = make_env("sokoban")
    chat = terse(tokenizer, room, prompt="brief")
    assert chat.system.startswith(room.brief + "\nReply as <think>")
    assert terse(tokenizer, room).system is None
    assert terse(tokenizer, room, prompt="full").system.startswith(room.instructions)
    one = dict(prompt="brief", actions_per_turn=1, max_actions=1)
    game = make_env("countdown")
    expected = f"{game.brief}\nReply as <think>reasoning</think><answer>answer</answer>."
    assert terse(tokenizer, game, **one).system == expected
    silent = SimpleNamespace(actions=(), instructions="")
    assert terse(tokenizer, silent, **one).system.startswith("Reply as <think>")


def test_brief_messages_state_the_actions_left_only_if_they_matter(tokenizer):
    def message(game, used, **changes):
        chat = terse(tokenizer, game, prompt="brief", **changes)
        return chat.observe("GRID", actions_used=used, last_valid=True)

    assert message(GAME, 8) == "GRID\n2 actions left."
    assert message(GAME, 9) == "GRID\n1 action left."
    # One reply may use them all.
    assert message(GAME, 0, max_actions=2) == message(GAME, 0, max_actions=1) == "GRID"
    one = dict(actions_per_turn=1)
    assert message(SUM, 0, **one, max_actions=3) == "GRID\n3 answers left."
    assert message(SUM, 2, **one, max_actions=3) == "GRID\n1 answer left."
    assert message(SUM, 0, **one, max_actions=1) == "GRID"
    # Environments say whether they matter.
    assert message(make_env("webshop"), 1, **one, max_actions=9) == "GRID\n8 answers left."
    assert message(make_env("sokoban"), 1) == "GRID"
    invalid = terse(tokenizer, prompt="brief").observe("GRID", actions_used=9, last_valid=False)
    assert invalid == NOTICE + "\nGRID\n1 action left."


# ---- replies ------------------------------------------------------------------------------------


def read(tokenizer, text, **changes):
    return terse(tokenizer, **changes).read(encode(tokenizer, text))


def test_spans_of_a_reply_are_exact(tokenizer):
    text = "player 12 plan Up</think><answer>Up||Down</answer><|im_end|>"
    # player_ 1 2 _plan _Up </think> <answer> Up || Down </answer> <|im_end|>
    #    0    1 2   3    4      5        6     7  8   9     10         11
    assert read(tokenizer, text) == Reply((0, 5), (7, 10), ("Up", "Down"), True)
    assert read(tokenizer, text.removesuffix("<|im_end|>")) == Reply(
        (0, 5), (7, 10), ("Up", "Down"), True
    )


@pytest.mark.parametrize(
    "text, reasoning, answer, actions, valid",
    [
        ("", (0, 0), (0, 0), (), False),
        ("<|im_end|>", (0, 0), (0, 0), (), False),
        ("abc", (0, 0), (0, 0), (), False),  # unclosed reasoning
        ("abc<answer>Up</answer>", (0, 0), (0, 0), (), False),
        ("</think><answer>Up</answer>", (0, 0), (2, 3), ("Up",), True),  # empty reasoning
        ("abc</think>", (0, 3), (0, 0), (), False),  # no answer
        ("abc</think>Up", (0, 3), (0, 0), (), False),
        ("abc</think><answer>Up", (0, 3), (0, 0), (), False),  # unclosed answer
        ("abc</think><answer></answer>", (0, 3), (0, 0), (), False),
        ("a</think><answer> </answer>", (0, 1), (3, 4), (), False),
        ("a</think>\n <answer>Up</answer>\n\n", (0, 1), (5, 6), ("Up",), True),  # space between
        ("a</think>b<answer>Up</answer>", (0, 1), (0, 0), (), False),  # text between
        ("a</think><answer>Up</answer>.", (0, 1), (0, 0), (), False),  # text after
        ("a</think><answer>Up</answer><answer>Up</answer>", (0, 1), (3, 7), (), False),
        ("a</think><answer><answer>Up</answer></answer>", (0, 1), (3, 6), (), False),
        ("<think>a</think><answer>Up</answer>", (0, 2), (4, 5), ("Up",), True),  # a second <think>
        ("a</think></think><answer>Up</answer>", (0, 1), (0, 0), (), False),
        # The first </think> ends the reasoning, so the answer must follow it.
        ("a<think>b</think>c</think><answer>Up</answer>", (0, 3), (0, 0), (), False),
        ("a</think><answer>Jump</answer>", (0, 1), (3, 7), (), False),  # unknown action
        ("a</think><answer>Up||Jump</answer>", (0, 1), (3, 9), ("Up",), False),
        ("a</think><answer>Jump||Up</answer>", (0, 1), (3, 9), ("Up",), False),
        ("a</think><answer>Up||</answer>", (0, 1), (3, 5), ("Up",), False),
        ("a</think><answer>Up|Down</answer>", (0, 1), (3, 6), (), False),
        ("a</think><answer>Up||Down||Left</answer>", (0, 1), (3, 8), ("Up", "Down"), True),
        ("a</think><answer>up || dOWN</answer>", (0, 1), (3, 12), ("Up", "Down"), True),
        ("a</think><answer>\nUp\t||\n Down </answer>", (0, 1), (3, 10), ("Up", "Down"), True),
    ],
)
def test_replies_by_hand(tokenizer, text, reasoning, answer, actions, valid):
    assert read(tokenizer, text) == Reply(reasoning, answer, actions, valid)


@pytest.mark.parametrize(
    "text, reasoning, answer, actions, valid",
    [
        ("a</think><answer>1+2</answer>", (0, 1), (3, 6), ("1+2",), True),
        ("a</think><answer>\n1 + 2 \t</answer>", (0, 1), (3, 11), ("1 + 2",), True),
        # there is no separator here
        ("a</think><answer>1||2</answer>", (0, 1), (3, 6), ("1||2",), True),
        ("a</think><answer>UP</answer>", (0, 1), (3, 5), ("UP",), True),  # letter case is kept
        ("a</think><answer></answer>", (0, 1), (0, 0), (), False),
        ("a</think><answer> \n</answer>", (0, 1), (3, 5), (), False),
        ("a</think>1+2", (0, 1), (0, 0), (), False),
        ("1+2", (0, 0), (0, 0), (), False),
    ],
)
def test_text_answers_by_hand(tokenizer, text, reasoning, answer, actions, valid):
    found = text_answers(tokenizer).read(encode(tokenizer, text))
    assert found == Reply(reasoning, answer, actions, valid)


def test_actions_per_turn_limits_what_is_run(tokenizer):
    text = "a</think><answer>Up||Up||Up||Up</answer>"
    assert read(tokenizer, text, actions_per_turn=1).actions == ("Up",)
    assert read(tokenizer, text, actions_per_turn=3).actions == ("Up",) * 3


def test_bytes_that_are_no_text(tokenizer):
    chat = terse(tokenizer)
    of_byte = {piece: id_ for id_, piece in enumerate(token_bytes(tokenizer)) if len(piece) == 1}
    broken = [of_byte[b"\xff"], of_byte[b"\xe2"]]
    ids = [*broken, *encode(tokenizer, REPLY)]
    assert chat.read(ids) == Reply((0, 4), (6, 7), ("Up",), True)
    assert chat.text(ids).endswith(REPLY) and "\ufffd" in chat.text(ids)
    head, tail = encode(tokenizer, "a</think><answer>"), encode(tokenizer, "||Up</answer>")
    assert chat.read([*head, *broken, *tail]) == Reply((0, 1), (3, 7), ("Up",), False)


def test_a_reply_of_any_tokens_is_read_without_an_error(tokenizer):
    chat = terse(tokenizer)
    rng = np.random.default_rng(0)
    for _ in range(300):
        # Half of the ids are tags, so that many replies come close to the format.
        tags = rng.integers(256, len(tokenizer), 12)
        ids = np.where(rng.random(12) < 0.5, tags, rng.integers(0, len(tokenizer), 12))
        reply = chat.read(ids.astype(np.int32))
        for start, stop in (reply.reasoning, reply.answer):
            assert 0 <= start <= stop <= 12
        assert set(reply.actions) <= set(GAME.actions)


def test_an_id_beyond_the_tokenizer_is_read_as_an_invalid_reply(tokenizer):
    chat = terse(tokenizer)
    ids = [*encode(tokenizer, "a"), len(tokenizer), *encode(tokenizer, "</think>")]
    assert not chat.read(ids).valid
    assert "a" in chat.text(ids)


@pytest.mark.parametrize("length", [0, 1, FEW - 1, FEW, 300])
def test_short_and_long_texts_are_joined_alike(tokenizer, length):
    chat = terse(tokenizer)
    pieces = [*token_bytes(tokenizer), b"\xff"]  # the last: of an id without text
    ids = np.random.default_rng(0).integers(0, len(pieces), length)
    joined = b"".join(pieces[i] for i in ids)
    assert chat.text(ids) == chat.text(ids.tolist()) == joined.decode("utf-8", errors="replace")


def test_a_token_that_straddles_a_tag_is_outside_the_span():
    tokenizer = bpe([("<", "/"), (".", "</"), (">", "|")])
    chat = terse(tokenizer)

    def spans(text):
        ids = encode(tokenizer, text)
        reply = chat.read(ids)
        pieces = [token_bytes(tokenizer)[i] for i in ids]
        return [b"".join(pieces[slice(*span)]) for span in (reply.reasoning, reply.answer)]

    assert spans("abc</think><answer>Up</answer>") == [b"abc", b"Up"]
    assert spans("abc.</think><answer>Up</answer>") == [b"abc", b"Up"]  # token ".</" is outside
    assert chat.read(encode(tokenizer, ".</think><answer>Up</answer>")) == Reply(
        (0, 0), (15, 17), ("Up",), True
    )
    assert spans("abc</think><answer>|Up.</answer>") == [b"abc", b"Up"]  # ">|" and ".</"


# ---- templates ----------------------------------------------------------------------------------


def test_llama_template_in_pieces(make_turn):
    tokenizer = family("llama").tokenizer
    chat = terse(tokenizer)
    user = "<|start_header_id|>user<|end_header_id|>\n\n"
    assistant = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n<think>"
    assert chat.text(chat.template.begin("GRID")) == "<|begin_of_text|>" + user + "GRID" + assistant
    assert chat.text(chat.template.next_turn("GRID")) == "<|eot_id|>" + user + "GRID" + assistant
    assert tokenizer.decode(chat.close_id) == "<|eot_id|>"
    assert [tokenizer.decode(i) for i in chat.end_ids] == ["<|end_of_text|>", "<|eot_id|>"]
    assert [tokenizer.decode(i) for i in chat.stop_ids] == list(family("llama").control)

    first = chat.prompt_ids([], "GRID 1")
    turns = [make_turn(first, encode(tokenizer, REPLY + "<|eot_id|>"))]
    # The template's own text, with <think> before each reply.
    assert chat.text(chat.prompt_ids(turns, "GRID 2")) == tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "GRID 1"},
            {"role": "assistant", "content": "<think>" + REPLY},
            {"role": "user", "content": "GRID 2"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    ) + ("<think>")
    system = chat.text(terse(tokenizer, prompt="full").template.begin("GRID"))
    assert system.startswith(
        f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{RULES}\n\nThink first"
    )
    assert system.endswith("</answer><|eot_id|>" + user + "GRID" + assistant)


def test_chatml_with_a_default_system_message():
    default = (
        "{% if messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}" + CHAT_TEMPLATE
    )
    tokenizer = bpe(template=default)
    user = "<|im_start|>user\n"
    chat = terse(tokenizer)
    middle = "<|im_end|>\n<|im_start|>assistant\n<think>"
    default = "<|im_start|>system\nYou are Qwen.<|im_end|>\n"
    assert chat.text(chat.template.begin("GRID")) == default + user + "GRID" + middle
    assert chat.text(chat.template.next_turn("GRID")) == "<|im_end|>\n" + user + "GRID" + middle
    # The rules replace the default.
    full = chat.text(terse(tokenizer, prompt="full").template.begin("GRID"))
    assert full.startswith("<|im_start|>system\n" + RULES) and "Qwen" not in full


def test_a_reply_starts_as_the_generation_prompt_says():
    # The template writes another head before earlier replies.
    template = CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant", "{{ '<|im_start|>assistant now")
    chat = terse(bpe(template=template))
    prompt = "<|im_start|>user\nGRID<|im_end|>\n<|im_start|>assistant now\n<think>"
    assert chat.text(chat.template.begin("GRID")) == prompt
    assert chat.text(chat.template.next_turn("GRID")) == "<|im_end|>\n" + prompt


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] }}",  # shows only the last message
        CHAT_TEMPLATE.replace("message['content']", "message['content'] | lower"),
        CHAT_TEMPLATE + "{{ messages[-1]['content'] }}",  # shows a message twice
        "{% for m in messages | reverse %}{{ m['content'] + '<|im_end|>' }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_show_its_messages_is_refused(template):
    match = "does not render every message once, verbatim, in the order user, assistant, user"
    with pytest.raises(ValueError, match=match):
        terse(bpe(template=template))


def test_a_template_that_puts_the_rules_elsewhere_is_refused():
    # Before the last user message, as in some templates of Mistral: every prompt would repeat
    # the rules.
    template = (
        "{% for m in messages %}{% if m['role'] != 'system' %}<|im_start|>"
        "{{ messages[0]['content'] if loop.last and messages[0]['role'] == 'system' }}"
        "{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    assert terse(bpe(template=template))
    with pytest.raises(ValueError, match="in the order system, user, assistant, user"):
        terse(bpe(template=template), prompt="full")


def test_a_template_that_knows_no_system_serves_terse_prompts_alone():
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system!') }}{% endif %}"
    )
    tokenizer = bpe(template=template + CHAT_TEMPLATE)
    assert terse(tokenizer).prompt_ids([], "GRID 1").tolist() == encode(
        tokenizer, "<|im_start|>user\nGRID 1<|im_end|>\n<|im_start|>assistant\n<think>"
    )
    match = "refuses a conversation of system, user, assistant, user: No system!"
    with pytest.raises(ValueError, match=match):
        terse(tokenizer, prompt="full")


@pytest.mark.parametrize(
    "between", ["\nUser: ", " <|im_end|>\n", "user<|im_end|>", "</answer><|im_end|>", ""]
)
def test_a_template_that_closes_a_reply_with_text_is_refused(between):
    template = (
        "{% for m in messages %}{{ m['content'] }}{{ between }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    ).replace("{{ between }}", between)
    match = "does not end a reply with a control token.*a reply is followed by " + re.escape(
        repr(between)
    )
    with pytest.raises(ValueError, match=match):
        terse(bpe(template=template, words=("user", *TAGS)))


def test_bad_arguments_are_named(tokenizer):
    with pytest.raises(ValueError, match=r"'sliding'; accepted: full, window, single_turn"):
        terse(tokenizer, context="sliding")
    with pytest.raises(ValueError, match="env.window is 0; it must be at least 1"):
        terse(tokenizer, context="window", window=0)
    with pytest.raises(ValueError, match=r"'long'; accepted: full, brief, terse"):
        terse(tokenizer, prompt="long")
    with pytest.raises(ValueError, match="has no chat template"):
        terse(bpe(template=None))


# ---- text after the answer ----------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", " ", " and more", "<answer>Down</answer>", ".\n\nUser: go"])
def test_text_after_an_answer(tokenizer, more):
    """It is invalid, unless the reply ends at a stop string or the form is not strict."""
    reply = encode(tokenizer, f"so</think><answer>Up</answer>{more}")
    strict, ends, lenient = (
        terse(tokenizer, **changes) for changes in ({}, {"stop": ("</answer>",)}, {"strict": False})
    )
    assert strict.read(reply).valid == (not more.strip())
    for chat in (ends, lenient):
        found = chat.read(reply)
        assert found.valid and found.actions == ("Up",)
        assert found.reasoning == strict.read(reply[: found.answer[1] + 1]).reasoning
    assert ends.ends_reply(reply) and not lenient.ends_reply(reply)
    assert not ends.ends_reply([]) and not ends.ends_reply(reply[: found.answer[1]])


def test_a_token_that_goes_on_after_the_answer_ends_it(tokenizer):
    """In some tokenizers, one token holds the end of the answer and a full stop."""
    family = bpe(((">", "."),))
    reply = encode(family, "so</think><answer>Up</answer>.")
    assert family.convert_ids_to_tokens(reply)[-1] == ">."
    assert not terse(family).read(reply).valid
    chat = terse(family, stop=("</answer>",))
    assert chat.read(reply).actions == ("Up",) and chat.read(reply).valid
    assert chat.ends_reply(reply) and not chat.ends_reply(reply[:-1])


def test_stop_strings_count_after_the_reasoning_only(tokenizer):
    chat = terse(tokenizer, stop=("</answer>",))
    quoting = encode(tokenizer, "in the form <answer>x</answer> so</think><answer>Up</answer>")
    found = chat.read(quoting)
    assert found.valid and found.actions == ("Up",)
    assert not chat.ends_reply(encode(tokenizer, "in the form <answer>x</answer> so"))
