"""Outputs that hold a whole conversation as one text, as in verl's multi-turn rollouts."""

import copy
import json

import pytest
from cli_commands import call

from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import encode_rows
from ragen_jax.score.files import read_files

START, END = "<|im_start|>", "<|im_end|>"
SAID = [f"<think>{word}</think><answer>{word}</answer>" for word in ("Up", "Down", "Left")]
FULL = "".join(
    f"{START}user\n_{i}{END}\n{START}assistant\n{said}{END}\n" for i, said in enumerate(SAID)
)
BARE = FULL.replace(START, "").replace(END, "")
# Drops earlier reasoning, as templates of reasoning models do, and opens the next reasoning.
STRIPPING = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{{- m.content.split('</think>')[-1] + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""


def turns_of(tokenizer, path, given, output, **names):
    """([(prompt, reply)] texts of a verl row, the `Encoder`)."""
    record = {names.get("prompt", "input"): given, names.get("reply", "output"): output}
    path.write_text(json.dumps(record) + "\n")
    encoder, rows = Encoder(tokenizer, len(tokenizer)), read_files([str(path)]).rows
    spoken, broken = encode_rows(rows, encoder)
    assert not broken
    decode = tokenizer.decode
    turns = spoken[rows[0].place]
    return [(decode(said.prompt_ids), decode(said.turn.sampled)) for said in turns], encoder


def cut(text):
    """Splits a conversation's text into (input, output)."""
    at = text.index("assistant\n") + len("assistant\n")
    return text[:at], text[at:]


@pytest.mark.parametrize("template", [None, STRIPPING])
@pytest.mark.parametrize("kind", ["bare", "control", "messages", "plain"])
def test_each_turn_is_read_after_its_own_prompt(tokenizer, tmp_path, kind, template):
    if template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    given, output = cut(FULL if kind == "control" else BARE.removesuffix("\n"))
    names = {"prompt": "prompt", "reply": "response"} if kind == "plain" else {}
    if kind == "messages":
        given = [{"role": "user", "content": "_0"}]
    turns, encoder = turns_of(tokenizer, tmp_path / "a.jsonl", given, output, **names)
    end = END if kind == "control" else ""
    assert [said for _, said in turns[:2]] == [s.removeprefix("<think>") + end for s in SAID[:2]]
    assert turns[2][1].startswith(SAID[2].removeprefix("<think>"))
    for i, (prompt, _) in enumerate(turns):
        assert prompt == FULL[: FULL.index(SAID[i])]
    assert len(turns) == 3 and encoder.counts.transcripts == 1


@pytest.mark.parametrize("control", [False, True])
def test_a_last_observation_is_no_part_of_a_reply(tokenizer, tmp_path, control):
    text = f"{FULL}{START}user\nover{END}\n"
    text = text if control else text.replace(START, "").replace(END, "")
    turns, encoder = turns_of(tokenizer, tmp_path / "a.jsonl", *cut(text))
    assert len(turns) == 3 and encoder.counts.trailing_observations == 1
    assert turns[2][1] == SAID[2].removeprefix("<think>") + (END if control else "")


def test_replies_opened_by_the_prompt(tokenizer, tmp_path):
    """If the generation prompt opens the reasoning, later prompts show its tag."""
    given, output = cut(BARE.removesuffix("\n").replace("<think>", ""))
    turns, _ = turns_of(tokenizer, tmp_path / "a.jsonl", given, output)
    assert [prompt.count("<think>") for prompt, _ in turns] == [0, 1, 2]
    assert [said.count("</think>") for _, said in turns] == [1, 1, 1]


@pytest.mark.parametrize(
    "output", ["<think>a user\nor an assistant\n</think>b", "<think>a</think>b\nuser\nc", SAID[0]]
)
def test_a_single_reply_stays_whole(tokenizer, tmp_path, output):
    turns, encoder = turns_of(tokenizer, tmp_path / "a.jsonl", cut(BARE)[0], output)
    assert [said for _, said in turns] == [output.removeprefix("<think>")]
    assert encoder.counts.transcripts == encoder.counts.trailing_observations == 0


def test_the_command_reads_turns(language_model, tmp_path):
    path, out = tmp_path / "1.jsonl", tmp_path / "score.json"
    rows = []
    for i in range(6):
        given, output = cut(
            BARE.removesuffix("\n").replace("_", f"{i // 2}").replace("Up", "ab"[i % 2])
        )
        rows.append(json.dumps({"input": given, "output": output, "score": i % 2}))
    path.write_text("\n".join(rows))
    code, _, errors = call(
        "ragen_jax.score", f"--model={language_model}", f"--rollouts={path}", f"--out={out}"
    )
    (step,) = json.loads(out.read_text())["steps"]
    assert code == 0 and step["rollout/turns"] == 3 and step["rollout/replies"] == 18
    assert "warning: 6 outputs hold later messages of a conversation" in errors
