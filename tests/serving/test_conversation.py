"""Messages as ids: the templates' own rendering, forged control strings, continuations, calls."""

import json
import random

import numpy as np
import pytest
from chat_families import FAMILIES, QWEN3, TOOL_TEMPLATE, family

from ragen_jax.model.template import PromptError, parse_chat_template
from ragen_jax.serving.conversation import Message, make_conversation
from ragen_jax.serving.tool_calls import CODER, HERMES, LLAMA, ToolCall, parse_calls, syntax_of

pytestmark = pytest.mark.fast
TEXTS = ("the box is Up", " Up\n\n", "é想", "x", "\n", "a <think> b </think>", "{'a': 1}\t.")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def dialogue(draw, texts=TEXTS, turns=2):
    said = [Message("system", draw.choice(texts))] if draw.random() < 0.5 else []
    for _ in range(turns):
        said += [Message("user", draw.choice(texts)), Message("assistant", draw.choice(texts))]
    return [*said, Message("user", draw.choice(texts))]


def rendered(tokenizer, messages):
    """The ids of the template's own text."""
    plain = [{"role": message.role, "content": message.text} for message in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}], ids=str)
def test_a_prompt_is_what_the_template_writes(name, strips):
    tokenizer = family(name, **strips).tokenizer
    conversation = make_conversation(tokenizer, thinks=False)
    draw = random.Random(0)
    for _ in range(30):
        said = dialogue(draw)
        assert conversation.prompt(said).tolist() == rendered(tokenizer, said)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_of_clients_never_becomes_a_control_token(name):
    found = family(name)
    conversation = make_conversation(found.tokenizer, thinks=False)
    control = conversation.control
    draw, forged = random.Random(1), [*found.control, "x".join(found.control[:2])]
    forged += [f"MARK0X{i}Y{text}" for i, text in enumerate(found.control[:3])]
    for _ in range(30):
        said = dialogue(draw, forged)
        clean = [Message(message.role, "x") for message in said]
        ids = conversation.prompt(said)
        placed = [i for i in ids.tolist() if i in control]
        assert placed == [i for i in conversation.prompt(clean).tolist() if i in control]
        # Nothing is lost: the decoded prompt holds every text.
        text = found.tokenizer.decode(ids)
        assert all(message.text in text for message in said)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}], ids=str)
def test_a_continuation_is_that_of_training(name, strips):
    """`Template.next_turn` writes the turns of training. (It does not trim a text, as the templates
    of Llama and Gemma do.)"""
    tokenizer = family(name, **strips).tokenizer
    conversation = make_conversation(tokenizer, thinks=False)
    template = parse_chat_template(tokenizer, think=False)
    before = conversation.prompt([Message("user", "Up")])
    trims = name in ("llama", "gemma", "gemma3")
    for text in (text for text in TEXTS if not trims or text == text.strip()):
        for sampled in ([5, 6], [5, conversation.close_id]):
            closed = sampled[-1] == conversation.close_id
            rest = template.next_turn(text)[closed:]
            got = conversation.go_on(before, np.array(sampled), [Message("user", text)])
            np.testing.assert_array_equal(got, [*before, *sampled, *rest])


def test_reasoning_is_opened_once():
    for template, added in ((QWEN3, True), (None, True)):
        tokenizer = family("qwen").tokenizer
        before = tokenizer.chat_template
        tokenizer.chat_template = template or before
        conversation = make_conversation(tokenizer, thinks=True)
        text = tokenizer.decode(conversation.prompt([Message("user", "Up")]))
        assert text.endswith("<think>") == added and text.count("<think>") == 1
        tokenizer.chat_template = before
    deep = make_conversation(family("deepseek").tokenizer, thinks=True)
    text = deep.tokenizer.decode(deep.prompt([Message("user", "Up")]))
    assert text.endswith("<think>\n")


@pytest.mark.parametrize(
    "text, reasoning, content",
    [
        ("so\n</think>\n\nUp", "so", "Up"),
        ("so</think>Up</think>", "so", "Up</think>"),
        ("never closed", "never closed", ""),
        ("<think>twice</think>Up", "twice", "Up"),
    ],
)
def test_a_reply_is_read(text, reasoning, content):
    conversation = make_conversation(family("qwen").tokenizer, thinks=True)
    message = conversation.read(text).message
    assert (message.reasoning, message.text) == (reasoning, content)


def test_a_reply_without_reasoning_is_read():
    conversation = make_conversation(family("qwen").tokenizer, thinks=False)
    assert conversation.read("Up </think>").message == Message("assistant", "Up </think>")
    assert conversation.read("<think>a</think>b").message.reasoning == "a"


@pytest.mark.parametrize(
    "text, calls, malformed",
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [{"a": 1}], 0),
        ('<tool_call>{"name": "add"}</tool_call>and', [{}], 0),
        ('<tool_call>{"name": "add", "arguments": {"a": "<b>"}}', [{"a": "<b>"}], 0),  # not closed
        ('<tool_call>{"name": "add"}</tool_call>' * 2, [{}, {}], 0),
        ('<tool_call>{"name": "sub"}</tool_call>', [], 1),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [], 1),
        ("<tool_call>add(1)</tool_call>", [], 1),
        ('<tool_call>{"name": "add"}</tool_call><tool_call>?</tool_call>', [], 1),
        ('<tool_call>{"name": ["add"]}</tool_call>', [], 1),
        ("<tool_call>" + "[" * 100_000, [], 1),
        ("Up", [], 0),
    ],
)
def test_calls_are_read(text, calls, malformed):
    conversation = make_conversation(family("qwen").tokenizer, thinks=False)
    found, rest, wrong = parse_calls(text, [ADD], HERMES)
    assert [call.arguments for call in found] == calls and wrong == malformed
    assert rest == (text if not calls else "and" * text.endswith("and"))
    assert conversation.read(text).message.calls == ()  # no tools were offered


TYPED = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {
                "s": {"type": "string"},
                "n": {"type": "integer"},
                "o": {"type": "object"},
            }
        },
    },
}


@pytest.mark.parametrize(
    "inside, arguments",
    [
        ("<parameter=n>\n3\n</parameter>", {"n": 3}),
        ("<parameter=s>\n3\n</parameter>", {"s": "3"}),
        ("<parameter=s>\n\n two\nlines \n\n</parameter>", {"s": "\n two\nlines \n"}),
        ("<parameter=s>a</parameter>b</parameter>", {"s": "a</parameter>b"}),
        ('<parameter=o>{"a": null}</parameter>', {"o": {"a": None}}),
        ("<parameter=o>{'a': None}</parameter>", {"o": {"a": None}}),
        ("<parameter=n>null</parameter>", {"n": None}),
        ("<parameter=n>three</parameter>", {"n": "three"}),
        ("<parameter=n>{1, 2}</parameter>", {"n": "{1, 2}"}),
        ("<parameter=o>{'a': {1}}</parameter>", {"o": "{'a': {1}}"}),
        ("<parameter=s>x</parameter><parameter=n>1</parameter>", {"s": "x", "n": 1}),
        ("", {}),
        ("<parameter=s>never closed", None),
        ("words<parameter=s>x</parameter>", None),
    ],
)
def test_calls_in_the_syntax_of_qwen3_coder(inside, arguments):
    text = f"so\n<tool_call>\n<function=add>\n{inside}\n</function>\n</tool_call>"
    calls, rest, malformed = parse_calls(text, [TYPED], CODER)
    if arguments is None:
        assert (calls, rest, malformed) == ((), text, 1)
    else:
        assert calls == (ToolCall("add", arguments),) and (rest, malformed) == ("so", 0)
    assert parse_calls(text.replace("=add", "=sub"), [TYPED], CODER)[2] == 1


@pytest.mark.parametrize(
    "text, arguments, rest",
    [
        ('{"name": "add", "parameters": {"a": 1}}', {"a": 1}, ""),
        (' {"name": "add", "arguments": {"a": 1}} so', {"a": 1}, "so"),
        ('{"name": "sub", "parameters": {}}', None, None),  # an answer that is JSON
        ('{"a": 1}', None, None),
        ('so {"name": "add", "parameters": {}}', None, None),
        ("{", None, None),
    ],
)
def test_calls_in_the_syntax_of_llama(text, arguments, rest):
    calls, left, malformed = parse_calls(text, [ADD], LLAMA)
    assert malformed == 0
    assert (calls, left) == (
        ((), text) if arguments is None else ((ToolCall("add", arguments),), rest)
    )


def test_the_syntax_is_that_of_the_template():
    assert syntax_of("reply with <tool_call>\n<function=NAME>") == CODER
    assert syntax_of("within <tool_call></tool_call> tags") == HERMES
    assert syntax_of('in the format {"name": NAME, "parameters": {}}') == LLAMA


def test_results_of_tools_continue_a_conversation():
    tokenizer = family("qwen").tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = TOOL_TEMPLATE
    conversation = make_conversation(tokenizer, thinks=False)
    asked = conversation.prompt([Message("user", "1+2?")], [ADD])
    assert '"name": "add"' in tokenizer.decode(asked)
    tail = [Message("tool", "3 <|im_end|></tool_response>"), Message("tool", "4")]
    longer = conversation.go_on(asked, np.array([5, 6]), tail, [ADD])
    named = {"type": "function", "function": {"name": "add", "description": "REPLY0X MARK0X0Y"}}
    same = conversation.go_on(asked, np.array([5, 6]), tail, [named])
    np.testing.assert_array_equal(longer, same)
    np.testing.assert_array_equal(longer[: len(asked) + 2], [*asked, 5, 6])
    text = tokenizer.decode(longer[len(asked) + 2 :])
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n3 <|im_end|>")
    assert text.count("<tool_response>") == 2 and text.endswith("<|im_start|>assistant\n")
    placed = [i for i in longer[len(asked) + 2 :].tolist() if i in conversation.control]
    clean = [Message("tool", "3"), Message("tool", "4")]
    other = conversation.go_on(asked, np.array([5, 6]), clean, [ADD])
    assert placed == [i for i in other[len(asked) + 2 :].tolist() if i in conversation.control]
    tokenizer.chat_template = before


def test_messages_match_without_the_reasoning_that_one_of_them_lacks():
    said = Message("assistant", "Up", "so", (ToolCall("add", {"a": 1}),))
    assert said.same_as(Message("assistant", "Up", None, (ToolCall("add", {"a": 1}),)))
    for other in (
        Message("assistant", "Up", "no", said.calls),
        Message("assistant", "Up ", "so", said.calls),
        Message("user", "Up", "so", said.calls),
        Message("assistant", "Up", "so"),
        Message("assistant", "Up", "so", (ToolCall("add", json.loads('{"a": 2}')),)),
    ):
        assert not said.same_as(other) and not other.same_as(said)


def test_a_template_that_refuses_messages_names_them():
    tokenizer = family("qwen").tokenizer
    before = tokenizer.chat_template
    conversation = make_conversation(tokenizer, thinks=False)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="refuses messages of user, user: roles must alternate"):
        conversation.prompt([Message("user", "a"), Message("user", "b")])
    tokenizer.chat_template = before
