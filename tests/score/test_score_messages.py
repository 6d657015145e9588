"""Messages of any form, rendered by the chat template: tool calls, parts, roles, reasoning."""

import copy
import json

import pytest
from cli_commands import call

from ragen_jax.score import notices
from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import encode_rows, make_steps
from ragen_jax.score.files import read_files

# How Qwen2.5 writes tools, calls and results, shortened.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}{%- for tool in tools %}{{ '\n' + tool|tojson }}
{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}{%- set call = call.function or call %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments|tojson + '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role in ('system', 'user') %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
START, END = "<|im_start|>", "<|im_end|>\n"
ASKED = {"role": "user", "content": "what is 1+2?"}
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "3"}
LAST = {"role": "assistant", "content": "<think>b</think><answer>3</answer>"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def calling(tokenizer):
    """A tokenizer whose chat template renders tools."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def scored(tokenizer, path, records):
    """([(prompt, reply)] texts of each row, `FileContents`, the `Encoder`, the warnings)."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    read, encoder = read_files([str(path)]), Encoder(tokenizer, len(tokenizer))
    spoken, broken = encode_rows(read.rows, encoder)
    assert not broken and not read.broken, (broken, read.broken)
    steps, surprises = make_steps(read.rows, spoken)
    texts = [
        [
            (tokenizer.decode(said.prompt_ids), tokenizer.decode(said.turn.sampled))
            for said in spoken[row.place]
        ]
        for row in read.rows
    ]
    warned = list(notices.warning_lines(read, steps, surprises, (), encoder))
    return texts, read, encoder, warned


def called(thought, **other):
    return {"role": "assistant", "content": thought, "tool_calls": [CALL], **other}


FORMS = {
    "verifiers": lambda m: {"example_id": 0, "prompt": m[:1], "completion": m[1:]},
    "TRL": lambda m: {"prompt": m[:1], "completion": m[1:]},
    "TRL as text": lambda m: {"prompt": json.dumps(m[:1]), "completion": json.dumps(m[1:])},
    "pandas": lambda m: {"prompt": str(m[:1]), "completion": str(m[1:])},
    "RAGEN": lambda m: {"messages": m, "metadata": {"group_id": 0}},
    "plain": lambda m: {"prompt": m[0]["content"], "response": m[1:]},
    "verl": lambda m: {"input": m[:1], "output": [json.dumps(each) for each in m[1:]]},
    "prime-rl": lambda m: {
        "traces": [
            {
                "nodes": [
                    {"message": each, "sampled": each["role"] == "assistant"}
                    | ({"parent": i - 1} if i else {})
                    for i, each in enumerate(m)
                ]
            }
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tool_call_is_in_its_reply_and_in_the_next_prompt(calling, tmp_path, form):
    messages = [ASKED, called("<think>a</think>"), RESULT, LAST]
    (turns,), read, encoder, warned = scored(calling, tmp_path / "a.jsonl", [FORMS[form](messages)])
    asked = f"{START}user\nwhat is 1+2?{END}{START}assistant\n"
    said = f"a</think>\n{WRITTEN}"
    later = f"{asked}<think>{said}{END}{START}user\n<tool_response>\n3\n</tool_response>{END}"
    assert turns == [
        (asked, said),
        (f"{later}{START}assistant\n", "b</think><answer>3</answer>"),
    ]
    unwritten = {"tool_call_id": 1, "tool_calls[].id": 1, "tool_calls[].type": 1}
    assert notices.unwritten_keys(read, encoder) == unwritten and not warned


@pytest.mark.parametrize("content", [None, "", [], float("nan")])
def test_a_call_without_content_is_the_whole_reply(calling, tmp_path, content):
    first = {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}
    record = {"prompt": [ASKED], "completion": [first, RESULT, LAST]}
    (turns,), *_ = scored(calling, tmp_path / "a.jsonl", [record])
    assert turns[0][1] == f"{WRITTEN}\n{WRITTEN}"
    assert f"{START}assistant\n{WRITTEN}\n{WRITTEN}{END}" in turns[1][0]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_of_a_row_are_in_its_prompts(calling, tmp_path, tools):
    record = {"prompt": [ASKED], "completion": [LAST], "tools": tools}
    (turns,), read, _, warned = scored(calling, tmp_path / "a.jsonl", [record])
    assert turns[0][0].startswith(f"{START}system\n# Tools\n") and '"name": "add"' in turns[0][0]
    assert not read.unread and not warned


def test_parts_roles_and_keys(calling, tmp_path):
    """Parts are joined, "developer" becomes "system", unread keys are counted."""
    prompt = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, "brief"]},
        ASKED | {"name": "ann", "content": {"type": "input_text", "text": "what?"}},
        {"role": "critic", "content": "hurry"},
    ]
    record = {"prompt": prompt, "completion": [LAST | {"refusal": None, "annotations": [1]}]}
    (turns, _), read, encoder, warned = scored(calling, tmp_path / "a.jsonl", [record, record])
    shown = f"{START}system\nbe brief{END}{START}user\nwhat?{END}{START}assistant\n"
    assert turns[0][0] == shown
    lines = list(notices.unread_lines(read, encoder))
    written = "keys of messages that the chat template does not write: "
    assert lines == [f"{written}annotations (2 messages), name (2 messages)"]
    assert warned[0].startswith("2 prompts or replies lack the messages of the role 'critic'")


@pytest.mark.parametrize("reads", [True, False])
def test_a_reasoning_that_the_server_split_off_is_in_later_prompts(calling, tmp_path, reads):
    """In the template's form, or between the tags if the template has no form for it."""
    if reads:
        form = "{%- if m.reasoning_content %}{{ '\n[' + m.reasoning_content + ']' }}{%- endif %}"
        calling.chat_template = TEMPLATE.replace(
            "{%- if m.content %}", form + "{%- if m.content %}"
        )
    first = called("", reasoning="a")
    record = {"prompt": [ASKED], "completion": [first, RESULT, LAST]}
    (turns,), *_ = scored(calling, tmp_path / "a.jsonl", [record])
    assert turns[0][1] == f"a</think>\n{WRITTEN}"
    thought = "[a]" if reads else "<think>a</think>"
    assert f"{START}assistant\n{thought}\n{WRITTEN}{END}" in turns[1][0]


def test_calls_that_a_template_cannot_write_are_counted(tokenizer, tmp_path):
    record = {"prompt": [ASKED], "completion": [called("<think>a</think>"), LAST], "tools": [TOOL]}
    texts, read, encoder, warned = scored(tokenizer, tmp_path / "a.jsonl", [record])
    assert texts[0][0][1] == "a</think>" and "tool_calls" in notices.unwritten_keys(read, encoder)
    lacking = [line.split(" lack the ")[1].split(":")[0] for line in warned if "lack the" in line]
    assert lacking == ["tool calls", "tool calls of a reply", "tools"]


@pytest.mark.parametrize(
    "message,words",
    [
        ({"role": None, "content": "a"}, "which has no role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is supported"),
        ({"role": "user", "content": 4}, "content is 4; expected text"),
        ({"role": "assistant", "content": "a", "tool_calls": ["x"]}, "the tool call 'x'"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}, "has no name"),
        ({"role": "assistant", "reasoning": [1]}, "reasoning is [1]; expected text"),
    ],
)
def test_a_message_that_cannot_be_read_names_its_row(tmp_path, message, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": [ASKED], "completion": [message, LAST]}))
    (broken,) = read_files([str(path)]).broken
    assert words in broken.reason


def test_parquet_structs_hold_no_foreign_keys(calling, tmp_path):
    """Each struct of a Parquet column has the fields of all structs; an absent field is null."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    objects = [CALL | {"function": {"name": "add", "arguments": {key: 1}}} for key in "ab"]
    rows = [
        {"prompt": [ASKED], "completion": [called("x</think>", tool_calls=[each]), RESULT, LAST]}
        for each in objects
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    replies = [row.replies[0] for row in read_files([str(path)]).rows]
    assert [reply.calls[0]["function"]["arguments"] for reply in replies] == [{"a": 1}, {"b": 1}]
    assert all("tool_calls" not in reply.prompt[0] for reply in replies)


def test_the_command_reports_calls_and_keys(language_model, tmp_path):
    records = [
        {
            "prompt": [{"role": "user", "content": f"what is {i // 2}?"}],
            "completion": [called(f"<think>{i} fox</think>"), RESULT, LAST],
            "reward": 1,
        }
        for i in range(4)
    ]
    path, out = tmp_path / "1.jsonl", tmp_path / "score.json"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    code, printed, errors = call(
        "ragen_jax.score", f"--model={language_model}", f"--rollouts={path}", f"--out={out}"
    )
    found = json.loads(out.read_text())
    assert code == 0 and found["steps"][0]["rollout/turns"] == 2
    assert found["message_keys_not_written"]["tool_calls"] == 4
    assert "keys of messages that the chat template does not write: " in printed
    assert "warning: 4 prompts or replies lack the tool calls of a reply" in errors


@pytest.mark.parametrize(
    "change,expected",
    [
        (("{%- if m.content %}", "{%- if '</think>' not in m.content and m.content %}"), WRITTEN),
        (
            (
                "{{ '<|im_start|>assistant\n' }}{%- endif",
                "{{ '<|im_start|>assistant\n<t>\n' }}{%- endif",
            ),
            WRITTEN,
        ),
        (("{%- if m.content %}", "{%- if m.content and not m.tool_calls %}"), WRITTEN),
        (("in m.tool_calls %}", "in [] %}"), ""),
    ],
)
def test_a_call_alone_is_what_the_template_writes_of_it(tokenizer, tmp_path, change, expected):
    """Templates that search the content, open the reasoning, or drop the content or the calls."""
    other = copy.deepcopy(tokenizer)
    assert change[0] in TEMPLATE
    other.chat_template = TEMPLATE.replace(*change)
    record = {"prompt": [ASKED], "completion": [called(None), RESULT, LAST]}
    (turns,), _, encoder, _ = scored(other, tmp_path / "a.jsonl", [record])
    assert turns[0][1] == expected
    assert encoder.counts.missing_parts["tool calls of a reply"] == (not expected)
