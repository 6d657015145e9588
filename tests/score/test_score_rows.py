"""Reading a dump's rows: prompts, tags, fields."""

import json
import pickle

import numpy as np
import pytest
from cli_commands import call

from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import encode_rows, make_steps
from ragen_jax.score.files import read_files
from ragen_jax.score.formats import ParsedReply, read_row

pytestmark = pytest.mark.fast

PROMPT = "<|im_start|>user\n_P#<|im_end|>\n<|im_start|>assistant\n"
SAID = "player 1</think><answer>Up</answer>"


@pytest.fixture
def encoder(tokenizer):
    return Encoder(tokenizer, len(tokenizer))


def text(tokenizer, ids):
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    "prompt,kind",
    [
        (PROMPT, "control tokens"),
        ("user\n_P#\nassistant\n", "restored"),
        ("user\n_P#\nassistant\n<think>", "restored"),
        ([{"role": "user", "content": "_P#"}], "messages"),
    ],
)
def test_prompts_of_any_kind_are_the_same_ids(encoder, tokenizer, prompt, kind):
    said = encoder.encode_reply(ParsedReply(prompt, SAID))
    assert text(tokenizer, said.turn.prompt) == PROMPT + "<think>"
    assert text(tokenizer, said.turn.sampled) == SAID
    assert list(encoder.counts.prompt_kinds) == [kind]


def test_a_conversation_without_control_tokens_is_restored(encoder, tokenizer):
    bare = "system\nbe brief\nuser\na\nassistant\nb\nuser\nc\nassistant\n"
    roles = ("system", "user", "assistant", "user")
    shown = zip(roles, ("be brief", "a", "b", "c"), strict=True)
    whole = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in shown)
    assert text(tokenizer, encoder.encode_prompt(bare)) == whole + "<|im_start|>assistant\n"


def test_other_text_stays_as_it_is(encoder, tokenizer):
    assert text(tokenizer, encoder.encode_prompt("What is 2 + 2?")) == "What is 2 + 2?"
    assert list(encoder.counts.prompt_kinds) == ["text"]


@pytest.mark.parametrize(
    "tags,said,thought,answer",
    [
        ({}, "<think>player 1</think><answer>Up</answer>", "player 1", "Up"),
        ({}, "Well. <think>a</think> So: <answer>Up</answer>!", "a", "Up"),
        ({}, "a</think><answer>Up</answer><|im_end|>", "a", "Up"),
        ({}, "a</think> Up", "a", ""),
        ({}, "<think>a", "", ""),
        ({}, "<answer>Up</answer>", "", ""),
        ({"answer": ()}, "<think>a</think>\nUp it is\n<|im_end|>", "a", "Up it is"),
        ({"think": ("<r>", "</r>")}, "<r>a</r><answer>Up</answer>", "a", "Up"),
    ],
)
def test_reasoning_and_answer(tokenizer, tags, said, thought, answer):
    turn = Encoder(tokenizer, len(tokenizer), **tags).encode_reply(ParsedReply(PROMPT, said)).turn
    assert text(tokenizer, turn.sampled[slice(*turn.reasoning)]) == thought
    assert text(tokenizer, turn.sampled[slice(*turn.answer)]) == answer
    assert turn.actions == ((answer,) if answer else ())
    if thought:
        assert turn.reasoning[0] == 0 and PROMPT in text(tokenizer, turn.prompt)


def test_an_answer_of_ours_ends_the_reply(encoder, tokenizer):
    said = "a</think><answer>Up</answer>!"
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert encoder.encode_reply(ParsedReply([1], ids)).turn.answer[1] > 0
    assert encoder.encode_reply(ParsedReply([1], ids, whole=True)).turn.answer == (0, 0)


def test_a_reasoning_that_the_server_split_off(encoder, tokenizer):
    message = {"role": "assistant", "reasoning_content": "a", "content": "<answer>Up</answer>"}
    record = {"prompt": [{"role": "user", "content": "_P#"}], "completion": [message]}
    row, _ = read_row(record | {"example_id": 4, "reward": 1}, "x:1")
    turn = encoder.encode_reply(row.replies[0]).turn
    assert text(tokenizer, turn.prompt) == PROMPT + "<think>"
    assert text(tokenizer, turn.sampled) == "a</think><answer>Up</answer>"
    assert row.group == "4" and row.reward == 1


def test_fields(tmp_path):
    record = {"prompt": "a", "completion": "b", "advantage": 0.5, "step": 7, "uid": "u"}
    record |= {"reward_len": 0.25, "correct_reward": None, "note": "x", "other": 3.0}
    row, unread = read_row(record, "x:1")
    assert (row.reward, row.group, row.step, row.success) == (0.25, "u", 7, None)
    assert unread == {"note", "other", "advantage"}
    row, unread = read_row(record, "x:1", ("other", "reward_len"))
    assert row.reward == 3.25
    ragen = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row, _ = read_row(ragen | {"metadata": {"group_id": 3, "total_reward": 2, "success": True}}, "")
    assert (row.group, row.reward, row.success) == ("3", 2, True)


@pytest.mark.parametrize(
    "record,words",
    [
        ([1], "is not an object"),
        ({"text": "a"}, "'text', which match no format"),
        ({"prompt": "", "response": "a"}, "an empty prompt"),
        ({"prompt": "a", "response": 4}, "4 as its response"),
        ({"prompt": "a", "response": "b", "reward": "high"}, "'high' as its reward"),
        ({"prompt": "a", "response": "b", "step": -1}, "the step -1"),
        ({"prompt": "a", "response": "b", "success": "yes"}, "'yes'"),
        ({"prompt": [{"content": "a"}], "response": "b"}, "no role"),
        ({"prompt": "a", "response": [{"role": "user", "content": "b"}]}, "no message of the role"),
        ({"turns": []}, "[] as its turns"),
    ],
)
def test_a_broken_row_says_why(record, words):
    with pytest.raises(ValueError) as caught:
        read_row(record, "x:1")
    assert words in str(caught.value)


def test_steps_and_groups(encoder, tmp_path):
    def row(prompt, **other):
        return json.dumps({"prompt": prompt, "response": "<think>a</think>", **other})

    first, second = tmp_path / "step_4.jsonl", tmp_path / "other.jsonl"
    first.write_text("\n".join([row("a"), row("b"), row("a"), row("c", step=9)]))
    second.write_text("\n".join([row("a", group=1), row("a", group=2), row("b", group=2)]))
    read = read_files([str(first), str(second)])
    spoken, broken = encode_rows(read.rows, encoder)
    steps, surprises = make_steps(read.rows, spoken)
    assert not broken and [step.number for step in steps] == [2, 4, 9]
    shape = [[(e.group, e.member) for e in step.episodes] for step in steps]
    assert shape == [[(0, 0), (1, 0), (2, 0)], [(0, 0), (0, 1), (1, 0)], [(0, 0)]]
    assert surprises.split_groups == [f"{second}:3"]  # in group 2, but with another prompt
    assert np.isnan(steps[0].reward_E).all() and not steps[0].success


@pytest.mark.parametrize(
    "words,said",
    [
        ([], "score needs --model=DIR"),
        (["--model={model}"], "score needs --rollouts=FILE"),
        (["--model={model}", "--rollouts={bare}", "--out=x.html"], "use --out=NAME.json"),
        (
            ["--model={model}", "--rollouts=nowhere.jsonl"],
            "--rollouts=nowhere.jsonl does not exist",
        ),
        (["--model={model}", "--rollouts={dumped}"], "dumped.pkl is a pickle; convert it"),
        (["--model={model}", "--rollouts={empty}"], "can be used, the files are empty"),
        (["--model={model}", "--rollouts={bare}"], "none of 1 rows holds reasoning"),
        (["--model={model}", "--rollouts={torn}"], "can be used; the first: "),
        (["--model={model}", "--rollouts={bare}", "--think=<a>"], "the opening and the closing"),
        (["--model=/nowhere", "--rollouts={bare}"], "no model directory /nowhere"),
        (
            ["--model={model}", "--rollouts={bare}", "--rollouts={seen}"],
            "seen.jsonl:2 is from an agent with images, which score does not support; pass "
            "files of text only",
        ),
    ],
)
def test_what_cannot_be_scored_is_said_in_a_line(language_model, tmp_path, words, said):
    files = {"model": language_model}
    for name, content in (
        ("empty", ""),
        ("torn", '{"prompt"'),
        ("bare", '{"prompt": "a", "response": "b"}'),
        ("seen", '{"turns": [{}]}\n{"turns": [{}, {"images": ["a.png"]}]}\n'),
    ):
        files[name] = tmp_path / f"{name}.jsonl"
        files[name].write_text(content)
    files["dumped"] = tmp_path / "dumped.pkl"
    files["dumped"].write_bytes(pickle.dumps([1]))
    code, _, errors = call("ragen_jax.score", *(word.format(**files) for word in words))
    assert code == 2 and said in errors.splitlines()[-1]


ROW = {"prompt": "a", "response": "b</think><answer>c</answer>"}


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": "9" * 400}, "has '999999"),
        ({"reward": "9" * 5000}, "as its reward; expected a finite number"),
        ({"reward": 10**400}, "as its reward; expected a finite number"),
        ({"reward": [1e308, 1e308]}, "has a reward of inf; expected one from -1e+15 to 1e+15"),
        ({"reward": {"a": {"score": 1e300, "weight": 1e300}}}, "has a reward of inf"),
        ({"reward": -1e16}, "has a reward of -1e+16; expected one from -1e+15 to 1e+15"),
        ({"step": 2**64}, "expected a number from 0, below 2**32"),
        ({"step": "9" * 5000}, "expected a number from 0, below 2**32"),
        ({"step": -1}, "has the step -1; expected"),
        ({"step": 1e300}, "expected a number from 0, below 2**32"),
        ({"response": "x" * 300_000 + "</think>"}, "; the model has 4096 positions"),
        ({"prompt": "x" * 300_000}, "; the model has 4096 positions"),
        ({"prompt": "x" * 10_000_000}, "has a prompt of 10000000 characters; at most 2000000"),
        ({"response": "x" * 10_000_000}, "has a reply of 10000000 characters; at most 2000000"),
    ],
    ids=range(14),
)
def test_a_row_beyond_every_measure_is_named_and_the_others_are_read(
    changes, said, tokenizer, tmp_path
):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW | changes, ROW)))
    read = read_files([str(path)])
    spoken, others = encode_rows(read.rows, Encoder(tokenizer, len(tokenizer), positions=4096))
    assert list(spoken) == [f"{path}:1", f"{path}:3"]
    ((place, reason),) = [(row.place, row.reason) for row in (*read.broken, *others)]
    assert place == f"{path}:2" and said in reason and len(reason) < 300


def test_halves_of_surrogate_pairs_are_read(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    said = {"prompt": "a\ud800", "response": "b\udc00</think><answer>c</answer>", "group": "\ud800"}
    nested = {"prompt": json.dumps([{"role": "user", "content": "\ud800"}]), "response": "b"}
    path.write_text("".join(json.dumps(row) + "\n" for row in (said, nested)))
    read = read_files([str(path)])
    spoken, others = encode_rows(read.rows, Encoder(tokenizer, len(tokenizer)))
    assert len(spoken) == 2 and not others and not read.broken
    assert read.rows[0].replies[0].prompt == "a\ufffd"
    assert read.rows[1].replies[0].prompt == [{"role": "user", "content": "\ufffd"}]


def test_a_number_in_a_file_name_beyond_steps_is_no_step(tmp_path):
    for name in ("20261125103000123456.jsonl", f"step_{'9' * 200}.jsonl", "7.jsonl"):
        (tmp_path / name).write_text(json.dumps(ROW))
    read = read_files([str(tmp_path)])
    assert [row.step for row in read.rows] == [1, 7, 3]


def test_a_template_that_raises_leaves_out_its_row(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW | {"prompt": "bad"})))
    encoder = Encoder(tokenizer, len(tokenizer))
    prompt = encoder.encode_prompt

    def refuse(given, *others):
        if given == "bad":
            raise KeyError("\ud800")
        return prompt(given, *others)

    monkeypatch.setattr(encoder, "encode_prompt", refuse)
    spoken, (left_out,) = encode_rows(read_files([str(path)]).rows, encoder)
    assert list(spoken) == [f"{path}:1"] and left_out.place == f"{path}:2"
    assert left_out.reason == "cannot be read: KeyError: '\\ud800'"
